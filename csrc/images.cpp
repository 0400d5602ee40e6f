#include "images.h"

#include <algorithm>

#include "deal.h"

namespace rewire {
namespace {

// Calls body(n, h) for every row of every panel.
template <class Body>
void for_each_row(const Images& of, int threads, Body&& body) {
    const int64_t rows = of.panels * of.height;
    parallel_for(rows, worth(rows * of.channels * of.row() / 4, threads),
                 [&](int64_t k) { body(k / of.height, k % of.height); });
}

}  // namespace

template <class T>
void panels(const Table<T>& table, const Images& of, bool into, const T* x, T* y, int threads) {
    const int64_t batch = of.panels * of.panel;
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++) {
            const int64_t here = (c * of.height + h) * of.width * batch + n * of.panel, there = of.at(n, h, c);
            into ? table.copy(x + here, batch, y + there, of.panel, of.width, of.panel)
                 : table.copy(x + there, of.panel, y + here, batch, of.width, of.panel);
        }
    });
}

template <class T>
void thin(const Table<T>& table, const Images& of, const Thinning& by, const T* x, T value, T* y, int threads) {
    const Images to = by.of(of);
    for_each_row(to, threads, [&](int64_t n, int64_t h) {
        T* const row = y + to.at(n, h, 0);
        std::fill(row, row + by.before * to.row(), value);
        for (int64_t c = 0; c < of.channels; c++)
            table.copy(x + of.at(n, h * by.down, c), by.across * of.panel, row + (by.before + c) * to.row(), of.panel,
                       to.width, of.panel);
        std::fill(row + (by.before + of.channels) * to.row(), row + to.channels * to.row(), value);
    });
}

template <class T>
void thin_gradient(const Table<T>& table, const Images& of, const Thinning& by, const T* dy, T* dx, int threads) {
    const Images to = by.of(of);
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        T* const row = dx + of.at(n, h, 0);
        if (h % by.down || by.across > 1) std::fill(row, row + of.channels * of.row(), T(0));
        for (int64_t c = 0; h % by.down == 0 && c < of.channels; c++)
            table.copy(dy + to.at(n, h / by.down, by.before + c), of.panel, row + c * of.row(), by.across * of.panel,
                       to.width, of.panel);
    });
}

template <class T>
void mean(const Images& of, const T* x, T* y, int threads) {
    const int64_t batch = of.panels * of.panel;
    const T share = T(1) / T(of.height * of.width);
    threads = worth(of.channels * of.height * of.width * batch / 4, threads);
    parallel_for(of.panels * of.channels, threads, [&](int64_t k) {
        const int64_t n = k / of.channels, c = k % of.channels;
        T* const to = y + c * batch + n * of.panel;
        const Scratch<T> row(of.panel);
        std::fill(to, to + of.panel, T(0));
        for (int64_t h = 0; h < of.height; h++) {  // sums of rows first, which are more exact
            std::fill(row.get(), row.get() + of.panel, T(0));
            for (int64_t w = 0; w < of.width; w++)
                for (int64_t i = 0; i < of.panel; i++) row[i] += x[of.at(n, h, c) + w * of.panel + i];
            for (int64_t i = 0; i < of.panel; i++) to[i] += row[i];
        }
        for (int64_t i = 0; i < of.panel; i++) to[i] *= share;
    });
}

template <class T>
void mean_gradient(const Images& of, const T* dy, T* dx, int threads) {
    const int64_t batch = of.panels * of.panel;
    const T share = T(1) / T(of.height * of.width);
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++) {
            const T* const from = dy + c * batch + n * of.panel;
            T* const row = dx + of.at(n, h, c);
            for (int64_t w = 0; w < of.width; w++)
                for (int64_t i = 0; i < of.panel; i++) row[w * of.panel + i] = from[i] * share;
        }
    });
}

#define REWIRE_INSTANTIATE(T)                                                                               \
    template void panels<T>(const Table<T>&, const Images&, bool, const T*, T*, int);                       \
    template void thin<T>(const Table<T>&, const Images&, const Thinning&, const T*, T, T*, int);           \
    template void thin_gradient<T>(const Table<T>&, const Images&, const Thinning&, const T*, T*, int);     \
    template void mean<T>(const Images&, const T*, T*, int);                                                \
    template void mean_gradient<T>(const Images&, const T*, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)

}  // namespace rewire
