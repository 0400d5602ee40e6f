// Layer normalisation of the columns of [channels][columns]: each column over all channels.

namespace rewire::REWIRE_ISA {

// V vectors of columns, of which the last has `rest` lanes if kPart. X and Y are computed in the same numbers.
template <int V, bool kPart>
struct Columns {
    template <class T>
    static REWIRE_INLINE Vec<T> get(const T* p, int v, int rest) {
        p += v * kLanes<T>;
        return kPart && v == V - 1 ? load_part(p, rest) : load<T>(p);
    }
    template <class T>
    static REWIRE_INLINE void put(T* p, int v, Vec<T> x, int rest) {
        p += v * kLanes<T>;
        kPart && v == V - 1 ? store_part(p, x, rest) : store<T>(p, x);
    }
};

// Calls body(Columns, first column, rest) for pieces of some vectors each.
template <class T, class Body>
REWIRE_INLINE void for_each_columns(int64_t columns, Body&& body) {
    constexpr int lanes = kLanes<T>;
    int64_t at = 0;
    for (; at + 4 * lanes <= columns; at += 4 * lanes) body(Columns<4, false>{}, at, 0);
    for (; at + lanes <= columns; at += lanes) body(Columns<1, false>{}, at, 0);
    if (at < columns) body(Columns<1, true>{}, at, int(columns - at));
}

template <class X, class Y, int V, bool kPart>
REWIRE_INLINE void layer_norm_columns(Columns<V, kPart> of, const LayerNorm<X>& norm, const X* x, Y* y, Number<X>* mean,
                                      Number<X>* scale, int rest) {
    const Vec<X> share = broadcast<X>(1 / Number<X>(norm.channels));
    Vec<X> middle[V] = {}, spread[V] = {};
    if (norm.centered) {
        for (int64_t c = 0; c < norm.channels; c++)
            for (int v = 0; v < V; v++) middle[v] += of.get(x + c * norm.step, v, rest);
        for (int v = 0; v < V; v++) middle[v] *= share;
    }
    for (int64_t c = 0; c < norm.channels; c++)
        for (int v = 0; v < V; v++) {
            const Vec<X> d = of.get(x + c * norm.step, v, rest) - middle[v];
            spread[v] += d * d;
        }
    for (int v = 0; v < V; v++) {
        spread[v] = inverse_root<X>(spread[v] * share + broadcast<X>(Number<X>(norm.eps)));
        if (mean) of.put(mean, v, middle[v], rest);
        if (scale) of.put(scale, v, spread[v], rest);
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<X> weight = broadcast<X>(norm.weight ? norm.weight[c] : 1);
        const Vec<X> bias = broadcast<X>(norm.bias ? norm.bias[c] : 0);
        for (int v = 0; v < V; v++)
            of.put(y + c * norm.step, v, (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v] * weight + bias, rest);
    }
}

// Some columns of one panel; `mean` and `scale`, 1 / the standard deviation, of each column unless null.
template <class X, class Y>
void layer_norm(const LayerNorm<X>& norm, int64_t columns, const X* x, Y* y, Number<X>* mean, Number<X>* scale) {
    for_each_columns<X>(columns, [&](auto of, int64_t at, int rest) REWIRE_BODY {
        layer_norm_columns(of, norm, x + at, y + at, mean ? mean + at : nullptr, scale ? scale + at : nullptr, rest);
    });
}

template <class X, class Y, int V, bool kPart>
REWIRE_INLINE void layer_norm_gradient_columns(Columns<V, kPart> of, const LayerNorm<X>& norm, const X* x, const Y* dy,
                                               const Number<X>* mean, const Number<X>* scale, X* dx, Number<X>* sums,
                                               int rest) {
    constexpr int lanes = kLanes<X>;
    const Vec<X> share = broadcast<X>(1 / Number<X>(norm.channels));
    Vec<X> middle[V], spread[V], g[V] = {}, gx[V] = {};  // sums of the gradient, and of its product with what was normalised
    for (int v = 0; v < V; v++) {
        middle[v] = norm.centered ? of.get(mean, v, rest) : Vec<X>{};
        spread[v] = of.get(scale, v, rest);
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<X> weight = broadcast<X>(norm.weight ? norm.weight[c] : 1);
        Vec<X> db = {}, dw = {};
        for (int v = 0; v < V; v++) {
            const Vec<X> d = of.get(dy + c * norm.step, v, rest);
            const Vec<X> normed = (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v];
            db += d;
            dw += d * normed;
            g[v] += d * weight;
            gx[v] += d * weight * normed;
        }
        if (sums) {
            Number<X>* const to = sums + 2 * c * lanes;
            store<Number<X>>(to, load(to) + dw);
            store<Number<X>>(to + lanes, load(to + lanes) + db);
        }
    }
    if (!dx) return;
    for (int v = 0; v < V; v++) {
        g[v] = norm.centered ? g[v] * share : Vec<X>{};
        gx[v] *= share;
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<X> weight = broadcast<X>(norm.weight ? norm.weight[c] : 1);
        for (int v = 0; v < V; v++) {
            const Vec<X> d = of.get(dy + c * norm.step, v, rest);
            const Vec<X> normed = (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v];
            of.put(dx + c * norm.step, v, (d * weight - g[v] - normed * gx[v]) * spread[v], rest);
        }
    }
}

// `dx` may be null. `sums`, or null: a vector for each channel's weight, then one for its bias, that their gradients are
// added to lane by lane.
template <class X, class Y>
void layer_norm_gradient(const LayerNorm<X>& norm, int64_t columns, const X* x, const Y* dy, const Number<X>* mean,
                         const Number<X>* scale, X* dx, Number<X>* sums) {
    for_each_columns<X>(columns, [&](auto of, int64_t at, int rest) REWIRE_BODY {
        layer_norm_gradient_columns(of, norm, x + at, dy + at, mean ? mean + at : nullptr, scale + at,
                                    dx ? dx + at : nullptr, sums, rest);
    });
}

}  // namespace rewire::REWIRE_ISA
