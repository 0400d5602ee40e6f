#include <algorithm>
#include <type_traits>

#include "steps.h"

namespace rewire::engine {
namespace {

constexpr int64_t kFarthest = int64_t(1) << 48;

Loops5 loops_of(const std::vector<int64_t>& sizes, int32_t channel) {
    refuse_unless(sizes.size() == 5, "loops are five sizes");
    refuse_unless(channel >= 0 && channel < 3, "channel is one of the outer three loops");
    product("the tensor", {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]});
    return {{sizes[0], sizes[1], sizes[2]}, sizes[3], sizes[4], channel};
}

Strides5 strides_of(const std::vector<int64_t>& s) {
    refuse_unless(s.size() == 5, "strides are five numbers");
    for (const int64_t one : s) refuse_unless(one >= 0 && one <= kFarthest, "strides must not be negative or beyond 2^48");
    refuse_unless(s[4] <= 1, "the stride of the innermost loop is 0 or 1");
    return {{s[0], s[1], s[2]}, s[3], s[4]};
}

// How many elements an operand must have. Each term is below 2^48 times a size, checked one by one.
int64_t reach(const Loops5& loops, const Strides5& s, int64_t offset) {
    refuse_unless(offset >= 0 && offset <= kFarthest, "an offset must not be negative or beyond 2^48");
    int64_t last = offset;
    const auto go = [&](int64_t size, int64_t stride) {
        refuse_unless(stride == 0 || size - 1 <= kFarthest / stride, "an operand reaches beyond 2^48 elements");
        last += (size - 1) * stride;
    };
    for (int d = 0; d < 3; d++) go(loops.outer[d], s.outer[d]);
    go(loops.width, s.width);
    go(loops.piece, s.piece);
    return last + 1;
}

// Whether each element is there once, and runs are contiguous.
void check_written(const Loops5& loops, const Strides5& s) {
    refuse_unless((loops.piece == 1 || s.piece == 1) && (loops.width == 1 || s.width == loops.piece),
                  "what is written must have contiguous runs");
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
    for (int d = 0; d < 3; d++)
        if (loops.outer[d] > 1) dims.emplace_back(s.outer[d], loops.outer[d]);
    std::sort(dims.begin(), dims.end());
    int64_t covered = loops.run();
    for (const auto& [stride, size] : dims) {
        refuse_unless(stride >= covered, "elements that are written overlap");
        covered = stride * (size - 1) + covered;
    }
}

void check_summed(const Loops5& loops, const Strides5& s) {
    const int along = loops.channel, first = along == 0 ? 1 : 0, second = 3 - along - first;
    refuse_unless(s.width == 0 && s.outer[second] == 0, "a sum goes over the width, and over rows");
    refuse_unless(loops.outer[along] == 1 || s.outer[along] > 0, "there is a sum for each channel");
    refuse_unless(s.piece == 1 || s.outer[first] == 0, "a sum by panel is one by sample");
    refuse_unless(s.piece == 0 || loops.outer[first] == 1 || s.outer[first] == 0 || s.outer[first] >= loops.piece,
                  "sums of samples overlap");
}

template <class Of>
Kind kind_of(const Of& access) {
    return access.wide ? Kind::numbers : Kind::values;
}

// Has a read, a write or a sum go to memory: to numbers, or to what is narrower.
template <class T, class Of, class At>
void place(const Run<T>& r, const At& at, Of& of) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        if (!at.wide) {
            of.narrow = r.at(at.operand) + at.offset;
            return;
        }
    }
    of.data = r.number(at.operand) + at.offset;
}

}  // namespace

int32_t Pointwise::slots() const {
    int32_t count = int32_t(reads.size() + 3 * norms.size());
    for (const Instruction& of : program) count = std::max(count, of.out + 1);
    return count;
}

