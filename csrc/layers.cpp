#include "layers.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "deal.h"
#include "plan.h"

namespace rewire {
namespace {

// A tensor, and what it is read through.
template <class T>
struct Source {
    const T* tensor;
    Reading<T> reading{};
};

// Rows of one panel of an image, packed as [channel][row][column][panel]. It moves down the image.
template <class T>
class Window {
   public:
    // `totals`, or null: takes in the sum of each channel over the rows from `own` on.
    Window(const Table<T>& table, const Plan& plan, const Source<T>& source, int64_t n, int64_t own, double* totals)
        : table_(table),
          plan_(plan),
          source_(source),
          n_(n),
          len_(std::min(plan.panel, plan.batch - n)),
          own_(own),
          totals_(totals),
          rows_(plan.channels * plan.plane() * plan.panel) {}

    // The element where tap shift 0 of row i, column 0 reads, once all is there that rows i to `last` read.
    const T* at(int64_t i, int64_t last) {
        const int64_t low = i * plan_.h.stride + plan_.origin;
        hold(std::max<int64_t>(low, 0),
             std::min(plan_.height, last * plan_.h.stride + plan_.rows.highest + 1));
        return rows_.get() + (low - first_) * plan_.row() * plan_.panel;
    }

   private:
    void hold(int64_t low, int64_t high) {
        if (plan_.height * plan_.width == 1 && !source_.reading.scale) return hold_units(high);
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
            for (int64_t c = 0; c < plan_.channels; c++) {
                T* to = &rows_[c * plane + (last_ - first_) * row];
                pack(c, n_ * plan_.from.column + (c * plan_.height + last_) * plan_.width * plan_.from.lane, to);
                if (totals_ && last_ >= own_) totals_[c] += total(to);
            }
    }

    // All units of a linear layer at once.
    void hold_units(int64_t high) {
        if (last_ >= high) return;
        const int64_t at = n_ * plan_.from.column;
        pack_pieces(0, at, rows_.get(), plan_.channels, len_);
        if (totals_ && own_ <= 0) table_.totals(rows_.get(), plan_.panel, plan_.channels, len_, totals_);
        last_ = high;
    }

    void pack(int64_t channel, int64_t at, T* to) const {
        const bool whole = plan_.from.lane == plan_.panel;  // then a row is one run
        pack_pieces(channel, at, to, whole ? 1 : plan_.width, whole ? plan_.width * len_ : len_);
    }

    void pack_pieces(int64_t channel, int64_t at, T* to, int64_t count, int64_t len) const {
        const T* from = source_.tensor + at;
        if (source_.reading.plain()) return table_.copy(from, plan_.from.lane, to, plan_.panel, count, len);
        table_.read(source_.reading.from(at), channel, from, plan_.from.lane, to, plan_.panel, count, len);
    }

    double total(const T* row) const {
        if (len_ == plan_.panel) return table_.total(row, plan_.width * len_);
        double sum = 0;
        for (int64_t j = 0; j < plan_.width; j++) sum += table_.total(row + j * plan_.panel, len_);
        return sum;
    }

    const Table<T>& table_;
    const Plan& plan_;
    const Source<T>& source_;
    int64_t n_, len_, own_, first_ = 0, last_ = 0;
    double* totals_;
    Scratch<T> rows_;
};

// The tiles of some passes over one source in the order in which they are worked on, cut into tasks. Several passes
// read one window; the first of them has the most rows and columns.
template <class T>
class Sweep {
   public:
    Sweep(const Table<T>& table, const std::vector<const Plan*>& plans, const Source<T>& source, int threads)
        : table_(table), plans_(plans), plan_(*plans.front()), source_(source) {
        if (plan_.mode == Mode::window) {
            for (const Plan* plan : plans) tiles_.push_back(plan->columns());
            tasks_ = tiles_.front().empty() || !plan_.h.count ? 0 : plan_.panels() * plan_.bands();
            return;
        }
        tiles_ = {plan_.cut()};
        tasks_ = std::min<int64_t>(64, int64_t(tiles_.front().size()));
        if (!source.reading.plain()) settle(threads);
    }

