// Everything that is built once per instruction set, and the table of it.
#include "kernels.h"
#include "simd.h"

#include "products.inl"
#include "transpose.inl"
#include "norm.inl"
#include "pool.inl"
#include "noise.inl"
#include "convert.inl"
#include "math.inl"
#include "pointwise.inl"
#include "bounds.inl"
#include "layer_norm.inl"
#include "lanes.inl"
#include "resample.inl"

namespace rewire::REWIRE_ISA {

template <class T>
constexpr Table<T> table() {
    return {4 * kLanes<T>,    4 * kLanes<T>,
            sum<T>,           dots<T>,
            copy<T>,          read<T>,
            transpose<T>,
            total<T>,         totals<T>,
            variation<T>,
            normalize<T>,     norm_sums<T>,
            norm_gradient<T>, max_pool<T>,
            max_pool_gradient<T>, mean_pool<T>,
            mean_pool_gradient<T>, drop_out<T>,
            pointwise<Number<T>>, blend<T>,
            lane_sums<T>,     lane_spreads<T>,
            lane_affine<T>};
}

template <class X, class Y>
constexpr LayerNormTable<X, Y> norm_table() {
    return {layer_norm<X, Y>, layer_norm_gradient<X, Y>};
}

const InstructionSet& instruction_set() {
    static const InstructionSet set{REWIRE_ISA_NAME,
                                    table<float>(),
                                    table<double>(),
                                    table<bfloat16>(),
                                    norm_table<float, float>(),
                                    norm_table<double, double>(),
                                    norm_table<bfloat16, bfloat16>(),
                                    norm_table<float, bfloat16>(),
                                    {widen, narrow},
                                    {within, falls}};
    return set;
}

}  // namespace rewire::REWIRE_ISA
