// The executor of plans. A plan is a list of steps, one for each kernel call, over numbered operands: external ones
// (tensors), which come with each run, and parts of one arena, which comes with each run as well. A step holds static
// sizes and operand numbers and is the same for all element types; a plan is for one type, and never changes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "layers.h"

namespace rewire::engine {

using Id = int32_t;          // the number of an operand
constexpr Id kAbsent = -1;   // an optional operand that is not there
constexpr int64_t kAlignment = 64;

// What an operand's elements are: of the plan's type; what that is computed in, such as parameters and statistics (floats in
// a plan of bfloat16, else the same type); int32 indices; or bytes.
enum class Kind : uint8_t { values, numbers, indices, bytes };

// What a step needs of one operand.
struct Need {
    const char* role;  // the step's name for it
    Id operand;
    Kind kind;
    bool reads, writes;
    int64_t elements;  // at least; -1: as many as there are connections, which is known when the plan runs
};

// The connections of a layer, as int32 vectors: by output, by input, or both. See `Topology` in rewire.ops.
struct TopologyOperands {
    Id indptr = kAbsent, indices = kAbsent, slots = kAbsent, outputs = kAbsent, order = kAbsent;
};

// A step's connections: `rows` + 1 elements of `ptr` count them, and the last of them says how many there are. Each has a
// unit below `limit`, ascending within a row if the kernel relies on it, and maybe a place among all in another order.
struct Connections {
    Id ptr = kAbsent;
    int64_t rows = 0;
    Id units = kAbsent;
    int64_t limit = 0;
    bool ascending = false;
    Id places = kAbsent;
};

// The product of sizes that are all at least 1; throws if one is not, or if no memory could hold so many elements.
int64_t product(const char* what, std::initializer_list<int64_t> sizes);

// Collects what a step needs; throws std::invalid_argument if the step makes no sense by itself.
class Needs {
   public:
    void reads(const char* role, Id id, int64_t elements, Kind kind = Kind::values) { add({role, id, kind, true, false, elements}); }
    void writes(const char* role, Id id, int64_t elements, Kind kind = Kind::values) { add({role, id, kind, false, true, elements}); }
    void reads_numbers(const char* role, Id id, int64_t elements) { reads(role, id, elements, Kind::numbers); }
    void writes_numbers(const char* role, Id id, int64_t elements) { writes(role, id, elements, Kind::numbers); }
    void updates_numbers(const char* role, Id id, int64_t elements) { add({role, id, Kind::numbers, true, true, elements}); }
    // The same where the operand may be absent.
    void may_read(const char* role, Id id, int64_t elements, Kind kind = Kind::values) { if (id != kAbsent) reads(role, id, elements, kind); }
    void may_write(const char* role, Id id, int64_t elements, Kind kind = Kind::values) { if (id != kAbsent) writes(role, id, elements, kind); }
    void may_read_numbers(const char* role, Id id, int64_t elements) { may_read(role, id, elements, Kind::numbers); }
    void may_write_numbers(const char* role, Id id, int64_t elements) { may_write(role, id, elements, Kind::numbers); }
    // A layer's connections in one order, and their values or the gradient of these, or neither.
    void by_output(const TopologyOperands&, const Geometry&);
    void by_input(const TopologyOperands&, const Geometry&);
    void reads_values(Id id) { add({"values", id, Kind::numbers, true, false, -1}); }
    void writes_dvalues(Id id) { add({"dvalues", id, Kind::numbers, false, true, -1}); }
    // Numbers that come with each run.
    void scalar(const char* role, int64_t index);
    void seed(const char* role, int64_t index);

    std::vector<Need> all;
    Connections connections;
    int64_t scalars = 0, seeds = 0;  // how many of them there must be

   private:
    void add(const Need&);
};

// What a step gets to work with.
template <class T>
struct Run {
    const Table<T>& table;
    const std::vector<void*>& addresses;  // by operand
    const std::vector<double>& scalars;
    const std::vector<uint64_t>& seeds;
    int threads;

