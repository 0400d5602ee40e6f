// Dealing elements out by unit in two rounds, first to bands of neighbouring units: few enough that each keeps
// a cache line and a page at hand while elements are dealt, and narrow enough that one band fits the cache
// when its own elements are put in order. One round over many units misses the cache with every element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "scratch.h"

namespace rewire {

class Bands {
   public:
    // The elements come in parts, each of which counts and deals its own.
    Bands(int64_t units, int64_t elements)
        : units_(units), parts_(std::clamp<int64_t>((elements + (1 << 14) - 1) >> 14, 1, kParts)) {
        while ((units - 1) >> shift_ >= kBands) shift_++;
        count_ = ((units - 1) >> shift_) + 1;
        next_ = Scratch<int64_t>(parts_ * count_);
        std::fill(next_.get(), next_.get() + parts_ * count_, 0);
    }

    int shift() const { return shift_; }  // unit >> shift is its band
    int64_t count() const { return count_; }
    int64_t parts() const { return parts_; }
    int64_t unit(int64_t band) const { return band << shift_; }  // the first
    int64_t units(int64_t band) const { return std::min(units_ - unit(band), int64_t(1) << shift_); }

    // Elements of a part in each band: to be counted, and after place() where the next one of them goes.
    int64_t* of(int64_t part) const { return next_.get() + part * count_; }
    // Bands follow each other, and in each band the parts.
    void place() {
        int64_t total = 0;
        for (int64_t b = 0; b < count_; b++) {
            start_.push_back(total);
            for (int64_t p = 0; p < parts_; p++) total += std::exchange(of(p)[b], total);
        }
        start_.push_back(total);
    }
    int64_t start(int64_t band) const { return start_[size_t(band)]; }

   private:
    static constexpr int64_t kBands = 1024, kParts = 16;
    int64_t units_, parts_, count_ = 0;
    int shift_ = 0;
    Scratch<int64_t> next_;
    std::vector<int64_t> start_;
};

}  // namespace rewire
