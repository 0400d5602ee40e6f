// Drawing, choosing and replacing connections: all in time linear in connections, draws and units, and all
// with results that do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "layers.h"

namespace rewire {

// A stream of random words: Philox4x64-10 with key (seed, purpose) and counter (block, layer, step, 0).
struct Stream {
    uint64_t seed, purpose, step, layer;
};

// A column of Vose's table of one distribution: its unit is taken where the fraction is below the threshold,
// the alias where it is not.
struct AliasColumn {
    uint64_t threshold;
    int32_t alias, unused;
};

// The table of the distribution in proportion to `weights`, which are finite, not negative, not all zero.
void build_alias(const double* weights, int64_t n, AliasColumn* columns);

// The distinct connections among `draws` independent ones that are not in `active`, by output unit.
// Null tables stand for the uniform distribution. `indices` has room for all draws; returns how many there are.
int64_t draw(const Stream&, int64_t draws, int64_t n_in, int64_t n_out, const AliasColumn* inputs,
             const AliasColumn* outputs, const ByOutput& active, int32_t* ptr, int32_t* indices, int threads);

// All connections that are not in `active`.
void complement(const ByOutput& active, int64_t n_in, int64_t n_out, int32_t* ptr, int32_t* indices, int threads);

// (active without pruned) together with the grown part of subset; source[e] says where connection e stood
// before, -1 for a grown one.
void replace(const ByOutput& active, const uint8_t* pruned, const ByOutput& subset, const uint8_t* grown,
             int64_t n_out, int32_t* ptr, int32_t* indices, int32_t* source, int threads);

// out[e] = x[source[e]], or `fresh` where that is -1
template <class T>
void follow(const T* x, const int32_t* source, int64_t n, T fresh, T* out, int threads);

// Connections as output * n_in + input, those with chosen[e] alone unless that is null:
// sets their bits, and returns how many were not set before;
int64_t mark(const ByOutput&, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* bits);
// adds them to a HyperLogLog sketch of 4096 registers.
void sketch(const ByOutput&, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* registers);

// Marks the k largest (or smallest) scores, equal ones in the order of their place; NaN is below all else.
template <class T>
void select(const T* scores, int64_t n, int64_t k, bool largest, uint8_t* chosen, int threads);

// One sign per sample and position, out[position][sample], 4-wise independent: the lowest bit of a cubic
// polynomial modulo 2^61 - 1, at (first + sample) * positions + position.
template <class T>
void signs(const Stream&, int64_t first, int64_t samples, int64_t positions, T* out, int threads);

// sums[r] = sum over row r of signs * x, or of |x| if signs is null
template <class T>
void unit_sums(const T* x, const T* signs, int64_t rows, int64_t len, T* sums, int threads);

}  // namespace rewire
