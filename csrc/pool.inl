// Pooling of one channel plane [H][W][N].

namespace rewire::REWIRE_ISA {

template <class T>
struct IndexOf;
template <>
struct IndexOf<float> {
    typedef int32_t type __attribute__((vector_size(kBytes)));
};
template <>
struct IndexOf<double> {
    typedef int64_t type __attribute__((vector_size(kBytes)));
};

// A vector's worth of taps, as they are kept: a byte each.
template <class T>
struct BytesOf {
    typedef uint8_t type __attribute__((vector_size(kLanes<T>)));
};

template <class T>
REWIRE_INLINE typename IndexOf<T>::type load_taps(const uint8_t* p, int n) {
    typename BytesOf<T>::type bytes{};
    if (n == kLanes<T>)
        std::memcpy(&bytes, p, kLanes<T>);
    else
        for (int i = 0; i < n; i++) bytes[i] = p[i];
    return __builtin_convertvector(bytes, typename IndexOf<T>::type);
}

template <class T>
REWIRE_INLINE void store_taps(uint8_t* p, typename IndexOf<T>::type taps, int n) {
    const auto bytes = __builtin_convertvector(taps, typename BytesOf<T>::type);
    if (n == kLanes<T>)
        std::memcpy(p, &bytes, kLanes<T>);
    else
        for (int i = 0; i < n; i++) p[i] = bytes[i];
}

// Positions of one window, or the windows over one position: at most 255 (a tap fits in a byte).
struct Window {
    int count = 0;
    int64_t at[256];
    int tap[256];

    void of_output(const Pool& p, int64_t oh, int64_t ow) {
        count = 0;
        for (int kh = 0; kh < p.kh; kh++)
            for (int kw = 0; kw < p.kw; kw++) {
                const int64_t h = oh * p.sh - p.ph + kh * p.dh, w = ow * p.sw - p.pw + kw * p.dw;
                if (h >= 0 && h < p.height && w >= 0 && w < p.width) add(h * p.width + w, kh * p.kw + kw);
            }
    }
    void of_input(const Pool& p, int64_t h, int64_t w) {
        count = 0;
        for (int kh = 0; kh < p.kh; kh++)
            for (int kw = 0; kw < p.kw; kw++) {
                const int64_t oh = h + p.ph - kh * p.dh, ow = w + p.pw - kw * p.dw;
                if (oh >= 0 && ow >= 0 && oh % p.sh == 0 && ow % p.sw == 0 && oh / p.sh < p.out_height &&
                    ow / p.sw < p.out_width)
                    add(oh / p.sh * p.out_width + ow / p.sw, kh * p.kw + kw);
            }
    }

