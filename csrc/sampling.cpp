#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "scratch.h"

namespace rewire {
namespace {

using Wide = unsigned __int128;

struct Words {
    uint64_t w[4];
};

Words philox(const Stream& s, uint64_t block) {
    uint64_t c0 = block + 1, c1 = s.layer, c2 = s.step, c3 = 0;  // numpy steps its counter first
    uint64_t k0 = s.seed, k1 = s.purpose;
    for (int round = 0; round < 10; round++) {
        const Wide a = Wide(0xD2E7470EE14C6C93u) * c0, b = Wide(0xCA5A826395121157u) * c2;
        c0 = uint64_t(b >> 64) ^ c1 ^ k0;
        c2 = uint64_t(a >> 64) ^ c3 ^ k1;
        c1 = uint64_t(b);
        c3 = uint64_t(a);
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    return {{c0, c1, c2, c3}};
}

// units[i] = what words[i * stride] draws from the table, or uniformly. The high word of word * n is a column,
// the low one a fraction of it. Columns are asked for well before they are looked at.
void pick(const uint64_t* words, int64_t count, int64_t stride, int64_t n, const AliasColumn* table, int32_t* units) {
    for (int64_t i = 0; i < count; i++) {
        units[i] = int32_t(Wide(words[i * stride]) * uint64_t(n) >> 64);
        if (table) __builtin_prefetch(table + units[i]);
    }
    for (int64_t i = 0; table && i < count; i++) {
        const AliasColumn& column = table[units[i]];
        const bool below = words[i * stride] * uint64_t(n) < column.threshold;
        units[i] = below ? units[i] : column.alias;
    }
}

int worth(int64_t work, int threads) { return work < (1 << 15) ? 1 : threads; }

// Calls task(begin, end) for pieces of [0, n).
template <class Task>
void pieces(int64_t n, int64_t piece, int threads, Task&& task) {
    parallel_for((n + piece - 1) / piece, threads,
                 [&](int64_t i) { task(i * piece, std::min(n, (i + 1) * piece)); });
}

// Rows of about the same length are shared out in runs of this many.
int64_t rows_each(int64_t rows) { return std::max<int64_t>(1, std::min<int64_t>(1024, rows / 64)); }

// Ascending, in linear time.
void sort(int32_t* row, int64_t n, int64_t limit, std::vector<int32_t>& spare) {
    constexpr int kBits = 11, kBuckets = 1 << kBits;
    if (n < 512) {
        std::sort(row, row + n);
        return;
    }
    spare.resize(size_t(n));
    int32_t *from = row, *to = spare.data();
    for (int shift = 0; shift < 31 && (int64_t(1) << shift) < limit; shift += kBits) {
        int64_t start[kBuckets + 1] = {0};
        for (int64_t i = 0; i < n; i++) start[((from[i] >> shift) & (kBuckets - 1)) + 1]++;
        for (int b = 0; b < kBuckets; b++) start[b + 1] += start[b];
        for (int64_t i = 0; i < n; i++) to[start[(from[i] >> shift) & (kBuckets - 1)]++] = from[i];
        std::swap(from, to);
    }
    if (from != row) std::copy(from, from + n, row);
}

// Keeps the distinct elements of a sorted row that are not in another; returns how many.
int64_t difference(int32_t* row, int64_t n, const int32_t* other, const int32_t* end) {
    int64_t kept = 0;
    int32_t last = -1;
    for (int64_t i = 0; i < n; i++) {
        const int32_t it = row[i];
        if (it == last) continue;
        last = it;
        while (other < end && *other < it) other++;
        if (other == end || *other != it) row[kept++] = it;
    }
    return kept;
}

void running_total(int32_t* ptr, int64_t rows) {
    ptr[0] = 0;
    for (int64_t r = 0; r < rows; r++) ptr[r + 1] += ptr[r];
}

template <class T>
struct Bits;
template <>
struct Bits<float> {
    using type = uint32_t;
};
template <>
struct Bits<double> {
    using type = uint64_t;
};

// An integer that orders as the score does.
template <class T>
typename Bits<T>::type order_key(T score) {
    using U = typename Bits<T>::type;
    constexpr U sign = U(1) << (8 * sizeof(T) - 1);
    if (std::isnan(score)) score = -std::numeric_limits<T>::infinity();
    score += T(0);  // -0 is 0
    U bits;
    std::memcpy(&bits, &score, sizeof(T));
    return bits & sign ? ~bits : bits | sign;
}

template <class Visit>
void for_each_key(const ByOutput& rows, const uint8_t* chosen, int64_t n_in, int64_t n_out, Visit&& visit) {
    for (int64_t r = 0; r < n_out; r++)
        for (int32_t e = rows.ptr[r]; e < rows.ptr[r + 1]; e++)
            if (!chosen || chosen[e]) visit(uint64_t(r * n_in + rows.indices[e]));
}

constexpr uint64_t kPrime = (uint64_t(1) << 61) - 1;

uint64_t reduce(Wide x) {
    const uint64_t sum = uint64_t(x & kPrime) + uint64_t(x >> 61);
    return sum >= kPrime ? sum - kPrime : sum;
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
            columns[s] = {uint64_t(share[s] * 0x1p64), l, 0};
            left = left - (1 - share[s]);
        }
        share[l] = left;
        if (left < 1) {
            larges--;
            small[smalls++] = l;
        }
    }
    // What rounding has left over takes its whole column, unless it must never be taken.
    auto keep = [&](int32_t i) { columns[i] = {0, weights[i] > 0 ? i : int32_t(best), 0}; };
    for (int64_t i = 0; i < smalls; i++) keep(small[i]);
    for (int64_t i = 0; i < larges; i++) keep(large[i]);
}

int64_t draw(const Stream& stream, int64_t draws, int64_t n_in, int64_t n_out, const AliasColumn* inputs,
             const AliasColumn* outputs, const ByOutput& active, int32_t* ptr, int32_t* indices, int threads) {
    std::fill(ptr, ptr + n_out + 1, 0);
    if (draws == 0) return 0;
    threads = worth(draws, threads);
    int32_t* input = indices;  // until it holds the result
    // Bands of output units, few enough that each keeps a cache line at hand while draws are dealt out to
    // them, and narrow enough that one fits the cache when it is sorted.
    constexpr int64_t kBands = 1024, kParts = 16, kPiece = 256;
    int shift = 0;
    while ((n_out - 1) >> shift >= kBands) shift++;
    const int64_t bands = ((n_out - 1) >> shift) + 1;
    const int64_t parts = std::min<int64_t>(kParts, (draws + (1 << 14) - 1) >> 14);
    const int64_t part = (draws + parts - 1) / parts / 2 * 2 + 2;  // whole blocks of random words
    Scratch<int32_t> output(draws);
    Scratch<int64_t> next(parts * bands);
    parallel_for(parts, threads, [&](int64_t p) {
        int64_t* count = next.get() + p * bands;
        std::fill(count, count + bands, 0);
        uint64_t words[2 * kPiece];
        const int64_t last = std::min(draws, (p + 1) * part);
        for (int64_t begin = p * part; begin < last; begin += kPiece) {
            const int64_t n = std::min(kPiece, last - begin);
            for (int64_t i = 0; i < n; i += 2) {
                const Words block = philox(stream, uint64_t((begin + i) / 2));
                std::copy(block.w, block.w + 4, words + 2 * i);
            }
            pick(words, n, 2, n_in, inputs, input + begin);
            pick(words + 1, n, 2, n_out, outputs, output.get() + begin);
            for (int64_t i = begin; i < begin + n; i++) count[output[i] >> shift]++;
        }
    });
    std::vector<int64_t> start(size_t(bands + 1));
    int64_t total = 0;
    for (int64_t b = 0; b < bands; b++) {
        start[size_t(b)] = total;
        for (int64_t p = 0; p < parts; p++) total += std::exchange(next[p * bands + b], total);
    }
    start[size_t(bands)] = total;
    struct Drawn {
        int32_t row, input;  // row of the band
    };
    Scratch<Drawn> dealt(draws);
    parallel_for(parts, threads, [&](int64_t p) {
        int64_t* place = next.get() + p * bands;
        for (int64_t i = p * part; i < std::min(draws, (p + 1) * part); i++)
            dealt[place[output[i] >> shift]++] = {output[i] & ((1 << shift) - 1), input[i]};
    });

    // Each band by row, into the memory of `output`, where its new connections stay until all are counted.
    Scratch<int32_t>& sorted = output;
    std::vector<int64_t> found(size_t(bands + 1), 0);
    parallel_for(bands, threads, [&](int64_t b) {
        const int64_t row = b << shift, rows = std::min(n_out - row, int64_t(1) << shift);
        const int64_t begin = start[size_t(b)], end = start[size_t(b + 1)];
        std::vector<int32_t> place(size_t(rows + 1), 0), spare;
        for (int64_t i = begin; i < end; i++) place[size_t(dealt[i].row + 1)]++;
        for (int64_t r = 0; r < rows; r++) place[size_t(r + 1)] += place[size_t(r)];
        for (int64_t i = begin; i < end; i++) sorted[begin + place[size_t(dealt[i].row)]++] = dealt[i].input;
        int32_t* to = sorted.get() + begin;
        for (int64_t r = 0, from = 0; r < rows; from = place[size_t(r++)]) {  // place[r] is now where r ends
            int32_t* mine = sorted.get() + begin + from;
            const int64_t n = place[size_t(r)] - from;
            if (n == 0) continue;
            sort(mine, n, n_in, spare);
            const int64_t kept = difference(mine, n, active.indices + active.ptr[row + r],
                                            active.indices + active.ptr[row + r + 1]);
            to = std::copy_n(mine, kept, to);
            ptr[row + r + 1] = int32_t(kept);
        }
        found[size_t(b + 1)] = to - (sorted.get() + begin);
    });
    running_total(ptr, n_out);
    for (int64_t b = 0; b < bands; b++) found[size_t(b + 1)] += found[size_t(b)];
    parallel_for(bands, threads, [&](int64_t b) {
        std::copy_n(sorted.get() + start[size_t(b)], found[size_t(b + 1)] - found[size_t(b)],
                    indices + found[size_t(b)]);
    });
    return ptr[n_out];
}

void complement(const ByOutput& active, int64_t n_in, int64_t n_out, int32_t* ptr, int32_t* indices, int threads) {
    for (int64_t r = 0; r <= n_out; r++) ptr[r] = int32_t(r * n_in - active.ptr[r]);
    pieces(n_out, rows_each(n_out), worth(ptr[n_out], threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int32_t* out = indices + ptr[r];
            int32_t from = 0;
            for (int32_t e = active.ptr[r]; e <= active.ptr[r + 1]; e++) {
                const int32_t to = e < active.ptr[r + 1] ? active.indices[e] : int32_t(n_in);
                while (from < to) *out++ = from++;
                from = to + 1;
            }
        }
    });
}

