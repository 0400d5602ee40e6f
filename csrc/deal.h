// Dealing the work of a layer out to tasks, and putting together what they have found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dispatch.h"
#include "parallel.h"
#include "scratch.h"

namespace rewire {

constexpr int64_t kGrain = 1 << 14;  // multiply-adds worth a second thread
constexpr int64_t kManyConnections = 1 << 17;
constexpr int64_t kElements = 256;  // of what is computed that are worth a part of their own

inline int worth(int64_t work, int threads) {
    return int(std::max<int64_t>(1, std::min<int64_t>(threads, work / kGrain)));
}

// Calls body(first, last) for blocks of [0, count).
template <class Body>
void for_each_block(int64_t count, int threads, Body&& body) {
    const int64_t block = 1 << 14;
    parallel_for((count + block - 1) / block, threads,
                 [&](int64_t b) { body(b * block, std::min(count, (b + 1) * block)); });
}

template <class T>
Scratch<T> gather(const T* values, const int32_t* places, int64_t count, int threads) {
    Scratch<T> gathered(count);
    T* out = gathered.get();
    for_each_block(count, threads, [=](int64_t first, int64_t last) {
        for (int64_t k = first; k < last; k++) out[k] = values[places[k]];
    });
    return gathered;
}

// A layer's weights in the order of its entries (places null: as they are). Of bfloat16, rounded to it, in both types: what
// is computed does not depend on which of them a loop reads.
template <class T>
class Weights {
   public:
    Weights(const Number<T>* values, const int32_t* places, int64_t count, int threads) : values_(values) {
        if (places) own_ = gather(values, places, count, threads);
        if (places) values_ = own_.get();
        if constexpr (!std::is_same_v<T, Number<T>>) {
            narrow_ = Scratch<T>(count);
            if (!places) own_ = Scratch<Number<T>>(count);
            conversions().narrow(values_, count, narrow_.get());
            conversions().widen(narrow_.get(), count, own_.get());
            values_ = own_.get();
        }
    }
    const Number<T>* get() const { return values_; }
    const T* narrow() const { return narrow_.get(); }

   private:
    const Number<T>* values_;
    Scratch<Number<T>> own_;
    Scratch<T> narrow_;
};

// How many blocks the rows of each of `tasks` are cut into, to keep `threads` busy. A task that is cut
// packs its source once per block.
inline int64_t row_blocks(int64_t tasks, int threads) {
    if (tasks % threads == 0 || tasks >= 4 * threads) return 1;
    return threads % tasks == 0 ? threads / tasks : (4 * threads + tasks - 1) / tasks;
}

// In how many parts the gradients of `count` connections, each used at so many elements, are summed by `tasks`, however many
// threads there are. Where there are many connections, or each is used at one position alone (`once`), putting parts together takes a good
// part of the time: then rows are cut rather than gradients kept more than twice.
inline int64_t gradient_parts(int64_t count, int64_t tasks, int64_t elements, bool once) {
    const int64_t most = once || count > kManyConnections ? 2 : std::clamp<int64_t>(elements / kElements, 1, 8);
    return std::min(most, tasks);
}

// grad[places[e]] = the sum of the parts' sums of entry e, in order (places null: e itself).
template <class T>
void join_parts(const T* sums, int64_t parts, int64_t count, const int32_t* places, T* grad, int threads) {
    for_each_block(count, threads, [=](int64_t first, int64_t last) {
        for (int64_t e = first; e < last; e++) {
            T sum = sums[e];
            for (int64_t part = 1; part < parts; part++) sum += sums[part * count + e];
            grad[places ? places[e] : e] = sum;
        }
    });
}

}  // namespace rewire