void Pointwise::needs(Needs& n) const {
    const Loops5 of = loops_of(loops, channel);
    const int64_t all = of.outer[0] * of.outer[1] * of.outer[2] * of.run(), channels = of.channels();
    refuse_unless(panel_rows >= 1 && all / channels % panel_rows == 0, "a channel has panel_rows runs of whole elements");
    refuse_unless(reads.size() + 3 * norms.size() < size_t(kPointwiseSlots), "too many operands");
    for (const Access& read : reads) n.reads("read", read.operand, reach(of, strides_of(read.strides), read.offset), kind_of(read));
    for (const NormOperands& norm : norms) norm_needs(n, norm, channels);
    const auto given = int32_t(reads.size() + 3 * norms.size());
    std::vector<char> known(size_t(kPointwiseSlots), 0);
    std::fill_n(known.begin(), given, 1);
    for (const Instruction& one : program) {
        refuse_unless(one.out >= given && one.out < kPointwiseSlots, "an instruction writes to a slot that it may not");
        const bool ternary = one.op == Operation::fma || one.op == Operation::centered;
        const bool unary = one.op == Operation::affine || one.op == Operation::activate;
        for (const int32_t slot : {one.a, unary ? one.a : one.b, ternary ? one.c : one.a})
            refuse_unless(slot >= 0 && slot < kPointwiseSlots && known[size_t(slot)], "an instruction reads a slot that nothing has written");
        known[size_t(one.out)] = 1;
    }
    const auto check = [&](int32_t slot) {
        refuse_unless(slot >= 0 && slot < kPointwiseSlots && known[size_t(slot)], "the slot has not been written");
    };
    for (const SlotAccess& write : writes) {
        check(write.slot);
        refuse_unless(write.slot >= given, "a write of what was read");
        const auto same = [&](const SlotAccess& other) { return other.slot == write.slot; };
        refuse_unless(std::count_if(writes.begin(), writes.end(), same) == 1, "a slot is written once");
        check_written(of, strides_of(write.strides));
        n.writes("write", write.operand, reach(of, strides_of(write.strides), write.offset), kind_of(write));
    }
    for (const SlotAccess& sum : sums) {
        check(sum.slot);
        check_summed(of, strides_of(sum.strides));
        n.writes("sum", sum.operand, reach(of, strides_of(sum.strides), sum.offset), kind_of(sum));
    }
    for (const NormSums& sum : norm_sums) {
        check(sum.g);
        check(sum.gx);
        refuse_unless(sum.index >= 0 && sum.index < int32_t(norms.size()), "there is no such norm");
        norm_gradient_needs(n, sum.gradients, channels);
        if (sum.gradients.factors != kAbsent) continue;
        n.reads("x", sum.x, all);
        const auto same = [&](const SlotAccess& other) { return other.operand == sum.dx && other.slot == sum.g; };
        refuse_unless(std::count_if(writes.begin(), writes.end(), same) == 1, "dx is where g is written");
    }
}

template <class T>
void Pointwise::execute(const Run<T>& r) const {
    using N = Number<T>;
    rewire::Pointwise<N> of{loops_of(loops, channel), {}, program.data(), int64_t(program.size()), slots(), {}, {}};
    const int64_t channels = of.loops.channels();
    for (const Access& read : reads) {
        of.reads.push_back({nullptr, strides_of(read.strides)});
        place(r, read, of.reads.back());
    }
    const int64_t length = of.loops.outer[0] * of.loops.outer[1] * of.loops.outer[2] * of.loops.run() / channels;
    std::vector<N> factors(size_t(3 * channels) * norms.size());
    std::vector<BatchNorm<T>> all_norms;
    for (size_t k = 0; k < norms.size(); k++) {
        const BatchNorm<T> norm = batch_norm_of(r, norms[k], Channels{channels, length, panel_rows});
        N* by = &factors[size_t(3 * channels) * k];
        for (int64_t c = 0; c < channels; c++) {
            by[c] = N(norm.scale(c));
            by[channels + c] = N(norm.shift(c));
            by[2 * channels + c] = norm.mean[c];
        }
        Strides5 strides;
        strides.outer[channel] = 1;
        for (int part = 0; part < 3; part++) of.reads.push_back({by + part * channels, strides});
        all_norms.push_back(norm);
    }
    for (const SlotAccess& write : writes) {
        of.writes.push_back({write.slot, nullptr, strides_of(write.strides)});
        place(r, write, of.writes.back());
    }
    for (const SlotAccess& sum : sums) {
        of.sums.push_back({sum.slot, nullptr, strides_of(sum.strides), nullptr, 0});
        place(r, sum, of.sums.back());
    }
    std::vector<double> raw(size_t(2 * channels) * norm_sums.size());
    for (size_t k = 0; k < norm_sums.size(); k++) {
        double* to = &raw[size_t(2 * channels) * k];
        of.sums.push_back({norm_sums[k].g, nullptr, Strides5{}, to, 2});
        of.sums.push_back({norm_sums[k].gx, nullptr, Strides5{}, to + 1, 2});
    }
    pointwise<N>(table<N>(), of, r.threads);
    for (size_t k = 0; k < norm_sums.size(); k++) {
        const NormSums& sum = norm_sums[k];
        const NormGradients<T> gradients{r.number(sum.gradients.weight), r.number(sum.gradients.bias),
                                         r.number(sum.gradients.factors)};
        batch_norm_gradient<T>(r.table, all_norms[size_t(sum.index)], r.at(sum.x), &raw[size_t(2 * channels) * k], r.at(sum.dx),
                               gradients, r.threads);
    }
}

REWIRE_INSTANTIATE_STEP(Pointwise)

}  // namespace rewire::engine
