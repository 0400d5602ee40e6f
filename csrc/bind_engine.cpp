#include "bind_engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine.h"
#include "steps.h"

namespace nb = nanobind;

namespace rewire {
namespace {

using namespace engine;

// A member of a struct as Python sees it: an argument of the constructor, and a read-only attribute.
template <class C, class F, class A>
struct Field {
    const char* name;
    F C::*member;
    A arg;
};

template <class C, class F, class A>
Field<C, F, A> make_field(const char* name, F C::*member, A arg) {
    return {name, member, std::move(arg)};
}

// Without a default, or with one.
template <class C, class F>
auto field(const char* name, F C::*member) {
    return make_field(name, member, nb::arg(name));
}
template <class C, class F, class D>
auto field(const char* name, F C::*member, const D& value) {
    return make_field(name, member, nb::arg(name) = value);
}

// An operand, or a group of them, that may be absent.
template <class C>
auto optional(const char* name, Id C::*member) {
    return field(name, member, kAbsent);
}
template <class C, class F>
auto optional(const char* name, std::optional<F> C::*member) {
    return make_field(name, member, nb::arg(name) = nb::none());
}

// What is wrong with a step by itself is said where it is made.
template <class S>
void check(const S& made) {
    if constexpr (std::is_base_of_v<Step, S>) {
        Needs needs;
        try {
            made.needs(needs);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string(S::kName) + ": " + error.what());
        }
    }
}

nb::str describe(nb::handle self) {
    std::string text = nb::cast<std::string>(nb::type_name(self.type()));
    text = text.substr(text.rfind('.') + 1) + "(";
    bool first = true;
    for (nb::handle name : self.attr("fields")) {
        text += (first ? "" : ", ") + nb::cast<std::string>(name) + "=" +
                nb::repr(nb::getattr(self, name)).c_str();
        first = false;
    }
    return nb::str((text + ")").c_str());
}

template <class S, class Members, class Values, size_t... k>
S made_of(const Members& members, Values& values, std::index_sequence<k...>) {
    S made{};
    ((made.*std::get<k>(members) = std::move(std::get<k>(values))), ...);
    return made;
}

// A struct whose constructor takes the fields: keywords only if `options` say so.
template <class S, class Class, class... C, class... F, class... A, class... Option>
void bind_fields(Class& c, const std::tuple<Option...>& options, const Field<C, F, A>&... fields) {
    const auto init = [members = std::make_tuple(fields.member...)](S* self, F... given) {
        auto values = std::make_tuple(std::move(given)...);
        S made = made_of<S>(members, values, std::index_sequence_for<F...>{});
        check(made);
        new (self) S(std::move(made));
    };
    std::apply([&](auto... option) { c.def("__init__", init, option..., fields.arg...); }, options);
    (c.def_ro(fields.name, fields.member), ...);
    c.attr("fields") = nb::make_tuple(fields.name...);
    c.def("__repr__", &describe);
}

template <class S, class... Fields>
void bind_step(nb::module_& m, const Fields&... fields) {
    nb::class_<S, Step> c(m, S::kName);
    bind_fields<S>(c, std::make_tuple(nb::kw_only()), fields..., field("wide", &Step::wide, false));
}

template <class S, class... Fields>
void bind_operands(nb::module_& m, const char* name, const Fields&... fields) {
    nb::class_<S> c(m, name);
    bind_fields<S>(c, std::make_tuple(nb::kw_only()), fields...);
}

// Positional arguments too.
template <class S, class... Fields>
void bind_sizes(nb::module_& m, const char* name, const Fields&... fields) {
    nb::class_<S> c(m, name);
    bind_fields<S>(c, std::make_tuple(), fields...);
}

// The products may be beyond 64 bits; the step that is given such a pool refuses it.
int64_t wrapped(std::initializer_list<int64_t> sizes) {
    uint64_t all = 1;
    for (const int64_t size : sizes) all *= uint64_t(size);
    return int64_t(all);
}

void bind_all_sizes(nb::module_& m) {
    using G = Geometry;
    bind_sizes<G>(m, "Geometry", field("batch", &G::batch), field("in_channels", &G::in_channels),
                  field("height", &G::height), field("width", &G::width), field("out_channels", &G::out_channels),
                  field("out_height", &G::out_height), field("out_width", &G::out_width), field("kh", &G::kh),
                  field("kw", &G::kw), field("sh", &G::sh), field("sw", &G::sw), field("ph", &G::ph),
                  field("pw", &G::pw), field("dh", &G::dh), field("dw", &G::dw), field("panel", &G::panel, 0),
                  field("in_panels", &G::in_panels, false), field("out_panels", &G::out_panels, false));
    bind_sizes<Images>(m, "Images", field("panels", &Images::panels), field("channels", &Images::channels),
                       field("height", &Images::height), field("width", &Images::width),
                       field("panel", &Images::panel), field("in_panels", &Images::in_panels, true));
    bind_sizes<Thinning>(m, "Thinning", field("down", &Thinning::down), field("across", &Thinning::across),
                         field("before", &Thinning::before), field("after", &Thinning::after));
    bind_sizes<Padding>(m, "Padding", field("channels_before", &Padding::channels_before, 0),
                        field("channels_after", &Padding::channels_after, 0), field("top", &Padding::top, 0),
                        field("bottom", &Padding::bottom, 0), field("left", &Padding::left, 0),
                        field("right", &Padding::right, 0));
    bind_sizes<Side>(m, "Side", field("ptr", &Side::ptr), field("pixels", &Side::from), field("weight", &Side::weight));
    nb::class_<Pool> pool(m, "Pool");
    pool.def("__init__", [](Pool* p, int64_t panels, int64_t batch, int64_t channels, int64_t height, int64_t width,
                            int64_t out_height, int64_t out_width, int32_t kh, int32_t kw, int32_t sh, int32_t sw,
                            int32_t ph, int32_t pw, bool count_padding, bool in_panels) {
        const auto steps = [&](int64_t h, int64_t w) {
            return in_panels ? Pool::Steps{wrapped({h, channels, w, batch}), wrapped({w, batch}), wrapped({channels, w, batch})}
                             : Pool::Steps{0, wrapped({h, w, batch}), wrapped({w, batch})};
        };
        new (p) Pool{panels, batch, channels, height, width, out_height, out_width, kh, kw, sh, sw, ph, pw,
                     count_padding, steps(height, width), steps(out_height, out_width)};
    }, nb::arg("panels"), nb::arg("batch"), nb::arg("channels"), nb::arg("height"), nb::arg("width"),
       nb::arg("out_height"), nb::arg("out_width"), nb::arg("kh"), nb::arg("kw"), nb::arg("sh"), nb::arg("sw"),
       nb::arg("ph"), nb::arg("pw"), nb::arg("count_padding") = true, nb::arg("in_panels") = false);
    const auto attributes = [&](auto... each) {
        (pool.def_ro(each.first, each.second), ...);
        pool.attr("fields") = nb::make_tuple(each.first..., "in_panels");
    };
    attributes(std::pair("panels", &Pool::panels), std::pair("batch", &Pool::batch), std::pair("channels", &Pool::channels),
               std::pair("height", &Pool::height), std::pair("width", &Pool::width),
               std::pair("out_height", &Pool::out_height), std::pair("out_width", &Pool::out_width),
               std::pair("kh", &Pool::kh), std::pair("kw", &Pool::kw), std::pair("sh", &Pool::sh),
               std::pair("sw", &Pool::sw), std::pair("ph", &Pool::ph), std::pair("pw", &Pool::pw),
               std::pair("count_padding", &Pool::count_padding));
    pool.def_prop_ro("in_panels", [](const Pool& p) { return p.in.panel != 0; });
    pool.def("__repr__", &describe);
}

void bind_all_operands(nb::module_& m) {
    using Topology = TopologyOperands;
    using Norm = NormOperands;
    using Gradient = NormGradientOperands;
    bind_operands<Topology>(m, "TopologyOperands", optional("indptr", &Topology::indptr),
                            optional("indices", &Topology::indices), optional("slots", &Topology::slots),
                            optional("outputs", &Topology::outputs), optional("order", &Topology::order));
    bind_operands<Norm>(m, "NormOperands", optional("weight", &Norm::weight), optional("bias", &Norm::bias),
                        field("mean", &Norm::mean), field("variance", &Norm::variance),
                        field("training", &Norm::training), field("relu", &Norm::relu, false),
                        field("eps", &Norm::eps));
    bind_operands<Gradient>(m, "NormGradientOperands", optional("weight", &Gradient::weight),
                            optional("bias", &Gradient::bias), optional("factors", &Gradient::factors));
    bind_operands<DeferredGradient>(m, "DeferredGradient", field("y", &DeferredGradient::y),
                                    field("factors", &DeferredGradient::factors));
    bind_operands<InputNorm>(m, "InputNorm", field("norm", &InputNorm::norm), optional("input", &InputNorm::input),
                             optional("more", &InputNorm::more));
    nb::class_<Operand>(m, "Operand")
        .def_ro("external", &Operand::external)
        .def_ro("offset", &Operand::offset)
        .def_ro("bytes", &Operand::bytes)
        .def("__repr__", [](const Operand& o) {
            return o.external ? std::string("External()")
                              : "Arena(offset=" + std::to_string(o.offset) + ", bytes=" + std::to_string(o.bytes) + ")";
        });
    m.def("External", [] { return Operand{}; }, "An operand that comes with each run.");
    m.def("Arena", [](int64_t offset, int64_t bytes) { return Operand{false, offset, bytes}; }, nb::arg("offset"),
          nb::arg("bytes"), "An operand in the arena.");
}

void bind_step_base(nb::module_& m) {
    nb::enum_<Kind>(m, "Kind")
        .value("values", Kind::values)
        .value("numbers", Kind::numbers)
        .value("indices", Kind::indices)
        .value("bytes", Kind::bytes);
    nb::class_<Need>(m, "Need")
        .def_ro("role", &Need::role)
        .def_ro("operand", &Need::operand)
        .def_ro("kind", &Need::kind)
        .def_ro("reads", &Need::reads)
        .def_ro("writes", &Need::writes)
        .def_ro("elements", &Need::elements);
    nb::class_<Step>(m, "Step")
        .def_prop_ro("name", &Step::name)
        .def_prop_ro("elementwise", &Step::elementwise)
        .def("needs", [](const Step& step) {
            Needs needs;
            step.needs(needs);
            return needs.all;
        });
}

void bind_layers(nb::module_& m) {
    {
        using S = ConvForward;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     optional("bias", &S::bias), field("x", &S::x), field("y", &S::y), optional("norm", &S::norm),
                     field("relu", &S::relu, false), optional("mean", &S::mean), optional("variance", &S::variance));
    }
    {
        using S = ConvBackward;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     field("x", &S::x), field("dy", &S::dy), optional("before", &S::before), optional("gate", &S::gate),
                     optional("deferred", &S::deferred), field("dx", &S::dx), field("dvalues", &S::dvalues),
                     optional("dbias", &S::dbias), optional("dnorm", &S::dnorm), optional("relu_sums", &S::relu_sums));
    }
    {
        using S = WeightGradient;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("x", &S::x),
                     field("dy", &S::dy), optional("gate", &S::gate), optional("deferred", &S::deferred),
                     field("dvalues", &S::dvalues), optional("dbias", &S::dbias));
    }
    {
        using S = InputGradient;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     field("dy", &S::dy), field("dx", &S::dx));
    }
    {
        using S = LinearRows;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     optional("bias", &S::bias), field("x", &S::x), field("y", &S::y), field("relu", &S::relu, false));
    }
    {
        using S = LinearRowsBackward;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     field("x", &S::x), field("dy", &S::dy), optional("gate", &S::gate), optional("dx", &S::dx),
                     field("dvalues", &S::dvalues), optional("dbias", &S::dbias));
    }
    {
        using S = LinearRowsInputGradient;
        bind_step<S>(m, field("geometry", &S::geometry), field("topology", &S::topology), field("values", &S::values),
                     field("dy", &S::dy), field("dx", &S::dx));
    }
}

