// The instruction set in use: the best one of this machine, unless another is asked for.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace rewire {

std::vector<std::string> supported_instruction_sets();  // best first
std::string current_instruction_set();
void use_instruction_set(const std::string& name);

// The inner loops in use.
template <class T>
const Table<T>& table();
template <class X, class Y>
const LayerNormTable<X, Y>& layer_norm_table();
const Conversions& conversions();
const Bounds& bounds();

}  // namespace rewire
