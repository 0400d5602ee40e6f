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
    n.may_read_numbers("norm.weight", norm.weight, channels);
    n.may_read_numbers("norm.bias", norm.bias, channels);
    n.reads_numbers("norm.mean", norm.mean, channels);
    n.reads_numbers("norm.variance", norm.variance, channels);
}

void norm_gradient_needs(Needs& n, const NormGradientOperands& of, int64_t channels) {
    n.may_write_numbers("dnorm.weight", of.weight, channels);
    n.may_write_numbers("dnorm.bias", of.bias, channels);
    if (of.factors != kAbsent) n.writes_numbers("dnorm.factors", of.factors, product("factors", {3, channels}));
}

void Moments::needs(Needs& n) const {
    n.reads("x", x, elements_of(*this));
    n.writes_numbers("mean", mean, channels);
    n.writes_numbers("variance", variance, channels);
}

template <class T>
void Moments::execute(const Run<T>& r) const {
    moments<T>(r.table, r.at(x), channels, length, panel_rows, r.number(mean), r.number(variance), r.threads);
}

void Track::needs(Needs& n) const {
    product("the moments", {channels});
    n.scalar("momentum", momentum);
    n.reads_numbers("mean", mean, channels);
    n.reads_numbers("variance", variance, channels);
    n.updates_numbers("running_mean", running_mean, channels);
    n.updates_numbers("running_variance", running_variance, channels);
}

template <class T>
void Track::execute(const Run<T>& r) const {
    track<Number<T>>(r.number(mean), r.number(variance), channels, r.scalars[size_t(momentum)], unbiased, r.number(running_mean),
             r.number(running_variance));
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
        n.writes_numbers("factors", factors, product("factors", {3, channels}));
    }
    n.may_write("dresidual", dresidual, all);
    n.may_write_numbers("dweight", dweight, channels);
    n.may_write_numbers("dbias", dbias, channels);
}

template <class T>
void NormBackward::execute(const Run<T>& r) const {
    batch_norm_gradient<T>(r.table, batch_norm_of(r, norm, *this), r.at(x), r.at(z), r.at(dz), r.at(more), r.at(dx),
                           r.at(dresidual), {r.number(dweight), r.number(dbias), r.number(factors)}, r.threads);
}

void ResolveDeferred::needs(Needs& n) const {
    const int64_t all = elements_of(*this);
    n.reads("g", g, all);
    n.reads("x", x, all);
    n.reads_numbers("factors", factors, product("factors", {3, channels}));
    n.writes("dx", dx, all);
}

template <class T>
void ResolveDeferred::execute(const Run<T>& r) const {
    settle_gradient<T>(r.table, r.at(g), r.at(x), r.number(factors), channels, length, panel_rows, r.at(dx), r.threads);
}

void RowSums::needs(Needs& n) const {
    n.reads("x", x, elements_of(*this));
    n.writes_numbers("sums", sums, channels);
}

template <class T>
void RowSums::execute(const Run<T>& r) const {
    channel_sums<T>(r.table, r.at(x), channels, length, panel_rows, r.number(sums), r.threads);
}

REWIRE_INSTANTIATE_STEP(Moments)
REWIRE_INSTANTIATE_STEP(Track)
REWIRE_INSTANTIATE_STEP(NormForward)
REWIRE_INSTANTIATE_STEP(NormBackward)
REWIRE_INSTANTIATE_STEP(ResolveDeferred)
REWIRE_INSTANTIATE_STEP(RowSums)

}  // namespace rewire::engine
