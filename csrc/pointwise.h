// Elementwise operations on whole tensors: a program that runs on tiles, with operands that are broadcast and results that
// are summed.
#pragma once

#include <vector>

#include "channels.h"
#include "kernels.h"

namespace rewire {

// The elements of a tensor as five nested loops, outermost first. The innermost two are a run: `width` pieces of `piece`
// elements. One of the outer three goes over channels.
struct Loops5 {
    int64_t outer[3] = {1, 1, 1}, width = 1, piece = 1;
    int channel = 0;

    int64_t run() const { return width * piece; }
    int64_t channels() const { return outer[channel]; }
};

// How an operand lies in memory: elements from one iteration of a loop to the next, 0 where it is broadcast. That of the
// innermost loop is 0 or 1.
struct Strides5 {
    int64_t outer[3] = {0, 0, 0}, width = 0, piece = 0;
};

// Slots have elements of type T; tensors have so, too, or they are narrow: bfloat16.
template <class T>
struct PointwiseRead {
    const T* data;
    Strides5 strides;
    const bfloat16* narrow = nullptr;  // instead of data
};

// A slot that is written to a tensor of full shape.
template <class T>
struct PointwiseWrite {
    int32_t slot;
    T* data;
    Strides5 strides;
    bfloat16* narrow = nullptr;  // instead of data
};

// A slot that is summed over all loops where the strides are 0. Strides are 0 along the width, and not along channels; along
// pieces they may be 1.
template <class T>
struct PointwiseSum {
    int32_t slot;
    T* data;          // or null
    Strides5 strides;
    double* raw;      // sums by channel, one or two apart, or null
    int64_t raw_step;
    bfloat16* narrow = nullptr;  // instead of data
};

template <class T>
struct Pointwise {
    Loops5 loops;
    std::vector<PointwiseRead<T>> reads;  // slots 0, 1, ...
    const Instruction* program;
    int64_t instructions;
    int32_t slots;
    std::vector<PointwiseWrite<T>> writes;
    std::vector<PointwiseSum<T>> sums;
};

constexpr int64_t kPointwiseTile = 512;  // elements of a slot
constexpr int32_t kPointwiseSlots = 48;

template <class T>
void pointwise(const Table<T>&, const Pointwise<T>&, int threads);

}  // namespace rewire
