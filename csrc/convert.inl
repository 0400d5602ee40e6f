// From float to bfloat16 and back.

namespace rewire::REWIRE_ISA {

inline void widen(const bfloat16* x, int64_t len, float* y) {
    for_each_vector<float>(len, [&](int64_t i, int n) REWIRE_BODY { put(y + i, get(x + i, n), n); });
}

inline void narrow(const float* x, int64_t len, bfloat16* y) {
    for_each_vector<float>(len, [&](int64_t i, int n) REWIRE_BODY { put(y + i, get(x + i, n), n); });
}

}  // namespace rewire::REWIRE_ISA
