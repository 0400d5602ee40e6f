// Images in panels, [N / panel][height][channels][width][panel]: in and out of them, some of their rows and
// columns, and means.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace rewire {

struct Images {
    int64_t panels, channels, height, width, panel;

    int64_t row() const { return width * panel; }
    // The first element of a row of a channel.
    int64_t at(int64_t n, int64_t h, int64_t c) const { return ((n * height + h) * channels + c) * row(); }
};

// y = x, from batch-last into panels or out of them.
template <class T>
void panels(const Table<T>&, const Images&, bool into, const T* x, T* y, int threads);

// Every so many rows and columns, and channels of one value before and after.
struct Thinning {
    int64_t down, across, before, after;

    Images of(const Images& x) const {
        return {x.panels, before + x.channels + after, (x.height + down - 1) / down, (x.width + across - 1) / across,
                x.panel};
    }
};
template <class T>
void thin(const Table<T>&, const Images&, const Thinning&, const T* x, T value, T* y, int threads);
template <class T>
void thin_gradient(const Table<T>&, const Images&, const Thinning&, const T* dy, T* dx, int threads);

// y, batch-last: the mean over all positions.
template <class T>
void mean(const Images&, const T* x, T* y, int threads);
template <class T>
void mean_gradient(const Images&, const T* dy, T* dx, int threads);

}  // namespace rewire
