#include "engine.h"

#include <limits>
#include <stdexcept>
#include <type_traits>

#include "dispatch.h"
#include "topology.h"

namespace rewire::engine {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 64;  // elements of anything

template <class T>
int64_t size_of(Kind kind) {
    switch (kind) {
        case Kind::values: return sizeof(T);
        case Kind::numbers: return sizeof(Number<T>);
        case Kind::indices: return sizeof(int32_t);
        default: return 1;
    }
}

const char* name_of(Kind kind) {
    constexpr const char* names[] = {"values", "numbers", "indices", "bytes"};
    return names[size_t(kind)];
}

// Where values and numbers are the same they are called values.
template <class T>
Kind kind_in(Kind kind, bool wide) {
    if (std::is_same_v<T, Number<T>>) return kind == Kind::numbers ? Kind::values : kind;
    return wide && kind == Kind::values ? Kind::numbers : kind;
}

[[noreturn]] void refuse(const std::string& problem) { throw std::invalid_argument(problem); }

}  // namespace

int64_t product(const char* what, std::initializer_list<int64_t> sizes) {
    int64_t all = 1;
    for (const int64_t size : sizes) {
        if (size < 1) refuse(std::string(what) + " has a size of " + std::to_string(size) + ", sizes must be at least 1");
        if (size > kMost / all) refuse(std::string(what) + " is too large for any memory");
        all *= size;
    }
    return all;
}

void Needs::add(const Need& need) {
    if (need.operand < 0)
        refuse(std::string(need.role) + " must be an operand, got " + std::to_string(need.operand));
    all.push_back(need);
}

void Needs::by_output(const TopologyOperands& t, const Geometry& g) {
    reads("indptr", t.indptr, g.out_channels + 1, Kind::indices);
    reads("indices", t.indices, -1, Kind::indices);
    const int64_t units = product("a row of connections", {g.in_channels, g.kh, g.kw});
    connections = {t.indptr, g.out_channels, t.indices, units, units > g.in_channels, kAbsent};
}

void Needs::by_input(const TopologyOperands& t, const Geometry& g) {
    const int64_t slots = product("the input", {g.in_channels, g.kh, g.kw});
    reads("slots", t.slots, slots + 1, Kind::indices);
    reads("outputs", t.outputs, -1, Kind::indices);
    reads("order", t.order, -1, Kind::indices);
    connections = {t.slots, slots, t.outputs, g.out_channels, false, t.order};
}

void Needs::scalar(const char* role, int64_t index) {
    if (index < 0 || index >= kMost) refuse(std::string(role) + " must be the index of a scalar, got " + std::to_string(index));
    scalars = std::max(scalars, index + 1);
}

void Needs::seed(const char* role, int64_t index) {
    if (index < 0 || index >= kMost) refuse(std::string(role) + " must be the index of a seed, got " + std::to_string(index));
    seeds = std::max(seeds, index + 1);
}

template <class T>
Plan<T>::Plan(const std::vector<const Step*>& steps, std::vector<Operand> operands, int64_t arena_bytes)
    : operands_(std::move(operands)), arena_bytes_(arena_bytes) {
    if (arena_bytes < 0) engine::refuse("the arena has " + std::to_string(arena_bytes) + " bytes");
    for (size_t k = 0; k < operands_.size(); k++) {
        const Operand& one = operands_[k];
        places_.push_back(one.external ? externals_++ : -1);
        if (one.external) continue;
        const std::string what = "operand " + std::to_string(k) + " (" + std::to_string(one.bytes) +
                                 " bytes at offset " + std::to_string(one.offset) + ")";
        if (one.offset < 0 || one.bytes < 0 || one.offset > arena_bytes || one.bytes > arena_bytes - one.offset)
            engine::refuse(what + " is not inside the arena of " + std::to_string(arena_bytes) + " bytes");
        if (one.offset % kAlignment)
            engine::refuse(what + " is not aligned to " + std::to_string(kAlignment) + " bytes");
    }
    std::vector<int> kinds(operands_.size(), -1);
    for (size_t s = 0; s < steps.size(); s++) {
        if (!steps[s]) engine::refuse("step " + std::to_string(s) + " is None");
        steps_.push_back(steps[s]->clone());
        Needs found;
        steps_.back()->needs(found);
        for (Need& need : found.all) need.kind = kind_in<T>(need.kind, steps[s]->wide);
        checks_.push_back({needs_.size(), needs_.size() + found.all.size(), found.connections, found.scalars, found.seeds});
        needs_.insert(needs_.end(), found.all.begin(), found.all.end());
        for (const Need& need : found.all) {
            if (size_t(need.operand) >= operands_.size())
                refuse(s, need, "does not exist: there are " + std::to_string(operands_.size()));
            int& kind = kinds[size_t(need.operand)];
            if (kind >= 0 && Kind(kind) != need.kind)
                refuse(s, need, std::string("holds ") + name_of(Kind(kind)) + " elsewhere and " + name_of(need.kind) + " here");
            kind = int(need.kind);
        }
        check_arena(s);
        check_overlaps(s);
    }
}

