// Layer normalisation of the columns of [channels][columns]: each column over all channels.

namespace rewire::REWIRE_ISA {

// V vectors of columns, of which the last has `rest` lanes if kPart.
template <class T, int V, bool kPart>
struct Columns {
    static REWIRE_INLINE Vec<T> get(const T* p, int v, int rest) {
        p += v * kLanes<T>;
        return kPart && v == V - 1 ? load_part(p, rest) : load<T>(p);
    }
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
    for (; at + 4 * lanes <= columns; at += 4 * lanes) body(Columns<T, 4, false>{}, at, 0);
    for (; at + lanes <= columns; at += lanes) body(Columns<T, 1, false>{}, at, 0);
    if (at < columns) body(Columns<T, 1, true>{}, at, int(columns - at));
}

template <class T, int V, bool kPart>
REWIRE_INLINE void layer_norm_columns(Columns<T, V, kPart> of, const LayerNorm<T>& norm, const T* x, T* y, T* mean,
                                      T* scale, int rest) {
    const Vec<T> share = broadcast<T>(T(1) / T(norm.channels));
    Vec<T> middle[V] = {}, spread[V] = {};
    if (norm.centered) {
        for (int64_t c = 0; c < norm.channels; c++)
            for (int v = 0; v < V; v++) middle[v] += of.get(x + c * norm.step, v, rest);
        for (int v = 0; v < V; v++) middle[v] *= share;
    }
    for (int64_t c = 0; c < norm.channels; c++)
        for (int v = 0; v < V; v++) {
            const Vec<T> d = of.get(x + c * norm.step, v, rest) - middle[v];
            spread[v] += d * d;
        }
    for (int v = 0; v < V; v++) {
        spread[v] = inverse_root<T>(spread[v] * share + broadcast<T>(T(norm.eps)));
        if (mean) of.put(mean, v, middle[v], rest);
        if (scale) of.put(scale, v, spread[v], rest);
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<T> weight = broadcast<T>(norm.weight ? norm.weight[c] : T(1));
        const Vec<T> bias = broadcast<T>(norm.bias ? norm.bias[c] : T(0));
        for (int v = 0; v < V; v++)
            of.put(y + c * norm.step, v, (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v] * weight + bias, rest);
    }
}

// Some columns of one panel; `mean` and `scale`, 1 / the standard deviation, of each column unless null.
template <class T>
void layer_norm(const LayerNorm<T>& norm, int64_t columns, const T* x, T* y, T* mean, T* scale) {
    for_each_columns<T>(columns, [&](auto of, int64_t at, int rest) REWIRE_BODY {
        layer_norm_columns(of, norm, x + at, y + at, mean ? mean + at : nullptr, scale ? scale + at : nullptr, rest);
    });
}

template <class T, int V, bool kPart>
REWIRE_INLINE void layer_norm_gradient_columns(Columns<T, V, kPart> of, const LayerNorm<T>& norm, const T* x, const T* dy,
                                               const T* mean, const T* scale, T* dx, T* sums, int rest) {
    constexpr int lanes = kLanes<T>;
    const Vec<T> share = broadcast<T>(T(1) / T(norm.channels));
    Vec<T> middle[V], spread[V], g[V] = {}, gx[V] = {};  // sums of the gradient, and of its product with what was normalised
    for (int v = 0; v < V; v++) {
        middle[v] = norm.centered ? of.get(mean, v, rest) : Vec<T>{};
        spread[v] = of.get(scale, v, rest);
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<T> weight = broadcast<T>(norm.weight ? norm.weight[c] : T(1));
        Vec<T> db = {}, dw = {};
        for (int v = 0; v < V; v++) {
            const Vec<T> d = of.get(dy + c * norm.step, v, rest);
            const Vec<T> normed = (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v];
            db += d;
            dw += d * normed;
            g[v] += d * weight;
            gx[v] += d * weight * normed;
        }
        if (sums) {
            T* const to = sums + 2 * c * lanes;
            store<T>(to, load<T>(to) + dw);
            store<T>(to + lanes, load<T>(to + lanes) + db);
        }
    }
    if (!dx) return;
    for (int v = 0; v < V; v++) {
        g[v] = norm.centered ? g[v] * share : Vec<T>{};
        gx[v] *= share;
    }
    for (int64_t c = 0; c < norm.channels; c++) {
        const Vec<T> weight = broadcast<T>(norm.weight ? norm.weight[c] : T(1));
        for (int v = 0; v < V; v++) {
            const Vec<T> d = of.get(dy + c * norm.step, v, rest);
            const Vec<T> normed = (of.get(x + c * norm.step, v, rest) - middle[v]) * spread[v];
            of.put(dx + c * norm.step, v, (d * weight - g[v] - normed * gx[v]) * spread[v], rest);
        }
    }
}

// `dx` may be null. `sums`, or null: a vector for each channel's weight, then one for its bias, that their gradients are
// added to lane by lane.
template <class T>
void layer_norm_gradient(const LayerNorm<T>& norm, int64_t columns, const T* x, const T* dy, const T* mean, const T* scale,
                         T* dx, T* sums) {
    for_each_columns<T>(columns, [&](auto of, int64_t at, int rest) REWIRE_BODY {
        layer_norm_gradient_columns(of, norm, x + at, dy + at, mean ? mean + at : nullptr, scale + at,
                                    dx ? dx + at : nullptr, sums, rest);
    });
}

}  // namespace rewire::REWIRE_ISA
