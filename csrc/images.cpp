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
    const int64_t batch = of.batch();
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++) {
            const int64_t here = (c * of.height + h) * of.width * batch + n * of.panel, there = of.at(n, h, c);
            into ? table.copy(x + here, batch, y + there, of.panel, of.width, of.panel)
                 : table.copy(x + there, of.panel, y + here, batch, of.width, of.panel);
        }
    });
}

template <class T>
void contiguous_panels(const Table<T>& table, const Images& of, bool into, const T* x, T* y, int threads) {
    const int64_t image = of.height * of.width, sample = of.channels * image;
    threads = worth(of.batch() * sample / 4, threads);
    if (of.height == 1) {  // a panel is the transpose of its samples
        const int64_t block = 64, blocks = (sample + block - 1) / block;
        return parallel_for(of.panels * blocks, threads, [&](int64_t k) {
            const int64_t n = k / blocks, column = k % blocks * block, columns = std::min(block, sample - column);
            const int64_t here = n * of.panel * sample + column, there = (n * sample + column) * of.panel;
            into ? table.transpose(x + here, sample, y + there, of.panel, of.panel, columns)
                 : table.transpose(x + there, of.panel, y + here, sample, columns, of.panel);
        });
    }
    // Several rows of an image are transposed at once, so that even narrow ones fill the blocks that `transpose` has fast
    // loops for; then they go to their places.
    const int64_t some = std::max<int64_t>(1, std::min(of.height, 128 / of.width));
    parallel_for(of.panels * of.channels, threads, [&](int64_t k) {
        const int64_t n = k / of.channels, c = k % of.channels;
        const Scratch<T> turned(some * of.row());
        for (int64_t h = 0; h < of.height; h += some) {
            const int64_t rows = std::min(some, of.height - h), columns = rows * of.width;
            const int64_t here = n * of.panel * sample + c * image + h * of.width;
            if (into) table.transpose(x + here, sample, turned.get(), of.panel, of.panel, columns);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t there = of.at(n, h + r, c);
                T* const part = turned.get() + r * of.row();
                into ? std::copy_n(part, of.row(), y + there) : std::copy_n(x + there, of.row(), part);
            }
            if (!into) table.transpose(turned.get(), of.panel, y + here, sample, columns, of.panel);
        }
    });
}

template <class T>
void thin(const Table<T>& table, const Images& of, const Thinning& by, const T* x, T value, T* y, int threads) {
    const Images to = by.of(of);
    for_each_row(to, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < to.channels; c++) {
            T* const row = y + to.at(n, h, c);
            if (c < by.before || c >= by.before + of.channels)
                std::fill(row, row + to.row(), value);
            else
                table.copy(x + of.at(n, h * by.down, c - by.before), by.across * of.panel, row, of.panel, to.width,
                           of.panel);
        }
    });
}

template <class T>
void thin_gradient(const Table<T>& table, const Images& of, const Thinning& by, const T* dy, T* dx, int threads) {
    const Images to = by.of(of);
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++) {
            T* const row = dx + of.at(n, h, c);
            if (h % by.down || by.across > 1) std::fill(row, row + of.row(), T(0));
            if (h % by.down == 0)
                table.copy(dy + to.at(n, h / by.down, by.before + c), of.panel, row, by.across * of.panel, to.width,
                           of.panel);
        }
    });
}

template <class T>
void pad(const Images& of, const Padding& by, const T* x, T value, T* y, int threads) {
    const Images to = by.of(of);
    for_each_row(to, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < to.channels; c++) {
            T* const row = y + to.at(n, h, c);
            T* const end = row + to.row();
            const int64_t from_h = h - by.top, from_c = c - by.channels_before;
            if (from_h < 0 || from_h >= of.height || from_c < 0 || from_c >= of.channels) {
                std::fill(row, end, value);
                continue;
            }
            T* const inner = row + by.left * of.panel;
            std::fill(row, inner, value);
            std::copy_n(x + of.at(n, from_h, from_c), of.row(), inner);
            std::fill(inner + of.row(), end, value);
        }
    });
}

