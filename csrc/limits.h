// What the memory of this machine gives, for benchmarks.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace rewire {

// Bytes per second that `threads` threads together read in pieces of the products' size, in random order,
// each from `bytes` of its own.
double read_rate(const Table<float>&, int64_t bytes, int threads);

}  // namespace rewire
