#include "kernels.h"

#if defined(__AVX512BF16__)
#define REWIRE_ISA avx512_bf16
#define REWIRE_ISA_NAME "avx512_bf16"
#define REWIRE_AVX512
#define REWIRE_BF16
#include "simd.h"

#include "products.inl"

namespace rewire::avx512_bf16 {

const InstructionSet* instruction_set() {
    static const InstructionSet set = [] {
        InstructionSet same = avx512::instruction_set();
        same.name = REWIRE_ISA_NAME;
        same.bf16.sum = sum<bfloat16>;
        same.bf16.dots = dots<bfloat16>;
        return same;
    }();
    return &set;
}

}  // namespace rewire::avx512_bf16
#else
const rewire::InstructionSet* rewire::avx512_bf16::instruction_set() { return nullptr; }
#endif