// Steps over the channels of a tensor.
template <class S, class... Fields>
void bind_channels_step(nb::module_& m, const Fields&... fields) {
    bind_step<S>(m, field("channels", &Channels::channels), field("length", &Channels::length),
                 field("panel_rows", &Channels::panel_rows, 1), fields...);
}

template <class S, class... Fields>
void bind_layer_norm_step(nb::module_& m, const Fields&... fields) {
    using N = LayerNormSizes;
    bind_step<S>(m, field("panels", &N::panels), field("channels", &N::channels), field("columns", &N::columns),
                 field("eps", &N::eps, N{}.eps), field("centered", &N::centered, true), field("wide_x", &N::wide_x, false),
                 field("wide_y", &N::wide_y, false), fields...);
}

void bind_layer_norms(nb::module_& m) {
    {
        using S = LayerNormForward;
        bind_layer_norm_step<S>(m, optional("weight", &S::weight), optional("bias", &S::bias), field("x", &S::x),
                                field("y", &S::y), optional("mean", &S::mean), optional("scale", &S::scale));
    }
    {
        using S = LayerNormBackward;
        bind_layer_norm_step<S>(m, optional("weight", &S::weight), field("x", &S::x), field("dy", &S::dy),
                                optional("mean", &S::mean), field("scale", &S::scale), optional("dx", &S::dx),
                                optional("dweight", &S::dweight), optional("dbias", &S::dbias));
    }
    {
        using S = TransposeEach;
        bind_step<S>(m, field("matrices", &S::matrices), field("rows", &S::rows), field("columns", &S::columns),
                     field("x", &S::x), field("y", &S::y));
    }
}

