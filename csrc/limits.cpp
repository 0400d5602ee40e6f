#include "limits.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "parallel.h"
#include "scratch.h"

namespace rewire {

double read_rate(const Table<float>& table, int64_t bytes, int threads) {
    const int64_t piece = table.sum_tile * int64_t(sizeof(float));
    const int64_t pieces = std::max<int64_t>(1, bytes / piece);
    std::vector<int32_t> order(size_t(std::max<int64_t>(pieces, (int64_t(4) << 20) / piece)));
    uint32_t state = 1;
    for (auto& place : order) {
        state = state * 1664525u + 1013904223u;
        place = int32_t((uint64_t(state) * uint64_t(pieces)) >> 32);
    }
    const int64_t size = pieces * table.sum_tile;
    const Scratch<float> data(size * threads);
    std::fill(data.get(), data.get() + size * threads, 1.0f);
    double best = 1e9, total = 0;
    for (int round = 0; round < 12; round++) {
        std::vector<double> sums(size_t(threads), 0);
        const auto start = std::chrono::steady_clock::now();
        parallel_for(threads, threads, [&](int64_t t) {
            sums[size_t(t)] = table.read_pieces(data.get() + t * size, order.data(), int64_t(order.size()));
        });
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        for (const double sum : sums) total += sum;
    }
    // What was read is used, or it would not be read.
    return total > 0 ? double(piece) * double(order.size()) * threads / best : 0;
}

}  // namespace rewire
