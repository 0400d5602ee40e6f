// Whether index vectors stay inside what they index.

namespace rewire::REWIRE_ISA {

// Whether all of `n` numbers are in [first, limit).
inline bool within(const int32_t* x, int64_t n, int64_t first, int64_t limit) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t above = uint32_t(x[i]) - uint32_t(first);
        most = above > most ? above : most;
    }
    return n == 0 || int64_t(most) < limit - first;
}

// How often a number is not at least `step` above the one before it; step is 0 or 1.
inline int64_t falls(const int32_t* x, int64_t n, int32_t step) {
    int64_t count = 0;
    for (int64_t begin = 1; begin < n; begin += 1 << 30) {  // counted in 32 bits, as wide as what is compared
        int32_t here = 0;
        const int64_t end = n - begin < (1 << 30) ? n : begin + (1 << 30);
        for (int64_t i = begin; i < end; i++) here += int32_t(uint32_t(x[i]) - uint32_t(step)) < x[i - 1];
        count += here;
    }
    return count;
}

}  // namespace rewire::REWIRE_ISA
