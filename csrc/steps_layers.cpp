#include <limits>

#include "rows.h"
#include "steps.h"

namespace rewire::engine {
namespace {

struct Sizes {
    int64_t input, output;  // elements
};

int64_t output_size(int64_t size, int64_t k, int64_t s, int64_t p, int64_t d) {
    const int64_t room = size + 2 * p - d * (k - 1) - 1;
    return room < 0 ? 0 : room / s + 1;
}

// Throws unless the sizes of a layer fit together.
Sizes checked(const Geometry& g) {
    product("the kernel", {g.kh, g.kw, g.sh, g.sw, g.dh, g.dw});
    refuse_unless(g.ph >= 0 && g.pw >= 0, "padding must not be negative");
    const Sizes sizes{product("the input", {g.batch, g.in_channels, g.height, g.width}),
                      product("the output", {g.batch, g.out_channels, g.out_height, g.out_width})};
    refuse_unless(product("a row of connections", {g.in_channels, g.kh, g.kw}) <= std::numeric_limits<int32_t>::max() &&
                      g.out_channels <= std::numeric_limits<int32_t>::max(),
                  "a layer has at most 2^31 - 1 input and output units");
    refuse_unless(g.out_height == output_size(g.height, g.kh, g.sh, g.ph, g.dh) &&
                      g.out_width == output_size(g.width, g.kw, g.sw, g.pw, g.dw),
                  "the size of the output does not follow from input, kernel, stride, padding and dilation");
    if (g.in_panels || g.out_panels)
        refuse_unless(g.panel >= 1 && g.batch % g.panel == 0, "the batch must be a multiple of the panel");
    return sizes;
}

Sizes checked_linear(const Geometry& g) {
    const Sizes sizes = checked(g);
    refuse_unless(g.height == 1 && g.width == 1 && g.kh == 1 && g.kw == 1 && g.ph == 0 && g.pw == 0 && !g.in_panels &&
                      !g.out_panels,
                  "a linear layer has images of 1 x 1, a kernel of 1 x 1, no padding and no panels");
    return sizes;
}

Channels input_channels(const Geometry& g) {
    return {g.in_channels, g.batch * g.height * g.width, g.in_panels ? g.batch / g.panel * g.height : 1};
}

ByOutput by_output(const TopologyOperands& t, const std::vector<void*>& at) {
    return {static_cast<const int32_t*>(at[size_t(t.indptr)]), static_cast<const int32_t*>(at[size_t(t.indices)])};
}

template <class T>
ByInput by_input(const TopologyOperands& t, const Run<T>& r) {
    return {r.indices(t.slots), r.indices(t.outputs), r.indices(t.order)};
}

// How dy is read.
template <class T>
Reading<T> reading_of(const Run<T>& r, int64_t channels, Id gate, const std::optional<DeferredGradient>& deferred) {
    if (!deferred) return {nullptr, nullptr, false, r.at(gate)};
    const Number<T>* f = r.number(deferred->factors);
    return {f, f + 2 * channels, false, nullptr, r.at(deferred->y), f + channels};
}

void reading_needs(Needs& n, const Geometry& g, int64_t output, Id gate, const std::optional<DeferredGradient>& deferred) {
    refuse_unless(gate == kAbsent || !deferred, "dy is read through a gate or with a deferred gradient, not both");
    n.may_read("gate", gate, output);
    if (!deferred) return;
    n.reads("deferred.y", deferred->y, output);
    n.reads_numbers("deferred.factors", deferred->factors, product("factors", {3, g.out_channels}));
}

}  // namespace

void ConvForward::needs(Needs& n) const {
    const Sizes sizes = checked(geometry);
    n.by_output(topology, geometry);
    n.reads_values(values);
    n.may_read_numbers("bias", bias, geometry.out_channels);
    n.reads("x", x, sizes.input);
    if (norm) norm_needs(n, *norm, geometry.in_channels);
    n.writes("y", y, sizes.output);
    refuse_unless((mean == kAbsent) == (variance == kAbsent), "mean and variance are computed together");
    n.may_write_numbers("mean", mean, geometry.out_channels);
    n.may_write_numbers("variance", variance, geometry.out_channels);
}

template <class T>
void ConvForward::execute(const Run<T>& r) const {
    BatchNorm<T> before{};
    if (norm) before = batch_norm_of(r, *norm, input_channels(geometry));
    forward<T>(r.table, geometry, by_output(topology, r.addresses), r.number(values), r.number(bias), r.at(x),
               norm ? &before : nullptr, r.at(y), relu, r.number(mean), r.number(variance), r.threads);
}

void ConvBackward::needs(Needs& n) const {
    const Sizes sizes = checked(geometry);
    n.by_input(topology, geometry);
    n.reads_values(values);
    n.reads("x", x, sizes.input);
    n.reads("dy", dy, sizes.output);
    reading_needs(n, geometry, sizes.output, gate, deferred);
    refuse_unless(before.has_value() == dnorm.has_value(), "before and dnorm belong together");
    if (before) {
        refuse_unless(relu_sums == kAbsent, "relu_sums is for layers without a batch norm before them");
        refuse_unless(before->input == kAbsent || dnorm->factors != kAbsent,
                      "the gradient of a batch norm whose output is part of a sum is deferred: it needs factors");
        norm_needs(n, before->norm, geometry.in_channels);
        n.may_read("before.input", before->input, sizes.input);
        n.may_read("before.more", before->more, sizes.input);
        norm_gradient_needs(n, *dnorm, geometry.in_channels);
    }
    n.writes("dx", dx, sizes.input);
    n.writes_dvalues(dvalues);
    n.may_write_numbers("dbias", dbias, geometry.out_channels);
    n.may_write_numbers("relu_sums", relu_sums, geometry.in_channels);
}

template <class T>
void ConvBackward::execute(const Run<T>& r) const {
    BatchNorm<T> norm{};
    Before<T> from;
    if (before) {
        norm = batch_norm_of(r, before->norm, input_channels(geometry));
        from = {&norm, r.at(before->input), r.at(before->more)};
    }
    gradients<T>(r.table, geometry, by_input(topology, r), r.number(values), r.at(x), from, r.at(dy),
                 reading_of(r, geometry.out_channels, gate, deferred),
                 {r.at(dx), r.number(dvalues), r.number(dbias), norm_gradients_of(r, dnorm), r.number(relu_sums)}, r.threads);
}

void WeightGradient::needs(Needs& n) const {
    const Sizes sizes = checked(geometry);
    n.by_output(topology, geometry);
    n.reads("x", x, sizes.input);
    n.reads("dy", dy, sizes.output);
    reading_needs(n, geometry, sizes.output, gate, deferred);
    n.writes_dvalues(dvalues);
    n.may_write_numbers("dbias", dbias, geometry.out_channels);
}

template <class T>
void WeightGradient::execute(const Run<T>& r) const {
    weight_gradient<T>(r.table, geometry, by_output(topology, r.addresses), r.at(x), r.at(dy),
                       reading_of(r, geometry.out_channels, gate, deferred), r.number(dvalues), r.number(dbias), r.threads);
}

void InputGradient::needs(Needs& n) const {
    const Sizes sizes = checked(geometry);
    n.by_input(topology, geometry);
    n.reads_values(values);
    n.reads("dy", dy, sizes.output);
    n.writes("dx", dx, sizes.input);
}

template <class T>
void InputGradient::execute(const Run<T>& r) const {
    input_gradient<T>(r.table, geometry, by_input(topology, r), r.number(values), r.at(dy), r.at(dx), r.threads);
}

void LinearRows::needs(Needs& n) const {
    const Sizes sizes = checked_linear(geometry);
    n.by_output(topology, geometry);
    n.reads_values(values);
    n.may_read_numbers("bias", bias, geometry.out_channels);
    n.reads("x", x, sizes.input);
    n.writes("y", y, sizes.output);
}

template <class T>
void LinearRows::execute(const Run<T>& r) const {
    forward_rows<T>(r.table, geometry, by_output(topology, r.addresses), r.number(values), r.number(bias), r.at(x), r.at(y), relu,
                    r.threads);
}

void LinearRowsBackward::needs(Needs& n) const {
    const Sizes sizes = checked_linear(geometry);
    n.by_input(topology, geometry);
    n.reads_values(values);
    n.reads("x", x, sizes.input);
    n.reads("dy", dy, sizes.output);
    n.may_read("gate", gate, sizes.output);
    n.may_write("dx", dx, sizes.input);
    n.writes_dvalues(dvalues);
    n.may_write_numbers("dbias", dbias, geometry.out_channels);
}

template <class T>
void LinearRowsBackward::execute(const Run<T>& r) const {
    gradients_rows<T>(r.table, geometry, by_input(topology, r), r.number(values), r.at(x), r.at(dy), r.at(gate), r.at(dx),
                      r.number(dvalues), r.number(dbias), r.threads);
}

void LinearRowsInputGradient::needs(Needs& n) const {
    const Sizes sizes = checked_linear(geometry);
    n.by_input(topology, geometry);
    n.reads_values(values);
    n.reads("dy", dy, sizes.output);
    n.writes("dx", dx, sizes.input);
}

template <class T>
void LinearRowsInputGradient::execute(const Run<T>& r) const {
    input_gradient_rows<T>(r.table, geometry, by_input(topology, r), r.number(values), r.at(dy), r.at(dx), r.threads);
}

REWIRE_INSTANTIATE_STEP(ConvForward)
REWIRE_INSTANTIATE_STEP(ConvBackward)
REWIRE_INSTANTIATE_STEP(WeightGradient)
REWIRE_INSTANTIATE_STEP(InputGradient)
REWIRE_INSTANTIATE_STEP(LinearRows)
REWIRE_INSTANTIATE_STEP(LinearRowsBackward)
REWIRE_INSTANTIATE_STEP(LinearRowsInputGradient)

}  // namespace rewire::engine
