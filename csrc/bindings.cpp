// The Python face of the kernels. Tensors come as addresses (an integer costs 0.3 us to pass, a DLPack
// array 4.6 us); rewire.ops is the only caller and has checked shapes, types, strides and indices.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind_engine.h"
#include "channels.h"
#include "dispatch.h"
#include "drawing.h"
#include "images.h"
#include "layers.h"
#include "limits.h"
#include "memory.h"
#include "parallel.h"
#include "rows.h"
#include "sampling.h"
#include "topology.h"

namespace nb = nanobind;
using namespace rewire;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// An uninitialised tensor in kept memory, as a DLPack capsule.
template <class T>
nb::ndarray<T> empty(const std::vector<size_t>& shape, const std::vector<int64_t>& strides) {
    struct Block {
        void* data;
        size_t bytes;
        bool panels;
    };
    const bool panels = shape.size() == 5;
    size_t bytes = sizeof(T);
    for (const size_t n : shape) bytes *= n;
    auto* block = new Block{take_memory(bytes, panels), bytes, panels};
    const nb::capsule owner(block, [](void* p) noexcept {
        auto* mine = static_cast<Block*>(p);
        give_memory(mine->data, mine->bytes, mine->panels);
        delete mine;
    });
    return {static_cast<T*>(block->data), shape.size(), shape.data(), owner, strides.data()};
}

// How a layer reads the gradient of its output: where the rectified output z is positive, or with what it owes.
template <class T>
Reading<T> reading(int64_t channels, Address z, Address y, Address factors) {
    if (!factors) return {nullptr, nullptr, false, at<T>(z)};
    const T* f = at<T>(factors);
    return {f, f + 2 * channels, false, nullptr, at<T>(y), f + channels};
}

