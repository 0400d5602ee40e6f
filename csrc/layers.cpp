#include "layers.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "plan.h"
#include "scratch.h"

namespace rewire {
namespace {

constexpr int64_t kGrain = 1 << 14;  // multiply-adds worth a second thread
constexpr int64_t kManyConnections = 1 << 17;

int worth(int64_t work, int threads) {
    return int(std::max<int64_t>(1, std::min<int64_t>(threads, work / kGrain)));
}

// Calls body(first, last) for blocks of [0, count).
template <class Body>
void for_each_block(int64_t count, int threads, Body&& body) {
    const int64_t block = 1 << 14;
    parallel_for((count + block - 1) / block, threads,
                 [&](int64_t b) { body(b * block, std::min(count, (b + 1) * block)); });
}

template <class T>
Scratch<T> gather(const T* values, const int32_t* places, int64_t count, int threads) {
    Scratch<T> gathered(count);
    T* out = gathered.get();
    for_each_block(count, threads, [=](int64_t first, int64_t last) {
        for (int64_t k = first; k < last; k++) out[k] = values[places[k]];
    });
    return gathered;
}

// Rows of one panel of an image, packed as [channel][row][column][panel]. It moves down the image.
template <class T>
class Window {
   public:
    Window(const Table<T>& table, const Plan& plan, const T* tensor, int64_t n)
        : table_(table),
          plan_(plan),
          tensor_(tensor + n),
          len_(std::min(plan.panel, plan.batch - n)),
          rows_(plan.channels * plan.plane() * plan.panel) {}

    // The element where tap shift 0 of row i, column 0 reads, once all its rows are there.
    const T* at(int64_t i) {
        const int64_t low = i * plan_.h.stride + plan_.origin;
        hold(std::max<int64_t>(low, 0),
             std::min(plan_.height, i * plan_.h.stride + plan_.h.highest() + 1));
        return rows_.get() + (low - first_) * plan_.row() * plan_.panel;
    }

   private:
    void hold(int64_t low, int64_t high) {
        const int64_t row = plan_.row() * plan_.panel, plane = plan_.plane() * plan_.panel;
        if (high > first_ + plan_.window_rows) {  // full: keep what is still needed
            const int64_t kept = std::max<int64_t>(0, last_ - low);
            for (int64_t c = 0; kept && c < plan_.channels; c++)
                std::memmove(&rows_[c * plane], &rows_[c * plane + (low - first_) * row],
                             sizeof(T) * size_t(kept * row));
            first_ = low;
            last_ = std::max(last_, low);
        }
        for (; last_ < high; last_++)
            for (int64_t c = 0; c < plan_.channels; c++)
                table_.copy(tensor_ + (c * plan_.height + last_) * plan_.width * plan_.batch, plan_.batch,
                            &rows_[c * plane + (last_ - first_) * row], plan_.panel, plan_.width, len_);
    }

    const Table<T>& table_;
    const Plan& plan_;
    const T* tensor_;
    int64_t len_, first_ = 0, last_ = 0;
    Scratch<T> rows_;
};

// The tiles of a pass in the order in which they are worked on, cut into tasks.
template <class T>
class Sweep {
   public:
    Sweep(const Table<T>& table, const Plan& plan, const T* tensor)
        : table_(table), plan_(plan), tensor_(tensor) {
        if (plan.mode == Mode::window) {
            tiles_ = plan.columns();
            tasks_ = tiles_.empty() || !plan.h.count ? 0 : plan.panels() * plan.bands();
            return;
        }
        tiles_ = plan.cut();
        tasks_ = std::min<int64_t>(64, int64_t(tiles_.size()));
    }

    int64_t tasks() const { return tasks_; }
    int64_t elements() const { return plan_.h.count * plan_.w.count * plan_.batch; }

