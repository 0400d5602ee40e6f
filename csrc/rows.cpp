#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "deal.h"
#include "plan.h"

namespace rewire {
namespace {

constexpr int64_t kTurned = 256;  // units whose results are turned at once, from the nearest cache

// The rows of one task, `width` at most, as the panel [unit][row].
struct Panel {
    int64_t first, len;
    Tile tile;

    Panel(int64_t at, int64_t batch, int64_t width)
        : first(at * width), len(std::min(width, batch - first)), tile{0, 0, 0, 0, 1, int32_t(len), 0, 1, 0, 1} {}
};

// panel[u][n] = x[n][u], some rows at a time: the processor reads ahead in no more of them at once.
template <class T>
void turn(const Table<T>& table, const T* x, int64_t step, int64_t rows, int64_t units, T* panel, int64_t width) {
    const int64_t some = 16;
    for (int64_t n = 0; n < rows; n += some)
        table.transpose(x + n * step, step, panel + n, width, std::min(some, rows - n), units);
}

// The entries of the rows from `row` on.
Entries entries_from(const int32_t* ptr, const int32_t* offset, int64_t row) { return {ptr + row, offset, 1, 1}; }

// y[n][row] = start[row] + sum over e of weight[e] * x[n][offset[e]], for the entries e of each of `rows`
template <class T>
void sum_rows(const Table<T>& table, int64_t batch, const int32_t* ptr, const int32_t* offset,
              const Weights<T>& weight, const Number<T>* start, bool relu, const T* x, int64_t units, T* y, int64_t rows,
              int threads) {
    const int64_t width = panel_width(batch, table.sum_tile), panels = (batch + width - 1) / width;
    threads = worth((ptr[rows] + rows) * batch, threads);
    const auto cuts = cut_rows(entries_from(ptr, offset, 0), rows, row_blocks(panels, threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    parallel_for(panels * blocks, threads, [&](int64_t task) {
        const Panel panel(task / blocks, batch, width);
        const Scratch<T> source(units * width), result(kTurned * width);
        turn(table, x + panel.first * units, units, panel.len, units, source.get(), width);
        const int64_t last = cuts[size_t(task % blocks + 1)];
        for (int64_t row = cuts[size_t(task % blocks)]; row < last; row += kTurned) {
            const int64_t count = std::min(kTurned, last - row);
            Sum<T> sum{entries_from(ptr, offset, row), weight.get(), source.get(), width, result.get(), width,
                       start ? start + row : nullptr, relu, nullptr};
            sum.narrow_weight = weight.narrow();
            table.sum(sum, &panel.tile, 1, 0, count);
            table.transpose(result.get(), width, y + panel.first * rows + row, rows, count, panel.len);
        }
    });
}

// sums[u] += the sum of the u-th of `units` columns
template <class T>
void add_columns(const T* x, int64_t rows, int64_t units, double* sums) {
    constexpr int64_t n = 16;
    int64_t u = 0;
    for (; u + n <= units; u += n) {
        Number<T> sum[n] = {};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t q = 0; q < n; q++) sum[q] += x[r * units + u + q];
        for (int64_t q = 0; q < n; q++) sums[u + q] += double(sum[q]);
    }
    for (; u < units; u++)
        for (int64_t r = 0; r < rows; r++) sums[u] += double(x[r * units + u]);
}

// What `dots_rows` reads and writes: the source [batch][units], counted where the gate is positive (null:
// everywhere), and the factor and the destination (or null) [batch][rows].
template <class T>
struct Turned {
    const T *source, *gate;
    int64_t units;
    const T* factor;
    T* destination;
    int64_t rows;
};

// grad[places[e]] = sum over n of factor[n][row] * source[n][offset[e]], for the entries e of each row (places
// null: e itself), and destination[n][row] = sum over e of weight[e] * source[n][offset[e]]. The panels are dealt
// into parts as in `gradients`. `totals`, or null: receives the sum of each unit of the source.
template <class T>
void dots_rows(const Table<T>& table, int64_t batch, const int32_t* ptr, const int32_t* offset, const int32_t* places,
               const Weights<T>& weight, const Turned<T>& in, Number<T>* grad, Number<T>* totals, int threads) {
    const int64_t units = in.units, rows = in.rows, all = ptr[rows];
    const int64_t width = panel_width(batch, table.dots_tile), panels = (batch + width - 1) / width;
    threads = worth((all + rows) * batch, threads);
    const int64_t parts = gradient_parts(all, panels, batch, true);
    const auto cuts = cut_rows(entries_from(ptr, offset, 0), rows, row_blocks(parts, threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    const Scratch<Number<T>> sums(parts * all);
    std::vector<double> unit_sums(totals ? size_t(parts * units) : 0);
    parallel_for(parts * blocks, threads, [&](int64_t task) {
        const int64_t part = task / blocks, first = cuts[size_t(task % blocks)], last = cuts[size_t(task % blocks + 1)];
        double* const mine = totals && !first ? &unit_sums[size_t(part * units)] : nullptr;
        Number<T>* const sum = sums.get() + part * all;
        std::memset(sum + ptr[first], 0, sizeof(Number<T>) * size_t(ptr[last] - ptr[first]));
        const Scratch<T> source(units * width), factor(kTurned * width), result(kTurned * width);
        const Scratch<T> passed(in.gate ? units * width : 0);
        for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
            const Panel panel(p, batch, width);
            const T* from = in.source + panel.first * units;
            if (in.gate) {
                const Reading<T> reading{nullptr, nullptr, false, in.gate + panel.first * units};
                table.read(reading, 0, from, 0, passed.get(), 0, 1, panel.len * units);
                from = passed.get();
            }
            turn(table, from, units, panel.len, units, source.get(), width);
            if (mine) add_columns(from, panel.len, units, mine);
            for (int64_t row = first; row < last; row += kTurned) {
                const int64_t count = std::min(kTurned, last - row), at = panel.first * rows + row;
                turn(table, in.factor + at, rows, panel.len, count, factor.get(), width);
                T* const to = in.destination ? result.get() : nullptr;
                Dots<T> dots{entries_from(ptr, offset, row), weight.get(), source.get(), width, factor.get(), to, width,
                             sum, {}, nullptr, nullptr, nullptr, nullptr};
                dots.narrow_weight = weight.narrow();
                table.dots(dots, &panel.tile, 1, 0, count);
                if (to) table.transpose(to, width, in.destination + at, rows, count, panel.len);
            }
        }
    });
    join_parts(sums.get(), parts, all, places, grad, threads);
    for (int64_t u = 0; totals && u < units; u++) {
        double sum = 0;
        for (int64_t part = 0; part < parts; part++) sum += unit_sums[size_t(part * units + u)];
        totals[u] = Number<T>(sum);
    }
}

}  // namespace

template <class T>
void forward_rows(const Table<T>& table, const Geometry& g, const ByOutput& a, const Number<T>* values,
                  const Number<T>* bias, const T* x, T* y, bool relu, int threads) {
    const Weights<T> weight(values, nullptr, a.ptr[g.out_channels], threads);
    sum_rows(table, g.batch, a.ptr, a.indices, weight, bias, relu, x, g.in_channels, y, g.out_channels, threads);
}

template <class T>
void input_gradient_rows(const Table<T>& table, const Geometry& g, const ByInput& a, const Number<T>* values, const T* dy,
                         T* dx, int threads) {
    const Weights<T> weight(values, a.order, a.ptr[g.in_channels], threads);
    sum_rows<T>(table, g.batch, a.ptr, a.outputs, weight, nullptr, false, dy, g.out_channels, dx, g.in_channels,
                threads);
}

template <class T>
void gradients_rows(const Table<T>& table, const Geometry& g, const ByInput& a, const Number<T>* values, const T* x,
                    const T* dy, const T* z, T* dx, Number<T>* grad, Number<T>* bias, int threads) {
    const Weights<T> weight(values, a.order, a.ptr[g.in_channels], threads);
    dots_rows<T>(table, g.batch, a.ptr, a.outputs, a.order, weight,
                 {dy, z, g.out_channels, x, dx, g.in_channels}, grad, bias, threads);
}

#define REWIRE_INSTANTIATE(T)                                                                                         \
    template void forward_rows<T>(const Table<T>&, const Geometry&, const ByOutput&, const Number<T>*,                \
                                  const Number<T>*, const T*, T*, bool, int);                                         \
    template void input_gradient_rows<T>(const Table<T>&, const Geometry&, const ByInput&, const Number<T>*,          \
                                         const T*, T*, int);                                                          \
    template void gradients_rows<T>(const Table<T>&, const Geometry&, const ByInput&, const Number<T>*, const T*,     \
                                    const T*, const T*, T*, Number<T>*, Number<T>*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)
REWIRE_INSTANTIATE(bfloat16)

}  // namespace rewire
