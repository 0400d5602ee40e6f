// What the memory of this machine gives, as the products ask for it.

namespace rewire::REWIRE_ISA {

// The sum of `count` pieces of four vectors, the k-th at order[k] pieces from the start.
template <class T>
double read_pieces(const T* from, const int32_t* order, int64_t count) {
    constexpr int lanes = kLanes<T>;
    Vec<T> sum[4] = {};
    for (int64_t k = 0; k < count; k++) {
        const T* piece = from + int64_t(order[k]) * 4 * lanes;
        for (int q = 0; q < 4; q++) sum[q] += load<T>(piece + q * lanes);
    }
    return double(sum_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3])));
}

}  // namespace rewire::REWIRE_ISA