    int64_t tasks() const { return tasks_; }
    int64_t elements() const { return plan_.h.count * plan_.w.count * plan_.batch; }

    // Whether the tasks together read all rows of the source, and can add up its channels on the way.
    bool totals() const {
        return plan_.mode == Mode::window && plan_.h.stride == 1 && plan_.origin <= 0 &&
               plan_.h.count - 1 + plan_.rows.highest >= plan_.height - 1;
    }
    const Source<T>& source() const { return source_; }

    // Calls body(pass, source, tiles, count) for the tiles of one task. `totals`, or null: takes in the sums of
    // the channels over what no other task adds.
    template <class Body>
    void run(int64_t task, double* totals, Body&& body) const {
        if (plan_.mode == Mode::window) return slide(task, totals, body);
        const auto& tiles = tiles_.front();
        const int64_t count = int64_t(tiles.size()), last = count * (task + 1) / tasks_;
        for (int64_t t = count * task / tasks_; t < last; t += kTiles)
            body(size_t(0), source_.tensor, &tiles[size_t(t)], std::min(kTiles, last - t));
    }

   private:
    // The source as it is read: where nothing is packed, this is done beforehand.
    void settle(int threads) {
        const int64_t len = plan_.height * plan_.width * plan_.from.lane, runs = plan_.runs();
        settled_ = Scratch<T>(runs * len);
        parallel_for(runs, worth(runs * len / 4, threads), [&](int64_t k) {
            table_.read(source_.reading.from(k * len), k % plan_.channels, source_.tensor + k * len, len,
                        &settled_[k * len], len, 1, len);
        });
        source_ = {settled_.get()};
    }

    template <class Body>
    void slide(int64_t task, double* totals, Body&& body) const {
        const int64_t bands = plan_.bands(), band = task % bands, n = task / bands * plan_.panel;
        const int64_t first = plan_.h.count * band / bands;
        // The band before has read up to here.
        const int64_t own = band ? (first - 1) * plan_.h.stride + plan_.rows.highest + 1 : 0;
        Window<T> window(table_, plan_, source_, n, own, totals);
        const int64_t end = plan_.h.count * (band + 1) / bands, each = int64_t(tiles_.front().size());
        const int64_t rows = std::max<int64_t>(1, std::min(plan_.rows_at_once(), kTiles / each));
        for (int64_t i = first; i < end; i += rows) {
            const int64_t next = std::min(end, i + rows);
            const T* source = window.at(i, next - 1);
            for (size_t pass = 0; pass < plans_.size(); pass++)
                place(pass, n, i, std::min(next, plans_[pass]->h.count), source, body);
        }
    }

    // The tiles of rows [first, end) of one pass, for the panel that starts at column n.
    template <class Body>
    void place(size_t pass, int64_t n, int64_t first, int64_t end, const T* source, Body&& body) const {
        const Plan& plan = *plans_[pass];
        Tile group[kTiles];
        int64_t count = 0;
        for (int64_t row = first; row < end; row++)
            for (Tile tile : tiles_[pass]) {
                plan.h.valid(row, tile.kh0, tile.kh1);
                tile.len = int32_t(std::min(plan.panel, plan.batch - n));
                tile.src += (row - first) * plan.h.stride * plan.row() * plan.panel;
                tile.dst += (plan.h.first + row * plan.h.every) * plan.out_width * plan.to.lane + n * plan.to.column;
                group[count++] = tile;
                if (count == kTiles) body(pass, source, group, std::exchange(count, 0));
            }
        if (count) body(pass, source, group, count);
    }

