#include "channels.h"

#include <algorithm>

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

template <class T>
NormGrad<T> norm_grad(const BatchNorm<T>& p, int64_t c, bool relu) {
    return {p.len, p.mean[c], T(p.inverse_std(c)), T(p.scale(c)), T(p.shift(c)), relu, p.training};
}

// What follows from the sums of g and of g * xhat over channel c.
template <class T>
void from_sums(const BatchNorm<T>& p, int64_t c, const double* sums, const NormGradients<T>& out) {
    if (out.bias) out.bias[c] = T(sums[0]);
    if (out.weight) out.weight[c] = T(sums[1]);
    if (!out.factors) return;
    const double scale = p.scale(c), inverse = p.inverse_std(c), each = p.training ? 1 / double(p.len) : 0;
    const double by_x = -scale * inverse * sums[1] * each;
    out.factors[c] = T(scale);
    out.factors[p.channels + c] = T(by_x);
    out.factors[2 * p.channels + c] = T(-scale * sums[0] * each - by_x * double(p.mean[c]));
}

}  // namespace

template <class T>
void moments(const Table<T>& table, const T* x, int64_t channels, int64_t len, T* mean, T* variance, int threads) {
    for_each_channel(channels, len, threads, [&](int64_t c) {
        const T* mine = x + c * len;
        mean[c] = T(table.total(mine, len) / double(len));
        variance[c] = T(table.variation(mine, len, mean[c]) / double(len));
    });
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
    for_each_channel(p.channels, p.len, threads, [&](int64_t c) {
        table.normalize({p.len, T(p.scale(c)), T(p.shift(c)), p.relu}, x + c * p.len, residual ? residual + c * p.len : nullptr,
                        z + c * p.len);
    });
}

template <class T>
void batch_norm_gradient(const Table<T>& table, const BatchNorm<T>& p, const T* x, const T* z, const T* dz, T* dx,
                         T* dresidual, const NormGradients<T>& out, int threads) {
    for_each_channel(p.channels, p.len, threads, [&](int64_t c) {
        const int64_t at = c * p.len;
        const NormGrad<T> grad = norm_grad(p, c, p.relu);
        const T* kept = z ? z + at : nullptr;
        T* g = dresidual ? dresidual + at : nullptr;
        double sums[2];
        table.norm_sums(grad, x + at, kept, dz + at, out.factors ? g : nullptr, sums);
        from_sums(p, c, sums, out);
        if (!out.factors) table.norm_gradient(grad, sums, x + at, kept, dz + at, dx + at, g);
    });
}

template <class T>
void batch_norm_gradient(const Table<T>& table, const BatchNorm<T>& p, const T* x, const double* sums, T* dx,
                         const NormGradients<T>& out, int threads) {
    for_each_channel(p.channels, out.factors ? 1 : p.len, threads, [&](int64_t c) {
        const double mine[2] = {sums[2 * c], sums[2 * c + 1] * p.inverse_std(c)};
        from_sums(p, c, mine, out);
        T* d = dx + c * p.len;
        if (!out.factors) table.norm_gradient(norm_grad(p, c, false), mine, x + c * p.len, nullptr, d, d, nullptr);
    });
}

template <class T>
void settle_gradient(const Table<T>& table, const T* g, const T* x, const T* factors, int64_t channels, int64_t len,
                     T* dx, int threads) {
    const Reading<T> reading{factors, factors + 2 * channels, false, nullptr, x, factors + channels};
    for_each_channel(channels, len, threads, [&](int64_t c) {
        table.read(reading.from(c * len), c, g + c * len, len, dx + c * len, len, 1, len);
    });
}

template <class T>
void max_pool(const Table<T>& table, const Pool& p, int64_t channels, const BatchNorm<T>* norm, const T* x, T* y,
              uint8_t* which, int threads) {
    const int64_t in = p.height * p.width * p.batch, out = p.out_height * p.out_width * p.batch;
    for_each_channel(channels, in, threads, [&](int64_t c) {
        Norm<T> mine{};
        if (norm) mine = {in, T(norm->scale(c)), T(norm->shift(c)), norm->relu};
        table.max_pool(p, norm ? &mine : nullptr, x + c * in, y + c * out, which ? which + c * out : nullptr);
    });
}

template <class T>
void max_pool_gradient(const Table<T>& table, const Pool& p, int64_t channels, const BatchNorm<T>* norm, const T* x,
                       const T* dy, const uint8_t* which, T* dx, const NormGradients<T>& gradients, int threads) {
    const int64_t in = p.height * p.width * p.batch, out = p.out_height * p.out_width * p.batch;
    for_each_channel(channels, in, threads, [&](int64_t c) {
        if (!norm) return table.max_pool_gradient(p, nullptr, nullptr, dy + c * out, which + c * out, dx + c * in, nullptr);
        const NormGrad<T> grad = norm_grad(*norm, c, norm->relu);
        double sums[2] = {};
        T* g = dx + c * in;
        table.max_pool_gradient(p, &grad, x + c * in, dy + c * out, which + c * out, g, sums);
        from_sums(*norm, c, sums, gradients);
        if (!gradients.factors)
            table.norm_gradient(norm_grad(*norm, c, false), sums, x + c * in, nullptr, g, g, nullptr);
    });
}

template <class T>
void mean_pool(const Table<T>& table, const Pool& p, int64_t channels, const T* x, T* y, int threads) {
    const int64_t in = p.height * p.width * p.batch, out = p.out_height * p.out_width * p.batch;
    for_each_channel(channels, in, threads, [&](int64_t c) { table.mean_pool(p, x + c * in, y + c * out); });
}

template <class T>
void mean_pool_gradient(const Table<T>& table, const Pool& p, int64_t channels, const T* dy, T* dx, int threads) {
    const int64_t in = p.height * p.width * p.batch, out = p.out_height * p.out_width * p.batch;
    for_each_channel(channels, in, threads,
                     [&](int64_t c) { table.mean_pool_gradient(p, dy + c * out, dx + c * in); });
}

#define REWIRE_INSTANTIATE(T)                                                                                      \
    template void moments<T>(const Table<T>&, const T*, int64_t, int64_t, T*, T*, int);                            \
    template void track<T>(const T*, const T*, int64_t, double, double, T*, T*);                                   \
    template void batch_norm<T>(const Table<T>&, const BatchNorm<T>&, const T*, const T*, T*, int);                \
    template void batch_norm_gradient<T>(const Table<T>&, const BatchNorm<T>&, const T*, const T*, const T*, T*, T*,\
                                         const NormGradients<T>&, int);                                             \
    template void batch_norm_gradient<T>(const Table<T>&, const BatchNorm<T>&, const T*, const double*, T*,         \
                                         const NormGradients<T>&, int);                                             \
    template void settle_gradient<T>(const Table<T>&, const T*, const T*, const T*, int64_t, int64_t, T*, int);     \
    template void max_pool<T>(const Table<T>&, const Pool&, int64_t, const BatchNorm<T>*, const T*, T*, uint8_t*, int);\
    template void max_pool_gradient<T>(const Table<T>&, const Pool&, int64_t, const BatchNorm<T>*, const T*, const T*,\
                                       const uint8_t*, T*, const NormGradients<T>&, int);                           \
    template void mean_pool<T>(const Table<T>&, const Pool&, int64_t, const T*, T*, int);                          \
    template void mean_pool_gradient<T>(const Table<T>&, const Pool&, int64_t, const T*, T*, int);

REWIRE_INSTANTIATE(float)
REWIRE_INSTANTIATE(double)

}  // namespace rewire
