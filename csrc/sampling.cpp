#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

namespace rewire {
namespace {

// Rows of about the same length are shared out in runs of this many.
int64_t rows_each(int64_t rows) { return std::max<int64_t>(1, std::min<int64_t>(1024, rows / 64)); }

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

}  // namespace

void complement(const ByOutput& active, int64_t n_in, int64_t n_out, int32_t* ptr, int32_t* indices, int threads) {
    for (int64_t r = 0; r <= n_out; r++) ptr[r] = int32_t(r * n_in - active.ptr[r]);
    pieces(n_out, rows_each(n_out), worth_sharing(ptr[n_out], threads), [&](int64_t begin, int64_t end) {
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

int64_t replace(const ByOutput& active, const uint8_t* pruned, const ByOutput& subset, const uint8_t* grown,
                int64_t n_out, int64_t count, int32_t* ptr, int32_t* indices, int32_t* source, int threads) {
    threads = worth_sharing(int64_t(active.ptr[n_out]) + subset.ptr[n_out], threads);
    pieces(n_out, rows_each(n_out), threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int32_t here = 0;
            for (int32_t e = active.ptr[r]; e < active.ptr[r + 1]; e++) here += !pruned[e];
            for (int32_t e = subset.ptr[r]; e < subset.ptr[r + 1]; e++) here += grown[e] != 0;
            ptr[r + 1] = here;
        }
    });
    running_total(ptr, n_out);
    if (ptr[n_out] != count) return ptr[n_out];
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
    return count;
}

template <class T>
void follow(const T* x, const int32_t* source, int64_t n, T fresh, T* out, int threads) {
    pieces(n, 1 << 16, worth_sharing(n, threads), [&](int64_t begin, int64_t end) {
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
    threads = worth_sharing(n, threads);
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
void unit_sums(const T* x, const T* signs, int64_t rows, int64_t len, T* sums, int threads) {
    constexpr int64_t kLanes = 16;
    pieces(rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, len)), worth_sharing(rows * len, threads),
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

}  // namespace rewire
