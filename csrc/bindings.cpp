// The Python module: what is not in bind_engine.cpp (plans and steps) or bind_sampling.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_engine.h"
#include "bind_sampling.h"
#include "dispatch.h"
#include "limits.h"
#include "memory.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace rewire;

template <>
struct nanobind::detail::dtype_traits<bfloat16> {
    static constexpr dlpack::dtype value{uint8_t(dlpack::dtype_code::Bfloat), 16, 1};
    static constexpr auto name = const_name("bfloat16");
};

namespace {

// The bytes of a tensor; throws unless its strides stay inside of them.
size_t bytes_of(const std::vector<size_t>& shape, const std::vector<int64_t>& strides, size_t element) {
    if (shape.size() != strides.size()) throw std::invalid_argument("empty: as many strides as sizes are expected");
    constexpr size_t most = size_t(1) << 62;
    size_t count = 1, last = 0;
    for (const size_t n : shape) {
        if (n > most / element / std::max<size_t>(1, count)) throw std::invalid_argument("empty: the shape is too large for any memory");
        count *= n;
    }
    for (size_t k = 0; count && k < shape.size(); k++) {
        if (strides[k] < 0 || (shape[k] > 1 && size_t(strides[k]) > (count - 1 - last) / (shape[k] - 1)))
            throw std::invalid_argument("empty: the strides leave the memory of so many elements");
        last += (shape[k] - 1) * size_t(strides[k]);
    }
    return count * element;
}

// An uninitialised tensor in kept memory, as a DLPack capsule.
template <class T>
nb::ndarray<T> empty(const std::vector<size_t>& shape, const std::vector<int64_t>& strides) {
    struct Block {
        void* data;
        size_t bytes;
    };
    const size_t bytes = bytes_of(shape, strides, sizeof(T));
    auto* block = new Block{take_memory(bytes), bytes};
    const nb::capsule owner(block, [](void* p) noexcept {
        auto* mine = static_cast<Block*>(p);
        give_memory(mine->data, mine->bytes);
        delete mine;
    });
    return {static_cast<T*>(block->data), shape.size(), shape.data(), owner, strides.data()};
}

template <class T>
void define(nb::module_& m) {
    m.def("empty", &empty<T>);
    m.def("panel", [] { return table<T>().sum_tile; });
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
    bind_sampling(m);
    bind_steps(m);

    auto f32 = m.def_submodule("f32");
    define<float>(f32);
    bind_sampling_of<float>(f32);
    bind_plan<float>(f32);
    auto f64 = m.def_submodule("f64");
    define<double>(f64);
    bind_sampling_of<double>(f64);
    bind_plan<double>(f64);
    auto bf16 = m.def_submodule("bf16");
    define<bfloat16>(bf16);
    bind_plan<bfloat16>(bf16);
}