    // Calls body(source, tile) for the tiles of one task.
    template <class Body>
    void run(int64_t task, Body&& body) const {
        if (plan_.mode == Mode::window) return slide(task, body);
        const int64_t count = int64_t(tiles_.size());
        for (int64_t t = count * task / tasks_; t < count * (task + 1) / tasks_; t++)
            body(tensor_, tiles_[size_t(t)]);
    }

   private:
    template <class Body>
    void slide(int64_t task, Body&& body) const {
        const int64_t bands = plan_.bands(), band = task % bands, n = task / bands * plan_.panel;
        Window<T> window(table_, plan_, tensor_, n);
        for (int64_t i = plan_.h.count * band / bands; i < plan_.h.count * (band + 1) / bands; i++) {
            const T* source = window.at(i);
            for (Tile tile : tiles_) {
                plan_.h.valid(i, tile.kh0, tile.kh1);
                tile.len = int32_t(std::min(plan_.panel, plan_.batch - n));
                tile.dst += (plan_.h.first + i * plan_.h.every) * plan_.out_width * plan_.batch + n;
                body(source, tile);
            }
        }
    }

    const Table<T>& table_;
    const Plan& plan_;
    const T* tensor_;
    std::vector<Tile> tiles_;  // in a window: of one row
    int64_t tasks_;
};

// How many blocks the rows of each of `tasks` are cut into, to keep `threads` busy. A task that is cut
// packs its window once per block.
int64_t row_blocks(int64_t tasks, int threads) {
    return tasks % threads == 0 || tasks >= 4 * threads ? 1 : (4 * threads + tasks - 1) / tasks;
}

template <class T>
void run_sum(const Table<T>& table, const Sum<T>& sum, const Plan& plan, const T* tensor, int64_t rows,
             int64_t count, int threads) {
    const Sweep<T> sweep(table, plan, tensor);
    if (!sweep.tasks() || !rows) return;
    threads = worth((count + rows) * sweep.elements(), threads);
    const auto cuts = cut_rows(sum.entries, rows, row_blocks(sweep.tasks(), threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    parallel_for(sweep.tasks() * blocks, threads, [&](int64_t task) {
        Sum<T> mine = sum;
        sweep.run(task / blocks, [&](const T* source, const Tile& tile) {
            mine.src = source;
            table.sum(mine, tile, cuts[size_t(task % blocks)], cuts[size_t(task % blocks + 1)]);
        });
    });
}

// grad[places[e]] = the sum over all positions for entry e (places null: e itself). The tasks are dealt
// into parts, each with sums of its own, which are added in order: the result does not depend on which
// thread did what.
template <class T>
void run_dots(const Table<T>& table, const Dots<T>& dots, const Plan& plan, const T* tensor, int64_t rows,
              const Offsets& offsets, T* grad, int threads) {
    const Sweep<T> sweep(table, plan, tensor);
    const int64_t count = offsets.count;
    const int32_t* places = offsets.places;
    if (!sweep.tasks() || !rows) {
        for (int64_t e = 0; e < count; e++) grad[places ? places[e] : e] = T(0);
        return;
    }
    threads = worth((count + rows) * sweep.elements(), threads);
    // Gradients of many connections are long: then rows are cut rather than kept more than twice.
    const int64_t parts = std::min<int64_t>(count > kManyConnections ? 2 : 8, sweep.tasks());
    const int64_t taps = dots.entries.taps_h * dots.entries.taps_w;
    const auto cuts = cut_rows(dots.entries, rows, row_blocks(parts, threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    const Scratch<T> sums(parts * count);
    parallel_for(parts * blocks, threads, [&](int64_t task) {
        const int64_t part = task / blocks, row0 = cuts[size_t(task % blocks)], row1 = cuts[size_t(task % blocks + 1)];
        const int64_t first = dots.entries.ptr[row0 * taps], last = dots.entries.ptr[row1 * taps];
        Dots<T> mine = dots;
        mine.grad = sums.get() + part * count;
        std::memset(mine.grad + first, 0, sizeof(T) * size_t(last - first));
        for (int64_t t = sweep.tasks() * part / parts; t < sweep.tasks() * (part + 1) / parts; t++)
            sweep.run(t, [&](const T* source, const Tile& tile) {
                mine.src = source;
                table.dots(mine, tile, row0, row1);
            });
    });
    const T* all = sums.get();
    for_each_block(count, threads, [=](int64_t first, int64_t last) {
        for (int64_t e = first; e < last; e++) {
            T sum = all[e];
            for (int64_t part = 1; part < parts; part++) sum += all[part * count + e];
            grad[places ? places[e] : e] = sum;
        }
    });
}

template <class T>
Plan forward_plan(const Geometry& g, int panel) {
    return Plan(forward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh),
                forward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw), g.in_channels, g.out_width, g.batch,
                panel, sizeof(T));
}

// Calls pass(plan) for each set of input positions that share their taps: one where the stride is 1.
template <class T, class Pass>
void for_each_phase(const Geometry& g, int panel, Pass&& pass) {
    for (int32_t rh = 0; rh < g.sh; rh++)
        for (int32_t rw = 0; rw < g.sw; rw++)
            pass(Plan(backward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh, rh),
                      backward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw, rw), g.out_channels, g.width,
                      g.batch, panel, sizeof(T)));
}

}  // namespace

template <class T>
void forward(const Table<T>& table, const Geometry& g, const ByOutput& a, const T* values, const T* bias,
             const T* x, T* y, bool relu, int threads) {
    const Plan plan = forward_plan<T>(g, table.sum_tile);
    const Offsets offsets = forward_offsets(g, a, plan);
    run_sum<T>(table, {offsets.entries, values, nullptr, plan.step(), y, g.out_plane() * g.batch, bias, relu}, plan, x,
               g.out_channels, offsets.count, threads);
}

template <class T>
void input_gradient(const Table<T>& table, const Geometry& g, const ByInput& a, const T* values, const T* dy,
                    T* dx, int threads) {
    for_each_phase<T>(g, table.sum_tile, [&](const Plan& plan) {
        const Offsets offsets = backward_offsets(g, a, plan);
        const auto weight = gather(values, offsets.places, offsets.count, threads);
        run_sum<T>(table,
                   {offsets.entries, weight.get(), nullptr, plan.step(), dx, g.in_plane() * g.batch, nullptr, false}, plan,
                   dy, g.in_channels, offsets.count, threads);
    });
}

template <class T>
void weight_gradient(const Table<T>& table, const Geometry& g, const ByOutput& a, const T* x, const T* dy,
                     T* grad, int threads) {
    const Plan plan = forward_plan<T>(g, table.dots_tile);
    const Offsets offsets = forward_offsets(g, a, plan);
    run_dots<T>(table,
                {offsets.entries, nullptr, nullptr, plan.step(), dy, nullptr, g.out_plane() * g.batch, nullptr},
                plan, x, g.out_channels, offsets, grad, threads);
}

template <class T>
void gradients(const Table<T>& table, const Geometry& g, const ByInput& a, const T* values, const T* x,
               const T* dy, T* dx, T* grad, int threads) {
    for_each_phase<T>(g, table.dots_tile, [&](const Plan& plan) {
        const Offsets offsets = backward_offsets(g, a, plan);
        const auto weight = gather(values, offsets.places, offsets.count, threads);
        run_dots<T>(table,
                    {offsets.entries, weight.get(), nullptr, plan.step(), x, dx, g.in_plane() * g.batch, nullptr},
                    plan, dy, g.in_channels, offsets, grad, threads);
    });
}

template <class T>
void row_sums(const Table<T>& table, const T* x, int64_t rows, int64_t len, T* sums, int threads) {
    const int64_t block = 16;
    parallel_for((rows + block - 1) / block, worth(rows * len / 4, threads), [&](int64_t b) {
        for (int64_t r = b * block; r < std::min(rows, (b + 1) * block); r++)
            sums[r] = T(table.total(x + r * len, len));
    });
}

template <class T>
void rectify_gradient(const Table<T>& table, const T* dz, const T* z, T* dy, int64_t len, int threads) {
    const int64_t block = 1 << 14;
    parallel_for((len + block - 1) / block, worth(len / 4, threads), [&](int64_t b) {
        const int64_t at = b * block;
        table.rectify_gradient(dz + at, z + at, dy + at, std::min(block, len - at));
    });
}

template <class T>
void transpose(const Table<T>& table, const T* in, int64_t rows, int64_t cols, T* out, int threads) {
    const int64_t block = 64;  // columns of the input: rows of the output
    parallel_for((cols + block - 1) / block, worth(rows * cols / 4, threads), [&](int64_t b) {
        const int64_t c = b * block;
        table.transpose(in + c, cols, out + c * rows, rows, rows, std::min(block, cols - c));
    });
}

void by_input(const ByOutput& a, int64_t in_channels, int64_t out_channels, int64_t taps, int32_t* ptr,
              int32_t* outputs, int32_t* order, int threads) {
    const int64_t slots = in_channels * taps, count = a.ptr[out_channels];
    auto slot = [&](int32_t index) { return taps == 1 ? index : index % in_channels * taps + index / in_channels; };
    // Runs of rows count, and then fill, their own places in every slot.
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(8, count / std::max<int64_t>(1, slots)));
    std::vector<int64_t> row(size_t(parts + 1));
    for (int64_t p = 0; p <= parts; p++)
        row[size_t(p)] = std::lower_bound(a.ptr, a.ptr + out_channels, count * p / parts) - a.ptr;
    row[0] = 0;
    row[size_t(parts)] = out_channels;
    Scratch<int32_t> next(parts * slots);
    parallel_for(parts, worth(count, threads), [&](int64_t p) {
        int32_t* mine = next.get() + p * slots;
        std::fill(mine, mine + slots, 0);
        for (int32_t e = a.ptr[row[size_t(p)]]; e < a.ptr[row[size_t(p + 1)]]; e++) mine[slot(a.indices[e])]++;
    });
    int32_t total = 0;
    for (int64_t s = 0; s < slots; s++) {
        ptr[s] = total;
        for (int64_t p = 0; p < parts; p++) {
            const int32_t here = next[p * slots + s];
            next[p * slots + s] = total;
            total += here;
        }
    }
    ptr[slots] = total;
    parallel_for(parts, worth(count, threads), [&](int64_t p) {
        int32_t* mine = next.get() + p * slots;
        for (int64_t o = row[size_t(p)]; o < row[size_t(p + 1)]; o++)
            for (int32_t e = a.ptr[o]; e < a.ptr[o + 1]; e++) {
                const int32_t k = mine[slot(a.indices[e])]++;
                outputs[k] = int32_t(o);
                order[k] = e;
            }
    });
}

#define REWIRE_INSTANTIATE(T)                                                                                       \
    template void forward<T>(const Table<T>&, const Geometry&, const ByOutput&, const T*, const T*, const T*, T*,   \
                             bool, int);                                                                            \
    template void rectify_gradient<T>(const Table<T>&, const T*, const T*, T*, int64_t, int);                       \
    template void input_gradient<T>(const Table<T>&, const Geometry&, const ByInput&, const T*, const T*, T*, int); \
    template void weight_gradient<T>(const Table<T>&, const Geometry&, const ByOutput&, const T*, const T*, T*,     \
                                     int);                                                                          \
    template void gradients<T>(const Table<T>&, const Geometry&, const ByInput&, const T*, const T*, const T*, T*,  \
                               T*, int);                                                                            \
    template void row_sums<T>(const Table<T>&, const T*, int64_t, int64_t, T*, int);                                \
    template void transpose<T>(const Table<T>&, const T*, int64_t, int64_t, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)

}  // namespace rewire
