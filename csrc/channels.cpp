#include "channels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "parallel.h"

namespace rewire {
namespace {

// Calls body(c) for every channel; short channels are handed out in blocks.
template <class Body>
void for_each_channel(int64_t channels, int64_t len, int threads, Body&& body) {
    const int64_t block = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, len));
    parallel_for((channels + block - 1) / block, threads, [&](int64_t b) {
        for (int64_t c = b * block; c < std::min(channels, (b + 1) * block); c++) body(c);
    });
}

// Calls body(at, n) for pieces of a tensor.
template <class Body>
void for_each_piece(int64_t len, int threads, Body&& body) {
    pieces(len, 1 << 14, worth_sharing(len, threads), [&](int64_t begin, int64_t end) { body(begin, end - begin); });
}

// splitmix64
inline uint64_t mixed(uint64_t h) {
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

// The contiguous runs that channels of `all` elements consist of.
struct Runs {
    int64_t channels, all, panels;

    int64_t len() const { return all / panels; }
    int64_t at(int64_t channel, int64_t panel) const { return (panel * channels + channel) * len(); }
};

template <class T>
Runs runs_of(const BatchNorm<T>& p) {
    return {p.channels, p.len, p.panels};
}

template <class T>
NormGrad<T> norm_grad(const BatchNorm<T>& p, int64_t c, bool relu) {
    using N = Number<T>;
    return {p.len, p.mean[c], N(p.inverse_std(c)), N(p.scale(c)), N(p.shift(c)), relu, p.training};
}

// What follows from the sums of g and of g * xhat over channel c.
template <class T>
void from_sums(const BatchNorm<T>& p, int64_t c, const double* sums, const NormGradients<T>& out) {
    using N = Number<T>;
    if (out.bias) out.bias[c] = N(sums[0]);
    if (out.weight) out.weight[c] = N(sums[1]);
    if (!out.factors) return;
    const double scale = p.scale(c), each = 1 / double(p.len);
    // In evaluation the sums play no part, not even where one of them is NaN.
    const double by_x = p.training ? -scale * p.inverse_std(c) * sums[1] * each : 0;
    out.factors[c] = N(scale);
    out.factors[p.channels + c] = N(by_x);
    out.factors[2 * p.channels + c] = p.training ? N(-scale * sums[0] * each - by_x * double(p.mean[c])) : N(0);
}

// What is left to do to the gradient in dx once its sums over all channels are known.
template <class T>
void subtract_means(const Table<T>& table, const BatchNorm<T>& p, const double* sums, const T* x, T* dx, int threads) {
    const int64_t len = runs_of(p).len();
    for_each_channel(p.channels * p.panels, len, threads, [&](int64_t k) {
        const int64_t c = k % p.channels;
        T* d = dx + k * len;
        table.norm_gradient(norm_grad(p, c, false), sums + 2 * c, len, x + k * len, nullptr, d, nullptr, d, nullptr);
    });
}

// Two sums for each channel, of what body(channel, at, sums) adds for the run that starts at element `at`. A
// channel that is one run is one task; others are gone through in the order of memory, a few rows of panels in a task.
template <class Body>
std::vector<double> sums_of(const Runs& runs, int threads, Body&& body) {
    const int64_t channels = runs.channels, tasks = std::min<int64_t>(runs.panels, 32);
    std::vector<double> sums(size_t(2 * channels));
    if (tasks == 1) {
        for_each_channel(channels, runs.all, threads, [&](int64_t c) { body(c, c * runs.len(), &sums[size_t(2 * c)]); });
        return sums;
    }
    std::vector<double> parts(size_t(2 * channels * tasks));
    parallel_for(tasks, threads, [&](int64_t task) {
        for (int64_t p = runs.panels * task / tasks; p < runs.panels * (task + 1) / tasks; p++)
            for (int64_t c = 0; c < channels; c++) body(c, runs.at(c, p), &parts[size_t(2 * (task * channels + c))]);
    });
    for (size_t k = 0; k < parts.size(); k++) sums[k % sums.size()] += parts[k];
    return sums;
}

}  // namespace

template <class T>
void moments(const Table<T>& table, const T* x, int64_t channels, int64_t len, int64_t panels, Number<T>* mean,
             Number<T>* variance, int threads) {
    const Runs runs{channels, len, panels};
    const auto sums = sums_of(runs, threads, [&](int64_t, int64_t at, double* to) { *to += table.total(x + at, runs.len()); });
    for (int64_t c = 0; c < channels; c++) mean[c] = Number<T>(sums[size_t(2 * c)] / double(len));
    const auto squares = sums_of(runs, threads, [&](int64_t c, int64_t at, double* to) {
        *to += table.variation(x + at, runs.len(), mean[c]);
    });
    for (int64_t c = 0; c < channels; c++) variance[c] = Number<T>(squares[size_t(2 * c)] / double(len));
}

