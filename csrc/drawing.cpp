#include "drawing.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "bands.h"
#include "parallel.h"
#include "scratch.h"

namespace rewire {
namespace {

using Wide = unsigned __int128;

// The four words of each of kBlocks blocks, which are worked on side by side: each is a long chain of products.
template <int kBlocks>
void philox(const Stream& s, uint64_t block, uint64_t* words) {
    uint64_t c[kBlocks][4];
    for (int b = 0; b < kBlocks; b++) {
        c[b][0] = block + uint64_t(b) + 1;  // numpy steps its counter first
        c[b][1] = s.layer;
        c[b][2] = s.step;
        c[b][3] = 0;
    }
    uint64_t k0 = s.seed, k1 = s.purpose;
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; b++) {
            const Wide p = Wide(0xD2E7470EE14C6C93u) * c[b][0], q = Wide(0xCA5A826395121157u) * c[b][2];
            c[b][0] = uint64_t(q >> 64) ^ c[b][1] ^ k0;
            c[b][2] = uint64_t(p >> 64) ^ c[b][3] ^ k1;
            c[b][1] = uint64_t(q);
            c[b][3] = uint64_t(p);
        }
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    for (int b = 0; b < kBlocks; b++) std::copy(c[b], c[b] + 4, words + 4 * b);
}

// Draws units from a table, or uniformly. The high word of word * n is a column, the upper half of the low one a
// fraction of it.
class Picker {
   public:
    Picker(const AliasColumn* columns, int64_t n, int64_t tables, int threads) : columns_(columns), n_(n) {
        if (!columns) return;
        n *= tables;
        sure_ = Scratch<uint8_t>(n);
        pieces(n, 1 << 14, worth_sharing(n, threads), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) sure_[i] = uint8_t(columns[i].threshold >> 24);
        });
    }

    // units[i] = what words[i * stride] draws; at most kMost. Most draws are decided by the first eight bits of
    // a threshold, which lie in a quarter of a cache where the table would not; columns are asked for well
    // before the others look at them.
    static constexpr int64_t kMost = 256;
    void operator()(const uint64_t* words, int64_t count, int64_t stride, int32_t* units) const {
        pick(words, count, stride, units, [](int64_t) { return int64_t(0); });
    }
    // The same where draw i is from table group(i).
    template <class Group>
    void operator()(const uint64_t* words, int64_t count, int64_t stride, int32_t* units, Group&& group) const {
        pick(words, count, stride, units, [&](int64_t i) { return group(i) * n_; });
    }

   private:
    // The columns of draw i are those from first(i) on.
    template <class First>
    void pick(const uint64_t* words, int64_t count, int64_t stride, int32_t* units, First&& first) const {
        const auto n = uint64_t(n_);
        for (int64_t i = 0; i < count; i++) {
            units[i] = int32_t(Wide(words[i * stride]) * n >> 64);
            if (columns_) __builtin_prefetch(&sure_[first(i) + units[i]]);
        }
        if (!columns_) return;
        int32_t open[kMost];
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            open[left] = int32_t(i);
            const bool unsure = (words[i * stride] * n >> 56) >= sure_[first(i) + units[i]];
            __builtin_prefetch(unsure ? columns_ + first(i) + units[i] : columns_);
            left += unsure;
        }
        for (int64_t k = 0; k < left; k++) {
            const int64_t i = open[k];
            const AliasColumn column = columns_[first(i) + units[i]];
            const bool below = uint32_t(words[i * stride] * n >> 32) < column.threshold;
            units[i] = below ? units[i] : column.alias;
        }
    }

    const AliasColumn* columns_;
    int64_t n_;
    Scratch<uint8_t> sure_;
};

