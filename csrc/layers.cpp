#include "layers.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "deal.h"
#include "plan.h"
#include "sweep.h"

namespace rewire {
namespace {

// totals[c] += the sum of the source's channel c.
template <class T>
void add_channels(const Table<T>& table, const Plan& plan, const Source<T>& source, double* totals, int threads) {
    const int64_t len = plan.run(), block = 1 << 12;
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
        scale_ = Scratch<Number<T>>(2 * norm->channels);
        for (int64_t c = 0; c < norm->channels; c++) {
            scale_[c] = Number<T>(norm->scale(c));
            scale_[norm->channels + c] = Number<T>(norm->shift(c));
        }
    }
    Reading<T> reading() const {
        if (!norm_) return {};
        return {scale_.get(), scale_.get() + norm_->channels, norm_->relu};
    }

   private:
    const BatchNorm<T>* norm_;
    Scratch<Number<T>> scale_;
};

template <class T>
bool starts_line(const T* p) {
    return reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

template <class T>
void run_sum(const Table<T>& table, const Sum<T>& sum, const Plan& plan, const Source<T>& source, int64_t rows,
             int64_t count, Number<T>* mean, Number<T>* variance, int threads) {
    const Sweep<T> sweep(table, {&plan}, source, threads);
    if (!sweep.tasks() || !rows) return;
    const bool past = plan.past(rows, sizeof(T)) && starts_line(sum.dst);
    std::vector<Spread> spreads(mean ? size_t(sweep.tasks() * rows) : 0);
    threads = worth((count + rows) * sweep.elements(), threads);
    const auto cuts = cut_rows(sum.entries, rows, sweep.row_blocks(sweep.tasks(), threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    parallel_for(sweep.tasks() * blocks, threads, [&](int64_t task) {
        Sum<T> mine = sum;
        if (mean) mine.spread = &spreads[size_t(task / blocks * rows)];
        mine.past = past;
        sweep.run(task / blocks, nullptr, [&](size_t, const Place<T>& from, const Tile* tiles, int64_t some) {
            mine.src = from.source;
            mine.soon = from.soon;
            mine.entries.offset = sum.entries.offset + from.phase * count;
            table.sum(mine, tiles, some, cuts[size_t(task % blocks)], cuts[size_t(task % blocks + 1)]);
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
        mean[row] = Number<T>(middle);
        variance[row] = Number<T>(std::max(variation, 0.0) / count_all);
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
    Weights<T> weight;
};

// grad[places[e]] = the sum over all positions for entry e of a pass (places null: e itself). The tasks are dealt
// into parts, each with sums of its own, which are added in order: the result does not depend on which
// thread did what. `totals`, or null: receives the sums of the source's channels.
template <class T>
void run_dots(const Table<T>& table, const Dots<T>& dots, const std::vector<const Pass<T>*>& passes,
              const Source<T>& source, int64_t rows, Number<T>* grad, double* totals, int threads) {
    std::vector<const Plan*> plans;
    int64_t count = 0, most = 0;
    for (const Pass<T>* pass : passes) {
        plans.push_back(&pass->plan);
        count += pass->offsets.count;
        if (pass->offsets.count > passes[size_t(most)]->offsets.count) most = int64_t(plans.size()) - 1;
    }
    const Plan& plan = *plans.front();
    const Sweep<T> sweep(table, plans, source, threads);
    const bool first = sweep.totals_first();
    if (totals && !((first || sweep.totals()) && sweep.tasks() && rows)) {
        add_channels(table, plan, sweep.source(), totals, threads);
        totals = nullptr;
    }
    if (!sweep.tasks() || !rows) {
        for (const Pass<T>* pass : passes)
            for (int64_t e = 0; e < pass->offsets.count; e++)
                grad[pass->offsets.places ? pass->offsets.places[e] : e] = 0;
        return;
    }
    threads = worth((count + rows) * sweep.elements(), threads);
    const int64_t parts = gradient_parts(count, sweep.tasks(), sweep.elements(), plan.h.count * plan.w.count == 1);
    const auto cuts = cut_rows(passes[size_t(most)]->offsets.entries, rows, sweep.row_blocks(parts, threads));
    const int64_t blocks = int64_t(cuts.size()) - 1;
    const bool past = dots.dst && plan.past(rows, sizeof(T)) && starts_line(dots.dst);
    const Scratch<Number<T>> sums(parts * count);  // by pass, then part
    std::vector<double> before_sums(dots.sums ? size_t(parts * rows * 2) : 0);
    std::vector<double> channel_sums(totals ? size_t(parts * plan.channels) : 0);
    parallel_for(parts * blocks, threads, [&](int64_t task) {
        const int64_t part = task / blocks, row0 = cuts[size_t(task % blocks)], row1 = cuts[size_t(task % blocks + 1)];
        std::vector<Dots<T>> mine;
        Number<T>* start = sums.get();
        for (const Pass<T>* pass : passes) {
            const Entries& entries = pass->offsets.entries;
            const int64_t taps = entries.taps_h * entries.taps_w;
            const int64_t first = entries.ptr[row0 * taps], last = entries.ptr[row1 * taps];
            mine.push_back(dots);
            mine.back().past = past;
            mine.back().entries = entries;
            mine.back().weight = pass->weight.get();
            mine.back().narrow_weight = pass->weight.narrow();
            mine.back().grad = start + part * pass->offsets.count;
            if (dots.sums) mine.back().sums = &before_sums[size_t(part * rows * 2)];
            std::memset(mine.back().grad + first, 0, sizeof(Number<T>) * size_t(last - first));
            start += parts * pass->offsets.count;
        }
        double* const channels = totals ? &channel_sums[size_t(part * plan.channels)] : nullptr;
        for (int64_t t = sweep.tasks() * part / parts; t < sweep.tasks() * (part + 1) / parts; t++) {
            if (channels && first) {
                const int64_t block = task % blocks;
                sweep.add_totals(t, plan.channels * block / blocks, plan.channels * (block + 1) / blocks, channels);
            }
            sweep.run(t, row0 ? nullptr : channels, [&](size_t pass, const Place<T>& from, const Tile* tiles, int64_t count) {
                const Offsets& offsets = passes[pass]->offsets;
                mine[pass].src = from.source;
                mine[pass].soon = from.soon;
                mine[pass].entries.offset = offsets.entries.offset + from.phase * offsets.count;
                table.dots(mine[pass], tiles, count, row0, row1);
            });
        }
    });
    if (dots.sums) add_parts(before_sums, parts, dots.sums);
    if (totals) add_parts(channel_sums, parts, totals);
    const Number<T>* start = sums.get();
    for (const Pass<T>* pass : passes) {
        join_parts(start, parts, pass->offsets.count, pass->offsets.places, grad, threads);
        start += parts * pass->offsets.count;
    }
}

Memory memory(const Geometry& g, bool panels, int64_t channels, int64_t height, int64_t width) {
    if (panels) return {g.panel, channels * height * width, width, channels * width, true};
    return {g.batch, 1, height * width, width, false};
}

Memory input(const Geometry& g) { return memory(g, g.in_panels, g.in_channels, g.height, g.width); }

Memory output(const Geometry& g) { return memory(g, g.out_panels, g.out_channels, g.out_height, g.out_width); }

// A layer that reads each position at one position is a linear layer whose samples are all positions; worth it where those of
// one position fill no vectors.
Geometry flat(Geometry g, int tile) {
    if (g.batch % tile == 0 || g.taps() > 1 || g.sh > 1 || g.sw > 1 || g.ph || g.pw || g.in_panels || g.out_panels) return g;
    g.batch *= g.height * g.width;
    g.height = g.width = g.out_height = g.out_width = 1;
    return g;
}

// Whether strips may be worth it: the samples of a batch fill no vectors, and there is more than one position.
bool uneven(const Geometry& g, int tile) { return !g.in_panels && !g.out_panels && g.batch % tile && g.height * g.width > 1; }

// Columns of a panel, where no tensor is in panels.
int64_t panel_of(const Geometry& g, int tile) { return g.panel ? g.panel : panel_width(g.batch, tile); }

// `connections`: see Plan; `all` of the layer.
template <class T>
Plan forward_plan(const Geometry& g, int tile, int64_t connections, int64_t all) {
    Axis h = forward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh);
    Axis w = forward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw);
    const Shifts rows = h.shifts();
    if (uneven(g, tile)) {
        const Strips strips = best_strips(h, w, rows, true, g.in_channels, g.batch, tile / 4, sizeof(T),
                                          double(all) / double(g.in_channels));
        if (strips.cost < cost_by_position(h, w, g.batch, tile / 4))
            return Plan(std::move(h), std::move(w), rows, g.in_channels, g.batch, input(g), output(g), strips);
    }
    return Plan(std::move(h), std::move(w), rows, g.in_channels, g.batch, panel_of(g, tile), input(g), output(g), sizeof(T),
                connections);
}

// One pass for each set of input positions that share their taps: one where the stride is 1. The first has the
// most rows and columns.
template <class T>
std::vector<Plan> backward_plans(const Geometry& g, int tile, int64_t connections, int64_t all) {
    std::vector<Axis> down, across;
    for (int32_t r = 0; r < g.sh; r++) down.push_back(backward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh, r));
    for (int32_t r = 0; r < g.sw; r++) across.push_back(backward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw, r));
    Shifts rows = down.front().shifts();
    for (const Axis& h : down) rows = {std::min(rows.lowest, h.shifts().lowest), std::max(rows.highest, h.shifts().highest)};
    std::vector<Plan> plans;
    if (uneven(g, tile)) {
        const Axis w = g.sw == 1 ? across.front() : spread_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw);
        const Strips strips = best_strips(down.front(), w, rows, g.sh == 1, g.out_channels, g.batch, tile / 4, sizeof(T),
                                          double(all) / double(g.out_channels));
        const Axis out_h = forward_axis(g.height, g.out_height, g.kh, g.sh, g.ph, g.dh);
        const Axis out_w = forward_axis(g.width, g.out_width, g.kw, g.sw, g.pw, g.dw);
        if (strips.cost < cost_by_position(out_h, out_w, g.batch, tile / 4)) {
            for (const Axis& h : down) plans.emplace_back(h, w, rows, g.out_channels, g.batch, output(g), input(g), strips);
            return plans;
        }
    }
    for (const Axis& h : down)
        for (const Axis& w : across)
            plans.emplace_back(h, w, rows, g.out_channels, g.batch, panel_of(g, tile), output(g), input(g), sizeof(T),
                               connections);
    return plans;
}

}  // namespace

template <class T>
void forward(const Table<T>& table, const Geometry& shape, const ByOutput& a, const Number<T>* values,
             const Number<T>* bias, const T* x, const BatchNorm<T>* norm, T* y, bool relu, Number<T>* mean,
             Number<T>* variance, int threads) {
    const Geometry g = flat(shape, table.sum_tile);
    const Plan plan = forward_plan<T>(g, table.sum_tile, norm ? -1 : a.ptr[g.out_channels], a.ptr[g.out_channels]);
    const Offsets offsets = forward_offsets(g, a, plan);
    const Affine<T> affine(norm);
    const Weights<T> weight(values, nullptr, offsets.count, threads);
    Sum<T> sum{offsets.entries, weight.get(), nullptr, plan.step(), y, plan.to.channels * plan.to.lane, bias, relu, nullptr};
    sum.narrow_weight = weight.narrow();
    run_sum<T>(table, sum, plan, {x, affine.reading()}, g.out_channels, offsets.count, mean, variance, threads);
}

template <class T>
void input_gradient(const Table<T>& table, const Geometry& shape, const ByInput& a, const Number<T>* values, const T* dy,
                    T* dx, int threads) {
    const Geometry g = flat(shape, table.sum_tile);
    const int64_t all = a.ptr[g.in_channels * g.taps()];
    for (const Plan& plan : backward_plans<T>(g, table.sum_tile, all, all)) {
        const Offsets offsets = backward_offsets(g, a, plan);
        const Weights<T> weight(values, offsets.places, offsets.count, threads);
        Sum<T> sum{offsets.entries, weight.get(), nullptr, plan.step(), dx, plan.to.channels * plan.to.lane, nullptr, false,
                   nullptr};
        sum.narrow_weight = weight.narrow();
        run_sum<T>(table, sum, plan, {dy}, g.in_channels, offsets.count, nullptr, nullptr, threads);
    }
}

template <class T>
void weight_gradient(const Table<T>& table, const Geometry& shape, const ByOutput& a, const T* x, const T* dy,
                     const Reading<T>& reading, Number<T>* grad, Number<T>* bias, int threads) {
    const Geometry g = flat(shape, table.sum_tile);
    Plan plan = forward_plan<T>(g, table.dots_tile, a.ptr[g.out_channels], a.ptr[g.out_channels]);
    Offsets offsets = forward_offsets(g, a, plan);
    const int64_t step = plan.step(), row = plan.to.channels * plan.to.lane;
    const Pass<T> pass{std::move(plan), std::move(offsets), Weights<T>(nullptr, nullptr, 0, threads)};
    std::vector<double> sums(bias || !reading.plain() ? size_t(2 * g.out_channels) : 0);
    run_dots<T>(table,
                {{}, nullptr, nullptr, step, dy, nullptr, row, nullptr, reading, nullptr,
                 sums.empty() ? nullptr : sums.data(), nullptr, nullptr},
                {&pass}, {x}, g.out_channels, grad, nullptr, threads);
    for (int64_t o = 0; bias && o < g.out_channels; o++) bias[o] = Number<T>(sums[size_t(2 * o)]);
}

template <class T>
void gradients(const Table<T>& table, const Geometry& shape, const ByInput& a, const Number<T>* values, const T* x,
               const Before<T>& before, const T* dy, const Reading<T>& reading, const Gradients<T>& out, int threads) {
    const Geometry g = flat(shape, table.sum_tile);
    const BatchNorm<T>* norm = before.norm;
    const Affine<T> affine(before.summed() ? nullptr : norm);
    Reading<T> factor = affine.reading();
    if (norm) factor.relu = norm->relu;
    std::vector<double> sums(norm || out.rectified ? size_t(2 * g.in_channels) : 0);
    std::vector<double> totals(out.bias ? size_t(g.out_channels) : 0);
    std::vector<Pass<T>> passes;
    const int64_t connections = a.ptr[g.in_channels * g.taps()];
    for (Plan& plan : backward_plans<T>(g, table.dots_tile, reading.plain() ? connections : -1, connections)) {
        Offsets offsets = backward_offsets(g, a, plan);
        Weights<T> weight(values, offsets.places, offsets.count, threads);
        passes.push_back({std::move(plan), std::move(offsets), std::move(weight)});
    }
    std::vector<const Pass<T>*> all;  // of them read the same rows
    for (const Pass<T>& pass : passes) all.push_back(&pass);
    const Plan& plan = passes.front().plan;
    run_dots<T>(table,
                {{}, nullptr, nullptr, plan.step(), x, out.dx, plan.to.channels * plan.to.lane, nullptr,
                 factor, norm ? norm->mean : nullptr, sums.empty() ? nullptr : sums.data(),
                 !norm ? nullptr : before.summed() ? before.input : x, before.more},
                all, {dy, reading}, g.in_channels, out.values, out.bias ? totals.data() : nullptr, threads);
    for (size_t c = 0; c < totals.size(); c++) out.bias[c] = Number<T>(totals[c]);
    for (size_t c = 0; out.rectified && c < size_t(g.in_channels); c++) out.rectified[c] = Number<T>(sums[2 * c]);
    if (norm) batch_norm_gradient(table, *norm, before.summed() ? before.input : x, sums.data(), out.dx, out.norm, threads);
}

template <class T>
void row_sums(const Table<T>& table, const T* x, int64_t rows, int64_t len, Number<T>* sums, int threads) {
    const int64_t block = 16;
    parallel_for((rows + block - 1) / block, worth(rows * len / 4, threads), [&](int64_t b) {
        for (int64_t r = b * block; r < std::min(rows, (b + 1) * block); r++)
            sums[r] = Number<T>(table.total(x + r * len, len));
    });
}

template <class T>
void transpose(const Table<T>& table, const T* in, int64_t rows, int64_t cols, T* out, int threads) {
    threads = worth(rows * cols / 4, threads);
    // Blocks that stay near, whose shorter side is whole if it is no batch of many: then lines are written once.
    const int64_t near = 1 << 15, most = 256, some = 16;
    const int64_t shorter = std::min({rows, cols, most}), longer = std::clamp(near / shorter / some * some, 4 * some, near / 4);
    const int64_t down = rows < cols ? shorter : longer, across = rows < cols ? longer : shorter;
    const int64_t beside = (cols + across - 1) / across;
    parallel_for((rows + down - 1) / down * beside, threads, [&](int64_t b) {
        const int64_t c = b % beside * across, width = std::min(across, cols - c);
        const int64_t first = b / beside * down, last = std::min(rows, first + down);
        // Some rows at a time: the processor reads ahead in no more of them at once.
        const int64_t step = rows < cols ? some : last - first;
        for (int64_t r = first; r < last; r += step)
            table.transpose(in + r * cols + c, cols, out + c * rows + r, rows, std::min(step, last - r), width);
    });
}

#define REWIRE_INSTANTIATE(T)                                                                                       \
    template void forward<T>(const Table<T>&, const Geometry&, const ByOutput&, const Number<T>*, const Number<T>*, \
                             const T*, const BatchNorm<T>*, T*, bool, Number<T>*, Number<T>*, int);                 \
    template void input_gradient<T>(const Table<T>&, const Geometry&, const ByInput&, const Number<T>*, const T*,   \
                                    T*, int);                                                                       \
    template void weight_gradient<T>(const Table<T>&, const Geometry&, const ByOutput&, const T*, const T*,         \
                                     const Reading<T>&, Number<T>*, Number<T>*, int);                               \
    template void gradients<T>(const Table<T>&, const Geometry&, const ByInput&, const Number<T>*, const T*,        \
                               const Before<T>&, const T*, const Reading<T>&, const Gradients<T>&, int);            \
    template void row_sums<T>(const Table<T>&, const T*, int64_t, int64_t, Number<T>*, int);                        \
    template void transpose<T>(const Table<T>&, const T*, int64_t, int64_t, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)
REWIRE_INSTANTIATE(bfloat16)

}  // namespace rewire