template <class T>
void channel_sums(const Table<T>& table, const T* x, int64_t channels, int64_t len, int64_t panels, Number<T>* sums,
                  int threads) {
    const Runs runs{channels, len, panels};
    const auto all = sums_of(runs, threads, [&](int64_t, int64_t at, double* to) { *to += table.total(x + at, runs.len()); });
    for (int64_t c = 0; c < channels; c++) sums[c] = Number<T>(all[size_t(2 * c)]);
}

template <class T>
void track(const T* mean, const T* variance, int64_t channels, double momentum, double unbiased, T* running_mean,
           T* running_variance) {
    // Not running + momentum * (moment - running), which loses a moment that is small beside what it replaces.
    auto move = [=](T& running, double moment) {
        running = T((1 - momentum) * double(running) + momentum * moment);
    };
    for (int64_t c = 0; c < channels; c++) {
        move(running_mean[c], double(mean[c]));
        move(running_variance[c], double(variance[c]) * unbiased);
    }
}

template <class T>
void batch_norm(const Table<T>& table, const BatchNorm<T>& p, const T* x, const T* residual, T* z, int threads) {
    const Runs runs = runs_of(p);
    for_each_channel(p.channels * p.panels, runs.len(), threads, [&](int64_t k) {
        const int64_t c = k % p.channels, at = k * runs.len();
        table.normalize({runs.len(), Number<T>(p.scale(c)), Number<T>(p.shift(c)), p.relu}, x + at, residual ? residual + at : nullptr,
                        z + at);
    });
}

template <class T>
void batch_norm_gradient(const Table<T>& table, const BatchNorm<T>& p, const T* x, const T* z, const T* dz,
                         const T* more, T* dx, T* dresidual, const NormGradients<T>& out, int threads) {
    const Runs runs = runs_of(p);
    const auto part = [](auto* tensor, int64_t at) { return tensor ? tensor + at : nullptr; };
    const auto sums = sums_of(runs, threads, [&](int64_t c, int64_t at, double* to) {
        double mine[2];
        table.norm_sums(norm_grad(p, c, p.relu), runs.len(), x + at, part(z, at), dz + at, part(more, at),
                        out.factors ? part(dresidual, at) : nullptr, mine);
        for (int q = 0; q < 2; q++) to[q] += mine[q];
    });
    for (int64_t c = 0; c < p.channels; c++) from_sums(p, c, &sums[size_t(2 * c)], out);
    if (out.factors) return;
    for_each_channel(p.channels * p.panels, runs.len(), threads, [&](int64_t k) {
        const int64_t c = k % p.channels, at = k * runs.len();
        table.norm_gradient(norm_grad(p, c, p.relu), &sums[size_t(2 * c)], runs.len(), x + at, part(z, at), dz + at,
                            part(more, at), dx + at, part(dresidual, at));
    });
}

template <class T>
void batch_norm_gradient(const Table<T>& table, const BatchNorm<T>& p, const T* x, const double* sums, T* dx,
                         const NormGradients<T>& out, int threads) {
    std::vector<double> mine(sums, sums + 2 * p.channels);
    for (int64_t c = 0; c < p.channels; c++) {
        mine[size_t(2 * c + 1)] *= p.inverse_std(c);
        from_sums(p, c, &mine[size_t(2 * c)], out);
    }
    if (!out.factors) subtract_means(table, p, mine.data(), x, dx, threads);
}

template <class T>
void settle_gradient(const Table<T>& table, const T* g, const T* x, const Number<T>* factors, int64_t channels, int64_t len,
                     int64_t panels, T* dx, int threads) {
    const Reading<T> reading{factors, factors + 2 * channels, false, nullptr, x, factors + channels};
    const int64_t each = len / panels;
    for_each_channel(channels * panels, each, threads, [&](int64_t k) {
        const int64_t at = k * each;
        table.read(reading.from(at), k % channels, g + at, each, dx + at, each, 1, each);
    });
}

template <class T>
void copy(const T* x, int64_t len, T* y, int threads) {
    for_each_piece(len, threads, [&](int64_t at, int64_t n) { std::memmove(y + at, x + at, sizeof(T) * size_t(n)); });
}

template <class T>
void fill(T value, int64_t len, T* y, int threads) {
    for_each_piece(len, threads, [&](int64_t at, int64_t n) { std::fill_n(y + at, n, value); });
}

void widen(const bfloat16* x, int64_t len, float* y, int threads) {
    for_each_piece(len, threads, [&](int64_t at, int64_t n) { conversions().widen(x + at, n, y + at); });
}

void narrow(const float* x, int64_t len, bfloat16* y, int threads) {
    for_each_piece(len, threads, [&](int64_t at, int64_t n) { conversions().narrow(x + at, n, y + at); });
}

template <class T>
void drop_out(const Table<T>& table, const T* x, int64_t len, double probability, double scale, uint64_t seed, T* y,
              int threads) {
    const auto limit = uint32_t(probability * 4294967296.0);  // of 2^32 values; the probability is below 1
    pieces(len, 1 << 14, worth_sharing(len, threads), [&](int64_t begin, int64_t end) {
        table.drop_out(x + begin, begin, end - begin, limit, Number<T>(scale), mixed(seed), y + begin);
    });
}