void replace(const ByOutput& active, const uint8_t* pruned, const ByOutput& subset, const uint8_t* grown,
             int64_t n_out, int32_t* ptr, int32_t* indices, int32_t* source, int threads) {
    threads = worth(int64_t(active.ptr[n_out]) + subset.ptr[n_out], threads);
    pieces(n_out, rows_each(n_out), threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int32_t count = 0;
            for (int32_t e = active.ptr[r]; e < active.ptr[r + 1]; e++) count += !pruned[e];
            for (int32_t e = subset.ptr[r]; e < subset.ptr[r + 1]; e++) count += grown[e] != 0;
            ptr[r + 1] = count;
        }
    });
    running_total(ptr, n_out);
    pieces(n_out, rows_each(n_out), threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int32_t a = active.ptr[r], s = subset.ptr[r];
            const int32_t a_end = active.ptr[r + 1], s_end = subset.ptr[r + 1];
            for (int32_t e = ptr[r]; e < ptr[r + 1]; e++) {
                while (a < a_end && pruned[a]) a++;
                while (s < s_end && !grown[s]) s++;
                const bool old = s == s_end || (a < a_end && active.indices[a] < subset.indices[s]);
                indices[e] = old ? active.indices[a] : subset.indices[s];
                source[e] = old ? a : -1;
                old ? a++ : s++;
            }
        }
    });
}

