// Normalisation, pooling and elementwise operators of activations. Batch-last, a channel is one contiguous run; in panels, one run for each
// row of each panel.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace rewire {

template <class T>
struct BatchNorm {
    int64_t channels, len;
    bool training, relu;     // training: mean and variance are those of x itself
    double epsilon;
    const Number<T> *weight, *bias;  // null: one and zero
    const Number<T> *mean, *variance;
    int64_t panels;  // rows of panels of the tensors, in each of which a channel has a run; 1: they are batch-last

    double inverse_std(int64_t c) const { return 1 / std::sqrt(double(variance[c]) + epsilon); }
    // The output is x * scale + shift.
    double scale(int64_t c) const { return inverse_std(c) * (weight ? double(weight[c]) : 1); }
    double shift(int64_t c) const { return (bias ? double(bias[c]) : 0) - double(mean[c]) * scale(c); }
};

// Mean and (biased) variance of each channel.
template <class T>
void moments(const Table<T>&, const T* x, int64_t channels, int64_t len, int64_t panels, Number<T>* mean,
             Number<T>* variance, int threads);

// sums[c] = the sum over channel c.
template <class T>
void channel_sums(const Table<T>&, const T* x, int64_t channels, int64_t len, int64_t panels, Number<T>* sums, int threads);

// running = (1 - momentum) * running + momentum * moment, the variance times `unbiased`.
template <class T>
void track(const T* mean, const T* variance, int64_t channels, double momentum, double unbiased, T* running_mean,
           T* running_variance);

// z = batch norm of x, plus residual (or null), rectified if asked.
template <class T>
void batch_norm(const Table<T>&, const BatchNorm<T>&, const T* x, const T* residual, T* z, int threads);

// The gradient of x is g * factors[c] + x * factors[channels + c] + factors[2 * channels + c], where g is
// what passes the rectifier. Where `factors` are asked for they are computed instead of it, and who needs
// the gradient does the rest as it reads g and x.
template <class T>
struct NormGradients {
    Number<T> *weight, *bias;  // or null
    Number<T>* factors;        // or null
};

// `z` is the output where a residual was added before rectifying, null otherwise. The output's gradient is dz,
// plus `more` unless that is null. `dresidual` receives g, or is null. With factors nothing is written to dx.
template <class T>
void batch_norm_gradient(const Table<T>&, const BatchNorm<T>&, const T* x, const T* z, const T* dz, const T* more,
                         T* dx, T* dresidual, const NormGradients<T>&, int threads);

// The same where g is in dx already, with sums[2*c] of it and sums[2*c + 1] of it times x - mean over each
// channel; dx is changed in place.
template <class T>
void batch_norm_gradient(const Table<T>&, const BatchNorm<T>&, const T* x, const double* sums, T* dx,
                         const NormGradients<T>&, int threads);

// dx = the gradient that g and factors stand for.
template <class T>
void settle_gradient(const Table<T>&, const T* g, const T* x, const Number<T>* factors, int64_t channels, int64_t len,
                     int64_t panels, T* dx, int threads);

template <class T>
void copy(const T* x, int64_t len, T* y, int threads);
template <class T>
void fill(T value, int64_t len, T* y, int threads);

void widen(const bfloat16* x, int64_t len, float* y, int threads);
void narrow(const float* x, int64_t len, bfloat16* y, int threads);

// y[i] = x[i] * scale, or 0 with the given probability; which ones is a function of seed and i alone.
template <class T>
void drop_out(const Table<T>&, const T* x, int64_t len, double probability, double scale, uint64_t seed, T* y,
              int threads);

// Of x, or of its batch norm; `which` receives the tap of each maximum, or is null.
template <class T>
void max_pool(const Table<T>&, const Pool&, const BatchNorm<T>*, const T* x, T* y, uint8_t* which, int threads);
// With factors dx receives g.
template <class T>
void max_pool_gradient(const Table<T>&, const Pool&, const BatchNorm<T>*, const T* x, const T* dy,
                       const uint8_t* which, T* dx, const NormGradients<T>&, int threads);
template <class T>
void mean_pool(const Table<T>&, const Pool&, const T* x, T* y, int threads);
template <class T>
void mean_pool_gradient(const Table<T>&, const Pool&, const T* dy, T* dx, int threads);

}  // namespace rewire
