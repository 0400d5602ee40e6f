// Sums by lane, for norms of each sample: `len` elements of a channel's rows, of which every `period`-th belongs to one lane.

namespace rewire::REWIRE_ISA {

// Calls body(element, lane, lanes from there on) for one vector after another.
template <class T, class Body>
REWIRE_INLINE void for_each_lanes(int64_t len, int64_t period, Body&& body) {
    for (int64_t at = 0; at < len; at += period) {
        const int64_t some = period < len - at ? period : len - at;
        for_each_vector<T>(some, [&](int64_t i, int n) REWIRE_BODY { body(at + i, i, n); });
    }
}

template <class T>
REWIRE_INLINE void add_lanes(Number<T>* sum, Vec<T> x, int n) {
    put<Number<T>>(sum, get(sum, n) + x, n);
}

template <class T>
void lane_sums(const T* x, int64_t len, int64_t period, Number<T>* sum) {
    for_each_lanes<T>(len, period, [&](int64_t at, int64_t lane, int n) REWIRE_BODY {
        add_lanes<T>(sum + lane, get(x + at, n), n);
    });
}

template <class T>
void lane_spreads(const T* x, int64_t len, int64_t period, const Number<T>* mean, Number<T>* sum) {
    for_each_lanes<T>(len, period, [&](int64_t at, int64_t lane, int n) REWIRE_BODY {
        const Vec<T> d = get(x + at, n) - get(mean + lane, n);
        add_lanes<T>(sum + lane, d * d, n);
    });
}

template <class T>
void lane_affine(const LaneAffine<T>& of, const T* x, const T* more, T* y) {
    for_each_lanes<T>(of.len, of.period, [&](int64_t at, int64_t lane, int n) REWIRE_BODY {
        Vec<T> v = (get(x + at, n) - get(of.mean + lane, n)) * get(of.factor + lane, n) + get(of.shift + lane, n);
        if (more) v += get(more + at, n);
        put(y + at, v, n);
    });
}

}  // namespace rewire::REWIRE_ISA