template <class T>
void follow(const T* x, const int32_t* source, int64_t n, T fresh, T* out, int threads) {
    pieces(n, 1 << 16, worth(n, threads), [&](int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; e++) out[e] = source[e] < 0 ? fresh : x[source[e]];
    });
}

int64_t mark(const ByOutput& rows, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* bits) {
    int64_t fresh = 0;
    for_each_key(rows, chosen, n_in, n_out, [&](uint64_t key) {
        const auto bit = uint8_t(1u << (key & 7));
        fresh += !(bits[key >> 3] & bit);
        bits[key >> 3] |= bit;
    });
    return fresh;
}

void sketch(const ByOutput& rows, const uint8_t* chosen, int64_t n_in, int64_t n_out, uint8_t* registers) {
    for_each_key(rows, chosen, n_in, n_out, [&](uint64_t key) {
        uint64_t h = key + 0x9E3779B97F4A7C15u;  // splitmix64
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
        h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
        h ^= h >> 31;
        const uint64_t rest = h << 12 | 1u << 11;
        uint8_t& most = registers[h >> 52];
        most = std::max(most, uint8_t(__builtin_clzll(rest) + 1));
    });
}

template <class T>
void select(const T* scores, int64_t n, int64_t k, bool largest, uint8_t* chosen, int threads) {
    using U = typename Bits<T>::type;
    if (k <= 0 || k >= n) {
        std::fill(chosen, chosen + n, uint8_t(k > 0));
        return;
    }
    constexpr int kBits = 11, kBuckets = 1 << kBits, kWidth = 8 * sizeof(T);
    constexpr int64_t kPiece = 1 << 16;
    const int64_t parts = (n + kPiece - 1) / kPiece;
    threads = worth(n, threads);
    // Largest first is smallest first of the complement.
    auto key = [&](int64_t i) { return largest ? U(~order_key(scores[i])) : order_key(scores[i]); };

    // The key of the k-th, digit by digit; of those that share it, `ties` are taken.
    U prefix = 0, known = 0;
    int64_t ties = k;
    std::vector<int64_t> counts;
    for (int high = kWidth; high > 0; high -= kBits) {
        const int shift = std::max(0, high - kBits);
        const U digits = U(kBuckets - 1) & U((uint64_t(1) << (high - shift)) - 1);
        const int64_t groups = std::min<int64_t>(parts, 16);
        counts.assign(size_t(groups * kBuckets), 0);
        parallel_for(groups, threads, [&](int64_t g) {
            int64_t* count = counts.data() + g * kBuckets;
            for (int64_t i = n * g / groups; i < n * (g + 1) / groups; i++) {
                const U it = key(i);
                if ((it & known) == prefix) count[(it >> shift) & digits]++;
            }
        });
        for (int64_t b = 0;; b++) {
            int64_t here = 0;
            for (int64_t g = 0; g < groups; g++) here += counts[size_t(g * kBuckets + b)];
            if (here >= ties) {
                prefix |= U(b) << shift;
                break;
            }
            ties -= here;
        }
        known |= digits << shift;
    }

    std::vector<int64_t> before(size_t(parts + 1), 0);
    pieces(n, kPiece, threads, [&](int64_t begin, int64_t end) {
        int64_t equal = 0;
        for (int64_t i = begin; i < end; i++) {
            const U it = key(i);
            chosen[i] = it < prefix;
            equal += it == prefix;
        }
        before[size_t(begin / kPiece + 1)] = equal;
    });
    for (int64_t p = 0; p < parts; p++) before[size_t(p + 1)] += before[size_t(p)];
    pieces(n, kPiece, threads, [&](int64_t begin, int64_t end) {
        int64_t left = ties - before[size_t(begin / kPiece)];
        for (int64_t i = begin; i < end && left > 0; i++)
            if (key(i) == prefix) {
                chosen[i] = 1;
                left--;
            }
    });
}

