// Images in panels, [N / panel][height][channels][width][panel], or batch-last, [channels][height][width][N], which is
// one panel of the whole batch: from one layout to another, some of their rows and columns, padding, other sizes, and means.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace rewire {

struct Images {
    int64_t panels, channels, height, width, panel;
    bool in_panels = true;  // else batch-last

    int64_t batch() const { return panels * panel; }
    int64_t row() const { return width * panel; }
    // The first element of a row of a channel.
    int64_t at(int64_t n, int64_t h, int64_t c) const {
        return (in_panels ? (n * height + h) * channels + c : c * height + h) * row();
    }
};

// y = x, from batch-last into panels or out of them.
template <class T>
void panels(const Table<T>&, const Images&, bool into, const T* x, T* y, int threads);

// The same, from contiguous memory, [N][channels][height][width], or into it.
template <class T>
void contiguous_panels(const Table<T>&, const Images&, bool into, const T* x, T* y, int threads);

// Every so many rows and columns, and channels of one value before and after.
struct Thinning {
    int64_t down, across, before, after;

    Images of(const Images& x) const {
        return {x.panels, before + x.channels + after, (x.height + down - 1) / down, (x.width + across - 1) / across,
                x.panel, x.in_panels};
    }
};
template <class T>
void thin(const Table<T>&, const Images&, const Thinning&, const T* x, T value, T* y, int threads);
template <class T>
void thin_gradient(const Table<T>&, const Images&, const Thinning&, const T* dy, T* dx, int threads);

// Constant padding: so many channels, rows and columns around.
struct Padding {
    int64_t channels_before = 0, channels_after = 0, top = 0, bottom = 0, left = 0, right = 0;

    Images of(const Images& x) const {
        return {x.panels, channels_before + x.channels + channels_after, top + x.height + bottom, left + x.width + right,
                x.panel, x.in_panels};
    }
};
template <class T>
void pad(const Images&, const Padding&, const T* x, T value, T* y, int threads);
template <class T>
void pad_gradient(const Images&, const Padding&, const T* dy, T* dx, int threads);

// The pixels along one side of an image as weighted sums of others: pixel i has the entries [ptr[i], ptr[i + 1]), maybe none.
struct Side {
    std::vector<int32_t> ptr, from;
    std::vector<double> weight;

    int64_t size() const { return int64_t(ptr.size()) - 1; }
};
// Images of another size. The weight of a pixel is the product of those along its column and along its row.
template <class T>
void resample(const Table<T>&, const Images&, const Side& rows, const Side& columns, const T* x, T* y, int threads);

// y, batch-last: the mean over all positions.
template <class T>
void mean(const Images&, const T* x, T* y, int threads);
template <class T>
void mean_gradient(const Images&, const T* dy, T* dx, int threads);

}  // namespace rewire
