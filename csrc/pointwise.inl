// Programs of elementwise operations, run on one tile at a time.

namespace rewire::REWIRE_ISA {

// What GELU takes the hyperbolic tangent of, and the x it is of: beyond 16 nothing changes, but cubes would overflow.
template <class T>
REWIRE_INLINE Vec<T> gelu_inner(Vec<T> x, Vec<T>& near) {
    const Vec<T> low = broadcast<T>(-16), high = broadcast<T>(16);
    near = x < low ? low : x;
    near = near > high ? high : near;
    return T(0.79788456080286535588) * (near + T(0.044715) * near * near * near);
}

// An activation of a vector; p and q are its parameters.
template <class T>
REWIRE_INLINE Vec<T> activate(Activation kind, Vec<T> x, T p, T q) {
    const Vec<T> zero{};
    switch (kind) {
        case Activation::relu: return rectify<T>(x);
        case Activation::hardtanh: {  // to [p, q]
            const Vec<T> low = broadcast<T>(p), high = broadcast<T>(q);
            const Vec<T> raised = x < low ? low : x;
            return raised > high ? high : raised;
        }
        case Activation::leaky_relu: return x > zero ? x : (x == x ? x * p : x);
        case Activation::elu:  // scale q
            return by_lane<T>(x, [=](T v) { return q * (v > 0 ? v : p * std::expm1(v)); });
        case Activation::silu: return x / (exponential(-x) + T(1));
        case Activation::gelu: return x * T(0.5) * (error_function(x * T(0.70710678118654752440)) + T(1));
        case Activation::gelu_tanh: {
            Vec<T> near;
            return x * T(0.5) * (hyperbolic_tangent(gelu_inner<T>(x, near)) + T(1));
        }
        case Activation::sigmoid: return sigmoid<T>(x);
        case Activation::tanh: return hyperbolic_tangent(x);
        case Activation::hardswish:
        case Activation::hardsigmoid: {
            const Vec<T> six = broadcast<T>(6);
            const Vec<T> raised = x + T(3) < zero ? zero : x + T(3);
            const Vec<T> gate = (raised > six ? six : raised) * T(1.0 / 6);
            return kind == Activation::hardswish ? x * gate : gate;
        }
        case Activation::softplus:  // beta p, threshold q
            return by_lane<T>(x, [=](T v) { return v * p > q ? v : std::log1p(std::exp(v * p)) / p; });
    }
    return x;
}

// The gradient of its input x, given that of its output. Where torch gives 0, it is 0 whatever g is.
template <class T>
REWIRE_INLINE Vec<T> activation_gradient(Activation kind, Vec<T> g, Vec<T> x, T p, T q) {
    const Vec<T> zero{}, three = broadcast<T>(3);
    switch (kind) {
        case Activation::relu: return x <= zero ? zero : g;
        case Activation::hardtanh: {
            const Vec<T> above = x <= broadcast<T>(p) ? zero : g;
            return x >= broadcast<T>(q) ? zero : above;
        }
        case Activation::leaky_relu: return x > zero ? g : g * p;
        case Activation::elu: return g * by_lane<T>(x, [=](T v) { return v > 0 ? q : q * p * std::exp(v); });
        case Activation::silu: {
            const Vec<T> s = sigmoid<T>(x);
            return g * s * (x * (T(1) - s) + T(1));
        }
        case Activation::gelu: {
            const Vec<T> cdf = T(0.5) * (error_function(x * T(0.70710678118654752440)) + T(1));
            return g * (cdf + x * T(0.39894228040143267794) * exponential(x * x * T(-0.5)));
        }
        case Activation::gelu_tanh: {
            Vec<T> near;
            const Vec<T> t = hyperbolic_tangent(gelu_inner<T>(x, near));
            const Vec<T> slope = T(0.79788456080286535588) * (T(3 * 0.044715) * near * near + T(1));
            return g * (T(0.5) * (t + T(1)) + T(0.5) * near * (T(1) - t * t) * slope);
        }
        case Activation::sigmoid: {
            const Vec<T> s = sigmoid<T>(x);
            return g * s * (T(1) - s);
        }
        case Activation::tanh: {
            const Vec<T> t = hyperbolic_tangent(x);
            return g * (T(1) - t * t);
        }
        case Activation::hardswish: {
            const Vec<T> inside = x < three ? g * (x * T(1.0 / 3) + T(0.5)) : g;
            return x <= -three ? zero : inside;
        }
        case Activation::hardsigmoid: {
            const Vec<T> inside = x < three ? g * T(1.0 / 6) : zero;
            return x <= -three ? zero : inside;
        }
        case Activation::softplus: return x * p > broadcast<T>(q) ? g : g * sigmoid<T>(x * p);
    }
    return g;
}

template <class T, class Value>
REWIRE_INLINE void tile_loop(int64_t len, T* out, Value&& value) {
    for_each_vector<T>(len, [&](int64_t i, int n) REWIRE_BODY { put(out + i, value(i, n), n); });
}

// The switch is outside of the loop: the compiler makes one loop for each kind.
template <class T, bool kGradient>
void activation_loop(const Instruction& of, const T* a, const T* b, T* out, int64_t len) {
    const T p = T(of.p), q = T(of.q);
    const auto loop = [&](auto kind) REWIRE_BODY {
        constexpr Activation k = decltype(kind)::value;
        tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY {
            if constexpr (kGradient) return activation_gradient<T>(k, get(a + i, n), get(b + i, n), p, q);
            else return activate<T>(k, get(a + i, n), p, q);
        });
    };
    switch (of.activation) {
#define REWIRE_CASE(k) \
    case Activation::k: return loop(std::integral_constant<Activation, Activation::k>{});
        REWIRE_CASE(relu)
        REWIRE_CASE(hardtanh)
        REWIRE_CASE(leaky_relu)
        REWIRE_CASE(elu)
        REWIRE_CASE(silu)
        REWIRE_CASE(gelu)
        REWIRE_CASE(gelu_tanh)
        REWIRE_CASE(sigmoid)
        REWIRE_CASE(tanh)
        REWIRE_CASE(hardswish)
        REWIRE_CASE(hardsigmoid)
        REWIRE_CASE(softplus)
#undef REWIRE_CASE
    }
}

template <class T>
void pointwise(const Instruction* program, int64_t count, T* const* slots, int64_t len) {
    for (int64_t k = 0; k < count; k++) {
        const Instruction& of = program[k];
        const T *a = slots[of.a], *b = of.b < 0 ? nullptr : slots[of.b], *c = of.c < 0 ? nullptr : slots[of.c];
        T* out = slots[of.out];
        const T p = T(of.p), q = T(of.q);
        switch (of.op) {
            case Operation::affine:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) * p + q; });
                break;
            case Operation::fma:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) * get(b + i, n) + get(c + i, n); });
                break;
            case Operation::centered:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) * (get(b + i, n) - get(c + i, n)); });
                break;
            case Operation::add:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) + get(b + i, n); });
                break;
            case Operation::sub:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) - get(b + i, n); });
                break;
            case Operation::mul:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) * get(b + i, n); });
                break;
            case Operation::div:
                tile_loop<T>(len, out, [&](int64_t i, int n) REWIRE_BODY { return get(a + i, n) / get(b + i, n); });
                break;
            case Operation::activate:
                activation_loop<T, false>(of, a, b, out, len);
                break;
            case Operation::gradient:
                activation_loop<T, true>(of, a, b, out, len);
                break;
        }
    }
}

}  // namespace rewire::REWIRE_ISA
