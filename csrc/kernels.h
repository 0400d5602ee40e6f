// What one thread does: the inner loops, built once per instruction set, and the table of them.
//
// Activations are batch-last: a tensor (N, C, H, W) lies in memory as [C][H][W][N], so that the batch
// is what vectors run over. A linear layer is a convolution with one tap over a 1 x 1 image.
#pragma once

#include <cstdint>
#include <cstring>

namespace rewire {

// The upper half of a float: memory for activations and their gradients. Whatever is computed is computed in float.
struct bfloat16 {
    uint16_t bits;

    // Always inlined: this header is compiled for several instruction sets.
    bfloat16() = default;
    __attribute__((always_inline)) explicit bfloat16(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        bits = x == x ? uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16) : 0x7FC0;  // to nearest even
    }
    __attribute__((always_inline)) explicit bfloat16(double x) : bfloat16(float(x)) {}
    __attribute__((always_inline)) explicit bfloat16(int x) : bfloat16(float(x)) {}
    __attribute__((always_inline)) operator float() const {
        const uint32_t word = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
    }
};

// What elements of type T are added up in, and what parameters and statistics that belong to them are.
template <class T>
struct NumberOf {
    typedef T type;
};
template <>
struct NumberOf<bfloat16> {
    typedef float type;
};
template <class T>
using Number = typename NumberOf<T>::type;

// Positions of an output plane, `len` elements each, and the taps whose source lies inside the image for
// all of them: rows kh0..kh1 and columns kw0..kw1 of the kernel.
struct Tile {
    int64_t dst, src;            // elements from the start of a plane to the first position
    int64_t dst_step, src_step;  // and from one position to the next
    int32_t count, len;
    int32_t kh0, kh1, kw0, kw1;
};

constexpr int64_t kTiles = 32;  // at most, that an inner loop takes at once

// Connections in the order of the rows that are being computed. Entry e of row r and tap t lies in
// [ptr[r*taps + t], ptr[r*taps + t + 1]) and reads the source at offset[e] positions from the tile's.
struct Entries {
    const int32_t* ptr;
    const int32_t* offset;
    int32_t taps_h, taps_w;
};

// What will be read soon: a run of cache lines. Loops ask for it on their way.
struct Soon {
    const char* first = nullptr;
    int64_t lines = 0;
};

// Mean and variation of numbers that come in pieces, as sums about a pivot near their mean.
struct Spread {
    double pivot = 0, sum = 0, squares = 0;
    int64_t count = 0;
};

// dst[row] = start[row] + sum over e of weight[e] * src[offset[e]], rectified if asked
template <class T>
struct Sum {
    Entries entries;
    const Number<T>* weight;
    const T* src;
    int64_t step;  // elements from one source position to the next
    T* dst;
    int64_t row;     // elements from one output row to the next
    const Number<T>* start;  // bias, or null
    bool relu;
    Spread* spread;  // of each row, or null
    bool past = false;  // whether dst is written past the caches
    Soon soon{};
    const T* narrow_weight = nullptr;  // of bfloat16: the weights once more, as such
};

// How the elements of a tensor are read: x * scale[channel] + shift[channel], rectified if asked, or plus
// another tensor of the same shape times its own factor; where scale is null, as they are. With a gate of
// the same shape, zero wherever the gate is not positive.
template <class T>
struct Reading {
    const Number<T> *scale = nullptr, *shift = nullptr;
    bool relu = false;
    const T *gate = nullptr, *other = nullptr;
    const Number<T>* other_scale = nullptr;

    bool plain() const { return !scale && !gate; }
    // The same from an element on.
    Reading from(int64_t element) const {
        Reading moved = *this;
        if (gate) moved.gate += element;
        if (other) moved.other += element;
        return moved;
    }
};

