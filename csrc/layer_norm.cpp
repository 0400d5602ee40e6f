#include "layer_norm.h"

#include <algorithm>

#include "deal.h"
#include "dispatch.h"

namespace rewire {
namespace {

constexpr int64_t kColumns = 64;  // that are normalised at once: all of their channels stay near
constexpr int64_t kParts = 8;     // sums of parameters' gradients, however many threads there are

// Calls body(first element, columns, number of the first column) for pieces of panels [first, last).
template <class T, class Body>
void pieces_of(const LayerNorms<T>& of, int64_t first, int64_t last, Body&& body) {
    const int64_t each = (of.columns + kColumns - 1) / kColumns;
    for (int64_t k = first; k < last; k++) {
        const int64_t panel = k / each, at = k % each * kColumns;
        body(panel * of.channels * of.columns + at, std::min(kColumns, of.columns - at), panel * of.columns + at);
    }
}

template <class T>
int64_t piece_count(const LayerNorms<T>& of) {
    return of.panels * ((of.columns + kColumns - 1) / kColumns);
}

template <class T>
LayerNorm<T> one(const LayerNorms<T>& of) {
    return {of.channels, of.columns, of.weight, of.bias, of.eps, of.centered};
}

}  // namespace

template <class X, class Y>
void layer_norm(const LayerNorms<X>& of, const X* x, Y* y, Number<X>* mean, Number<X>* scale, int threads) {
    const LayerNormTable<X, Y>& table = layer_norm_table<X, Y>();
    const LayerNorm<X> norm = one(of);
    const int64_t count = piece_count(of), each = std::max<int64_t>(1, (1 << 14) / (of.channels * kColumns));
    parallel_for((count + each - 1) / each, worth(of.panels * of.channels * of.columns, threads), [&](int64_t task) {
        pieces_of(of, task * each, std::min(count, (task + 1) * each), [&](int64_t at, int64_t columns, int64_t column) {
            table.layer_norm(norm, columns, x + at, y + at, mean ? mean + column : nullptr, scale ? scale + column : nullptr);
        });
    });
}

template <class X, class Y>
void layer_norm_gradient(const LayerNorms<X>& of, const X* x, const Y* dy, const Number<X>* mean, const Number<X>* scale, X* dx,
                         Number<X>* dweight, Number<X>* dbias, int threads) {
    using N = Number<X>;
    const LayerNormTable<X, Y>& table = layer_norm_table<X, Y>();
    const LayerNorm<X> norm = one(of);
    const int64_t count = piece_count(of), parts = std::min(kParts, count), lanes = rewire::table<X>().sum_tile / 4;
    const bool sums = dweight || dbias;
    const Scratch<N> all(sums ? parts * 2 * of.channels * lanes : 0);
    parallel_for(parts, worth(of.panels * of.channels * of.columns, threads), [&](int64_t part) {
        N* const mine = sums ? all.get() + part * 2 * of.channels * lanes : nullptr;
        if (sums) std::fill_n(mine, 2 * of.channels * lanes, N(0));
        pieces_of(of, count * part / parts, count * (part + 1) / parts, [&](int64_t at, int64_t columns, int64_t column) {
            table.layer_norm_gradient(norm, columns, x + at, dy + at, of.centered ? mean + column : nullptr, scale + column,
                                      dx ? dx + at : nullptr, mine);
        });
    });
    for (int64_t c = 0; sums && c < of.channels; c++) {
        double weight = 0, bias = 0;
        for (int64_t part = 0; part < parts; part++)
            for (int64_t q = 0; q < lanes; q++) {
                const N* const from = all.get() + (part * of.channels + c) * 2 * lanes + q;
                weight += double(from[0]);
                bias += double(from[lanes]);
            }
        if (dweight) dweight[c] = N(weight);
        if (dbias) dbias[c] = N(bias);
    }
}

template <class T>
void transpose_each(const Table<T>& table, const T* x, int64_t matrices, int64_t rows, int64_t cols, T* y, int threads) {
    const int64_t block = 64, blocks = (rows + block - 1) / block;  // rows of the input
    parallel_for(matrices * blocks, worth(matrices * rows * cols / 4, threads), [&](int64_t task) {
        const int64_t at = task / blocks * rows * cols, row = task % blocks * block;
        table.transpose(x + at + row * cols, cols, y + at + row, rows, std::min(block, rows - row), cols);
    });
}

#define REWIRE_INSTANTIATE(X, Y)                                                                                           \
    template void layer_norm<X, Y>(const LayerNorms<X>&, const X*, Y*, Number<X>*, Number<X>*, int);                       \
    template void layer_norm_gradient<X, Y>(const LayerNorms<X>&, const X*, const Y*, const Number<X>*, const Number<X>*,  \
                                            X*, Number<X>*, Number<X>*, int);

REWIRE_INSTANTIATE(float, float)
REWIRE_INSTANTIATE(double, double)
REWIRE_INSTANTIATE(bfloat16, bfloat16)
REWIRE_INSTANTIATE(float, bfloat16)

template void transpose_each<float>(const Table<float>&, const float*, int64_t, int64_t, int64_t, float*, int);
template void transpose_each<double>(const Table<double>&, const double*, int64_t, int64_t, int64_t, double*, int);
template void transpose_each<bfloat16>(const Table<bfloat16>&, const bfloat16*, int64_t, int64_t, int64_t, bfloat16*, int);

}  // namespace rewire