   private:
    void add(int64_t position, int which) {
        at[count] = position;
        tap[count++] = which;
    }
};

template <class T, bool kNorm>
void max_pool_as(const Pool& p, const Norm<T>& norm, const T* x, T* y, uint8_t* which) {
    using Index = typename IndexOf<T>::type;
    using Element = decltype(Index{}[0] + 0);
    auto read = [&](int64_t i, int n) {
        const Vec<T> v = get(x + i, n);
        if constexpr (!kNorm) return v;
        const Vec<T> out = v * norm.scale + norm.shift;
        return norm.relu ? rectify<T>(out) : out;
    };
    Window window;
    for (int64_t o = 0; o < p.out_height * p.out_width; o++) {
        window.of_output(p, o / p.out_width, o % p.out_width);
        for (int64_t panel = 0; panel < p.panels; panel++) {
            const int64_t in = panel * p.in_step, out = panel * p.out_step + o * p.batch;
            for_each_vector<T>(p.batch, [&](int64_t i, int n) {
                Vec<T> best = read(in + window.at[0] * p.batch + i, n);
                Index tap = Index{} + Element(window.tap[0]);
                for (int k = 1; k < window.count; k++) {
                    const Vec<T> v = read(in + window.at[k] * p.batch + i, n);
                    const Index larger = (v > best) | (v != v);
                    best = larger ? v : best;
                    tap = larger ? Index{} + Element(window.tap[k]) : tap;
                }
                put(y + out + i, best, n);
                if (which) store_taps<T>(which + out + i, tap, n);
            });
        }
    }
}

template <class T>
void max_pool(const Pool& p, const Norm<T>* norm, const T* x, T* y, uint8_t* which) {
    norm ? max_pool_as<T, true>(p, *norm, x, y, which) : max_pool_as<T, false>(p, {}, x, y, which);
}

template <class T, bool kNorm>
void max_pool_gradient_as(const Pool& p, const NormGrad<T>& norm, const T* x, const T* dy, const uint8_t* which,
                          T* dx, double* sums) {
    using Element = decltype(typename IndexOf<T>::type{}[0] + 0);
    Window window;
    for (int64_t h = 0; h < p.height; h++)
        for (int64_t w = 0; w < p.width; w++) {
            window.of_input(p, h, w);
            Vec<T> total = {}, total_x = {};
            for (int64_t panel = 0; panel < p.panels; panel++) {
                const int64_t in = panel * p.in_step + (h * p.width + w) * p.batch, out = panel * p.out_step;
                for_each_vector<T>(p.batch, [&](int64_t i, int n) {
                    Vec<T> sum = {};
                    for (int k = 0; k < window.count; k++) {
                        const int64_t at = out + window.at[k] * p.batch + i;
                        sum += load_taps<T>(which + at, n) == Element(window.tap[k]) ? get(dy + at, n) : Vec<T>{};
                    }
                    if constexpr (kNorm) {
                        const Vec<T> v = get(x + in + i, n);
                        if (norm.relu) sum = v * norm.scale + norm.shift <= Vec<T>{} ? Vec<T>{} : sum;
                        total += sum;
                        total_x += sum * ((v - norm.mean) * norm.inverse_std);
                    }
                    put(dx + in + i, sum, n);
                });
            }
            if constexpr (kNorm) {
                sums[0] += double(sum_lanes<T>(total));
                sums[1] += double(sum_lanes<T>(total_x));
            }
        }
}

template <class T>
void max_pool_gradient(const Pool& p, const NormGrad<T>* norm, const T* x, const T* dy, const uint8_t* which, T* dx,
                       double* sums) {
    norm ? max_pool_gradient_as<T, true>(p, *norm, x, dy, which, dx, sums)
         : max_pool_gradient_as<T, false>(p, {}, x, dy, which, dx, sums);
}

// One over the number of positions that torch takes the mean of one window over.
template <class T>
REWIRE_INLINE T share(const Pool& p, int64_t oh, int64_t ow) {
    int64_t h0 = oh * p.sh - p.ph, w0 = ow * p.sw - p.pw;
    int64_t h1 = h0 + p.kh < p.height + p.ph ? h0 + p.kh : p.height + p.ph;
    int64_t w1 = w0 + p.kw < p.width + p.pw ? w0 + p.kw : p.width + p.pw;
    if (!p.count_padding) {
        h0 = h0 < 0 ? 0 : h0;
        w0 = w0 < 0 ? 0 : w0;
        h1 = h1 > p.height ? p.height : h1;
        w1 = w1 > p.width ? p.width : w1;
    }
    return T(1) / T((h1 - h0) * (w1 - w0));
}

template <class T>
void mean_pool(const Pool& p, const T* x, T* y) {
    Window window;
    for (int64_t oh = 0; oh < p.out_height; oh++)
        for (int64_t ow = 0; ow < p.out_width; ow++, y += p.batch) {
            window.of_output(p, oh, ow);
            const Vec<T> scale = broadcast<T>(share<T>(p, oh, ow));
            for_each_vector<T>(p.batch, [&](int64_t i, int n) {
                Vec<T> sum = {};
                for (int k = 0; k < window.count; k++) sum += get(x + window.at[k] * p.batch + i, n);
                put(y + i, sum * scale, n);
            });
        }
}

template <class T>
void mean_pool_gradient(const Pool& p, const T* dy, T* dx) {
    Window window;
    for (int64_t h = 0; h < p.height; h++)
        for (int64_t w = 0; w < p.width; w++, dx += p.batch) {
            window.of_input(p, h, w);
            for_each_vector<T>(p.batch, [&](int64_t i, int n) {
                Vec<T> sum = {};
                for (int k = 0; k < window.count; k++) {
                    const int64_t o = window.at[k];
                    sum += get(dy + o * p.batch + i, n) * share<T>(p, o / p.out_width, o % p.out_width);
                }
                put(dx + i, sum, n);
            });
        }
}

}  // namespace rewire::REWIRE_ISA