void bind_norms(nb::module_& m) {
    {
        using S = Moments;
        bind_channels_step<S>(m, field("x", &S::x), field("mean", &S::mean), field("variance", &S::variance));
    }
    {
        using S = Track;
        bind_step<S>(m, field("channels", &S::channels), field("momentum", &S::momentum), field("unbiased", &S::unbiased),
                     field("mean", &S::mean), field("variance", &S::variance), field("running_mean", &S::running_mean),
                     field("running_variance", &S::running_variance));
    }
    {
        using S = NormForward;
        bind_channels_step<S>(m, field("norm", &S::norm), field("x", &S::x), optional("residual", &S::residual),
                              field("z", &S::z));
    }
    {
        using S = NormBackward;
        bind_channels_step<S>(m, field("norm", &S::norm), field("x", &S::x), optional("z", &S::z), field("dz", &S::dz),
                              optional("more", &S::more), optional("dx", &S::dx), optional("dresidual", &S::dresidual),
                              optional("dweight", &S::dweight), optional("dbias", &S::dbias),
                              optional("factors", &S::factors));
    }
    {
        using S = ResolveDeferred;
        bind_channels_step<S>(m, field("g", &S::g), field("x", &S::x), field("factors", &S::factors),
                              field("dx", &S::dx));
    }
    {
        using S = RowSums;
        bind_channels_step<S>(m, field("x", &S::x), field("sums", &S::sums));
    }
}

