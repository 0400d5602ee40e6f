// Drawing connections, in time linear in draws, connections and units, and the same on any number of threads.
#pragma once

#include <cstdint>

#include "layers.h"

namespace rewire {

// A stream of random words: Philox4x64-10 with key (seed, purpose) and counter (block, layer, step, 0).
struct Stream {
    uint64_t seed, purpose, step, layer;
};

// A column of Vose's table of one distribution: its unit is taken where the fraction is below the threshold,
// the alias where it is not. Eight bytes: tables of wide layers are looked up from all over a cache.
struct AliasColumn {
    uint32_t threshold;
    int32_t alias;
};

// The table of the distribution in proportion to `weights`, which are finite, not negative, not all zero.
void build_alias(const double* weights, int64_t n, AliasColumn* columns);

// Whether all aliases of `tables` tables of n columns each are in [0, n).
bool sound(const AliasColumn* columns, int64_t n, int64_t tables);

// The distinct connections among `draws` independent ones that are not in `active`, by output unit.
// Null tables stand for the uniform distribution; `groups` runs of output units have each a table of `inputs` of their
// own, one after the other. `indices` has room for all draws; returns how many there are.
int64_t draw(const Stream&, int64_t draws, int64_t n_in, int64_t n_out, const AliasColumn* inputs,
             const AliasColumn* outputs, int64_t groups, const ByOutput& active, int32_t* ptr, int32_t* indices,
             int threads);

// One sign per sample and position, out[position][sample], 4-wise independent: the lowest bit of a cubic
// polynomial modulo 2^61 - 1, at (first + sample) * positions + position.
template <class T>
void signs(const Stream&, int64_t first, int64_t samples, int64_t positions, T* out, int threads);

}  // namespace rewire
