#define REWIRE_ISA avx512
#define REWIRE_ISA_NAME "avx512"
#define REWIRE_AVX512
#include "isa.inl"
