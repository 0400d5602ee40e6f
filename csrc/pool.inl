// Pooling of images whose columns follow each other in memory.

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

template <>
struct IndexOf<bfloat16> : IndexOf<float> {};

// A vector's worth of taps, as they are kept: a byte each.
template <class T>
struct BytesOf {
    typedef uint8_t type __attribute__((vector_size(kLanes<T>)));
};

// Compilers take bytes apart one by one where they are told to convert a vector of them.
template <class T>
REWIRE_INLINE typename IndexOf<T>::type load_taps(const uint8_t* p) {
    using Index = typename IndexOf<T>::type;
#if defined(REWIRE_AVX512)
    if constexpr (sizeof(Number<T>) == 4) return (Index)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return (Index)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
#elif defined(REWIRE_AVX2)
    if constexpr (sizeof(Number<T>) == 4) return (Index)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return (Index)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
#else
    typename BytesOf<T>::type bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, Index);
#endif
}

// The first n of them.
template <class T>
REWIRE_INLINE typename IndexOf<T>::type load_taps(const uint8_t* p, int n) {
    if (n == kLanes<T>) return load_taps<T>(p);
    uint8_t bytes[kLanes<T>] = {};
    for (int i = 0; i < n; i++) bytes[i] = p[i];
    return load_taps<T>(bytes);
}

template <class T>
REWIRE_INLINE void store_taps(uint8_t* p, typename IndexOf<T>::type taps, int n) {
    const auto bytes = __builtin_convertvector(taps, typename BytesOf<T>::type);
    if (n == kLanes<T>)
        std::memcpy(p, &bytes, kLanes<T>);
    else
        for (int i = 0; i < n; i++) p[i] = bytes[i];
}

// The elements of windows, or the windows over positions, of some columns of a row; a tap fits in a byte.
struct Windows {
    static constexpr int kMost = 1024, kColumns = 256;
    int first[kColumns + 1] = {};  // of each column; at least one column fits
    int64_t at[kMost];
    int tap[kMost];

    // How many columns of windows of `p` fit.
    static int64_t room(const Pool& p) {
        const int64_t some = kMost / (p.kh * p.kw);
        return some < kColumns ? some : kColumns;
    }
    // The elements under windows (oh, ow) to (oh, ow + count - 1).
    void of_outputs(const Pool& p, int64_t oh, int64_t ow, int64_t count) {
        for (int64_t k = 0; k < count; k++) {
            int next = first[k];
            for (int kh = 0; kh < p.kh; kh++)
                for (int kw = 0; kw < p.kw; kw++) {
                    const int64_t h = oh * p.sh - p.ph + kh, w = (ow + k) * p.sw - p.pw + kw;
                    if (h >= 0 && h < p.height && w >= 0 && w < p.width)
                        add(next, h * p.in.row + w * p.batch, kh * p.kw + kw);
                }
            first[k + 1] = next;
        }
    }
    // The windows over positions (h, w) to (h, w + count - 1).
    void of_inputs(const Pool& p, int64_t h, int64_t w, int64_t count) {
        for (int64_t k = 0; k < count; k++) {
            int next = first[k];
            for (int kh = 0; kh < p.kh; kh++)
                for (int kw = 0; kw < p.kw; kw++) {
                    const int64_t oh = h + p.ph - kh, ow = w + k + p.pw - kw;
                    if (oh >= 0 && ow >= 0 && oh % p.sh == 0 && ow % p.sw == 0 && oh / p.sh < p.out_height &&
                        ow / p.sw < p.out_width)
                        add(next, oh / p.sh * p.out.row + ow / p.sw * p.batch, kh * p.kw + kw);
                }
            first[k + 1] = next;
        }
    }

   private:
    void add(int& next, int64_t element, int which) {
        at[next] = element;
        tap[next++] = which;
    }
};

template <class T, bool kNorm>
void max_pool_as(const Pool& p, const Norm<T>* norms, int64_t row, const T* x, T* y, uint8_t* which) {
    using Index = typename IndexOf<T>::type;
    using Element = decltype(Index{}[0] + 0);
    const int64_t some = Windows::room(p);
    Windows windows;
    for (int64_t column = 0; column < p.out_width; column += some) {
        const int64_t count = some < p.out_width - column ? some : p.out_width - column;
        windows.of_outputs(p, row, column, count);
        for (int64_t c = 0; c < p.channels; c++) {
            const Norm<T> norm = kNorm ? norms[c] : Norm<T>{};
            const T* from = x + c * p.in.channel;
            auto read = [&](int64_t i, int n) REWIRE_BODY {
                const Vec<T> v = get(from + i, n);
                if constexpr (!kNorm) return v;
                const Vec<T> z = v * norm.scale + norm.shift;
                return norm.relu ? rectify<T>(z) : z;
            };
            for (int64_t w = 0; w < count; w++) {
                const int64_t out = c * p.out.channel + row * p.out.row + (column + w) * p.batch;
                const int first = windows.first[w], last = windows.first[w + 1];
                for_each_vector<T>(p.batch, [&](int64_t i, int n) REWIRE_BODY {
                    Vec<T> best = read(windows.at[first] + i, n);
                    Index tap = Index{} + Element(windows.tap[first]);
                    for (int k = first + 1; k < last; k++) {
                        const Vec<T> v = read(windows.at[k] + i, n);
                        const Index larger = (v > best) | (v != v);
                        best = larger ? v : best;
                        tap = larger ? Index{} + Element(windows.tap[k]) : tap;
                    }
                    put(y + out + i, best, n);
                    if (which) store_taps<T>(which + out + i, tap, n);
                });
            }
        }
    }
}

