// Linear layers on row-major activations, [row][unit]: each task turns the rows it works on into a panel
// [unit][row] of its own, and what it has computed back into rows. No tensor is turned as a whole.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "layers.h"

namespace rewire {

template <class T>
void forward_rows(const Table<T>&, const Geometry&, const ByOutput&, const Number<T>* values, const Number<T>* bias,
                  const T* x, T* y, bool relu, int threads);

template <class T>
void input_gradient_rows(const Table<T>&, const Geometry&, const ByInput&, const Number<T>* values, const T* dy, T* dx,
                         int threads);

// All gradients in one pass over dy. `z`, or null: dy counts where z is positive. `dx` and `bias` may be null.
template <class T>
void gradients_rows(const Table<T>&, const Geometry&, const ByInput&, const Number<T>* values, const T* x, const T* dy,
                    const T* z, T* dx, Number<T>* grad, Number<T>* bias, int threads);

}  // namespace rewire