// Ascending, in linear time, of keys of so many bits.
template <class Key>
void sort(Key* keys, int64_t n, int bits) {
    constexpr int kMost = 11;
    if (n < 128) {
        std::sort(keys, keys + n);
        return;
    }
    const int passes = (bits + kMost - 1) / kMost, digit = passes ? (bits + passes - 1) / passes : 0;
    const Scratch<Key> spare(n);
    Key *from = keys, *to = spare.get();
    for (int shift = 0; shift < bits; shift += digit) {
        int32_t start[(1 << kMost) + 1] = {0};
        const Key mask = (Key(1) << digit) - 1;
        for (int64_t i = 0; i < n; i++) start[((from[i] >> shift) & mask) + 1]++;
        for (int64_t d = 0; d < (1 << digit); d++) start[d + 1] += start[d];
        for (int64_t i = 0; i < n; i++) to[start[(from[i] >> shift) & mask]++] = from[i];
        std::swap(from, to);
    }
    if (from != keys) std::copy(from, from + n, keys);
}

int bits_of(int64_t n) {  // that numbers below n need
    int bits = 0;
    while ((n - 1) >> bits) bits++;
    return bits;
}

constexpr uint64_t kPrime = (uint64_t(1) << 61) - 1;

uint64_t reduce(Wide x) {
    const uint64_t sum = uint64_t(x & kPrime) + uint64_t(x >> 61);
    return sum >= kPrime ? sum - kPrime : sum;
}

// Units that were drawn; `part` of them make up a part of the bands.
struct Drawn {
    const int32_t* inputs;
    int32_t* outputs;
    int64_t count, part;
};

// Sorts what was drawn by keys, output unit in its band and input unit, and keeps what is new. The inputs that
// are kept take the place of the outputs, those of a band from where its draws start; rows[r + 1] is how many
// output unit r has.
template <class Key>
void keep_new(const Drawn& drawn, const Bands& bands, int64_t n_in, const ByOutput& active, int32_t* rows,
              int threads) {
    const int bits = bits_of(n_in);
    const Scratch<Key> keys(drawn.count);
    parallel_for(bands.parts(), threads, [&](int64_t p) {
        int64_t* next = bands.of(p);
        const int32_t within = (1 << bands.shift()) - 1;
        for (int64_t i = p * drawn.part; i < std::min(drawn.count, (p + 1) * drawn.part); i++) {
            const int32_t o = drawn.outputs[i];
            keys[next[o >> bands.shift()]++] = Key(o & within) << bits | Key(drawn.inputs[i]);
        }
    });
    parallel_for(bands.count(), threads, [&](int64_t b) {
        const Key *it = keys.get() + bands.start(b), *end = keys.get() + bands.start(b + 1);
        sort(keys.get() + bands.start(b), end - it, bits + bands.shift());
        int32_t* to = drawn.outputs + bands.start(b);
        for (int64_t r = 0; it < end; r++) {
            const int64_t row = bands.unit(b) + r;
            const int32_t *other = active.indices + active.ptr[row], *stop = active.indices + active.ptr[row + 1];
            const bool few = stop - other <= 32;  // then a look at all is quicker than guessing where to stop
            int32_t* const first = to;
            int32_t last = -1;
            for (; it < end && int64_t(*it >> bits) == r; it++) {
                const auto input = int32_t(*it & ((Key(1) << bits) - 1));
                bool known = input == last;
                if (few) {
                    for (const int32_t* a = other; a < stop; a++) known |= *a == input;
                } else {
                    while (other < stop && *other < input) other++;
                    known |= other < stop && *other == input;
                }
                *to = last = input;
                to += !known;
            }
            rows[row + 1] = int32_t(to - first);
        }
    });
}

}  // namespace

void build_alias(const double* weights, int64_t n, AliasColumn* columns) {
    double total = 0;
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        total += weights[i];
        if (weights[i] > weights[best]) best = i;
    }
    Scratch<double> share(n);
    Scratch<int32_t> small(n), large(n);  // stacks
    int64_t smalls = 0, larges = 0;
    for (int64_t i = 0; i < n; i++) {
        share[i] = weights[i] / total * double(n);
        const bool is_small = share[i] < 1;
        small[smalls] = large[larges] = int32_t(i);
        smalls += is_small;
        larges += !is_small;
    }
    while (smalls > 0 && larges > 0) {
        const int32_t l = large[larges - 1];
        double left = share[l];
        while (smalls > 0 && !(left < 1)) {
            const int32_t s = small[--smalls];
            columns[s] = {uint32_t(share[s] * 0x1p32), l};
            left = left - (1 - share[s]);
        }
        share[l] = left;
        if (left < 1) {
            larges--;
            small[smalls++] = l;
        }
    }
    // What rounding has left over takes its whole column, unless it must never be taken.
    auto keep = [&](int32_t i) { columns[i] = {0, weights[i] > 0 ? i : int32_t(best)}; };
    for (int64_t i = 0; i < smalls; i++) keep(small[i]);
    for (int64_t i = 0; i < larges; i++) keep(large[i]);
}

