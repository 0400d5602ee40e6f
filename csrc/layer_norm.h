// Layer normalisation over channels, and root mean square normalisation, of tensors whose columns are samples or positions:
// in memory [panels][channels][columns].
#pragma once

#include <cstdint>

#include "kernels.h"

namespace rewire {

template <class T>
struct LayerNorms {
    int64_t panels, channels, columns;
    const T *weight, *bias;  // or null
    double eps;
    bool centered;  // whether the mean is subtracted
};

// y, and for each column its mean and the inverse of its standard deviation, or null.
template <class T>
void layer_norm(const Table<T>&, const LayerNorms<T>&, const T* x, T* y, T* mean, T* scale, int threads);

// `dx`, `dweight` and `dbias` may be null. `mean` is not read unless the norm is centered.
template <class T>
void layer_norm_gradient(const Table<T>&, const LayerNorms<T>&, const T* x, const T* dy, const T* mean, const T* scale,
                         T* dx, T* dweight, T* dbias, int threads);

// y[k] = the transpose of the k-th of so many matrices
template <class T>
void transpose_each(const Table<T>&, const T* x, int64_t matrices, int64_t rows, int64_t cols, T* y, int threads);

}  // namespace rewire