void bind_group_norms(nb::module_& m) {
    {
        using S = GroupMoments;
        bind_step<S>(m, field("images", &GroupSizes::images), field("groups", &GroupSizes::groups), field("eps", &S::eps),
                     optional("weight", &S::weight), field("x", &S::x), field("moments", &S::moments),
                     optional("inverse", &S::inverse));
    }
    {
        using S = GroupMomentsBackward;
        bind_step<S>(m, field("images", &GroupSizes::images), field("groups", &GroupSizes::groups),
                     optional("weight", &S::weight), field("x", &S::x), field("moments", &S::moments),
                     field("inverse", &S::inverse), field("dmoments", &S::dmoments), optional("more", &S::more),
                     optional("dx", &S::dx), optional("dweight", &S::dweight));
    }
}

void bind_images(nb::module_& m) {
    {
        using S = MaxPool;
        bind_step<S>(m, field("pool", &S::pool), optional("norm", &S::norm), field("x", &S::x), field("y", &S::y),
                     optional("which", &S::which));
    }
    {
        using S = MaxPoolBackward;
        bind_step<S>(m, field("pool", &S::pool), optional("norm", &S::norm), optional("x", &S::x), field("dy", &S::dy),
                     field("which", &S::which), field("dx", &S::dx), optional("dnorm", &S::dnorm));
    }
    bind_step<AvgPool>(m, field("pool", &AvgPool::pool), field("x", &AvgPool::x), field("y", &AvgPool::y));
    bind_step<AvgPoolBackward>(m, field("pool", &AvgPoolBackward::pool), field("dy", &AvgPoolBackward::dy),
                               field("dx", &AvgPoolBackward::dx));
    bind_step<GlobalMean>(m, field("images", &GlobalMean::images), field("x", &GlobalMean::x), field("y", &GlobalMean::y));
    bind_step<GlobalMeanBackward>(m, field("images", &GlobalMeanBackward::images), field("dy", &GlobalMeanBackward::dy),
                                  field("dx", &GlobalMeanBackward::dx));
    bind_step<Slice>(m, field("images", &Slice::images), field("slicing", &Slice::slicing), field("value", &Slice::value, 0.0),
                     field("x", &Slice::x), field("y", &Slice::y));
    bind_step<SliceBackward>(m, field("images", &SliceBackward::images), field("slicing", &SliceBackward::slicing),
                             field("dy", &SliceBackward::dy), field("dx", &SliceBackward::dx));
    bind_step<Pad>(m, field("images", &Pad::images), field("padding", &Pad::padding), field("value", &Pad::value, 0.0),
                   field("x", &Pad::x), field("y", &Pad::y));
    bind_step<PadBackward>(m, field("images", &PadBackward::images), field("padding", &PadBackward::padding),
                           field("dy", &PadBackward::dy), field("dx", &PadBackward::dx));
    bind_step<Resample>(m, field("images", &Resample::images), field("down", &Resample::rows),
                        field("across", &Resample::columns), field("x", &Resample::x), field("y", &Resample::y));
    nb::enum_<Layout>(m, "Layout")
        .value("contiguous", Layout::contiguous)
        .value("batch_last", Layout::batch_last)
        .value("panels", Layout::panels);
    bind_step<Relayout>(m, field("images", &Relayout::images), field("source", &Relayout::source),
                        field("target", &Relayout::target), field("x", &Relayout::x), field("y", &Relayout::y));
}

