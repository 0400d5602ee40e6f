// Layer normalisation over channels, and root mean square normalisation, of tensors whose columns are samples or positions:
// in memory [panels][channels][columns].
#pragma once

#include <cstdint>

#include "kernels.h"

namespace rewire {

template <class T>
struct LayerNorms {
    int64_t panels, channels, columns;
    const Number<T> *weight, *bias;  // or null
    double eps;
    bool centered;  // whether the mean is subtracted
};

// y, and for each column its mean and the inverse of its standard deviation, or null. X and Y are one type, or float and
// bfloat16.
template <class X, class Y>
void layer_norm(const LayerNorms<X>&, const X* x, Y* y, Number<X>* mean, Number<X>* scale, int threads);

// `dx`, `dweight` and `dbias` may be null. `mean` is not read unless the norm is centered.
template <class X, class Y>
void layer_norm_gradient(const LayerNorms<X>&, const X* x, const Y* dy, const Number<X>* mean, const Number<X>* scale, X* dx,
                         Number<X>* dweight, Number<X>* dbias, int threads);

// y[k] = the transpose of the k-th of so many matrices
template <class T>
void transpose_each(const Table<T>&, const T* x, int64_t matrices, int64_t rows, int64_t cols, T* y, int threads);

}  // namespace rewire
