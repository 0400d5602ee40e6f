#include "tensors.h"

#include "topology.h"

#include <limits>
#include <stdexcept>
#include <type_traits>

namespace nb = nanobind;

namespace rewire {
namespace {

// Names and types that live as long as the process.
struct {
    PyObject *data_ptr, *numel, *dtype, *is_cpu, *is_contiguous;
    PyObject *int32, *uint8, *boolean, *float32, *float64;
} known;

template <class T>
PyObject* dtype_of() {
    if constexpr (std::is_same_v<T, int32_t>) return known.int32;
    if constexpr (std::is_same_v<T, uint8_t>) return known.uint8;
    if constexpr (std::is_same_v<T, bool>) return known.boolean;
    if constexpr (std::is_same_v<T, float>) return known.float32;
    if constexpr (std::is_same_v<T, double>) return known.float64;
}

std::string text(nb::handle object) { return nb::str(object).c_str(); }

nb::object get(nb::handle object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object.ptr(), name);
    if (!found) throw nb::python_error();
    return nb::steal(found);
}

nb::object call(nb::handle object, PyObject* name) {
    PyObject* arguments[] = {object.ptr()};
    PyObject* result = PyObject_VectorcallMethod(name, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

}  // namespace

void prepare_tensors() {
    auto name = [](const char* of) { return PyUnicode_InternFromString(of); };
    const nb::module_ torch = nb::module_::import_("torch");
    auto type = [&](const char* of) { return nb::object(torch.attr(of)).release().ptr(); };
    known = {name("data_ptr"), name("numel"), name("dtype"),   name("is_cpu"),  name("is_contiguous"),
             type("int32"),    type("uint8"), type("bool"),    type("float32"), type("float64")};
}

void Arguments::refuse(const std::string& problem) const {
    throw std::invalid_argument(std::string(function_) + ": " + problem);
}

template <class T>
Vector<T> Arguments::vector(const char* name, const Tensor& given) const {
    const nb::handle tensor = given.object;
    nb::object dtype;
    try {
        dtype = get(tensor, known.dtype);
    } catch (const nb::python_error&) {
        throw nb::type_error((std::string(function_) + ": " + name + " must be a torch.Tensor, got " +
                              nb::type_name(tensor.type()).c_str()).c_str());
    }
    if (dtype.ptr() != dtype_of<T>())
        refuse(std::string(name) + " must be of " + text(dtype_of<T>()) + ", got " + text(dtype));
    if (get(tensor, known.is_cpu).ptr() != Py_True)
        refuse(std::string(name) + " must be on the CPU, got device " + text(tensor.attr("device")));
    if (call(tensor, known.is_contiguous).ptr() != Py_True) {
        const nb::object shape = tensor.attr("shape"), strides = tensor.attr("stride")();
        refuse(std::string(name) + " must be contiguous, got shape " + text(nb::list(shape)) + " and strides " +
               text(nb::list(strides)));
    }
    const Vector<T> found{reinterpret_cast<T*>(nb::cast<uintptr_t>(call(tensor, known.data_ptr))),
                          nb::cast<int64_t>(call(tensor, known.numel))};
    if (!found.data && found.size) refuse(std::string(name) + " has no memory: its storage was resized");
    return found;
}

void Arguments::expect(const char* name, int64_t elements, Size size) const {
    if (elements != size.elements)
        refuse(std::string(name) + " has " + std::to_string(elements) + " elements, expected " + size.what + " = " +
               std::to_string(size.elements));
}

template <class T>
T* Arguments::data(const char* name, const Tensor& tensor, Size size) const {
    const auto found = vector<T>(name, tensor);
    expect(name, found.size, size);
    return found.data;
}

template <class T>
T* Arguments::data(const char* name, const std::optional<Tensor>& tensor, Size size) const {
    return tensor ? data<T>(name, *tensor, size) : nullptr;
}

uint8_t* Arguments::mask(const char* name, const Tensor& tensor, Size size) const {
    return reinterpret_cast<uint8_t*>(data<bool>(name, tensor, size));
}

uint8_t* Arguments::mask(const char* name, const std::optional<Tensor>& tensor, Size size) const {
    return tensor ? mask(name, *tensor, size) : nullptr;
}

Rows Arguments::rows(const char* indptr_name, const Tensor& indptr, const char* indices_name, const Tensor& indices,
                     int64_t n_in, int64_t n_out) const {
    const auto ptr = vector<int32_t>(indptr_name, indptr);
    const auto all = vector<int32_t>(indices_name, indices);
    if (n_out >= 0) expect(indptr_name, ptr.size, {n_out + 1, "n_out + 1"});
    if (ptr.size == 0) refuse(std::string(indptr_name) + " has 0 elements, expected at least 1");
    const int32_t first = ptr.data[0], last = ptr.data[ptr.size - 1];
    if (first != 0 || last != all.size)
        refuse(std::string(indptr_name) + " must rise from 0 to the number of " + indices_name + ", " +
               std::to_string(all.size) + ", but goes from " + std::to_string(first) + " to " + std::to_string(last));
    const Rows found{{ptr.data, all.data}, ptr.size - 1, all.size};
    const Problem problem = find_problem(found.by_output, found.units, n_in, Order::distinct, nullptr, 1);
    if (problem == Problem::count) refuse(std::string(indptr_name) + " falls in between: it must rise");
    if (problem == Problem::units)
        refuse(std::string(indices_name) + " must be in [0, " + std::to_string(n_in) + ") and ascend for each output unit");
    return found;
}

void Arguments::at_least(const char* name, int64_t given, int64_t least) const {
    if (given < least)
        refuse(std::string(name) + " is " + std::to_string(given) + ", expected at least " + std::to_string(least));
}

void Arguments::units(const char* name, int64_t given, int64_t least) const {
    at_least(name, given, least);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    if (given > most)
        refuse(std::string(name) + " is " + std::to_string(given) + ", expected at most " + std::to_string(most));
}

template Vector<int32_t> Arguments::vector(const char*, const Tensor&) const;
template Vector<uint8_t> Arguments::vector(const char*, const Tensor&) const;
template Vector<float> Arguments::vector(const char*, const Tensor&) const;
template Vector<double> Arguments::vector(const char*, const Tensor&) const;
template int32_t* Arguments::data(const char*, const Tensor&, Size) const;
template uint8_t* Arguments::data(const char*, const Tensor&, Size) const;
template float* Arguments::data(const char*, const Tensor&, Size) const;
template double* Arguments::data(const char*, const Tensor&, Size) const;
template int32_t* Arguments::data(const char*, const std::optional<Tensor>&, Size) const;
template float* Arguments::data(const char*, const std::optional<Tensor>&, Size) const;
template double* Arguments::data(const char*, const std::optional<Tensor>&, Size) const;

}  // namespace rewire
