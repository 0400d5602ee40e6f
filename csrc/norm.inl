// Batch normalisation of one channel, which is one contiguous run in batch-last memory.

namespace rewire::REWIRE_ISA {

// Calls body(i, n) for consecutive pieces of one vector each; n < lanes only for the last.
template <class T, class Body>
REWIRE_INLINE void for_each_vector(int64_t len, Body&& body) {
    constexpr int lanes = kLanes<T>;
    int64_t i = 0;
    for (; i + lanes <= len; i += lanes) body(i, lanes);
    if (i < len) body(i, int(len - i));
}

template <class T>
REWIRE_INLINE Vec<T> get(const T* p, int n) {
    return n == kLanes<T> ? load<T>(p) : load_part(p, n);
}

template <class T>
REWIRE_INLINE void put(T* p, Vec<T> v, int n) {
    n == kLanes<T> ? store<T>(p, v) : store_part(p, v, n);
}

// The sum of value(x vector) over the run: vectors within blocks of a few additions each, doubles across. Gradients
// cancel in such sums, and what is left has to be exact.
template <class T, class Value>
REWIRE_INLINE double block_sum(int64_t len, Value&& value) {
    constexpr int lanes = kLanes<T>;
    constexpr int64_t block = 32 * lanes;
    double sum = 0;
    for (int64_t start = 0; start < len; start += block) {
        const int64_t end = start + block < len ? start + block : len;
        Vec<T> acc[4] = {};
        int64_t i = start;
        for (; i + 4 * lanes <= end; i += 4 * lanes)
            for (int q = 0; q < 4; q++) acc[q] += value(i + q * lanes, lanes);
        for (; i < end; i += lanes) acc[0] += value(i, end - i < lanes ? int(end - i) : lanes);
        const Vec<T> part = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        for (int q = 0; q < lanes; q++) sum += double(part[q]);
    }
    return sum;
}

template <class T>
double total(const T* x, int64_t len) {
    return block_sum<T>(len, [&](int64_t i, int n) REWIRE_BODY { return get(x + i, n); });
}

// sums[k] += the sum of the k-th of `count` pieces
template <class T>
void totals(const T* x, int64_t step, int64_t count, int64_t len, double* sums) {
    constexpr int lanes = kLanes<T>;
    int64_t k = 0;
    for (; len == 4 * lanes && k + 4 <= count; k += 4) {
        Vec<T> all[4];
        for (int q = 0; q < 4; q++) {
            const T* one = x + (k + q) * step;
            all[q] = (load<T>(one) + load<T>(one + lanes)) + (load<T>(one + 2 * lanes) + load<T>(one + 3 * lanes));
        }
        Number<T> four[4] = {};
        add_sums(four, all);
        for (int q = 0; q < 4; q++) sums[k + q] += double(four[q]);
    }
    for (; k < count; k++) sums[k] += total(x + k * step, len);
}

template <class T>
double variation(const T* x, int64_t len, Number<T> mean) {
    const Vec<T> m = broadcast<T>(mean);
    return block_sum<T>(len, [&](int64_t i, int n) REWIRE_BODY {
        Vec<T> d = get(x + i, n) - m;
        if (n < kLanes<T>)
            for (int q = n; q < kLanes<T>; q++) d[q] = 0;
        return d * d;
    });
}

template <class T, bool kRelu, bool kResidual>
void normalize_as(const Norm<T>& p, const T* x, const T* residual, T* z) {
    const Vec<T> scale = broadcast<T>(p.scale), shift = broadcast<T>(p.shift);
    for_each_vector<T>(p.len, [&](int64_t i, int n) REWIRE_BODY {
        Vec<T> v = get(x + i, n) * scale + shift;
        if constexpr (kResidual) v += get(residual + i, n);
        put(z + i, kRelu ? rectify<T>(v) : v, n);
    });
}

template <class T>
void normalize(const Norm<T>& p, const T* x, const T* residual, T* z) {
    if (p.relu)
        residual ? normalize_as<T, true, true>(p, x, residual, z) : normalize_as<T, true, false>(p, x, residual, z);
    else
        residual ? normalize_as<T, false, true>(p, x, residual, z) : normalize_as<T, false, false>(p, x, residual, z);
}

// The gradient that passes the rectifier: by the output if it was kept, else by computing it again.
template <class T>
REWIRE_INLINE Vec<T> passed(const NormGrad<T>& p, Vec<T> x, const T* z, const T* dz, const T* more, int64_t i, int n) {
    Vec<T> g = get(dz + i, n);
    if (more) g += get(more + i, n);
    if (!p.relu) return g;
    const Vec<T> out = z ? get(z + i, n) : x * p.scale + p.shift;
    return out <= Vec<T>{} ? Vec<T>{} : g;
}

template <class T>
void norm_sums(const NormGrad<T>& p, int64_t all, const T* x, const T* z, const T* dz, const T* more, T* to,
               double* sums) {
    constexpr int lanes = kLanes<T>;
    constexpr int64_t block = 256 * lanes;
    double sum_g = 0, sum_gx = 0;
    for (int64_t start = 0; start < all; start += block) {
        const int64_t len = all - start < block ? all - start : block;
        Vec<T> a = {}, b = {};
        for_each_vector<T>(len, [&](int64_t i, int n) REWIRE_BODY {
            const Vec<T> v = get(x + start + i, n);
            const Vec<T> g = passed(p, v, z, dz, more, start + i, n);
            if (to) put(to + start + i, g, n);
            a += g;
            b += g * ((v - p.mean) * p.inverse_std);
        });
        sum_g += double(sum_lanes<T>(a));
        sum_gx += double(sum_lanes<T>(b));
    }
    sums[0] = sum_g;
    sums[1] = sum_gx;
}

template <class T>
void norm_gradient(const NormGrad<T>& p, const double* sums, int64_t len, const T* x, const T* z, const T* dz,
                   const T* more, T* dx, T* dresidual) {
    const auto mean_g = p.training ? Number<T>(sums[0] / double(p.len)) : 0;
    const auto mean_gx = p.training ? Number<T>(sums[1] / double(p.len)) * p.inverse_std : 0;
    for_each_vector<T>(len, [&](int64_t i, int n) REWIRE_BODY {
        const Vec<T> v = get(x + i, n);
        const Vec<T> g = passed(p, v, z, dz, more, i, n);
        if (dresidual) put(dresidual + i, g, n);
        put(dx + i, (p.training ? g - mean_g - (v - p.mean) * mean_gx : g) * p.scale, n);
    });
}

}  // namespace rewire::REWIRE_ISA
