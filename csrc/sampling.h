// Choosing and replacing connections: all in time linear in connections and units, and all with results that do
// not depend on the number of threads.
#pragma once

#include <cstdint>

#include "layers.h"

namespace rewire {

// All connections that are not in `active`.
void complement(const ByOutput& active, int64_t n_in, int64_t n_out, int32_t* ptr, int32_t* indices, int threads);

// (active without pruned) together with the grown part of subset; source[e] says where connection e stood
// before, -1 for a grown one. Returns how many there are; where that is not `count`, which is how many there is room for,
// indices and source are left as they are.
int64_t replace(const ByOutput& active, const uint8_t* pruned, const ByOutput& subset, const uint8_t* grown,
                int64_t n_out, int64_t count, int32_t* ptr, int32_t* indices, int32_t* source, int threads);

// out[e] = x[source[e]], or `fresh` where that is -1
template <class T>
void follow(const T* x, const int32_t* source, int64_t n, T fresh, T* out, int threads);

// Connections as output * n_in + input, those with chosen[e] alone unless that is null:
// sets their bits, and returns how many were not set before;
int64_t mark(const ByOutput&, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* bits);
// adds them to a HyperLogLog sketch of kRegisters registers.
constexpr int64_t kRegisters = 1 << 12;
void sketch(const ByOutput&, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* registers);

// Marks the k largest (or smallest) scores, equal ones in the order of their place; NaN is below all else.
template <class T>
void select(const T* scores, int64_t n, int64_t k, bool largest, uint8_t* chosen, int threads);

// sums[r] = sum over row r of signs * x, or of |x| if signs is null
template <class T>
void unit_sums(const T* x, const T* signs, int64_t rows, int64_t len, T* sums, int threads);

}  // namespace rewire