    const Table<T>& table_;
    const std::vector<const Plan*> plans_;
    const Plan& plan_;  // the first
    Source<T> source_;
    Scratch<T> settled_;
    std::vector<std::vector<Tile>> tiles_;  // of each pass; in a window: of one row
    int64_t tasks_;
};

// totals[c] += the sum of the source's channel c.
template <class T>
void add_channels(const Table<T>& table, const Plan& plan, const Source<T>& source, double* totals, int threads) {
    const int64_t len = plan.height * plan.width * plan.from.lane, block = 1 << 12;
    parallel_for(plan.channels, worth(plan.runs() * len / 4, threads), [&](int64_t c) {
        const Scratch<T> piece(block);
        for (int64_t k = c; k < plan.runs(); k += plan.channels)
            for (int64_t i = k * len; i < (k + 1) * len; i += block) {
                const int64_t n = std::min(block, (k + 1) * len - i);
                const T* x = source.tensor + i;
                if (!source.reading.plain()) table.read(source.reading.from(i), c, x, n, piece.get(), n, 1, n);
                totals[c] += table.total(source.reading.plain() ? x : piece.get(), n);
            }
    });
}

// What a batch norm does to its channels.
template <class T>
class Affine {
   public:
    explicit Affine(const BatchNorm<T>* norm) : norm_(norm) {
        if (!norm) return;
        scale_ = Scratch<T>(2 * norm->channels);
        for (int64_t c = 0; c < norm->channels; c++) {
            scale_[c] = T(norm->scale(c));
            scale_[norm->channels + c] = T(norm->shift(c));
        }
    }
    Reading<T> reading() const {
        if (!norm_) return {};
        return {scale_.get(), scale_.get() + norm_->channels, norm_->relu};
    }