void bind_elementwise(nb::module_& m) {
    bind_step<Copy>(m, field("length", &Copy::length), field("x", &Copy::x), field("y", &Copy::y));
    bind_step<Fill>(m, field("length", &Fill::length), field("value", &Fill::value), field("y", &Fill::y));
    bind_step<Convert>(m, field("length", &Convert::length), field("widen", &Convert::widen), field("x", &Convert::x),
                       field("y", &Convert::y));
    bind_step<Dropout>(m, field("length", &Dropout::length), field("probability", &Dropout::probability),
                       field("seed", &Dropout::seed), field("x", &Dropout::x), field("y", &Dropout::y));
}

void bind_pointwise(nb::module_& m) {
    nb::enum_<Activation>(m, "Activation")
        .value("relu", Activation::relu)
        .value("hardtanh", Activation::hardtanh)
        .value("leaky_relu", Activation::leaky_relu)
        .value("elu", Activation::elu)
        .value("silu", Activation::silu)
        .value("gelu", Activation::gelu)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("sigmoid", Activation::sigmoid)
        .value("tanh", Activation::tanh)
        .value("hardswish", Activation::hardswish)
        .value("hardsigmoid", Activation::hardsigmoid)
        .value("softplus", Activation::softplus);
    nb::enum_<Operation>(m, "Operation")
        .value("affine", Operation::affine)
        .value("fma", Operation::fma)
        .value("centered", Operation::centered)
        .value("add", Operation::add)
        .value("sub", Operation::sub)
        .value("mul", Operation::mul)
        .value("div", Operation::div)
        .value("activate", Operation::activate)
        .value("gradient", Operation::gradient);
    using I = Instruction;
    bind_operands<I>(m, "Instruction", field("op", &I::op), field("out", &I::out), field("a", &I::a),
                     field("b", &I::b, -1), field("c", &I::c, -1), field("activation", &I::activation, Activation::relu),
                     field("p", &I::p, 0.0), field("q", &I::q, 0.0));
    bind_operands<Access>(m, "Access", field("operand", &Access::operand), field("strides", &Access::strides),
                          field("offset", &Access::offset, 0), field("wide", &Access::wide, false));
    bind_operands<SlotAccess>(m, "SlotAccess", field("slot", &SlotAccess::slot), field("operand", &SlotAccess::operand),
                              field("strides", &SlotAccess::strides),
                              field("offset", &SlotAccess::offset, 0), field("wide", &SlotAccess::wide, false));
    using N = NormSums;
    bind_operands<N>(m, "NormSums", field("index", &N::index), field("g", &N::g), field("gx", &N::gx),
                     field("gradients", &N::gradients), optional("x", &N::x), optional("dx", &N::dx));
    using S = engine::Pointwise;
    using Accesses = std::vector<SlotAccess>;
    bind_step<S>(m, field("loops", &S::loops), field("channel", &S::channel, 0), field("panel_rows", &S::panel_rows, 1),
                 field("reads", &S::reads), field("norms", &S::norms, std::vector<NormOperands>{}),
                 field("program", &S::program, std::vector<Instruction>{}), field("writes", &S::writes, Accesses{}),
                 field("sums", &S::sums, Accesses{}), field("norm_sums", &S::norm_sums, std::vector<NormSums>{}));
}

}  // namespace

