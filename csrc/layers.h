// Whole operators on raw pointers: planning, scratch memory and threads around the inner loops.
#pragma once

#include <cstdint>
#include <vector>

#include "channels.h"
#include "kernels.h"

namespace rewire {

// A 2-D convolution over activations that are batch-last, [channel][position][batch], or in panels,
// [batch / panel][row][channel][column][panel]; a linear layer is the one with 1 x 1 images.
struct Geometry {
    int64_t batch;
    int64_t in_channels, height, width;
    int64_t out_channels, out_height, out_width;
    int32_t kh, kw, sh, sw, ph, pw, dh, dw;
    int64_t panel = 0;                           // columns of a panel where one of the tensors is in panels,
    bool in_panels = false, out_panels = false;  // and which (input and output, and their gradients)

    int64_t taps() const { return int64_t(kh) * kw; }
};

// The active connections by output unit: row o holds indices[ptr[o] .. ptr[o+1]), ascending, where
// input unit (kh*KW + kw)*in_channels + c is tap (kh, kw) of input channel c.
struct ByOutput {
    const int32_t* ptr;
    const int32_t* indices;
};

// The same connections by input channel and tap: slot c*taps + t holds outputs[ptr[slot] ..
// ptr[slot+1]), ascending; order[k] is where the k-th stands by output.
struct ByInput {
    const int32_t* ptr;
    const int32_t* outputs;
    const int32_t* order;
};

// `norm`, or null: x is the input of a batch norm whose output is what the layer reads. `mean` and
// `variance`, or null: those of each output channel.
template <class T>
void forward(const Table<T>&, const Geometry&, const ByOutput&, const Number<T>* values, const Number<T>* bias,
             const T* x, const BatchNorm<T>* norm, T* y, bool relu, Number<T>* mean, Number<T>* variance, int threads);

template <class T>
void input_gradient(const Table<T>&, const Geometry&, const ByInput&, const Number<T>* values, const T* dy,
                    T* dx, int threads);

// grad[e] = sum over positions of dy times x, for the connections e of `by_output`. dy is read as said (as it is, with
// a gate, or plus another tensor); `bias`, or null: receives its sum by channel.
template <class T>
void weight_gradient(const Table<T>&, const Geometry&, const ByOutput&, const T* x, const T* dy, const Reading<T>&,
                     Number<T>* grad, Number<T>* bias, int threads);

// A batch norm before a layer. Where `summed`, the layer's input is a rectified sum of its output and something else;
// then `input` is the batch norm's input, `more` another gradient of the sum, or null, and factors are asked for.
template <class T>
struct Before {
    const BatchNorm<T>* norm = nullptr;
    const T *input = nullptr, *more = nullptr;

    bool summed() const { return input != nullptr; }
};

// What `gradients` computes. With a batch norm before the layer, dx is the gradient of its input, or g of
// `NormGradients` if factors are asked for. `bias` may be null. `rectified`, or null: x is the output of a rectifier, dx the
// gradient of that one's input, and this its sum by channel.
template <class T>
struct Gradients {
    T* dx;
    Number<T> *values, *bias;
    NormGradients<T> norm;
    Number<T>* rectified;
};

// All gradients in one pass over dy, which is read as said.
template <class T>
void gradients(const Table<T>&, const Geometry&, const ByInput&, const Number<T>* values, const T* x, const Before<T>&,
               const T* dy, const Reading<T>&, const Gradients<T>&, int threads);

// sums[r] = sum of the r-th row
template <class T>
void row_sums(const Table<T>&, const T* x, int64_t rows, int64_t len, Number<T>* sums, int threads);

template <class T>
void transpose(const Table<T>&, const T* in, int64_t rows, int64_t cols, T* out, int threads);

}  // namespace rewire
