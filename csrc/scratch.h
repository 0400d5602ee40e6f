// Working memory that is kept between calls: fresh pages from the system cost more than the work.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "memory.h"
#include "pages.h"

namespace rewire {

// Blocks that the calling thread has given back, at most kKeep bytes of them.
class Shelf {
   public:
    static Shelf& mine() {
        thread_local Shelf shelf;
        return shelf;
    }
    ~Shelf() {
        for (auto& [data, size] : blocks_) std::free(data);
    }
    // At least `size` bytes, aligned to a cache line; `size` becomes what was given.
    void* take(size_t& size) {
        size_t best = blocks_.size();
        for (size_t i = 0; i < blocks_.size(); i++)
            if (blocks_[i].second >= size && (best == blocks_.size() || blocks_[i].second < blocks_[best].second))
                best = i;
        if (best < blocks_.size()) {
            const auto [data, given] = blocks_[best];
            blocks_.erase(blocks_.begin() + int64_t(best));
            kept_ -= given;
            size = given;
            return data;
        }
        const bool huge = size >= kSmall;
        if (huge) size = (size + kHugePage - 1) / kHugePage * kHugePage;
        return allocate_pages(size, huge);
    }
    void give(void* data, size_t size) noexcept {
        try {
            blocks_.emplace_back(data, size);
        } catch (const std::bad_alloc&) {
            return std::free(data);
        }
        kept_ += size;
        while (kept_ > kKeep) {
            std::free(blocks_.front().first);
            kept_ -= blocks_.front().second;
            blocks_.erase(blocks_.begin());
        }
    }

   private:
    static constexpr size_t kSmall = 64 << 10, kKeep = size_t(128) << 20;
    std::vector<std::pair<void*, size_t>> blocks_;
    size_t kept_ = 0;
};

// `count` uninitialised elements from the shelf; more than it has room for, from the memory of results.
template <class T>
class Scratch {
   public:
    Scratch() = default;
    explicit Scratch(int64_t count) : bytes_(sizeof(T) * size_t(count)) {
        data_ = static_cast<T*>(large() ? take_memory(bytes_) : Shelf::mine().take(bytes_));
    }
    Scratch(Scratch&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
    Scratch& operator=(Scratch&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Scratch() {
        if (data_) large() ? give_memory(data_, bytes_) : Shelf::mine().give(data_, bytes_);
    }
    T* get() const { return data_; }
    T& operator[](int64_t i) const { return data_[i]; }

   private:
    static constexpr size_t kShelved = 16 << 20;  // of whole huge pages: what the shelf gives is no more either
    bool large() const { return bytes_ > kShelved; }

    T* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace rewire