   private:
    const BatchNorm<T>* norm_;
    Scratch<T> scale_;
};

template <class T>
void run_sum(const Table<T>& table, const Sum<T>& sum, const Plan& plan, const Source<T>& source, int64_t rows,
             int64_t count, T* mean, T* variance, int threads) {
    const Sweep<T> sweep(table, {&plan}, source, threads);
    if (!sweep.tasks() || !rows) return;
    std::vector<Spread> spreads(mean ? size_t(sweep.tasks() * rows) : 0);
    threads = worth((count + rows) * sweep.elements(), threads);
    const auto cuts = cut_rows(sum.entries, rows, row_blocks(sweep.tasks(), threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    parallel_for(sweep.tasks() * blocks, threads, [&](int64_t task) {
        Sum<T> mine = sum;
        if (mean) mine.spread = &spreads[size_t(task / blocks * rows)];
        sweep.run(task / blocks, nullptr, [&](size_t, const T* from, const Tile* tiles, int64_t count) {
            mine.src = from;
            table.sum(mine, tiles, count, cuts[size_t(task % blocks)], cuts[size_t(task % blocks + 1)]);
        });
    });
    for (int64_t row = 0; mean && row < rows; row++) {
        double count_all = 0, middle = 0, variation = 0;
        for (int64_t task = 0; task < sweep.tasks(); task++) {
            const Spread& one = spreads[size_t(task * rows + row)];
            const double n = double(one.count), gap = one.pivot + one.sum / n - middle;
            count_all += n;
            middle += gap * n / count_all;
            variation += one.squares - one.sum * one.sum / n + gap * gap * n * (count_all - n) / count_all;
        }
        mean[row] = T(middle);
        variance[row] = T(std::max(variation, 0.0) / count_all);
    }
}

// out[k] += the k-th of each part's sums, in order.
template <class Out>
void add_parts(const std::vector<double>& sums, int64_t parts, Out* out) {
    const size_t each = sums.size() / size_t(parts);
    for (size_t k = 0; k < sums.size(); k++) out[k % each] += Out(sums[k]);
}

// A backward pass: which positions it computes, over which connections, with which weights.
template <class T>
struct Pass {
    Plan plan;
    Offsets offsets;
    Scratch<T> weight;
};

// grad[places[e]] = the sum over all positions for entry e of a pass (places null: e itself). The tasks are dealt
// into parts, each with sums of its own, which are added in order: the result does not depend on which
// thread did what. `totals`, or null: receives the sums of the source's channels.
template <class T>
void run_dots(const Table<T>& table, const Dots<T>& dots, const std::vector<const Pass<T>*>& passes,
              const Source<T>& source, int64_t rows, T* grad, double* totals, int threads) {
    std::vector<const Plan*> plans;
    int64_t count = 0, most = 0;
    for (const Pass<T>* pass : passes) {
        plans.push_back(&pass->plan);
        count += pass->offsets.count;
        if (pass->offsets.count > passes[size_t(most)]->offsets.count) most = int64_t(plans.size()) - 1;
    }
    const Plan& plan = *plans.front();
    const Sweep<T> sweep(table, plans, source, threads);
    if (totals && !(sweep.totals() && sweep.tasks() && rows)) {
        add_channels(table, plan, sweep.source(), totals, threads);
        totals = nullptr;
    }
    if (!sweep.tasks() || !rows) {
        for (const Pass<T>* pass : passes)
            for (int64_t e = 0; e < pass->offsets.count; e++)
                grad[pass->offsets.places ? pass->offsets.places[e] : e] = T(0);
        return;
    }
    threads = worth((count + rows) * sweep.elements(), threads);
    const int64_t parts = gradient_parts(count, sweep.tasks());
    const auto cuts = cut_rows(passes[size_t(most)]->offsets.entries, rows, row_blocks(parts, threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    const Scratch<T> sums(parts * count);  // by pass, then part
    std::vector<double> norm_sums(dots.sums ? size_t(parts * rows * 2) : 0);
    std::vector<double> channel_sums(totals ? size_t(parts * plan.channels) : 0);
    parallel_for(parts * blocks, threads, [&](int64_t task) {
        const int64_t part = task / blocks, row0 = cuts[size_t(task % blocks)], row1 = cuts[size_t(task % blocks + 1)];
        std::vector<Dots<T>> mine;
        T* start = sums.get();
        for (const Pass<T>* pass : passes) {
            const Entries& entries = pass->offsets.entries;
            const int64_t taps = entries.taps_h * entries.taps_w;
            const int64_t first = entries.ptr[row0 * taps], last = entries.ptr[row1 * taps];
            mine.push_back(dots);
            mine.back().entries = entries;
            mine.back().weight = pass->weight.get();
            mine.back().grad = start + part * pass->offsets.count;
            if (dots.sums) mine.back().sums = &norm_sums[size_t(part * rows * 2)];
            std::memset(mine.back().grad + first, 0, sizeof(T) * size_t(last - first));
            start += parts * pass->offsets.count;
        }
        double* channels = totals && !row0 ? &channel_sums[size_t(part * plan.channels)] : nullptr;
        for (int64_t t = sweep.tasks() * part / parts; t < sweep.tasks() * (part + 1) / parts; t++)
            sweep.run(t, channels, [&](size_t pass, const T* from, const Tile* tiles, int64_t count) {
                mine[pass].src = from;
                table.dots(mine[pass], tiles, count, row0, row1);
            });
    });
    if (dots.sums) add_parts(norm_sums, parts, dots.sums);
    if (totals) add_parts(channel_sums, parts, totals);
    const T* start = sums.get();
    for (const Pass<T>* pass : passes) {
        join_parts(start, parts, pass->offsets.count, pass->offsets.places, grad, threads);
        start += parts * pass->offsets.count;
    }
}

Memory input(const Geometry& g) {
    return g.in_panels ? Memory{g.panel, g.in_channels * g.in_plane(), true} : Memory{g.batch, 1, false};
}

Memory output(const Geometry& g) {
    return g.out_panels ? Memory{g.panel, g.out_channels * g.out_plane(), true} : Memory{g.batch, 1, false};
}

// `connections`: see Plan.
template <class T>
Plan forward_plan(const Geometry& g, int panel, int64_t connections) {
    Axis h = forward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh);
    const Shifts rows = h.shifts();
    return Plan(std::move(h), forward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw), rows, g.in_channels,
                g.out_width, g.batch, g.panel ? g.panel : panel, input(g), output(g), sizeof(T), connections);
}

// One pass for each set of input positions that share their taps: one where the stride is 1. The first has the
// most rows and columns.
template <class T>
std::vector<Plan> backward_plans(const Geometry& g, int panel, int64_t connections) {
    std::vector<Axis> down, across;
    for (int32_t r = 0; r < g.sh; r++) down.push_back(backward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh, r));
    for (int32_t r = 0; r < g.sw; r++) across.push_back(backward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw, r));
    Shifts rows = down.front().shifts();
    for (const Axis& h : down) rows = {std::min(rows.lowest, h.shifts().lowest), std::max(rows.highest, h.shifts().highest)};
    std::vector<Plan> plans;
    for (const Axis& h : down)
        for (const Axis& w : across)
            plans.emplace_back(h, w, rows, g.out_channels, g.width, g.batch, g.panel ? g.panel : panel, output(g),
                               input(g), sizeof(T), connections);
    return plans;
}

}  // namespace

template <class T>
void forward(const Table<T>& table, const Geometry& g, const ByOutput& a, const T* values, const T* bias,
             const T* x, const BatchNorm<T>* norm, T* y, bool relu, T* mean, T* variance, int threads) {
    const Plan plan = forward_plan<T>(g, table.sum_tile, norm ? -1 : a.ptr[g.out_channels]);
    const Offsets offsets = forward_offsets(g, a, plan);
    const Affine<T> affine(norm);
    run_sum<T>(table,
               {offsets.entries, values, nullptr, plan.step(), y, g.out_plane() * plan.to.lane, bias, relu, nullptr},
               plan, {x, affine.reading()}, g.out_channels, offsets.count, mean, variance, threads);
}

template <class T>
void input_gradient(const Table<T>& table, const Geometry& g, const ByInput& a, const T* values, const T* dy,
                    T* dx, int threads) {
    for (const Plan& plan : backward_plans<T>(g, table.sum_tile, a.ptr[g.in_channels * g.taps()])) {
        const Offsets offsets = backward_offsets(g, a, plan);
        const auto weight = gather(values, offsets.places, offsets.count, threads);
        run_sum<T>(table,
                   {offsets.entries, weight.get(), nullptr, plan.step(), dx, g.in_plane() * plan.to.lane, nullptr, false,
                    nullptr},
                   plan, {dy}, g.in_channels, offsets.count, nullptr, nullptr, threads);
    }
}

template <class T>
void weight_gradient(const Table<T>& table, const Geometry& g, const ByOutput& a, const T* x, const T* dy,
                     T* grad, int threads) {
    Plan plan = forward_plan<T>(g, table.dots_tile, a.ptr[g.out_channels]);
    Offsets offsets = forward_offsets(g, a, plan);
    const int64_t step = plan.step(), row = g.out_plane() * plan.to.lane;
    const Pass<T> pass{std::move(plan), std::move(offsets), {}};
    run_dots<T>(table, {{}, nullptr, nullptr, step, dy, nullptr, row, nullptr, {}, nullptr, nullptr, nullptr, nullptr},
                {&pass}, {x},
                g.out_channels, grad, nullptr, threads);
}

template <class T>
void gradients(const Table<T>& table, const Geometry& g, const ByInput& a, const T* values, const T* x,
               const Before<T>& before, const T* dy, const Reading<T>& reading, const Gradients<T>& out, int threads) {
    const BatchNorm<T>* norm = before.norm;
    const Affine<T> affine(before.summed() ? nullptr : norm);
    Reading<T> factor = affine.reading();
    if (norm) factor.relu = norm->relu;
    std::vector<double> sums(norm ? size_t(2 * g.in_channels) : 0), totals(out.bias ? size_t(g.out_channels) : 0);
    std::vector<Pass<T>> passes;
    const int64_t connections = reading.plain() ? a.ptr[g.in_channels * g.taps()] : -1;
    for (Plan& plan : backward_plans<T>(g, table.dots_tile, connections)) {
        Offsets offsets = backward_offsets(g, a, plan);
        auto weight = gather(values, offsets.places, offsets.count, threads);
        passes.push_back({std::move(plan), std::move(offsets), std::move(weight)});
    }
    double* sum_up = out.bias ? totals.data() : nullptr;
    const auto run = [&](const std::vector<const Pass<T>*>& some) {
        const Plan& plan = some.front()->plan;
        run_dots<T>(table,
                    {{}, nullptr, nullptr, plan.step(), x, out.dx, g.in_plane() * plan.to.lane, nullptr,
                     factor, norm ? norm->mean : nullptr, norm ? sums.data() : nullptr,
                     before.summed() ? before.input : x, before.more},
                    some, {dy, reading}, g.in_channels, out.values, std::exchange(sum_up, nullptr), threads);
    };
    if (passes.front().plan.mode == Mode::window) {  // which all of them read
        std::vector<const Pass<T>*> all;
        for (const Pass<T>& pass : passes) all.push_back(&pass);
        run(all);
    } else {
        for (const Pass<T>& pass : passes) run({&pass});
    }
    for (size_t c = 0; c < totals.size(); c++) out.bias[c] = T(totals[c]);
    if (norm) batch_norm_gradient(table, *norm, before.summed() ? before.input : x, sums.data(), out.dx, out.norm, threads);
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
        table.read({nullptr, nullptr, false, z + at}, 0, dz + at, 0, dy + at, 0, 1, std::min(block, len - at));
    });
}

