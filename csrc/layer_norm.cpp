#include "layer_norm.h"

#include <algorithm>

#include "deal.h"

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

template <class T>
void layer_norm(const Table<T>& table, const LayerNorms<T>& of, const T* x, T* y, T* mean, T* scale, int threads) {
    const LayerNorm<T> norm = one(of);
    const int64_t count = piece_count(of), each = std::max<int64_t>(1, (1 << 14) / (of.channels * kColumns));
    parallel_for((count + each - 1) / each, worth(of.panels * of.channels * of.columns, threads), [&](int64_t task) {
        pieces_of(of, task * each, std::min(count, (task + 1) * each), [&](int64_t at, int64_t columns, int64_t column) {
            table.layer_norm(norm, columns, x + at, y + at, mean ? mean + column : nullptr, scale ? scale + column : nullptr);
        });
    });
}

template <class T>
void layer_norm_gradient(const Table<T>& table, const LayerNorms<T>& of, const T* x, const T* dy, const T* mean,
                         const T* scale, T* dx, T* dweight, T* dbias, int threads) {
    const LayerNorm<T> norm = one(of);
    const int64_t count = piece_count(of), parts = std::min(kParts, count), lanes = table.sum_tile / 4;
    const bool sums = dweight || dbias;
    const Scratch<T> all(sums ? parts * 2 * of.channels * lanes : 0);
    parallel_for(parts, worth(of.panels * of.channels * of.columns, threads), [&](int64_t part) {
        T* const mine = sums ? all.get() + part * 2 * of.channels * lanes : nullptr;
        if (sums) std::fill_n(mine, 2 * of.channels * lanes, T(0));
        pieces_of(of, count * part / parts, count * (part + 1) / parts, [&](int64_t at, int64_t columns, int64_t column) {
            table.layer_norm_gradient(norm, columns, x + at, dy + at, of.centered ? mean + column : nullptr, scale + column,
                                      dx ? dx + at : nullptr, mine);
        });
    });
    for (int64_t c = 0; sums && c < of.channels; c++) {
        double weight = 0, bias = 0;
        for (int64_t part = 0; part < parts; part++)
            for (int64_t q = 0; q < lanes; q++) {
                const T* const from = all.get() + (part * of.channels + c) * 2 * lanes + q;
                weight += double(from[0]);
                bias += double(from[lanes]);
            }
        if (dweight) dweight[c] = T(weight);
        if (dbias) dbias[c] = T(bias);
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

#define REWIRE_INSTANTIATE(T)                                                                                              \
    template void layer_norm<T>(const Table<T>&, const LayerNorms<T>&, const T*, T*, T*, T*, int);                         \
    template void layer_norm_gradient<T>(const Table<T>&, const LayerNorms<T>&, const T*, const T*, const T*, const T*,    \
                                         T*, T*, T*, int);                                                                 \
    template void transpose_each<T>(const Table<T>&, const T*, int64_t, int64_t, int64_t, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)

}  // namespace rewire
