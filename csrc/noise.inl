// Dropout.

namespace rewire::REWIRE_ISA {

// y[i] = x[i] * scale, or 0 where the noise of element first + i is below `limit`: a hash of 32 bits (two rounds of
// multiplying and shifting, half of the seed before each), without branches, which could not be foreseen.
template <class T>
void drop_out(const T* x, int64_t first, int64_t len, uint32_t limit, Number<T> scale, uint64_t seed, T* y) {
    const uint64_t start = uint64_t(first);  // a piece of a tensor lies within 2^32 elements from a multiple of them
    const uint32_t low = uint32_t(seed) + uint32_t(start) * 0x9E3779B1u, high = uint32_t(seed >> 32) + uint32_t(start >> 32);
    const auto least = int32_t(limit ^ 0x80000000u);  // signed numbers compare faster
    for (int64_t i = 0; i < len; i++) {
        uint32_t h = low + uint32_t(i) * 0x9E3779B1u;
        h ^= h >> 16;
        h = (h * 0x21F0AAADu) ^ high;
        h ^= h >> 15;
        h *= 0xD35A2D97u;
        h ^= h >> 15;
        y[i] = T(x[i] * (int32_t(h ^ 0x80000000u) < least ? 0 : scale));
    }
}

}  // namespace rewire::REWIRE_ISA
