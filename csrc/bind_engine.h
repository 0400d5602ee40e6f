// The Python face of plans: their sizes, operands and steps, and running them.
#pragma once

#include <nanobind/nanobind.h>

namespace rewire {

// Everything that is the same for all element types.
void bind_steps(nanobind::module_&);

template <class T>
void bind_plan(nanobind::module_&);

}  // namespace rewire
