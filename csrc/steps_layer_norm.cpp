#include "layer_norm.h"
#include "steps.h"

namespace rewire::engine {
namespace {

template <class T>
LayerNorms<T> norms_of(const Run<T>& r, const LayerNormSizes& of, Id weight, Id bias) {
    return {of.panels, of.channels, of.columns, r.at(weight), r.at(bias), of.eps, of.centered};
}

}  // namespace

void LayerNormForward::needs(Needs& n) const {
    const int64_t all = product("the tensor", {panels, channels, columns});
    n.may_read("weight", weight, channels);
    n.may_read("bias", bias, channels);
    n.reads("x", x, all);
    n.writes("y", y, all);
    n.may_write("mean", mean, panels * columns);
    n.may_write("scale", scale, panels * columns);
}

template <class T>
void LayerNormForward::execute(const Run<T>& r) const {
    layer_norm<T>(r.table, norms_of(r, *this, weight, bias), r.at(x), r.at(y), r.at(mean), r.at(scale), r.threads);
}

void LayerNormBackward::needs(Needs& n) const {
    const int64_t all = product("the tensor", {panels, channels, columns});
    n.may_read("weight", weight, channels);
    n.reads("x", x, all);
    n.reads("dy", dy, all);
    refuse_unless(!centered || mean != kAbsent, "a norm that is centered needs the means");
    n.may_read("mean", mean, panels * columns);
    n.reads("scale", scale, panels * columns);
    n.may_write("dx", dx, all);
    n.may_write("dweight", dweight, channels);
    n.may_write("dbias", dbias, channels);
}

template <class T>
void LayerNormBackward::execute(const Run<T>& r) const {
    layer_norm_gradient<T>(r.table, norms_of(r, *this, weight, kAbsent), r.at(x), r.at(dy), r.at(mean), r.at(scale),
                           r.at(dx), r.at(dweight), r.at(dbias), r.threads);
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
