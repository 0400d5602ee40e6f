// One vector type per instruction set, on the compiler's portable vectors. The file is compiled once
// for each instruction set, inside its own namespace (REWIRE_ISA).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(REWIRE_AVX512) || defined(REWIRE_AVX2)
#include <immintrin.h>
#endif

namespace rewire::REWIRE_ISA {

#if defined(REWIRE_AVX512)
constexpr int kBytes = 64;
#elif defined(REWIRE_AVX2)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
    typedef float type __attribute__((vector_size(kBytes)));
};
template <>
struct VecOf<double> {
    typedef double type __attribute__((vector_size(kBytes)));
};
template <>
struct VecOf<bfloat16> : VecOf<float> {};
// A vector of the numbers that elements of type T are computed in.
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(Number<T>));

#define REWIRE_INLINE inline __attribute__((always_inline))
#define REWIRE_BODY __attribute__((always_inline))  // of a lambda

// bfloat16: the bits of floats as words, rounded to nearest even; NaN stays NaN.
typedef uint32_t Words __attribute__((vector_size(kBytes)));
REWIRE_INLINE Words rounded(Vec<float> v) {
    const Words word = (Words)v;
    return v == v ? word + (0x7FFFu + (word >> 16 & 1u)) : Words{} + 0x7FC00000u;
}
REWIRE_INLINE Vec<float> load_narrow(const bfloat16* p) {
#if defined(REWIRE_AVX512)
    return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(REWIRE_AVX2)
    return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    Vec<float> v;
    for (int i = 0; i < kLanes<float>; i++) v[i] = p[i];
    return v;
#endif
}
REWIRE_INLINE void store_narrow(bfloat16* p, Vec<float> v) {
    const Words words = rounded(v) >> 16;
#if defined(REWIRE_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)words));
#elif defined(REWIRE_AVX2)
    const __m128i low = _mm256_castsi256_si128((__m256i)words), high = _mm256_extracti128_si256((__m256i)words, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
#else
    for (int i = 0; i < kLanes<float>; i++) p[i].bits = uint16_t(words[i]);
#endif
}

// What a store and a load make of it.
template <class T>
REWIRE_INLINE Vec<T> stored(Vec<T> v) {
    if constexpr (std::is_same_v<T, bfloat16>) return (Vec<T>)(rounded(v) & 0xFFFF0000u);
    else return v;
}

template <class T>
REWIRE_INLINE Vec<T> load(const T* p) {
    if constexpr (std::is_same_v<T, bfloat16>) return load_narrow(p);
    Vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class T>
REWIRE_INLINE void store(T* p, Vec<T> v) {
    if constexpr (std::is_same_v<T, bfloat16>) return store_narrow(p, v);
    else std::memcpy(p, &v, sizeof v);
}

// A register of bfloat16, and its elements as two vectors of floats: in another order than in memory, which is cheaper.
REWIRE_INLINE Words load_words(const bfloat16* p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
#if defined(REWIRE_BF16)
// As words are interleaved, which is what products of pairs work on: four of each eight elements in either vector.
REWIRE_INLINE Words interleave_low(Words a, Words b) { return (Words)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
REWIRE_INLINE Words interleave_high(Words a, Words b) { return (Words)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
REWIRE_INLINE Vec<float> first_half(Words words) { return (Vec<float>)interleave_low(Words{}, words); }
REWIRE_INLINE Vec<float> second_half(Words words) { return (Vec<float>)interleave_high(Words{}, words); }
REWIRE_INLINE Words joined(Vec<float> first, Vec<float> second) {
    return (Words)_mm512_packus_epi32((__m512i)(rounded(first) >> 16), (__m512i)(rounded(second) >> 16));
}
// sum + the products of both elements of each word.
REWIRE_INLINE Vec<float> add_products(Vec<float> sum, Words a, Words b) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// Two elements in every word.
REWIRE_INLINE Words broadcast_pair(const bfloat16* p) {
    uint32_t both;
    std::memcpy(&both, p, sizeof both);
    return Words{} + both;
}
#else
// Those at even and those at odd places.
REWIRE_INLINE Vec<float> first_half(Words words) { return (Vec<float>)(words << 16); }
REWIRE_INLINE Vec<float> second_half(Words words) { return (Vec<float>)(words & 0xFFFF0000u); }
REWIRE_INLINE Words joined(Vec<float> first, Vec<float> second) {
    return rounded(first) >> 16 | (rounded(second) & 0xFFFF0000u);
}
#endif

// The same past the caches, to where a vector may start. Whoever is to read it has to wait for stores_done().
#if defined(REWIRE_AVX512)
REWIRE_INLINE void store_past(float* p, Vec<float> v) { _mm512_stream_ps(p, (__m512)v); }
REWIRE_INLINE void store_past(double* p, Vec<double> v) { _mm512_stream_pd(p, (__m512d)v); }
REWIRE_INLINE void store_past(bfloat16* p, Words v) { _mm512_stream_si512((__m512i*)p, (__m512i)v); }
REWIRE_INLINE void stores_done() { _mm_sfence(); }
#elif defined(REWIRE_AVX2)
REWIRE_INLINE void store_past(float* p, Vec<float> v) { _mm256_stream_ps(p, (__m256)v); }
REWIRE_INLINE void store_past(double* p, Vec<double> v) { _mm256_stream_pd(p, (__m256d)v); }
REWIRE_INLINE void store_past(bfloat16* p, Words v) { _mm256_stream_si256((__m256i*)p, (__m256i)v); }
REWIRE_INLINE void stores_done() { _mm_sfence(); }
#else
template <class T, class V>
REWIRE_INLINE void store_past(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
REWIRE_INLINE void stores_done() {}
#endif

template <class T>
REWIRE_INLINE Vec<T> broadcast(Number<T> x) {
#if defined(REWIRE_AVX512)
    if constexpr (std::is_same_v<T, double>) return (Vec<T>)_mm512_set1_pd(x);
    else return (Vec<T>)_mm512_set1_ps(x);
#elif defined(REWIRE_AVX2)
    if constexpr (std::is_same_v<T, double>) return (Vec<T>)_mm256_set1_pd(x);
    else return (Vec<T>)_mm256_set1_ps(x);
#else
    if constexpr (std::is_same_v<T, double>) return Vec<T>{x, x};
    else return Vec<T>{x, x, x, x};
#endif
}

// Keeps a loaded vector in its register: compilers would rather load it again for each use, and loads
// are what the products wait for.
template <class T>
REWIRE_INLINE void hold(Vec<T>& v) {
#if defined(REWIRE_AVX512)
    asm("" : "+v"(v));
#elif defined(REWIRE_AVX2)
    asm("" : "+x"(v));
#else
    (void)v;
#endif
}

// Has what lies `ahead` elements behind V vectors brought near: layers go through activations in order, but stop for
// their products so often that the processor does not see it.
template <int V, class T>
REWIRE_INLINE void read_soon(const T* p, int64_t ahead) {
    for (int at = 0; at < V * kLanes<T> * int(sizeof(T)); at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(p + ahead) + at, 0, 0);
}
template <int V, class T>
REWIRE_INLINE void write_soon(T* p, int64_t ahead) {
    for (int at = 0; at < V * kLanes<T> * int(sizeof(T)); at += 64)
        __builtin_prefetch(reinterpret_cast<char*>(p + ahead) + at, 1);
}

// max(v, 0) that lets NaN through, as torch's relu does.
template <class T>
REWIRE_INLINE Vec<T> rectify(Vec<T> v) {
    return v < Vec<T>{} ? Vec<T>{} : v;
}

// 1 / sqrt(v), exact to rounding.
#if defined(REWIRE_AVX512)
REWIRE_INLINE Vec<float> root(Vec<float> v) { return (Vec<float>)_mm512_sqrt_ps((__m512)v); }
REWIRE_INLINE Vec<double> root(Vec<double> v) { return (Vec<double>)_mm512_sqrt_pd((__m512d)v); }
#elif defined(REWIRE_AVX2)
REWIRE_INLINE Vec<float> root(Vec<float> v) { return (Vec<float>)_mm256_sqrt_ps((__m256)v); }
REWIRE_INLINE Vec<double> root(Vec<double> v) { return (Vec<double>)_mm256_sqrt_pd((__m256d)v); }
#else
template <class V>
REWIRE_INLINE V root(V v) {
    for (size_t i = 0; i < sizeof v / sizeof v[0]; i++) v[i] = std::sqrt(v[i]);
    return v;
}
#endif
template <class T>
REWIRE_INLINE Vec<T> inverse_root(Vec<T> v) {
    return broadcast<T>(1) / root(v);
}

// The first n lanes, of memory or of a vector, zeros behind them; nothing past p + n is touched.
#if defined(REWIRE_AVX512)
REWIRE_INLINE Vec<float> load_part(const float* p, int n) {
    return (Vec<float>)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
REWIRE_INLINE Vec<double> load_part(const double* p, int n) {
    return (Vec<double>)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
}
REWIRE_INLINE Vec<float> keep_part(Vec<float> v, int n) {
    return (Vec<float>)_mm512_maskz_mov_ps((__mmask16)((1u << n) - 1), (__m512)v);
}
REWIRE_INLINE Vec<double> keep_part(Vec<double> v, int n) {
    return (Vec<double>)_mm512_maskz_mov_pd((__mmask8)((1u << n) - 1), (__m512d)v);
}
REWIRE_INLINE void store_part(float* p, Vec<float> v, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
}
REWIRE_INLINE void store_part(double* p, Vec<double> v, int n) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)v);
}
#elif defined(REWIRE_AVX2)
REWIRE_INLINE __m256i first_lanes(int n, float) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
REWIRE_INLINE __m256i first_lanes(int n, double) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
REWIRE_INLINE Vec<float> load_part(const float* p, int n) {
    return (Vec<float>)_mm256_maskload_ps(p, first_lanes(n, 0.0f));
}
REWIRE_INLINE Vec<double> load_part(const double* p, int n) {
    return (Vec<double>)_mm256_maskload_pd(p, first_lanes(n, 0.0));
}
REWIRE_INLINE Vec<float> keep_part(Vec<float> v, int n) {
    return (Vec<float>)_mm256_and_ps((__m256)v, _mm256_castsi256_ps(first_lanes(n, 0.0f)));
}
REWIRE_INLINE Vec<double> keep_part(Vec<double> v, int n) {
    return (Vec<double>)_mm256_and_pd((__m256d)v, _mm256_castsi256_pd(first_lanes(n, 0.0)));
}
template <class T>
REWIRE_INLINE void store_part(T* p, Vec<T> v, int n) {  // masked stores are slow on some CPUs
    for (int i = 0; i < n; i++) p[i] = v[i];
}
#else
template <class T>
REWIRE_INLINE Vec<T> load_part(const T* p, int n) {
    Vec<T> v{};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}
template <class V>
REWIRE_INLINE V keep_part(V v, int n) {
    for (int i = n; i < int(sizeof(v) / sizeof(v[0])); i++) v[i] = 0;
    return v;
}
template <class T>
REWIRE_INLINE void store_part(T* p, Vec<T> v, int n) {
    for (int i = 0; i < n; i++) p[i] = v[i];
}
#endif

REWIRE_INLINE Vec<float> load_part(const bfloat16* p, int n) {
    bfloat16 part[kLanes<float>] = {};
    std::memcpy(part, p, size_t(n) * sizeof *p);
    return load_narrow(part);
}
REWIRE_INLINE void store_part(bfloat16* p, Vec<float> v, int n) {
    bfloat16 part[kLanes<float>];
    store_narrow(part, v);
    std::memcpy(p, part, size_t(n) * sizeof *p);
}

// A short vector, and its elements from anywhere: single loads are faster than the instructions that gather.
template <class T>
struct ShortOf {
    typedef Number<T> type __attribute__((vector_size(16)));
};
template <class T>
using Short = typename ShortOf<T>::type;
#if defined(REWIRE_AVX512) || defined(REWIRE_AVX2)
REWIRE_INLINE __m128 two(const float* from, const int32_t* at, int64_t step) {
    return _mm_insert_ps(_mm_load_ss(from + at[0] * step), _mm_load_ss(from + at[1] * step), 0x10);
}
REWIRE_INLINE Short<float> collect(const float* from, const int32_t* at, int64_t step) {
    return (Short<float>)_mm_movelh_ps(two(from, at, step), two(from, at + 2, step));
}
#else
REWIRE_INLINE Short<float> collect(const float* from, const int32_t* at, int64_t step) {
    return Short<float>{from[at[0] * step], from[at[1] * step], from[at[2] * step], from[at[3] * step]};
}
#endif
REWIRE_INLINE Short<double> collect(const double* from, const int32_t* at, int64_t step) {
    return Short<double>{from[at[0] * step], from[at[1] * step]};
}

REWIRE_INLINE Short<float> collect(const bfloat16* from, const int32_t* at, int64_t step) {
    return Short<float>{from[at[0] * step], from[at[1] * step], from[at[2] * step], from[at[3] * step]};
}

// The sum of all lanes, always in the same order: halves, then halves of these.
#if defined(REWIRE_AVX512) || defined(REWIRE_AVX2)
#if defined(REWIRE_AVX512)
REWIRE_INLINE __m256 half(Vec<float> v) {
    __m512 x = (__m512)v;
    return _mm256_add_ps(_mm512_castps512_ps256(x),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
}
REWIRE_INLINE __m256d half(Vec<double> v) {
    __m512d x = (__m512d)v;
    return _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
}
#else
REWIRE_INLINE __m256 half(Vec<float> v) { return (__m256)v; }
REWIRE_INLINE __m256d half(Vec<double> v) { return (__m256d)v; }
#endif
REWIRE_INLINE float sum_of_lanes(Vec<float> v) {
    const __m256 h = half(v);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 two = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
REWIRE_INLINE double sum_of_lanes(Vec<double> v) {
    const __m256d h = half(v);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
#else
template <class V>
REWIRE_INLINE auto sum_of_lanes(V v) {
    for (int width = int(sizeof(v) / sizeof(v[0])) / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0] + 0;
}
#endif
template <class T>
REWIRE_INLINE Number<T> sum_lanes(Vec<T> v) {
    return sum_of_lanes(v);
}

// sums[q] += the sum of the lanes of v[q], q = 0..3.
#if defined(REWIRE_AVX512) || defined(REWIRE_AVX2)
REWIRE_INLINE void add_sums(float* sums, const Vec<float> (&v)[4]) {
    __m256 a = _mm256_hadd_ps(half(v[0]), half(v[1])), b = _mm256_hadd_ps(half(v[2]), half(v[3]));
    __m256 c = _mm256_hadd_ps(a, b);
    __m128 d = _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), d));
}
REWIRE_INLINE void add_sums(double* sums, const Vec<double> (&v)[4]) {
    __m256d a = _mm256_hadd_pd(half(v[0]), half(v[1])), b = _mm256_hadd_pd(half(v[2]), half(v[3]));
    __m256d c = _mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x21), _mm256_blend_pd(a, b, 0xC));
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), c));
}
#else
template <class T>
REWIRE_INLINE void add_sums(T* sums, const Vec<T> (&v)[4]) {
    for (int q = 0; q < 4; q++) sums[q] += sum_lanes<T>(v[q]);
}
#endif

}  // namespace rewire::REWIRE_ISA
