#define REWIRE_ISA generic
#define REWIRE_ISA_NAME "generic"
#define REWIRE_GENERIC
#include "isa.inl"