    T* at(Id id) const { return get<T>(id); }
    Number<T>* number(Id id) const { return get<Number<T>>(id); }
    const int32_t* indices(Id id) const { return get<int32_t>(id); }
    uint8_t* bytes(Id id) const { return get<uint8_t>(id); }

   private:
    template <class E>
    E* get(Id id) const {
        return id == kAbsent ? nullptr : static_cast<E*>(addresses[size_t(id)]);
    }
};

class Step {
   public:
    virtual ~Step() = default;
    virtual const char* name() const = 0;
    // The one place that says which operands the step uses, and that its sizes fit together.
    virtual void needs(Needs&) const = 0;
    // Whether each element it writes depends on the same element of what it reads, so that it may write there.
    virtual bool elementwise() const { return false; }
    virtual void run(const Run<float>&) const = 0;
    virtual void run(const Run<double>&) const = 0;
    virtual void run(const Run<bfloat16>&) const = 0;
    virtual std::unique_ptr<const Step> clone() const = 0;

    bool wide = false;  // in a plan of bfloat16: whether all that it reads and writes are floats
};

// A step S has a name, `needs`, and a template `execute`.
template <class S, bool kElementwise = false>
class StepOf : public Step {
   public:
    const char* name() const override { return S::kName; }
    bool elementwise() const override { return kElementwise; }
    void run(const Run<float>& r) const override { self().execute(r); }
    void run(const Run<double>& r) const override { self().execute(r); }
    void run(const Run<bfloat16>& r) const override {
        if (wide) self().execute(Run<float>{table<float>(), r.addresses, r.scalars, r.seeds, r.threads});
        else self().execute(r);
    }
    std::unique_ptr<const Step> clone() const override { return std::make_unique<const S>(self()); }

   private:
    const S& self() const { return static_cast<const S&>(*this); }
};

// Where an operand is: in a tensor that comes with each run, or in the arena.
struct Operand {
    bool external = true;
    int64_t offset = 0, bytes = 0;  // in the arena
};

// What comes with a run: address and number of elements of the k-th external operand, 0 where no step needs it; the arena;
// scalars and seeds.
struct Inputs {
    std::vector<uintptr_t> addresses;
    std::vector<int64_t> elements;
    uintptr_t arena = 0;
    int64_t arena_bytes = 0;
    std::vector<double> scalars;
    std::vector<uint64_t> seeds;
    int threads = 1;
};

template <class T>
class Plan {
   public:
    // Throws std::invalid_argument if a step names an operand that is not there, or one of another kind; if a part of the
    // arena is too small for a step, not aligned or not inside the arena; or if a step would write what it reads.
    Plan(const std::vector<const Step*>& steps, std::vector<Operand> operands, int64_t arena_bytes);
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    // Runs the steps in [first, last). Everything is checked before the first one runs.
    void run(int64_t first, int64_t last, const Inputs&) const;

    const std::vector<std::unique_ptr<const Step>>& steps() const { return steps_; }
    const std::vector<Operand>& operands() const { return operands_; }
    int64_t arena_bytes() const { return arena_bytes_; }
    int64_t externals() const { return externals_; }

   private:
    // What one step needs: a run of all needs, its connections, and how many scalars and seeds.
    struct Checks {
        size_t first, last;
        Connections connections;
        int64_t scalars, seeds;
    };
    void check_arena(size_t step) const;
    void check_overlaps(size_t step) const;
    void check_run(size_t step, const Inputs&, const std::vector<void*>& addresses) const;
    void check_connections(size_t step, const Inputs&, const std::vector<void*>& addresses) const;
    int64_t elements_of(const Need&, const Inputs&) const;
    [[noreturn]] void refuse(size_t step, const Need&, const std::string& problem) const;

    std::vector<std::unique_ptr<const Step>> steps_;
    std::vector<Operand> operands_;
    std::vector<int64_t> places_;  // of each operand among the external ones, or -1
    std::vector<Need> needs_;
    std::vector<Checks> checks_;
    int64_t arena_bytes_, externals_ = 0;
};

}  // namespace rewire::engine