template <class T>
void max_pool(const Table<T>& table, const Pool& p, const BatchNorm<T>* norm, const T* x, T* y, uint8_t* which,
              int threads) {
    std::vector<Norm<T>> norms;
    for (int64_t c = 0; norm && c < p.channels; c++)
        norms.push_back({p.batch, Number<T>(norm->scale(c)), Number<T>(norm->shift(c)), norm->relu});
    parallel_for(p.panels * p.out_height, threads, [&](int64_t task) {
        const int64_t panel = task / p.out_height, out = panel * p.out.panel;
        table.max_pool(p, norm ? norms.data() : nullptr, task % p.out_height, x + panel * p.in.panel, y + out,
                       which ? which + out : nullptr);
    });
}

template <class T>
void max_pool_gradient(const Table<T>& table, const Pool& p, const BatchNorm<T>* norm, const T* x, const T* dy,
                       const uint8_t* which, T* dx, const NormGradients<T>& gradients, int threads) {
    std::vector<NormGrad<T>> norms;
    for (int64_t c = 0; norm && c < p.channels; c++) norms.push_back(norm_grad(*norm, c, norm->relu));
    const int64_t tasks = p.panels * p.height;
    std::vector<double> parts(norm ? size_t(2 * p.channels * tasks) : 0), sums(norm ? size_t(2 * p.channels) : 0);
    parallel_for(tasks, threads, [&](int64_t task) {
        const int64_t panel = task / p.height, in = panel * p.in.panel, out = panel * p.out.panel;
        table.max_pool_gradient(p, norm ? norms.data() : nullptr, task % p.height, norm ? x + in : nullptr, dy + out,
                                which + out, dx + in, norm ? &parts[size_t(2 * p.channels * task)] : nullptr);
    });
    if (!norm) return;
    for (size_t k = 0; k < parts.size(); k++) sums[k % sums.size()] += parts[k];
    for (int64_t c = 0; c < p.channels; c++) from_sums(*norm, c, &sums[size_t(2 * c)], gradients);
    if (!gradients.factors) subtract_means(table, *norm, sums.data(), x, dx, threads);
}

template <class T>
void mean_pool(const Table<T>& table, const Pool& p, const T* x, T* y, int threads) {
    for_each_channel(p.panels * p.channels, p.height * p.width * p.batch, threads, [&](int64_t k) {
        const int64_t panel = k / p.channels, c = k % p.channels;
        table.mean_pool(p, x + panel * p.in.panel + c * p.in.channel, y + panel * p.out.panel + c * p.out.channel);
    });
}

template <class T>
void mean_pool_gradient(const Table<T>& table, const Pool& p, const T* dy, T* dx, int threads) {
    for_each_channel(p.panels * p.channels, p.height * p.width * p.batch, threads, [&](int64_t k) {
        const int64_t panel = k / p.channels, c = k % p.channels;
        table.mean_pool_gradient(p, dy + panel * p.out.panel + c * p.out.channel,
                                 dx + panel * p.in.panel + c * p.in.channel);
    });
}

#define REWIRE_INSTANTIATE(T)                                                                                      \
    template void moments<T>(const Table<T>&, const T*, int64_t, int64_t, int64_t, Number<T>*, Number<T>*, int);   \
    template void channel_sums<T>(const Table<T>&, const T*, int64_t, int64_t, int64_t, Number<T>*, int);          \
    template void batch_norm<T>(const Table<T>&, const BatchNorm<T>&, const T*, const T*, T*, int);                \
    template void batch_norm_gradient<T>(const Table<T>&, const BatchNorm<T>&, const T*, const T*, const T*,    \
                                         const T*, T*, T*, const NormGradients<T>&, int);                           \
    template void batch_norm_gradient<T>(const Table<T>&, const BatchNorm<T>&, const T*, const double*, T*,         \
                                         const NormGradients<T>&, int);                                             \
    template void settle_gradient<T>(const Table<T>&, const T*, const T*, const Number<T>*, int64_t, int64_t, int64_t, T*, int); \
    template void copy<T>(const T*, int64_t, T*, int);                                                              \
    template void fill<T>(T, int64_t, T*, int);                                                                     \
    template void drop_out<T>(const Table<T>&, const T*, int64_t, double, double, uint64_t, T*, int);               \
    template void max_pool<T>(const Table<T>&, const Pool&, const BatchNorm<T>*, const T*, T*, uint8_t*, int);\
    template void max_pool_gradient<T>(const Table<T>&, const Pool&, const BatchNorm<T>*, const T*, const T*,\
                                       const uint8_t*, T*, const NormGradients<T>&, int);                           \
    template void mean_pool<T>(const Table<T>&, const Pool&, const T*, T*, int);                          \
    template void mean_pool_gradient<T>(const Table<T>&, const Pool&, const T*, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)
REWIRE_INSTANTIATE(bfloat16)

template void track<float>(const float*, const float*, int64_t, double, double, float*, float*);
template void track<double>(const double*, const double*, int64_t, double, double, double*, double*);

}  // namespace rewire