template <class T>
void pad_gradient(const Images& of, const Padding& by, const T* dy, T* dx, int threads) {
    const Images to = by.of(of);
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++)
            std::copy_n(dy + to.at(n, by.top + h, by.channels_before + c) + by.left * of.panel, of.row(),
                        dx + of.at(n, h, c));
    });
}

template <class T>
void resample(const Table<T>& table, const Images& of, const Side& rows, const Side& columns, const T* x, T* y, int threads) {
    using N = Number<T>;
    const Images to{of.panels, of.channels, rows.size(), columns.size(), of.panel, of.in_panels};
    const std::vector<N> weight(columns.weight.begin(), columns.weight.end());
    const std::vector<N> row_weight(rows.weight.begin(), rows.weight.end());
    for_each_row(to, threads, [&](int64_t n, int64_t h) {
        const int32_t first = rows.ptr[size_t(h)], count = rows.ptr[size_t(h) + 1] - first;
        const Scratch<int64_t> at(count + 1);
        for (int32_t r = 0; r < count; r++) at[r] = of.at(n, rows.from[size_t(first + r)], 0) - of.at(n, 0, 0);
        const Blend<T> blend{of.panel, to.width, count, columns.ptr.data(), columns.from.data(), weight.data(), at.get(),
                             row_weight.data() + first};
        for (int64_t c = 0; c < of.channels; c++) table.blend(blend, x + of.at(n, 0, c), y + to.at(n, h, c));
    });
}

template <class T>
void mean(const Images& of, const T* x, T* y, int threads) {
    const int64_t batch = of.panels * of.panel;
    using N = Number<T>;
    const N share = 1 / N(of.height * of.width);
    threads = worth(of.channels * of.height * of.width * batch / 4, threads);
    parallel_for(of.panels * of.channels, threads, [&](int64_t k) {
        const int64_t n = k / of.channels, c = k % of.channels;
        T* const to = y + c * batch + n * of.panel;
        const Scratch<N> row(of.panel), all(of.panel);
        std::fill_n(all.get(), of.panel, N(0));
        for (int64_t h = 0; h < of.height; h++) {  // sums of rows first, which are more exact
            std::fill_n(row.get(), of.panel, N(0));
            for (int64_t w = 0; w < of.width; w++)
                for (int64_t i = 0; i < of.panel; i++) row[i] += x[of.at(n, h, c) + w * of.panel + i];
            for (int64_t i = 0; i < of.panel; i++) all[i] += row[i];
        }
        for (int64_t i = 0; i < of.panel; i++) to[i] = T(all[i] * share);
    });
}

template <class T>
void mean_gradient(const Images& of, const T* dy, T* dx, int threads) {
    const int64_t batch = of.panels * of.panel;
    const Number<T> share = 1 / Number<T>(of.height * of.width);
    for_each_row(of, threads, [&](int64_t n, int64_t h) {
        for (int64_t c = 0; c < of.channels; c++) {
            const T* const from = dy + c * batch + n * of.panel;
            T* const row = dx + of.at(n, h, c);
            for (int64_t w = 0; w < of.width; w++)
                for (int64_t i = 0; i < of.panel; i++) row[w * of.panel + i] = T(from[i] * share);
        }
    });
}

#define REWIRE_INSTANTIATE(T)                                                                               \
    template void panels<T>(const Table<T>&, const Images&, bool, const T*, T*, int);                       \
    template void contiguous_panels<T>(const Table<T>&, const Images&, bool, const T*, T*, int);            \
    template void pad<T>(const Images&, const Padding&, const T*, T, T*, int);                              \
    template void pad_gradient<T>(const Images&, const Padding&, const T*, T*, int);                        \
    template void thin<T>(const Table<T>&, const Images&, const Thinning&, const T*, T, T*, int);           \
    template void thin_gradient<T>(const Table<T>&, const Images&, const Thinning&, const T*, T*, int);     \
    template void resample<T>(const Table<T>&, const Images&, const Side&, const Side&, const T*, T*, int); \
    template void mean<T>(const Images&, const T*, T*, int);                                                \
    template void mean_gradient<T>(const Images&, const T*, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)
REWIRE_INSTANTIATE(bfloat16)

}  // namespace rewire
