#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <vector>

#include "pages.h"

namespace rewire {
namespace {

constexpr std::size_t kLine = 64, kSlack = std::size_t(256) << 20;

// To the next of 64 sizes between two powers of two: no two subsets of a rewiring are of quite the same size,
// and the second is to find the memory of the first.
std::size_t rounded(std::size_t bytes) {
    std::size_t step = kLine;
    while (bytes / step >= 128) step *= 2;
    return (bytes + step - 1) / step * step;
}

// Blocks that were given back, the longest unused first. There are a few hundred at most. Used and kept
// together are at most `limit()`: what was in use at once and a quarter more, or kSlack more if that is
// little. At the end of a backward pass blocks of other sizes are in use than at its start, and a rewiring
// needs new sizes for a moment; neither must cost those of the activations.
struct Cache {
    struct Block {
        std::size_t bytes;
        void* data;
    };
    std::mutex mutex;
    std::vector<Block> blocks;
    std::size_t used = 0, peak = 0, kept = 0;

    std::size_t limit() const { return peak + std::max(peak / 4, kSlack); }

    // Of this size, the last one that was given back: it may still be in the processor's cache.
    void* find(std::size_t bytes) {
        const auto last =
            std::find_if(blocks.rbegin(), blocks.rend(), [&](const Block& b) { return b.bytes == bytes; });
        if (last == blocks.rend()) return nullptr;
        void* const data = last->data;
        blocks.erase(std::next(last).base());
        kept -= bytes;
        return data;
    }

    // Frees the longest unused blocks until `bytes` more are within the limit.
    void make_room(std::size_t bytes) {
        auto end = blocks.begin();
        for (; end != blocks.end() && used + kept + bytes > limit(); ++end) {
            std::free(end->data);
            kept -= end->bytes;
        }
        blocks.erase(blocks.begin(), end);
    }

    std::size_t clear() {
        const std::size_t freed = kept;
        for (const Block& block : blocks) std::free(block.data);
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
    void* data = c.find(bytes);
    if (!data) {
        c.make_room(bytes);
        data = allocate_pages(bytes, bytes >= kHugePage);
    }
    c.used += bytes;
    if (c.used > c.peak) c.peak = c.used;
    return data;
}

void give_memory(void* data, std::size_t bytes) noexcept {
    bytes = rounded(bytes);
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    c.used -= bytes;
    try {
        c.blocks.push_back({bytes, data});
    } catch (const std::bad_alloc&) {
        return std::free(data);
    }
    c.kept += bytes;
}

std::size_t empty_cache() {
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    c.peak = c.used;
    return c.clear();
}

}  // namespace rewire