template <class T>
void Plan<T>::refuse(size_t step, const Need& need, const std::string& problem) const {
    throw std::invalid_argument("step " + std::to_string(step) + " (" + steps_[step]->name() + "): " + need.role +
                                " (operand " + std::to_string(need.operand) + ") " + problem);
}

template <class T>
void Plan<T>::check_arena(size_t step) const {
    for (size_t k = checks_[step].first; k < checks_[step].last; k++) {
        const Need& need = needs_[k];
        const Operand& one = operands_[size_t(need.operand)];
        if (one.external) continue;
        if (need.kind == Kind::indices) refuse(step, need, "holds indices, which must be external");
        if (need.elements > one.bytes / size_of<T>(need.kind))
            refuse(step, need, "has " + std::to_string(one.bytes) + " bytes in the arena, needs " +
                                   std::to_string(need.elements * size_of<T>(need.kind)));
    }
}

// A step may write what it reads only if it goes element by element, and nothing twice.
template <class T>
void Plan<T>::check_overlaps(size_t step) const {
    const Checks& mine = checks_[step];
    for (size_t w = mine.first; w < mine.last; w++)
        for (size_t k = mine.first; needs_[w].writes && k < mine.last; k++) {
            if (k == w) continue;
            const Need &written = needs_[w], &other = needs_[k];
            const Operand &a = operands_[size_t(written.operand)], &b = operands_[size_t(other.operand)];
            const bool same = written.operand == other.operand || (!a.external && !b.external && a.offset == b.offset);
            const bool overlap = same ? a.external || (a.bytes && b.bytes)
                                      : !a.external && !b.external && a.offset < b.offset + b.bytes &&
                                            b.offset < a.offset + a.bytes;
            const bool in_place = same && steps_[step]->elementwise() && !other.writes && other.elements == written.elements;
            if (overlap && !in_place)
                refuse(step, written, std::string("is written where ") + other.role + " (operand " +
                                          std::to_string(other.operand) + ") is");
        }
}

template <class T>
int64_t Plan<T>::elements_of(const Need& need, const Inputs& in) const {
    const auto id = size_t(need.operand);
    return places_[id] < 0 ? operands_[id].bytes / size_of<T>(need.kind) : in.elements[size_t(places_[id])];
}

template <class T>
void Plan<T>::check_run(size_t step, const Inputs& in, const std::vector<void*>& addresses) const {
    const Checks& mine = checks_[step];
    for (size_t k = mine.first; k < mine.last; k++) {
        const Need& need = needs_[k];
        const auto id = size_t(need.operand);
        if (places_[id] < 0) continue;
        const int64_t given = in.elements[size_t(places_[id])];
        if (given < 0) refuse(step, need, "has " + std::to_string(given) + " elements");
        if (given < need.elements)
            refuse(step, need, "has " + std::to_string(given) + " elements, needs " + std::to_string(need.elements));
        // An empty tensor has no address.
        if (!addresses[id] && (given || need.elements > 0)) refuse(step, need, "has no address");
        if (reinterpret_cast<uintptr_t>(addresses[id]) % uintptr_t(size_of<T>(need.kind)))
            refuse(step, need, "is not aligned to its elements");
    }
    if (mine.connections.ptr != kAbsent) check_connections(step, in, addresses);
    if (mine.scalars > int64_t(in.scalars.size()) || mine.seeds > int64_t(in.seeds.size()))
        throw std::invalid_argument("step " + std::to_string(step) + " (" + steps_[step]->name() + ") needs " +
                                    std::to_string(mine.scalars) + " scalars and " + std::to_string(mine.seeds) +
                                    " seeds, got " + std::to_string(in.scalars.size()) + " and " +
                                    std::to_string(in.seeds.size()));
}

