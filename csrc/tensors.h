// Tensors as arguments of the extension: read from the Python object, without torch's headers, and checked against what
// a function expects before it runs. (nanobind's ndarray goes through DLPack, which takes 1.7 us; this takes 0.25 us.)
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>

#include "layers.h"

namespace rewire {

// An argument: any Python object until `Arguments` has looked at it.
struct Tensor {
    nanobind::object object;
};

// The elements of a contiguous tensor on the CPU.
template <class T>
struct Vector {
    T* data = nullptr;
    int64_t size = 0;
};

// Connections by output unit.
struct Rows {
    ByOutput by_output;
    int64_t units, count;
};

// How many elements an argument must have, and what that is: "n_out + 1".
struct Size {
    int64_t elements;
    const char* what;
};

// Looks names and types up; before all else here.
void prepare_tensors();

// Reads the arguments of one call of a function. Whatever does not fit raises a ValueError (a TypeError for what is no
// tensor) that says which argument of which function it is.
class Arguments {
   public:
    explicit Arguments(const char* function) : function_(function) {}

    // T is int32_t, uint8_t, bool, float or double.
    template <class T>
    Vector<T> vector(const char* name, const Tensor&) const;
    template <class T>
    T* data(const char* name, const Tensor&, Size) const;
    template <class T>
    T* data(const char* name, const std::optional<Tensor>&, Size) const;  // null for None
    uint8_t* mask(const char* name, const Tensor&, Size) const;
    uint8_t* mask(const char* name, const std::optional<Tensor>&, Size) const;

    // Of `n_out` units, or as many as `indptr` says; its last element is the number of connections. Inputs of each unit
    // ascend and are below `n_in`.
    Rows rows(const char* indptr_name, const Tensor& indptr, const char* indices_name, const Tensor& indices,
              int64_t n_in, int64_t n_out = -1) const;
    Rows rows(const Tensor& indptr, const Tensor& indices, int64_t n_in, int64_t n_out = -1) const {
        return rows("indptr", indptr, "indices", indices, n_in, n_out);
    }

    // Sizes that int32 indices can reach.
    void units(const char* name, int64_t given, int64_t least = 0) const;
    void at_least(const char* name, int64_t given, int64_t least) const;

    void expect(const char* name, int64_t elements, Size) const;
    [[noreturn]] void refuse(const std::string& problem) const;

   private:
    const char* function_;
};

}  // namespace rewire

namespace nanobind::detail {

template <>
struct type_caster<rewire::Tensor> {
    NB_TYPE_CASTER(rewire::Tensor, const_name("torch.Tensor"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        value.object = borrow(source);
        return true;
    }
};

}  // namespace nanobind::detail