// grad[e] += <factor[row], src[offset[e]]>; with dst as well, dst[row] = sum of weight[e] * src[offset[e]].
// With sums, the factor is the output of a rectifier or a batch norm: then dst is the gradient that passes the rectifier,
// and sums[2*row] += dst. If `normed` is there it is a batch norm, sums[2*row + 1] += dst * (normed - mean[row]), and
// either the factor is the batch norm's input, and read with a scale; or it is the sum of its output and something
// else, and `more` is a gradient it has besides. With sums and without dst, the factor is read as `reading` says (with
// a gate, or plus another tensor), and sums[2*row] += it.
template <class T>
struct Dots {
    Entries entries;
    const Number<T>* weight;
    const T* src;
    int64_t step;
    const T* factor;
    T* dst;
    int64_t row;
    Number<T>* grad;
    Reading<T> reading;  // of the factor
    const Number<T>* mean;
    double* sums;
    const T *normed, *more;  // the batch norm's input; or null
    bool past = false;
    Soon soon{};
    const T* narrow_weight = nullptr;  // see Sum
};

// One channel of batch normalisation: z = x * scale + shift (+ residual), rectified if asked.
template <class T>
struct Norm {
    int64_t len;
    Number<T> scale, shift;
    bool relu;
};

// What the gradient of one channel needs besides the tensors.
template <class T>
struct NormGrad {
    int64_t len;  // of all runs of the channel together
    Number<T> mean, inverse_std, scale, shift;  // scale = weight * inverse_std
    bool relu, training;
};

struct Pool {
    // Elements from one panel, channel and row of an image to the next.
    struct Steps {
        int64_t panel, channel, row;
    };
    int64_t panels, batch, channels, height, width, out_height, out_width;  // batch: columns of one panel
    int32_t kh, kw, sh, sw, ph, pw;
    bool count_padding;
    Steps in, out;
};

// Elementwise functions of one value; p and q are parameters.
enum class Activation : uint8_t {
    relu, hardtanh, leaky_relu, elu, silu, gelu, gelu_tanh, sigmoid, tanh, hardswish, hardsigmoid, softplus
};

enum class Operation : uint8_t {
    affine,    // a * p + q
    fma,       // a * b + c
    centered,  // a * (b - c)
    add, sub, mul, div,
    activate,  // activation(a)
    gradient,  // a * the derivative of the activation at b
};

// One instruction of a pointwise program: slots are tiles of numbers.
struct Instruction {
    Operation op = Operation::add;
    Activation activation = Activation::relu;
    int32_t out = 0, a = 0, b = -1, c = -1;
    double p = 0, q = 0;
};

// Layer normalisation of columns over all channels, `step` elements apart.
template <class T>
struct LayerNorm {
    int64_t channels, step;
    const Number<T> *weight, *bias;  // or null: 1 and 0
    double eps;
    bool centered;  // else root mean square normalisation
};

// A row of pixels of `len` elements. Output column w is the sum over its entries e, [ptr[w], ptr[w + 1]), and over the rows
// r of the input, which begin at x + at[r], of weight[e] * row_weight[r] * pixel from[e] of the row.
template <class T>
struct Blend {
    int64_t len, columns, rows;
    const int32_t *ptr, *from;
    const Number<T>* weight;
    const int64_t* at;
    const Number<T>* row_weight;
};

// y = (x - mean) * factor + shift, plus `more` unless null. There is a mean, a factor and a shift for each of `period` lanes.
template <class T>
struct LaneAffine {
    int64_t len, period;
    const Number<T> *mean, *factor, *shift;
};

