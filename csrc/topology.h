// The connections of a layer: whether they are sound, and their other traversal order.
#pragma once

#include <cstdint>

#include "layers.h"

namespace rewire {

// -1 if rows of ascending, distinct indices in [0, inputs) tile [0, count); else the first row that does not.
int64_t first_bad_row(const ByOutput&, int64_t rows, int64_t inputs, int64_t count, int threads);

// The same connections by input: slot c * taps + tap of input unit tap * in_channels + c.
void index_by_input(const ByOutput&, int64_t in_channels, int64_t out_channels, int64_t taps, int32_t* ptr,
                    int32_t* outputs, int32_t* order, int threads);

// What is wrong with connections for a kernel, which reads what they point to unchecked.
enum class Problem { none, count, units, places };

// How units must follow each other within a row.
enum class Order : int8_t { any = -1, ascending = 0, distinct = 1 };

// The first of: `a.ptr` falls somewhere; the units of `a` are not all in [0, limit), or not in order within each row;
// `places`, or null, are not all in [0, a.ptr[rows]). a.ptr[0] is 0.
Problem find_problem(const ByOutput& a, int64_t rows, int64_t limit, Order order, const int32_t* places, int threads);

}  // namespace rewire
