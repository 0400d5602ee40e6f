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

template <class T>
void define(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("empty", &empty<T>);
    m.def("panel", [] { return table<T>().sum_tile; });
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
