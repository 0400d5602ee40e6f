// The inner loops without all that surrounds them, for benchmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace rewire {

// `rows` units of `entries` connections each on average read a panel of `pieces` positions, at `count` positions that
// follow each other. Every thread has a panel of its own, and what it reads and writes stays where it is: nothing is
// packed, joined or handed on. No layer of such sizes is faster with these loops.
class Loops {
   public:
    Loops(const Table<float>& table, int64_t rows, double entries, int64_t pieces, int64_t count, int threads);

    // As a forward pass does it, so many times by all threads together.
    void forward(int64_t times) const;
    // As a backward pass does it: both gradients.
    void backward(int64_t times) const;

   private:
    template <class Body>
    void share(int64_t times, Body&& body) const;

    const Table<float>& table_;
    int64_t rows_, pieces_, count_;
    int threads_;
    std::vector<int32_t> ptr_, offset_;
    Scratch<float> weight_, source_, factor_, result_, grad_;
    Tile tile_;
};

}  // namespace rewire
