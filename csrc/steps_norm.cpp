#include <stdexcept>

#include "steps.h"

namespace rewire::engine {

void refuse_unless(bool fine, const char* problem) {
    if (!fine) throw std::invalid_argument(problem);
}

int64_t elements_of(const Channels& of) {
    const int64_t all = product("the tensor", {of.channels, of.length});
    refuse_unless(of.panel_rows >= 1 && of.length % of.panel_rows == 0, "length must be a multiple of panel_rows");
    return all;
}

void norm_needs(Needs& n, const NormOperands& norm, int64_t channels) {
    n.may_read("norm.weight", norm.weight, channels);
    n.may_read("norm.bias", norm.bias, channels);
    n.reads("norm.mean", norm.mean, channels);
    n.reads("norm.variance", norm.variance, channels);
}

void norm_gradient_needs(Needs& n, const NormGradientOperands& of, int64_t channels) {
    n.may_write("dnorm.weight", of.weight, channels);
    n.may_write("dnorm.bias", of.bias, channels);
    if (of.factors != kAbsent) n.writes("dnorm.factors", of.factors, product("factors", {3, channels}));
}

void Moments::needs(Needs& n) const {
    n.reads("x", x, elements_of(*this));
    n.writes("mean", mean, channels);
    n.writes("variance", variance, channels);
}

template <class T>
void Moments::execute(const Run<T>& r) const {
    moments<T>(r.table, r.at(x), channels, length, panel_rows, r.at(mean), r.at(variance), r.threads);
}

void Track::needs(Needs& n) const {
    product("the moments", {channels});
    n.scalar("momentum", momentum);
    n.reads("mean", mean, channels);
    n.reads("variance", variance, channels);
    n.updates("running_mean", running_mean, channels);
    n.updates("running_variance", running_variance, channels);
}

template <class T>
void Track::execute(const Run<T>& r) const {
    track<T>(r.at(mean), r.at(variance), channels, r.scalars[size_t(momentum)], unbiased, r.at(running_mean),
             r.at(running_variance));
}

void NormForward::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    norm_needs(n, norm, channels);
    n.reads("x", x, all);
    n.may_read("residual", residual, all);
    n.writes("z", z, all);
}

template <class T>
void NormForward::execute(const Run<T>& r) const {
    batch_norm<T>(r.table, batch_norm_of(r, norm, *this), r.at(x), r.at(residual), r.at(z), r.threads);
}

void NormBackward::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    norm_needs(n, norm, channels);
    n.reads("x", x, all);
    n.may_read("z", z, all);
    n.reads("dz", dz, all);
    n.may_read("more", more, all);
    if (factors == kAbsent) {
        n.writes("dx", dx, all);
    } else {
        refuse_unless(dx == kAbsent, "with factors the gradient of x is deferred: there is no dx");
        refuse_unless(dresidual != kAbsent || !(norm.relu || more != kAbsent),
                      "with factors, and a ReLU or more, g has to be written: it needs dresidual");
        n.writes("factors", factors, product("factors", {3, channels}));
    }
    n.may_write("dresidual", dresidual, all);
    n.may_write("dweight", dweight, channels);
    n.may_write("dbias", dbias, channels);
}

template <class T>
void NormBackward::execute(const Run<T>& r) const {
    batch_norm_gradient<T>(r.table, batch_norm_of(r, norm, *this), r.at(x), r.at(z), r.at(dz), r.at(more), r.at(dx),
                           r.at(dresidual), {r.at(dweight), r.at(dbias), r.at(factors)}, r.threads);
}

void ResolveDeferred::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    n.reads("g", g, all);
    n.reads("x", x, all);
    n.reads("factors", factors, product("factors", {3, channels}));
    n.writes("dx", dx, all);
}

template <class T>
void ResolveDeferred::execute(const Run<T>& r) const {
    settle_gradient<T>(r.table, r.at(g), r.at(x), r.at(factors), channels, length, panel_rows, r.at(dx), r.threads);
}

void RowSums::needs(Needs& n) const {
    n.reads("x", x, elements_of(*this));
    n.writes("sums", sums, channels);
}

template <class T>
void RowSums::execute(const Run<T>& r) const {
    channel_sums<T>(r.table, r.at(x), channels, length, panel_rows, r.at(sums), r.threads);
}

REWIRE_INSTANTIATE_STEP(Moments)
REWIRE_INSTANTIATE_STEP(Track)
REWIRE_INSTANTIATE_STEP(NormForward)
REWIRE_INSTANTIATE_STEP(NormBackward)
REWIRE_INSTANTIATE_STEP(ResolveDeferred)
REWIRE_INSTANTIATE_STEP(RowSums)

}  // namespace rewire::engine