bool sound(const AliasColumn* columns, int64_t n, int64_t tables) {
    bool good = true;
    for (int64_t i = 0; i < n * tables; i++) good &= columns[i].alias >= 0 && columns[i].alias < n;
    return good;
}

int64_t draw(const Stream& stream, int64_t draws, int64_t n_in, int64_t n_out, const AliasColumn* inputs,
             const AliasColumn* outputs, int64_t groups, const ByOutput& active, int32_t* ptr, int32_t* indices,
             int threads) {
    std::fill(ptr, ptr + n_out + 1, 0);
    if (draws == 0) return 0;
    threads = worth_sharing(draws, threads);
    Bands bands(n_out, draws);
    constexpr int64_t kPiece = Picker::kMost, kBlocks = 2;  // draws, and blocks of two draws each
    const Picker input_unit(inputs, n_in, groups, threads), output_unit(outputs, n_out, 1, threads);
    const int64_t part = ((draws - 1) / bands.parts() / kPiece + 1) * kPiece;
    int32_t* input = indices;  // until it holds the result
    const Scratch<int32_t> output(draws);
    parallel_for(bands.parts(), threads, [&](int64_t p) {
        int64_t* count = bands.of(p);
        uint64_t words[2 * kPiece];
        const int64_t last = std::min(draws, (p + 1) * part);
        for (int64_t begin = p * part; begin < last; begin += kPiece) {
            const int64_t n = std::min(kPiece, last - begin);
            for (int64_t i = 0; i < n; i += 2 * kBlocks) philox<kBlocks>(stream, uint64_t((begin + i) / 2), words + 2 * i);
            const int32_t* const here = output.get() + begin;
            output_unit(words + 1, n, 2, output.get() + begin);
            if (groups == 1)
                input_unit(words, n, 2, input + begin);
            else
                input_unit(words, n, 2, input + begin, [&](int64_t i) { return here[i] / (n_out / groups); });
            for (int64_t i = begin; i < begin + n; i++) count[output[i] >> bands.shift()]++;
        }
    });
    bands.place();
    const Drawn drawn{input, output.get(), draws, part};
    const bool narrow = bits_of(n_in) + bands.shift() <= 32;
    (narrow ? keep_new<uint32_t> : keep_new<uint64_t>)(drawn, bands, n_in, active, ptr, threads);
    for (int64_t r = 0; r < n_out; r++) ptr[r + 1] += ptr[r];
    parallel_for(bands.count(), threads, [&](int64_t b) {
        const int32_t first = ptr[bands.unit(b)], last = ptr[bands.unit(b) + bands.units(b)];
        std::copy_n(output.get() + bands.start(b), last - first, indices + first);
    });
    return ptr[n_out];
}

template <class T>
void signs(const Stream& stream, int64_t first, int64_t samples, int64_t positions, T* out, int threads) {
    uint64_t coefficient[4];
    philox<1>(stream, 0, coefficient);
    for (uint64_t& it : coefficient) it %= kPrime;
    pieces(positions, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, samples)),
           worth_sharing(samples * positions, threads), [&](int64_t begin, int64_t end) {
               for (int64_t p = begin; p < end; p++)
                   for (int64_t n = 0; n < samples; n++) {
                       const uint64_t at = reduce(Wide(uint64_t(first + n)) * uint64_t(positions) + uint64_t(p));
                       uint64_t value = coefficient[3];
                       for (int i = 2; i >= 0; i--) value = reduce(Wide(value) * at + coefficient[i]);
                       out[p * samples + n] = value & 1 ? T(1) : T(-1);
                   }
           });
}

template void signs<float>(const Stream&, int64_t, int64_t, int64_t, float*, int);
template void signs<double>(const Stream&, int64_t, int64_t, int64_t, double*, int);

}  // namespace rewire