template <class T>
void panels(const Table<T>& table, const T* x, int64_t positions, int64_t batch, int64_t panel, bool into, T* y,
            int threads) {
    const int64_t block = 256;
    parallel_for((positions + block - 1) / block, worth(positions * batch / 4, threads), [&](int64_t b) {
        const int64_t first = b * block, count = std::min(block, positions - first);
        for (int64_t n = 0; n < batch; n += panel) {
            const int64_t there = n * positions + first * panel, here = first * batch + n;
            into ? table.copy(x + here, batch, y + there, panel, count, panel)
                 : table.copy(x + there, panel, y + here, batch, count, panel);
        }
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

#define REWIRE_INSTANTIATE(T)                                                                                       \
    template void forward<T>(const Table<T>&, const Geometry&, const ByOutput&, const T*, const T*, const T*,       \
                             const BatchNorm<T>*, T*, bool, T*, T*, int);                                           \
    template void rectify_gradient<T>(const Table<T>&, const T*, const T*, T*, int64_t, int);                       \
    template void input_gradient<T>(const Table<T>&, const Geometry&, const ByInput&, const T*, const T*, T*, int); \
    template void weight_gradient<T>(const Table<T>&, const Geometry&, const ByOutput&, const T*, const T*, T*,     \
                                     int);                                                                          \
    template void gradients<T>(const Table<T>&, const Geometry&, const ByInput&, const T*, const T*,                \
                               const Before<T>&, const T*, const Reading<T>&, const Gradients<T>&, int);            \
    template void panels<T>(const Table<T>&, const T*, int64_t, int64_t, int64_t, bool, T*, int);                   \
    template void row_sums<T>(const Table<T>&, const T*, int64_t, int64_t, T*, int);                                \
    template void transpose<T>(const Table<T>&, const T*, int64_t, int64_t, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)

}  // namespace rewire