template <class T>
void signs(const Stream& stream, int64_t first, int64_t samples, int64_t positions, T* out, int threads) {
    const Words words = philox(stream, 0);
    uint64_t coefficient[4];
    for (int i = 0; i < 4; i++) coefficient[i] = words.w[i] % kPrime;
    pieces(positions, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, samples)), worth(samples * positions, threads),
           [&](int64_t begin, int64_t end) {
               for (int64_t p = begin; p < end; p++)
                   for (int64_t n = 0; n < samples; n++) {
                       const uint64_t at = reduce(Wide(uint64_t(first + n)) * uint64_t(positions) + uint64_t(p));
                       uint64_t value = coefficient[3];
                       for (int i = 2; i >= 0; i--) value = reduce(Wide(value) * at + coefficient[i]);
                       out[p * samples + n] = value & 1 ? T(1) : T(-1);
                   }
           });
}

template <class T>
void unit_sums(const T* x, const T* signs, int64_t rows, int64_t len, T* sums, int threads) {
    constexpr int64_t kLanes = 16;
    pieces(rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, len)), worth(rows * len, threads),
           [&](int64_t begin, int64_t end) {
               for (int64_t r = begin; r < end; r++) {
                   const T* row = x + r * len;
                   double lane[kLanes] = {0}, total = 0;
                   int64_t i = 0;
                   if (signs)
                       for (; i + kLanes <= len; i += kLanes)
                           for (int64_t j = 0; j < kLanes; j++) lane[j] += double(row[i + j] * signs[i + j]);
                   else
                       for (; i + kLanes <= len; i += kLanes)
                           for (int64_t j = 0; j < kLanes; j++) lane[j] += double(std::abs(row[i + j]));
                   for (; i < len; i++) total += double(signs ? row[i] * signs[i] : std::abs(row[i]));
                   for (const double part : lane) total += part;
                   sums[r] = T(total);
               }
           });
}

template void follow<float>(const float*, const int32_t*, int64_t, float, float*, int);
template void follow<double>(const double*, const int32_t*, int64_t, double, double*, int);
template void unit_sums<float>(const float*, const float*, int64_t, int64_t, float*, int);
template void unit_sums<double>(const double*, const double*, int64_t, int64_t, double*, int);
template void select<float>(const float*, int64_t, int64_t, bool, uint8_t*, int);
template void select<double>(const double*, int64_t, int64_t, bool, uint8_t*, int);
template void signs<float>(const Stream&, int64_t, int64_t, int64_t, float*, int);
template void signs<double>(const Stream&, int64_t, int64_t, int64_t, double*, int);

}  // namespace rewire