template <class T>
void max_pool(const Pool& p, const Norm<T>* norms, int64_t row, const T* x, T* y, uint8_t* which) {
    norms ? max_pool_as<T, true>(p, norms, row, x, y, which) : max_pool_as<T, false>(p, norms, row, x, y, which);
}

template <class T, bool kNorm>
void max_pool_gradient_as(const Pool& p, const NormGrad<T>* norms, int64_t row, const T* x, const T* dy,
                          const uint8_t* which, T* dx, double* sums) {
    using Element = decltype(typename IndexOf<T>::type{}[0] + 0);
    const int64_t some = Windows::room(p);
    Windows windows;
    for (int64_t column = 0; column < p.width; column += some) {
        const int64_t count = some < p.width - column ? some : p.width - column;
        windows.of_inputs(p, row, column, count);
        for (int64_t c = 0; c < p.channels; c++) {
            const NormGrad<T> norm = kNorm ? norms[c] : NormGrad<T>{};
            const int64_t out = c * p.out.channel;
            Vec<T> total = {}, total_x = {};
            for (int64_t w = 0; w < count; w++) {
                const int64_t in = c * p.in.channel + row * p.in.row + (column + w) * p.batch;
                for_each_vector<T>(p.batch, [&](int64_t i, int n) REWIRE_BODY {
                    Vec<T> sum = {};
                    for (int k = windows.first[w]; k < windows.first[w + 1]; k++) {
                        const int64_t at = out + windows.at[k] + i;
                        sum += load_taps<T>(which + at, n) == Element(windows.tap[k]) ? get(dy + at, n) : Vec<T>{};
                    }
                    if constexpr (kNorm) {
                        const Vec<T> v = get(x + in + i, n);
                        if (norm.relu) sum = v * norm.scale + norm.shift <= Vec<T>{} ? Vec<T>{} : sum;
                        total += sum;
                        total_x += sum * ((v - norm.mean) * norm.inverse_std);
                    }
                    put(dx + in + i, sum, n);
                });
                if (kNorm && (w % 8 == 7 || w + 1 == count)) {  // short runs of floats
                    sums[2 * c] += double(sum_lanes<T>(total));
                    sums[2 * c + 1] += double(sum_lanes<T>(total_x));
                    total = total_x = Vec<T>{};
                }
            }
        }
    }
}

template <class T>
void max_pool_gradient(const Pool& p, const NormGrad<T>* norms, int64_t row, const T* x, const T* dy,
                       const uint8_t* which, T* dx, double* sums) {
    norms ? max_pool_gradient_as<T, true>(p, norms, row, x, dy, which, dx, sums)
          : max_pool_gradient_as<T, false>(p, norms, row, x, dy, which, dx, sums);
}

// One over the number of positions that torch takes the mean of one window over.
template <class T>
REWIRE_INLINE Number<T> share(const Pool& p, int64_t oh, int64_t ow) {
    int64_t h0 = oh * p.sh - p.ph, w0 = ow * p.sw - p.pw;
    int64_t h1 = h0 + p.kh < p.height + p.ph ? h0 + p.kh : p.height + p.ph;
    int64_t w1 = w0 + p.kw < p.width + p.pw ? w0 + p.kw : p.width + p.pw;
    if (!p.count_padding) {
        h0 = h0 < 0 ? 0 : h0;
        w0 = w0 < 0 ? 0 : w0;
        h1 = h1 > p.height ? p.height : h1;
        w1 = w1 > p.width ? p.width : w1;
    }
    return 1 / Number<T>((h1 - h0) * (w1 - w0));
}

template <class T>
void mean_pool(const Pool& p, const T* x, T* y) {
    Windows windows;
    for (int64_t oh = 0; oh < p.out_height; oh++)
        for (int64_t ow = 0; ow < p.out_width; ow++) {
            windows.of_outputs(p, oh, ow, 1);
            T* const out = y + oh * p.out.row + ow * p.batch;
            const Vec<T> scale = broadcast<T>(share<T>(p, oh, ow));
            for_each_vector<T>(p.batch, [&](int64_t i, int n) REWIRE_BODY {
                Vec<T> sum = {};
                for (int k = 0; k < windows.first[1]; k++) sum += get(x + windows.at[k] + i, n);
                put(out + i, sum * scale, n);
            });
        }
}

template <class T>
void mean_pool_gradient(const Pool& p, const T* dy, T* dx) {
    Windows windows;
    for (int64_t h = 0; h < p.height; h++)
        for (int64_t w = 0; w < p.width; w++) {
            windows.of_inputs(p, h, w, 1);
            T* const in = dx + h * p.in.row + w * p.batch;
            for_each_vector<T>(p.batch, [&](int64_t i, int n) REWIRE_BODY {
                Vec<T> sum = {};
                for (int k = 0; k < windows.first[1]; k++) {
                    const int64_t at = windows.at[k];
                    sum += get(dy + at + i, n) * share<T>(p, at / p.out.row, at % p.out.row / p.batch);
                }
                put(in + i, sum, n);
            });
        }
}

}  // namespace rewire::REWIRE_ISA
