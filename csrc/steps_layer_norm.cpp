#include "layer_norm.h"
#include "steps.h"

namespace rewire::engine {
namespace {

template <class X>
LayerNorms<X> norms_of(const LayerNormSizes& of, const Number<X>* weight, const Number<X>* bias) {
    return {of.panels, of.channels, of.columns, weight, bias, of.eps, of.centered};
}

// Calls body(x, y) with values of the element types of x and y, in a plan for T.
template <class T, class Body>
void by_types(const LayerNormSizes& of, Body&& body) {
    using N = Number<T>;
    if (of.wide_y) return body(N{}, N{});
    of.wide_x ? body(N{}, T{}) : body(T{}, T{});
}

int64_t elements_of(const LayerNormSizes& of) {
    refuse_unless(of.wide_x || !of.wide_y, "y is wide only if x is");
    return product("the tensor", {of.panels, of.channels, of.columns});
}

// An operand of a type.
template <class X, class T>
X* operand(const Run<T>& r, Id id) {
    return reinterpret_cast<X*>(r.bytes(id));
}

}  // namespace

void LayerNormForward::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    n.may_read_numbers("weight", weight, channels);
    n.may_read_numbers("bias", bias, channels);
    n.reads("x", x, all, x_kind());
    n.writes("y", y, all, y_kind());
    n.may_write_numbers("mean", mean, panels * columns);
    n.may_write_numbers("scale", scale, panels * columns);
}

template <class T>
void LayerNormForward::execute(const Run<T>& r) const {
    by_types<T>(*this, [&](auto x_type, auto y_type) {
        using X = decltype(x_type);
        using Y = decltype(y_type);
        layer_norm<X, Y>(norms_of<X>(*this, r.number(weight), r.number(bias)), operand<X>(r, x), operand<Y>(r, y),
                         r.number(mean), r.number(scale), r.threads);
    });
}

void LayerNormBackward::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    n.may_read_numbers("weight", weight, channels);
    n.reads("x", x, all, x_kind());
    n.reads("dy", dy, all, y_kind());
    refuse_unless(!centered || mean != kAbsent, "a norm that is centered needs the means");
    n.may_read_numbers("mean", mean, panels * columns);
    n.reads_numbers("scale", scale, panels * columns);
    n.may_write("dx", dx, all, x_kind());
    n.may_write_numbers("dweight", dweight, channels);
    n.may_write_numbers("dbias", dbias, channels);
}

template <class T>
void LayerNormBackward::execute(const Run<T>& r) const {
    by_types<T>(*this, [&](auto x_type, auto y_type) {
        using X = decltype(x_type);
        using Y = decltype(y_type);
        layer_norm_gradient<X, Y>(norms_of<X>(*this, r.number(weight), nullptr), operand<X>(r, x), operand<Y>(r, dy),
                                  r.number(mean), r.number(scale), operand<X>(r, dx), r.number(dweight), r.number(dbias),
                                  r.threads);
    });
}

void TransposeEach::needs(Needs& n) const {
    const int64_t all = product("the matrices", {matrices, rows, columns});
    n.reads("x", x, all);
    n.writes("y", y, all);
}

template <class T>
void TransposeEach::execute(const Run<T>& r) const {
    transpose_each<T>(r.table, r.at(x), matrices, rows, columns, r.at(y), r.threads);
}

REWIRE_INSTANTIATE_STEP(LayerNormForward)
REWIRE_INSTANTIATE_STEP(LayerNormBackward)
REWIRE_INSTANTIATE_STEP(TransposeEach)

}  // namespace rewire::engine