template <class T>
struct Table {
    int sum_tile, dots_tile;  // elements that stay in registers
    // Of the rows in [row0, row1) and up to kTiles tiles: each row with all of them, then the next.
    void (*sum)(const Sum<T>&, const Tile* tiles, int64_t count, int64_t row0, int64_t row1);
    void (*dots)(const Dots<T>&, const Tile* tiles, int64_t count, int64_t row0, int64_t row1);
    // `count` pieces of `len` elements from one spacing to another
    void (*copy)(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t count, int64_t len);
    // the same of a channel that is not read as it is; gate and other tensor start where `from` does
    void (*read)(const Reading<T>&, int64_t channel, const T* from, int64_t from_step, T* to, int64_t to_step,
                 int64_t count, int64_t len);
    void (*transpose)(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows, int64_t cols);
    double (*total)(const T* x, int64_t len);
    void (*totals)(const T* x, int64_t step, int64_t count, int64_t len, double* sums);  // of pieces, added to sums
    double (*variation)(const T* x, int64_t len, Number<T> mean);  // sum of (x - mean)^2
    void (*normalize)(const Norm<T>&, const T* x, const T* residual, T* z);
    // sums = (sum of g, sum of g * xhat), g = dz (plus `more`, unless null) where z was not cut off (z null:
    // recomputed from x); g is written unless null
    void (*norm_sums)(const NormGrad<T>&, int64_t len, const T* x, const T* z, const T* dz, const T* more, T* g,
                      double* sums);
    void (*norm_gradient)(const NormGrad<T>&, const double* sums, int64_t len, const T* x, const T* z, const T* dz,
                          const T* more, T* dx, T* dresidual);
    // one row of the output, all channels of a panel: of x, or of its batch norm
    void (*max_pool)(const Pool&, const Norm<T>* of_channel, int64_t row, const T* x, T* y, uint8_t* which);
    // one row of the input: what passes the rectifier of the batch norm, and each channel's sums as above
    void (*max_pool_gradient)(const Pool&, const NormGrad<T>* of_channel, int64_t row, const T* x, const T* dy,
                              const uint8_t* which, T* dx, double* sums);
    // one channel of a panel
    void (*mean_pool)(const Pool&, const T* x, T* y);
    void (*mean_pool_gradient)(const Pool&, const T* dy, T* dx);
    // elements [first, first + len) of a tensor
    void (*drop_out)(const T* x, int64_t first, int64_t len, uint32_t limit, Number<T> scale, uint64_t seed, T* y);
    // a program on one tile; an instruction may write the slot that it reads
    void (*pointwise)(const Instruction* program, int64_t count, Number<T>* const* slots, int64_t len);
    // one row of one channel
    void (*blend)(const Blend<T>&, const T* x, T* y);
    // sum[lane] += x, or (x - mean[lane])^2
    void (*lane_sums)(const T* x, int64_t len, int64_t period, Number<T>* sum);
    void (*lane_spreads)(const T* x, int64_t len, int64_t period, const Number<T>* mean, Number<T>* sum);
    void (*lane_affine)(const LaneAffine<T>&, const T* x, const T* more, T* y);
};

// Layer normalisation of X that gives Y.
template <class X, class Y>
struct LayerNormTable {
    // some columns, with their means and inverse standard deviations
    void (*layer_norm)(const LayerNorm<X>&, int64_t columns, const X* x, Y* y, Number<X>* mean, Number<X>* scale);
    // sums[2*c] and sums[2*c + 1], vectors: the gradients of weight and bias of channel c, lane by lane
    void (*layer_norm_gradient)(const LayerNorm<X>&, int64_t columns, const X* x, const Y* dy, const Number<X>* mean,
                                const Number<X>* scale, X* dx, Number<X>* sums);
};

// From one element type to another.
struct Conversions {
    void (*widen)(const bfloat16* x, int64_t len, float* y);
    void (*narrow)(const float* x, int64_t len, bfloat16* y);
};

// The loops that look at index vectors before any other loop does.
struct Bounds {
    bool (*within)(const int32_t* x, int64_t n, int64_t first, int64_t limit);  // whether all are in [first, limit)
    int64_t (*falls)(const int32_t* x, int64_t n, int32_t step);  // how often one is not `step` above the one before it
};

struct InstructionSet {
    const char* name;
    Table<float> f32;
    Table<double> f64;
    Table<bfloat16> bf16;
    LayerNormTable<float, float> norm_f32;
    LayerNormTable<double, double> norm_f64;
    LayerNormTable<bfloat16, bfloat16> norm_bf16;
    LayerNormTable<float, bfloat16> norm_mixed;
    Conversions conversions;
    Bounds bounds;
};

namespace generic {
const InstructionSet& instruction_set();
}
#ifdef REWIRE_X86
namespace avx2 {
const InstructionSet& instruction_set();
}
namespace avx512 {
const InstructionSet& instruction_set();
}
// The same with products of pairs of bfloat16, where the compiler knows them: else null.
namespace avx512_bf16 {
const InstructionSet* instruction_set();
}
#endif

}  // namespace rewire
