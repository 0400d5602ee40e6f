#include "dispatch.h"

#include <stdexcept>

namespace rewire {
namespace {

std::vector<const InstructionSet*> supported() {
    std::vector<const InstructionSet*> sets;
#ifdef REWIRE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (avx512_bf16::instruction_set() && __builtin_cpu_supports("avx512bf16"))
            sets.push_back(avx512_bf16::instruction_set());
        sets.push_back(&avx512::instruction_set());
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&avx2::instruction_set());
#endif
    sets.push_back(&generic::instruction_set());
    return sets;
}

const InstructionSet* current = supported().front();

}  // namespace

template <>
const Table<float>& table() {
    return current->f32;
}
template <>
const Table<double>& table() {
    return current->f64;
}
template <>
const Table<bfloat16>& table() {
    return current->bf16;
}

template <>
const LayerNormTable<float, float>& layer_norm_table() {
    return current->norm_f32;
}
template <>
const LayerNormTable<double, double>& layer_norm_table() {
    return current->norm_f64;
}
template <>
const LayerNormTable<bfloat16, bfloat16>& layer_norm_table() {
    return current->norm_bf16;
}
template <>
const LayerNormTable<float, bfloat16>& layer_norm_table() {
    return current->norm_mixed;
}

const Conversions& conversions() { return current->conversions; }
const Bounds& bounds() { return current->bounds; }

std::vector<std::string> supported_instruction_sets() {
    std::vector<std::string> names;
    for (const auto* set : supported()) names.emplace_back(set->name);
    return names;
}

std::string current_instruction_set() { return current->name; }

void use_instruction_set(const std::string& name) {
    for (const auto* set : supported())
        if (name == set->name) {
            current = set;
            return;
        }
    throw std::invalid_argument("this machine does not support the instruction set '" + name + "'");
}

}  // namespace rewire
