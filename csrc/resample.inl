// Pixels that are weighted sums of pixels: resizing of images, and padding with what is in them.

namespace rewire::REWIRE_ISA {

// V vectors of a pixel from element i on, of which the last has `rest` lanes if kPart.
template <class T, int V, bool kPart>
REWIRE_INLINE void blend_vectors(const Blend<T>& of, int32_t first, int32_t last, const T* x, T* y, int64_t i, int rest) {
    constexpr int lanes = kLanes<T>;
    Vec<T> sum[V] = {};
    for (int64_t r = 0; r < of.rows; r++) {
        Vec<T> row[V] = {};
        for (int32_t e = first; e < last; e++) {
            const T* from = x + of.at[r] + of.from[e] * of.len + i;
            const Vec<T> weight = broadcast<T>(of.weight[e]);
            for (int v = 0; v < V; v++)
                row[v] += weight * (kPart ? load_part(from, rest) : load<T>(from + v * lanes));
        }
        const Vec<T> weight = broadcast<T>(of.row_weight[r]);
        for (int v = 0; v < V; v++) sum[v] += weight * row[v];
    }
    for (int v = 0; v < V; v++)
        kPart ? store_part(y + i, sum[v], rest) : store<T>(y + i + v * lanes, sum[v]);
}

template <class T>
void blend(const Blend<T>& of, const T* x, T* y) {
    constexpr int lanes = kLanes<T>;
    for (int64_t w = 0; w < of.columns; w++, y += of.len) {
        const int32_t first = of.ptr[w], last = of.ptr[w + 1];
        int64_t i = 0;
        for (; i + 4 * lanes <= of.len; i += 4 * lanes) blend_vectors<T, 4, false>(of, first, last, x, y, i, 0);
        for (; i + lanes <= of.len; i += lanes) blend_vectors<T, 1, false>(of, first, last, x, y, i, 0);
        if (i < of.len) blend_vectors<T, 1, true>(of, first, last, x, y, i, int(of.len - i));
    }
}

}  // namespace rewire::REWIRE_ISA