void bind_steps(nb::module_& m) {
    bind_all_sizes(m);
    bind_all_operands(m);
    bind_step_base(m);
    bind_layers(m);
    bind_norms(m);
    bind_layer_norms(m);
    bind_group_norms(m);
    bind_images(m);
    bind_elementwise(m);
    bind_pointwise(m);
}

template <class T>
void bind_plan(nb::module_& m) {
    using P = engine::Plan<T>;
    nb::class_<P>(m, "Plan")
        .def("__init__", [](P* p, const std::vector<const Step*>& steps, std::vector<Operand> operands, int64_t arena_bytes) {
            new (p) P(steps, std::move(operands), arena_bytes);
        }, nb::arg("steps"), nb::arg("operands"), nb::arg("arena_bytes") = 0)
        .def("run", [](const P& plan, int64_t first, int64_t last, std::vector<uintptr_t> addresses,
                       std::vector<int64_t> elements, uintptr_t arena, int64_t arena_bytes, std::vector<double> scalars,
                       std::vector<uint64_t> seeds, int threads) {
            const Inputs inputs{std::move(addresses), std::move(elements), arena,  arena_bytes,
                                std::move(scalars),   std::move(seeds),    threads};
            const nb::gil_scoped_release free;
            plan.run(first, last, inputs);
        }, nb::arg("first"), nb::arg("last"), nb::arg("addresses"), nb::arg("elements"), nb::arg("arena") = 0,
           nb::arg("arena_bytes") = 0, nb::arg("scalars") = std::vector<double>{},
           nb::arg("seeds") = std::vector<uint64_t>{}, nb::arg("threads") = 1)
        .def_prop_ro("steps", [](const P& plan) {
            std::vector<const Step*> steps;
            for (const auto& step : plan.steps()) steps.push_back(step.get());
            return steps;
        }, nb::rv_policy::reference_internal)
        .def_prop_ro("operands", &P::operands)
        .def_prop_ro("arena_bytes", &P::arena_bytes)
        .def_prop_ro("externals", &P::externals);
}

template void bind_plan<float>(nb::module_&);
template void bind_plan<double>(nb::module_&);
template void bind_plan<bfloat16>(nb::module_&);

}  // namespace rewire
