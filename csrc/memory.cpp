#include "memory.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "pages.h"

namespace rewire {
namespace {

constexpr std::size_t kLine = 64;

std::size_t rounded(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Kept blocks by size. Never more than was in use at once: `free_` <= `peak_` - `used_`.
struct Cache {
    std::mutex mutex;
    std::map<std::size_t, std::vector<void*>> blocks;
    std::size_t used = 0, peak = 0, kept = 0;

    std::size_t clear() {
        const std::size_t freed = kept;
        for (auto& [size, list] : blocks)
            for (void* data : list) std::free(data);
        blocks.clear();
        kept = 0;
        return freed;
    }
};

Cache& cache() {
    static Cache* const it = new Cache;  // outlives tensors that die at exit
    return *it;
}

}  // namespace

void* take_memory(std::size_t bytes) {
    bytes = rounded(bytes);
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    void* data = nullptr;
    auto found = c.blocks.find(bytes);
    if (found != c.blocks.end() && !found->second.empty()) {
        data = found->second.back();
        found->second.pop_back();
        c.kept -= bytes;
    } else {
        if (c.used + c.kept + bytes > c.peak) c.clear();  // sizes have changed: make room
        data = allocate_pages(bytes, bytes >= kHugePage);
    }
    c.used += bytes;
    if (c.used > c.peak) c.peak = c.used;
    return data;
}

void give_memory(void* data, std::size_t bytes) {
    bytes = rounded(bytes);
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    c.used -= bytes;
    c.kept += bytes;
    c.blocks[bytes].push_back(data);
}

std::size_t empty_cache() {
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    c.peak = c.used;
    return c.clear();
}

}  // namespace rewire
