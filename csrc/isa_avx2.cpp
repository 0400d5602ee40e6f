#define REWIRE_ISA avx2
#define REWIRE_ISA_NAME "avx2"
#define REWIRE_AVX2
#include "isa.inl"