// What is in index vectors is looked at whenever they are used: their memory is the
// user's, and torch does not count every way to write to it. It takes about as long as reading them.
template <class T>
void Plan<T>::check_connections(size_t step, const Inputs& in, const std::vector<void*>& addresses) const {
    const Checks& mine = checks_[step];
    const Connections& given = mine.connections;
    const auto at = [&](Id id) { return static_cast<const int32_t*>(addresses[size_t(id)]); };
    const auto need_of = [&](Id id) -> const Need& {
        size_t k = mine.first;
        while (needs_[k].operand != id || needs_[k].kind != Kind::indices) k++;
        return needs_[k];
    };
    const Need& counted = need_of(given.ptr);
    const int64_t rows = given.rows, elements = elements_of(counted, in);
    if (elements != rows + 1)
        refuse(step, counted, "has " + std::to_string(elements) + " elements, expected " + std::to_string(rows + 1));
    const int32_t* ptr = at(given.ptr);
    if (ptr[0] != 0 || ptr[rows] < 0)
        refuse(step, counted, "must rise from 0, but goes from " + std::to_string(ptr[0]) + " to " +
                                  std::to_string(ptr[rows]));
    const int64_t count = ptr[rows];
    for (size_t k = mine.first; k < mine.last; k++) {
        const Need& need = needs_[k];
        if (need.elements >= 0) continue;
        const int64_t found = elements_of(need, in);
        if (operands_[size_t(need.operand)].external ? found != count : found < count)
            refuse(step, need, "has " + std::to_string(found) + " elements, but " + counted.role + " counts " +
                                   std::to_string(count) + " connections");
    }
    const Problem problem = find_problem({ptr, at(given.units)}, rows, given.limit, given.ascending ? Order::ascending : Order::any,
                                         given.places == kAbsent ? nullptr : at(given.places), in.threads);
    if (problem == Problem::none) return;
    const Need& wrong = problem == Problem::count  ? counted
                        : problem == Problem::units ? need_of(given.units)
                                                    : need_of(given.places);
    refuse(step, wrong, problem == Problem::count
                            ? "falls in between: it must rise"
                            : "was written to since it was checked: it must be in [0, " +
                                  std::to_string(problem == Problem::units ? given.limit : count) + ")" +
                                  (problem == Problem::units && given.ascending ? " and ascend for each output unit" : ""));
}

template <class T>
void Plan<T>::run(int64_t first, int64_t last, const Inputs& in) const {
    if (first < 0 || last < first || last > int64_t(steps_.size()))
        engine::refuse("steps " + std::to_string(first) + " to " + std::to_string(last) + " of a plan with " +
               std::to_string(steps_.size()) + " steps");
    if (int64_t(in.addresses.size()) != externals_ || int64_t(in.elements.size()) != externals_)
        engine::refuse("got " + std::to_string(in.addresses.size()) + " addresses and " + std::to_string(in.elements.size()) +
               " numbers of elements, the plan has " + std::to_string(externals_) + " external operands");
    if (in.arena_bytes < arena_bytes_ || (arena_bytes_ && !in.arena))
        engine::refuse("the arena has " + std::to_string(in.arena ? in.arena_bytes : 0) + " bytes, the plan needs " +
               std::to_string(arena_bytes_));
    if (in.arena % kAlignment) engine::refuse("the arena is not aligned to " + std::to_string(kAlignment) + " bytes");
    if (in.threads < 1) engine::refuse("threads is " + std::to_string(in.threads) + ", expected at least 1");
    std::vector<void*> addresses(operands_.size());
    for (size_t k = 0; k < operands_.size(); k++)
        addresses[k] = reinterpret_cast<void*>(places_[k] < 0 ? in.arena + uintptr_t(operands_[k].offset)
                                                              : in.addresses[size_t(places_[k])]);
    for (int64_t s = first; s < last; s++) check_run(size_t(s), in, addresses);
    const Run<T> run{table<T>(), addresses, in.scalars, in.seeds, in.threads};
    for (int64_t s = first; s < last; s++) steps_[size_t(s)]->run(run);
}

template class Plan<float>;
template class Plan<double>;
template class Plan<bfloat16>;

}  // namespace rewire::engine