template <class T>
void define(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("empty", &empty<T>);
    m.def("panel", [] { return table<T>().sum_tile; });
    nb::class_<BatchNorm<T>>(m, "BatchNorm")
        .def("__init__", [](BatchNorm<T>* p, int64_t channels, int64_t len, bool training, bool relu, double epsilon,
                            Address weight, Address bias, Address mean, Address variance, int64_t panels) {
            new (p) BatchNorm<T>{channels,      len,         training,    relu,            epsilon,
                                 at<T>(weight), at<T>(bias), at<T>(mean), at<T>(variance), panels};
        });
    m.def("forward", [](const Geometry& g, Address ptr, Address indices, Address values, Address bias, Address x,
                        const BatchNorm<T>* norm, Address y, bool relu, Address mean, Address variance, int threads) {
        forward<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(indices)}, at<T>(values), at<T>(bias), at<T>(x),
                   norm, at<T>(y), relu, at<T>(mean), at<T>(variance), threads);
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
       nb::arg(), nb::arg(), nb::arg(), free);
    m.def("input_gradient", [](const Geometry& g, Address ptr, Address outputs, Address order, Address values,
                               Address dy, Address dx, int threads) {
        input_gradient<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(outputs), at<int32_t>(order)},
                          at<T>(values), at<T>(dy), at<T>(dx), threads);
    }, free);
    m.def("weight_gradient", [](const Geometry& g, Address ptr, Address indices, Address x, Address dy, Address z,
                                Address y, Address factors, Address grad, Address bias, int threads) {
        weight_gradient<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(indices)}, at<T>(x), at<T>(dy),
                           reading<T>(g.out_channels, z, y, factors), at<T>(grad), at<T>(bias), threads);
    }, free);
    m.def("gradients", [](const Geometry& g, Address ptr, Address outputs, Address order, Address values,
                          Address x, const BatchNorm<T>* norm, Address normed, Address more, Address dy, Address z,
                          Address y, Address factors, Address dx, Address grad, Address bias, Address norm_weight,
                          Address norm_bias, Address norm_factors, Address rectified, int threads) {
        gradients<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(outputs), at<int32_t>(order)}, at<T>(values),
                     at<T>(x), {norm, at<T>(normed), at<T>(more)}, at<T>(dy),
                     reading<T>(g.out_channels, z, y, factors),
                     {at<T>(dx), at<T>(grad), at<T>(bias), {at<T>(norm_weight), at<T>(norm_bias), at<T>(norm_factors)},
                      at<T>(rectified)},
                     threads);
    }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
       nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
       nb::arg(), nb::arg(), free);
    m.def("forward_rows", [](const Geometry& g, Address ptr, Address indices, Address values, Address bias, Address x,
                             Address y, bool relu, int threads) {
        forward_rows<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(indices)}, at<T>(values), at<T>(bias), at<T>(x),
                        at<T>(y), relu, threads);
    }, free);
    m.def("input_gradient_rows", [](const Geometry& g, Address ptr, Address outputs, Address order, Address values,
                                    Address dy, Address dx, int threads) {
        input_gradient_rows<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(outputs), at<int32_t>(order)},
                               at<T>(values), at<T>(dy), at<T>(dx), threads);
    }, free);
    m.def("gradients_rows", [](const Geometry& g, Address ptr, Address outputs, Address order, Address values,
                               Address x, Address dy, Address z, Address dx, Address grad, Address bias, int threads) {
        gradients_rows<T>(table<T>(), g, {at<int32_t>(ptr), at<int32_t>(outputs), at<int32_t>(order)}, at<T>(values),
                          at<T>(x), at<T>(dy), at<T>(z), at<T>(dx), at<T>(grad), at<T>(bias), threads);
    }, free);
    // Of each layer: units of the output, ptr, indices, values, bias, whether it is rectified.
    m.def("forward_single", [](const std::vector<std::tuple<int64_t, Address, Address, Address, Address, bool>>& layers,
                               Address x, Address y, int threads) {
        std::vector<Single<T>> all;
        for (const auto& [units, ptr, indices, values, bias, relu] : layers)
            all.push_back({units, {at<int32_t>(ptr), at<int32_t>(indices)}, at<T>(values), at<T>(bias), relu});
        forward_single<T>(table<T>(), all, at<T>(x), at<T>(y), threads);
    }, free);
    m.def("row_sums", [](Address x, int64_t rows, int64_t len, Address sums, int threads) {
        row_sums<T>(table<T>(), at<T>(x), rows, len, at<T>(sums), threads);
    }, free);
    m.def("rectify_gradient", [](Address dz, Address z, Address dy, int64_t len, int threads) {
        rectify_gradient<T>(table<T>(), at<T>(dz), at<T>(z), at<T>(dy), len, threads);
    }, free);
    m.def("panels", [](const Images& of, bool into, Address x, Address y, int threads) {
        panels<T>(table<T>(), of, into, at<T>(x), at<T>(y), threads);
    }, free);
    m.def("thin", [](const Images& of, const Thinning& by, Address x, T value, Address y, int threads) {
        thin<T>(table<T>(), of, by, at<T>(x), value, at<T>(y), threads);
    }, free);
    m.def("thin_gradient", [](const Images& of, const Thinning& by, Address dy, Address dx, int threads) {
        thin_gradient<T>(table<T>(), of, by, at<T>(dy), at<T>(dx), threads);
    }, free);
    m.def("mean", [](const Images& of, Address x, Address y, int threads) {
        mean<T>(of, at<T>(x), at<T>(y), threads);
    }, free);
    m.def("mean_gradient", [](const Images& of, Address dy, Address dx, int threads) {
        mean_gradient<T>(of, at<T>(dy), at<T>(dx), threads);
    }, free);
    m.def("transpose", [](Address in, int64_t rows, int64_t cols, Address out, int threads) {
        transpose<T>(table<T>(), at<T>(in), rows, cols, at<T>(out), threads);
    }, free);
    m.def("moments", [](Address x, int64_t channels, int64_t len, int64_t panels, Address mean, Address variance,
                        int threads) {
        moments<T>(table<T>(), at<T>(x), channels, len, panels, at<T>(mean), at<T>(variance), threads);
    }, free);
    m.def("track", [](Address mean, Address variance, int64_t channels, double momentum, double unbiased,
                      Address running_mean, Address running_variance) {
        track<T>(at<T>(mean), at<T>(variance), channels, momentum, unbiased, at<T>(running_mean),
                 at<T>(running_variance));
    });
    m.def("batch_norm", [](const BatchNorm<T>& p, Address x, Address residual, Address z, int threads) {
        batch_norm<T>(table<T>(), p, at<T>(x), at<T>(residual), at<T>(z), threads);
    }, free);
    m.def("batch_norm_gradient", [](const BatchNorm<T>& p, Address x, Address z, Address dz, Address more, Address dx,
                                    Address dresidual, Address dweight, Address dbias, Address factors, int threads) {
        batch_norm_gradient<T>(table<T>(), p, at<T>(x), at<T>(z), at<T>(dz), at<T>(more), at<T>(dx), at<T>(dresidual),
                               {at<T>(dweight), at<T>(dbias), at<T>(factors)}, threads);
    }, free);
    m.def("settle_gradient", [](Address g, Address x, Address factors, int64_t channels, int64_t len, int64_t panels,
                                Address dx, int threads) {
        settle_gradient<T>(table<T>(), at<T>(g), at<T>(x), at<T>(factors), channels, len, panels, at<T>(dx), threads);
    }, free);
    m.def("drop_out", [](Address x, int64_t len, double probability, double scale, uint64_t seed, Address y,
                         int threads) {
        drop_out<T>(table<T>(), at<T>(x), len, probability, scale, seed, at<T>(y), threads);
    }, free);
    m.def("max_pool", [](const Pool& p, const BatchNorm<T>* norm, Address x, Address y, Address which, int threads) {
        max_pool<T>(table<T>(), p, norm, at<T>(x), at<T>(y), at<uint8_t>(which), threads);
    }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), free);
    m.def("max_pool_gradient", [](const Pool& p, const BatchNorm<T>* norm, Address x, Address dy, Address which, Address dx,
                                  Address dweight, Address dbias, Address factors, int threads) {
        max_pool_gradient<T>(table<T>(), p, norm, at<T>(x), at<T>(dy), at<uint8_t>(which), at<T>(dx),
                             {at<T>(dweight), at<T>(dbias), at<T>(factors)}, threads);
    }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
       nb::arg(), nb::arg(), free);
    m.def("mean_pool", [](const Pool& p, Address x, Address y, int threads) {
        mean_pool<T>(table<T>(), p, at<T>(x), at<T>(y), threads);
    }, free);
    m.def("mean_pool_gradient", [](const Pool& p, Address dy, Address dx, int threads) {
        mean_pool_gradient<T>(table<T>(), p, at<T>(dy), at<T>(dx), threads);
    }, free);
    m.def("select", [](Address scores, int64_t n, int64_t k, bool largest, Address chosen, int threads) {
        select<T>(at<T>(scores), n, k, largest, at<uint8_t>(chosen), threads);
    }, free);
    m.def("follow", [](Address x, Address source, int64_t n, double fresh, Address out, int threads) {
        follow<T>(at<T>(x), at<int32_t>(source), n, T(fresh), at<T>(out), threads);
    }, free);
    m.def("unit_sums", [](Address x, Address signs, int64_t rows, int64_t len, Address sums, int threads) {
        unit_sums<T>(at<T>(x), at<T>(signs), rows, len, at<T>(sums), threads);
    }, free);
    m.def("signs", [](const Stream& stream, int64_t first, int64_t samples, int64_t positions, Address out,
                      int threads) {
        signs<T>(stream, first, samples, positions, at<T>(out), threads);
    }, free);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // sizes live in caches until the interpreter ends
    m.def("supported", &supported_instruction_sets, "Instruction sets of this machine, best first.");
    m.def("current", &current_instruction_set);
    m.def("use", &use_instruction_set);
    m.def("shares_torch_threads", &shares_torch_threads);
    m.def("empty_cache", &empty_cache);
    nb::class_<Loops>(m, "Loops")
        .def("__init__", [](Loops* p, int64_t rows, double entries, int64_t pieces, int64_t count, int threads) {
            new (p) Loops(table<float>(), rows, entries, pieces, count, threads);
        })
        .def("forward", &Loops::forward, nb::call_guard<nb::gil_scoped_release>())
        .def("backward", &Loops::backward, nb::call_guard<nb::gil_scoped_release>());
    m.def("first_bad_row", [](Address ptr, Address indices, int64_t rows, int64_t inputs, int64_t count, int threads) {
        return first_bad_row({at<int32_t>(ptr), at<int32_t>(indices)}, rows, inputs, count, threads);
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("by_input", [](Address ptr, Address indices, int64_t in_channels, int64_t out_channels, int64_t taps,
                         Address to_ptr, Address to_outputs, Address to_order, int threads) {
        index_by_input({at<int32_t>(ptr), at<int32_t>(indices)}, in_channels, out_channels, taps,
                       at<int32_t>(to_ptr), at<int32_t>(to_outputs), at<int32_t>(to_order), threads);
    }, nb::call_guard<nb::gil_scoped_release>());

    m.def("alias", [](const std::vector<Address>& weights, const std::vector<int64_t>& sizes,
                      const std::vector<Address>& columns, int threads) {
        parallel_for(int64_t(sizes.size()), worth_sharing(sizes[0], threads), [&](int64_t i) {
            const auto k = size_t(i);
            build_alias(at<double>(weights[k]), sizes[k], at<AliasColumn>(columns[k]));
        });
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("draw", [](const Stream& stream, int64_t draws, int64_t n_in, int64_t n_out, Address inputs,
                     Address outputs, Address ptr, Address indices, Address to_ptr, Address to_indices,
                     int threads) {
        return draw(stream, draws, n_in, n_out, at<AliasColumn>(inputs), at<AliasColumn>(outputs),
                    {at<int32_t>(ptr), at<int32_t>(indices)}, at<int32_t>(to_ptr), at<int32_t>(to_indices),
                    threads);
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("complement", [](Address ptr, Address indices, int64_t n_in, int64_t n_out, Address to_ptr,
                           Address to_indices, int threads) {
        complement({at<int32_t>(ptr), at<int32_t>(indices)}, n_in, n_out, at<int32_t>(to_ptr),
                   at<int32_t>(to_indices), threads);
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("replace", [](Address ptr, Address indices, Address pruned, Address subset_ptr, Address subset_indices,
                        Address grown, int64_t n_out, Address to_ptr, Address to_indices, Address source,
                        int threads) {
        replace({at<int32_t>(ptr), at<int32_t>(indices)}, at<uint8_t>(pruned),
                {at<int32_t>(subset_ptr), at<int32_t>(subset_indices)}, at<uint8_t>(grown), n_out,
                at<int32_t>(to_ptr), at<int32_t>(to_indices), at<int32_t>(source), threads);
    }, nb::call_guard<nb::gil_scoped_release>());

    m.def("mark", [](Address ptr, Address indices, Address chosen, int64_t n_in, int64_t n_out, Address bits) {
        return mark({at<int32_t>(ptr), at<int32_t>(indices)}, at<uint8_t>(chosen), n_in, n_out, at<uint8_t>(bits));
    }, nb::call_guard<nb::gil_scoped_release>());
    m.def("sketch", [](Address ptr, Address indices, Address chosen, int64_t n_in, int64_t n_out,
                       Address registers) {
        sketch({at<int32_t>(ptr), at<int32_t>(indices)}, at<uint8_t>(chosen), n_in, n_out, at<uint8_t>(registers));
    }, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Stream>(m, "Stream")
        .def("__init__", [](Stream* s, uint64_t seed, uint64_t purpose, uint64_t step, uint64_t layer) {
            new (s) Stream{seed, purpose, step, layer};
        });
    bind_steps(m);

    auto f32 = m.def_submodule("f32");
    define<float>(f32);
    bind_plan<float>(f32);
    auto f64 = m.def_submodule("f64");
    define<double>(f64);
    bind_plan<double>(f64);
}
