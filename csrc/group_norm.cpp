#include "group_norm.h"

#include <algorithm>
#include <cmath>

#include "deal.h"

namespace rewire {
namespace {

constexpr int64_t kPeriod = 64;  // lanes that are worth a loop: those of a small batch are repeated along rows

int64_t period_of(const Images& of) { return of.panel * std::clamp<int64_t>(kPeriod / of.panel, 1, of.width); }

// Calls body(panel, group) for each of them.
template <class Body>
void for_each_group(const Groups& of, int threads, Body&& body) {
    const int64_t all = of.images.panels * of.images.channels * of.images.height * of.images.row();
    parallel_for(of.images.panels * of.groups, worth(all, threads),
                 [&](int64_t task) { body(task / of.groups, task % of.groups); });
}

// The same lanes again and again; they may be the first ones of `to`.
template <class T>
void repeat(const T* lanes, int64_t panel, int64_t period, T* to) {
    for (int64_t at = lanes == to ? panel : 0; at < period; at += panel) std::copy_n(lanes, panel, to + at);
}

// totals[lane] = the sum over a group of what add(row, sums) adds to its sums by lane.
template <class T, class Add>
void sum_group(const Groups& of, int64_t n, int64_t g, const T* x, Number<T>* sums, double* totals, Add&& add) {
    const Images& images = of.images;
    const int64_t period = period_of(images);
    std::fill_n(totals, images.panel, 0.0);
    for (int64_t c = g * of.channels(); c < (g + 1) * of.channels(); c++) {
        std::fill_n(sums, period, Number<T>(0));
        for (int64_t h = 0; h < images.height; h++) add(x + images.at(n, h, c), sums);
        for (int64_t at = 0; at < period; at += images.panel)
            for (int64_t i = 0; i < images.panel; i++) totals[i] += double(sums[at + i]);
    }
}

}  // namespace

template <class T>
void group_moments(const Table<T>& table, const Groups& of, const T* x, const Number<T>* weight, Number<T>* moments,
                   Number<T>* inverse, int threads) {
    using N = Number<T>;
    const Images& images = of.images;
    const int64_t panel = images.panel, period = period_of(images), length = images.row(), all = images.channels;
    for_each_group(of, threads, [&](int64_t n, int64_t g) {
        const Scratch<double> totals(panel);
        const Scratch<N> sums(period), means(period), scale(panel);
        sum_group(of, n, g, x, sums.get(), totals.get(),
                  [&](const T* row, N* to) { table.lane_sums(row, length, period, to); });
        for (int64_t i = 0; i < panel; i++) means[i] = N(totals[i] / double(of.count()));
        repeat(means.get(), panel, period, means.get());
        sum_group(of, n, g, x, sums.get(), totals.get(),
                  [&](const T* row, N* to) { table.lane_spreads(row, length, period, means.get(), to); });
        for (int64_t i = 0; i < panel; i++) scale[i] = N(1 / std::sqrt(totals[i] / double(of.count()) + of.eps));
        if (inverse) std::copy_n(scale.get(), panel, inverse + (n * of.groups + g) * panel);
        for (int64_t c = g * of.channels(); c < (g + 1) * of.channels(); c++) {
            N* const mean = moments + (2 * n * all + c) * panel;
            N* const factor = mean + all * panel;
            std::copy_n(means.get(), panel, mean);
            for (int64_t i = 0; i < panel; i++) factor[i] = weight ? scale[i] * weight[c] : scale[i];
        }
    });
}

namespace {

// The gradient of the input, group by group.
template <class T>
void input_gradient(const Table<T>& table, const Groups& of, const GroupMomentsGradient<T>& with, int threads) {
    using N = Number<T>;
    const Images& images = of.images;
    const int64_t panel = images.panel, period = period_of(images), length = images.row(), all = images.channels;
    for_each_group(of, threads, [&](int64_t n, int64_t g) {
        const Scratch<double> dmean(panel), dfactor(panel);
        const Scratch<N> mean(period), factor(period), shift(period);
        std::fill_n(dmean.get(), panel, 0.0);
        std::fill_n(dfactor.get(), panel, 0.0);
        const int64_t first = g * of.channels(), last = first + of.channels();
        for (int64_t c = first; c < last; c++) {
            const N* const dm = with.dmoments + (2 * n * all + c) * panel;
            const double weight = with.weight ? double(with.weight[c]) : 1.0;
            for (int64_t i = 0; i < panel; i++) {
                dmean[i] += double(dm[i]);
                dfactor[i] += double(dm[all * panel + i]) * weight;
            }
        }
        const N* const scale = with.inverse + (n * of.groups + g) * panel;
        const double share = 1 / double(of.count());
        for (int64_t i = 0; i < panel; i++) {
            const double s = scale[i];
            factor[i] = N(-s * s * s * dfactor[i] * share);
            shift[i] = N(dmean[i] * share);
        }
        std::copy_n(with.moments + (2 * n * all + first) * panel, panel, mean.get());
        for (const Scratch<N>* each : {&mean, &factor, &shift}) repeat(each->get(), panel, period, each->get());
        const LaneAffine<T> affine{length, period, mean.get(), factor.get(), shift.get()};
        for (int64_t c = first; c < last; c++)
            for (int64_t h = 0; h < images.height; h++) {
                const int64_t at = images.at(n, h, c);
                table.lane_affine(affine, with.x + at, with.more ? with.more + at : nullptr, with.dx + at);
            }
    });
}

}  // namespace

template <class T>
void group_moments_gradient(const Table<T>& table, const Groups& of, const GroupMomentsGradient<T>& with, int threads) {
    if (with.dx) input_gradient(table, of, with, threads);
    if (!with.dweight) return;
    const int64_t panel = of.images.panel, all = of.images.channels;
    for (int64_t c = 0; c < all; c++) {
        double sum = 0;
        for (int64_t n = 0; n < of.images.panels; n++) {
            const Number<T>* const dfactor = with.dmoments + ((2 * n + 1) * all + c) * panel;
            const Number<T>* const scale = with.inverse + (n * of.groups + c / of.channels()) * panel;
            for (int64_t i = 0; i < panel; i++) sum += double(dfactor[i]) * double(scale[i]);
        }
        with.dweight[c] = Number<T>(sum);
    }
}

#define REWIRE_INSTANTIATE(T)                                                                                        \
    template void group_moments<T>(const Table<T>&, const Groups&, const T*, const Number<T>*, Number<T>*, Number<T>*, int); \
    template void group_moments_gradient<T>(const Table<T>&, const Groups&, const GroupMomentsGradient<T>&, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)
REWIRE_INSTANTIATE(bfloat16)

}  // namespace rewire
