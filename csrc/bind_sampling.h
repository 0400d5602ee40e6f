// The Python face of drawing, choosing, replacing, counting and indexing connections.
#pragma once

#include <nanobind/nanobind.h>

namespace rewire {

// Everything that is the same for all element types.
void bind_sampling(nanobind::module_&);

template <class T>
void bind_sampling_of(nanobind::module_&);

}  // namespace rewire
