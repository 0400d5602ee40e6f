// Elementary functions of vectors. Of floats they are polynomials, right to about two units in the last place; of doubles,
// which are there for tests and gradcheck, each lane is the C library's. NaN stays NaN.
#include <cmath>

namespace rewire::REWIRE_ISA {

typedef int32_t IntVec __attribute__((vector_size(kBytes)));

template <class T, class F>
REWIRE_INLINE Vec<T> by_lane(Vec<T> x, F&& f) {
    for (int i = 0; i < kLanes<T>; i++) x[i] = f(x[i]);
    return x;
}

template <class T>
REWIRE_INLINE Vec<T> magnitude(Vec<T> x) {
    return x < Vec<T>{} ? -x : x;
}

REWIRE_INLINE Vec<float> exponential(Vec<float> x) {
    // Beyond these the result is 0 or infinity; a comparison with NaN is false, so NaN is kept.
    const Vec<float> low = broadcast<float>(-104.0f), high = broadcast<float>(89.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec<float> magic = broadcast<float>(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec<float> n = (x * 1.44269504088896341f + magic) - magic;
    Vec<float> r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: n may be beyond the exponents of a float. Of NaN, n is no number, and p stays NaN.
    const IntVec k = __builtin_convertvector(n == n ? n : Vec<float>{}, IntVec), half = k >> 1;
    const Vec<float> first = (Vec<float>)((half + 127) << 23), second = (Vec<float>)((k - half + 127) << 23);
    return p * first * second;
}
REWIRE_INLINE Vec<double> exponential(Vec<double> x) {
    return by_lane<double>(x, [](double v) { return std::exp(v); });
}

template <class T>
REWIRE_INLINE Vec<T> sigmoid(Vec<T> x) {
    return T(1) / (exponential(-x) + T(1));
}

REWIRE_INLINE Vec<float> hyperbolic_tangent(Vec<float> x) {
    const Vec<float> a = magnitude<float>(x), z = x * x;
    Vec<float> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const Vec<float> near = p * z * x + x;
    const Vec<float> far = 1.0f - 2.0f / (exponential(a + a) + 1.0f);
    return a < broadcast<float>(0.625f) ? near : (x < Vec<float>{} ? -far : far);
}
REWIRE_INLINE Vec<double> hyperbolic_tangent(Vec<double> x) {
    return by_lane<double>(x, [](double v) { return std::tanh(v); });
}

// The error function: a series near 0, else 1 - t * exp(-x^2 + polynomial(t)).
REWIRE_INLINE Vec<float> error_function(Vec<float> x) {
    const Vec<float> a = magnitude<float>(x), z = x * x;
    Vec<float> s = z * 7.853861353153693e-5f - 8.010193625184903e-4f;
    s = s * z + 5.188327685732524e-3f;
    s = s * z - 2.685381193529856e-2f;
    s = s * z + 1.128358514861418e-1f;
    s = s * z - 3.761262582423300e-1f;
    s = s * z + 1.128379165726710f;
    const Vec<float> near = s * x;
    const Vec<float> t = 1.0f / (a * 0.5f + 1.0f);
    Vec<float> p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    const Vec<float> far = 1.0f - t * exponential(p - z);
    return a < broadcast<float>(0.9f) ? near : (x < Vec<float>{} ? -far : far);
}
REWIRE_INLINE Vec<double> error_function(Vec<double> x) {
    return by_lane<double>(x, [](double v) { return std::erf(v); });
}

}  // namespace rewire::REWIRE_ISA
