#include "bind_sampling.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "dispatch.h"
#include "drawing.h"
#include "parallel.h"
#include "sampling.h"
#include "tensors.h"
#include "topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace rewire {
namespace {

using Optional = std::optional<Tensor>;
using Free = nb::gil_scoped_release;

constexpr const char* kConnections = "connections";
constexpr int64_t kAnyUnits = std::numeric_limits<int32_t>::max();

AliasColumn* columns(int32_t* of) { return reinterpret_cast<AliasColumn*>(of); }

void bind_topology(nb::module_& m) {
    m.def("first_bad_row", [](const Tensor& indptr, const Tensor& indices, int64_t n_in, int threads) {
        const Arguments given("first_bad_row");
        const auto ptr = given.vector<int32_t>("indptr", indptr);
        const auto all = given.vector<int32_t>("indices", indices);
        if (ptr.size == 0) given.refuse("indptr has 0 elements, expected at least 1");
        const Free free;
        return first_bad_row({ptr.data, all.data}, ptr.size - 1, n_in, all.size, threads);
    }, nb::kw_only(), "indptr"_a, "indices"_a, "n_in"_a, "threads"_a);
    m.def("by_input", [](const Tensor& indptr, const Tensor& indices, int64_t in_channels, int64_t taps,
                         const Tensor& slots, const Tensor& outputs, const Tensor& order, int threads) {
        const Arguments given("by_input");
        given.units("in_channels", in_channels);
        given.units("taps", taps, 1);
        given.units("in_channels * taps", in_channels * taps);
        const Rows rows = given.rows(indptr, indices, in_channels * taps);
        auto* to_ptr = given.data<int32_t>("slots", slots, {in_channels * taps + 1, "in_channels * taps + 1"});
        auto* to_outputs = given.data<int32_t>("outputs", outputs, {rows.count, kConnections});
        auto* to_order = given.data<int32_t>("order", order, {rows.count, kConnections});
        const Free free;
        index_by_input(rows.by_output, in_channels, rows.units, taps, to_ptr, to_outputs, to_order, threads);
    }, nb::kw_only(), "indptr"_a, "indices"_a, "in_channels"_a, "taps"_a, "slots"_a, "outputs"_a, "order"_a,
       "threads"_a);
}

void bind_drawing(nb::module_& m) {
    nb::class_<Stream>(m, "Stream")
        .def("__init__", [](Stream* s, uint64_t seed, uint64_t purpose, uint64_t step, uint64_t layer) {
            new (s) Stream{seed, purpose, step, layer};
        }, "seed"_a, "purpose"_a, "step"_a, "layer"_a);
    m.def("alias", [](const std::vector<Tensor>& weights, const std::vector<Tensor>& tables, int threads) {
        const Arguments given("alias");
        if (weights.size() != tables.size())
            given.refuse("got " + std::to_string(weights.size()) + " weights and " + std::to_string(tables.size()) +
                         " tables");
        struct Work {
            Vector<double> weights;
            AliasColumn* to;
        };
        std::vector<Work> all;
        for (size_t k = 0; k < weights.size(); k++) {
            const std::string number = "[" + std::to_string(k) + "]";
            const auto from = given.vector<double>(("weights" + number).c_str(), weights[k]);
            auto* to = given.data<int32_t>(("tables" + number).c_str(), tables[k], {2 * from.size, "2 * units"});
            all.push_back({from, columns(to)});
        }
        if (all.empty()) return;
        const Free free;
        parallel_for(int64_t(all.size()), worth_sharing(all[0].weights.size, threads), [&](int64_t k) {
            const Work& it = all[size_t(k)];
            build_alias(it.weights.data, it.weights.size, it.to);
        });
    }, nb::kw_only(), "weights"_a, "tables"_a, "threads"_a);
    m.def("draw", [](const Stream& stream, int64_t draws, int64_t n_in, int64_t n_out, const Optional& inputs,
                     const Optional& outputs, int64_t groups, const Tensor& indptr, const Tensor& indices,
                     const Tensor& to_indptr, const Tensor& to_indices, int threads) {
        const Arguments given("draw");
        given.units("draws", draws);
        given.units("n_in", n_in, draws > 0);
        given.units("n_out", n_out, draws > 0);
        given.units("groups", groups, 1);
        if (n_out % groups)
            given.refuse("n_out is " + std::to_string(n_out) + ", expected a multiple of " + std::to_string(groups) +
                         " groups");
        auto* by_input = columns(given.data<int32_t>("inputs", inputs, {2 * n_in * groups, "2 * n_in * groups"}));
        auto* by_output = columns(given.data<int32_t>("outputs", outputs, {2 * n_out, "2 * n_out"}));
        if (by_input && !sound(by_input, n_in, groups)) given.refuse("inputs has an alias that is no input unit");
        if (by_output && !sound(by_output, n_out, 1)) given.refuse("outputs has an alias that is no output unit");
        const Rows active = given.rows(indptr, indices, n_in, n_out);
        auto* to_ptr = given.data<int32_t>("to_indptr", to_indptr, {n_out + 1, "n_out + 1"});
        auto* to = given.data<int32_t>("to_indices", to_indices, {draws, "draws"});
        const Free free;
        return draw(stream, draws, n_in, n_out, by_input, by_output, groups, active.by_output, to_ptr, to, threads);
    }, nb::kw_only(), "stream"_a, "draws"_a, "n_in"_a, "n_out"_a, "inputs"_a, "outputs"_a, "groups"_a, "indptr"_a,
       "indices"_a, "to_indptr"_a, "to_indices"_a, "threads"_a);
}

void bind_changes(nb::module_& m) {
    m.def("complement", [](const Tensor& indptr, const Tensor& indices, int64_t n_in, int64_t n_out,
                           const Tensor& to_indptr, const Tensor& to_indices, int threads) {
        const Arguments given("complement");
        given.units("n_in", n_in);
        given.units("n_out", n_out);
        const Rows active = given.rows(indptr, indices, n_in, n_out);
        auto* to_ptr = given.data<int32_t>("to_indptr", to_indptr, {n_out + 1, "n_out + 1"});
        auto* to = given.data<int32_t>("to_indices", to_indices,
                                       {n_in * n_out - active.count, "n_in * n_out - connections"});
        const Free free;
        complement(active.by_output, n_in, n_out, to_ptr, to, threads);
    }, nb::kw_only(), "indptr"_a, "indices"_a, "n_in"_a, "n_out"_a, "to_indptr"_a, "to_indices"_a, "threads"_a);
    m.def("replace", [](const Tensor& indptr, const Tensor& indices, const Tensor& pruned, const Tensor& subset_indptr,
                        const Tensor& subset_indices, const Tensor& grown, const Tensor& to_indptr,
                        const Tensor& to_indices, const Tensor& source, int threads) {
        const Arguments given("replace");
        const Rows active = given.rows(indptr, indices, kAnyUnits);
        const Rows subset =
            given.rows("subset_indptr", subset_indptr, "subset_indices", subset_indices, kAnyUnits, active.units);
        const auto* without = given.mask("pruned", pruned, {active.count, kConnections});
        const auto* with = given.mask("grown", grown, {subset.count, "connections of the subset"});
        auto* to_ptr = given.data<int32_t>("to_indptr", to_indptr, {active.units + 1, "n_out + 1"});
        const auto to = given.vector<int32_t>("to_indices", to_indices);
        auto* from = given.data<int32_t>("source", source, {to.size, "elements of to_indices"});
        int64_t count;
        {
            const Free free;
            count = replace(active.by_output, without, subset.by_output, with, active.units, to.size, to_ptr, to.data,
                            from, threads);
        }
        given.expect("to_indices", to.size, {count, "connections kept and grown"});
    }, nb::kw_only(), "indptr"_a, "indices"_a, "pruned"_a, "subset_indptr"_a, "subset_indices"_a, "grown"_a,
       "to_indptr"_a, "to_indices"_a, "source"_a, "threads"_a);
}

void bind_counting(nb::module_& m) {
    m.def("mark", [](const Tensor& indptr, const Tensor& indices, const Optional& chosen, int64_t n_in, int64_t n_out,
                     const Tensor& bits) {
        const Arguments given("mark");
        given.units("n_in", n_in);
        given.units("n_out", n_out);
        const Rows rows = given.rows(indptr, indices, n_in, n_out);
        const auto* of = given.mask("chosen", chosen, {rows.count, kConnections});
        auto* to = given.data<uint8_t>("bits", bits, {(n_in * n_out + 7) / 8, "n_in * n_out / 8, rounded up,"});
        const Free free;
        return mark(rows.by_output, of, n_in, n_out, to);
    }, nb::kw_only(), "indptr"_a, "indices"_a, "chosen"_a, "n_in"_a, "n_out"_a, "bits"_a);
    m.def("sketch", [](const Tensor& indptr, const Tensor& indices, const Optional& chosen, int64_t n_in, int64_t n_out,
                       const Tensor& registers) {
        const Arguments given("sketch");
        given.units("n_in", n_in);
        given.units("n_out", n_out);
        const Rows rows = given.rows(indptr, indices, n_in, n_out);
        const auto* of = given.mask("chosen", chosen, {rows.count, kConnections});
        auto* to = given.data<uint8_t>("registers", registers, {kRegisters, "registers of a sketch"});
        const Free free;
        sketch(rows.by_output, of, n_in, n_out, to);
    }, nb::kw_only(), "indptr"_a, "indices"_a, "chosen"_a, "n_in"_a, "n_out"_a, "registers"_a);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    prepare_tensors();
    bind_topology(m);
    bind_drawing(m);
    bind_changes(m);
    bind_counting(m);
}

template <class T>
void bind_sampling_of(nb::module_& m) {
    m.def("select", [](const Tensor& scores, int64_t count, bool largest, const Tensor& chosen, int threads) {
        const Arguments given("select");
        const auto from = given.vector<T>("scores", scores);
        auto* to = given.mask("chosen", chosen, {from.size, "scores"});
        if (count < 0 || count > from.size)
            given.refuse("count is " + std::to_string(count) + ", expected 0 to " + std::to_string(from.size));
        const Free free;
        select<T>(from.data, from.size, count, largest, to, threads);
    }, nb::kw_only(), "scores"_a, "count"_a, "largest"_a, "chosen"_a, "threads"_a);
    m.def("follow", [](const Tensor& x, const Tensor& source, double fresh, const Tensor& out, int threads) {
        const Arguments given("follow");
        const auto from = given.vector<T>("x", x);
        const auto places = given.vector<int32_t>("source", source);
        auto* to = given.data<T>("out", out, {places.size, "elements of source"});
        if (!bounds().within(places.data, places.size, -1, from.size))
            given.refuse("source must be in [-1, " + std::to_string(from.size) + "), the places in x");
        const Free free;
        follow<T>(from.data, places.data, places.size, T(fresh), to, threads);
    }, nb::kw_only(), "x"_a, "source"_a, "fresh"_a, "out"_a, "threads"_a);
    m.def("unit_sums", [](const Tensor& x, const Optional& signs, const Tensor& sums, int threads) {
        const Arguments given("unit_sums");
        const auto from = given.vector<T>("x", x);
        const auto to = given.vector<T>("sums", sums);
        if (to.size ? from.size % to.size : from.size)
            given.refuse("x has " + std::to_string(from.size) + " elements, expected a multiple of those of sums, " +
                         std::to_string(to.size));
        if (to.size == 0) return;
        const int64_t len = from.size / to.size;
        const auto* with = given.data<T>("signs", signs, {len, "elements of x / elements of sums"});
        const Free free;
        unit_sums<T>(from.data, with, to.size, len, to.data, threads);
    }, nb::kw_only(), "x"_a, "signs"_a, "sums"_a, "threads"_a);
    m.def("signs", [](const Stream& stream, int64_t first, int64_t samples, int64_t positions, const Tensor& out,
                      int threads) {
        const Arguments given("signs");
        given.at_least("first", first, 0);
        given.units("samples", samples);
        given.units("positions", positions);
        auto* to = given.data<T>("out", out, {samples * positions, "samples * positions"});
        const Free free;
        signs<T>(stream, first, samples, positions, to, threads);
    }, nb::kw_only(), "stream"_a, "first"_a, "samples"_a, "positions"_a, "out"_a, "threads"_a);
}

template void bind_sampling_of<float>(nb::module_&);
template void bind_sampling_of<double>(nb::module_&);

}  // namespace rewire
