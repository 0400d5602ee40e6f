#include "pointwise.h"

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "parallel.h"

namespace rewire {
namespace {

int64_t offset(const Strides5& s, const int64_t* at) {
    return at[0] * s.outer[0] + at[1] * s.outer[1] + at[2] * s.outer[2];
}

// Whether the elements of a run lie one after another.
bool contiguous(const Strides5& s, const Loops5& loops) {
    return (loops.piece == 1 || s.piece == 1) && (loops.width == 1 || s.width == loops.piece);
}

// Elements [first, first + len) of a run, where they are not one after another.
template <class E, class T>
void gather(const E* from, const Strides5& s, const Loops5& loops, int64_t first, int64_t len, T* to) {
    int64_t w = first / loops.piece, p = first % loops.piece;
    for (int64_t done = 0; done < len; w++, p = 0) {
        const int64_t n = std::min(loops.piece - p, len - done);
        const E* piece = from + w * s.width;
        if (s.piece) std::copy_n(piece + p, n, to + done);
        else std::fill_n(to + done, n, T(*piece));
        done += n;
    }
}

// One thread's tiles and accumulators.
template <class T>
class Worker {
   public:
    Worker(const Table<T>& table, const Pointwise<T>& of)
        : table_(table), of_(of), memory_(size_t(of.slots * kPointwiseTile)), fixed_(of.reads.size()),
          slots_(size_t(of.slots)) {
        for (int32_t s = 0; s < of.slots; s++) slots_[size_t(s)] = &memory_[size_t(s * kPointwiseTile)];
        for (size_t k = 0; k < of.reads.size(); k++) {
            const Strides5& s = of.reads[k].strides;
            // A constant of the run, or a piece that repeats in every tile alike, is brought in once for a run.
            fixed_[k] = !contiguous(s, of.loops) && s.width == 0 && (s.piece == 0 || kPointwiseTile % of.loops.piece == 0);
        }
        tile_ = kPointwiseTile;
    }

    // Calls done(tile, slots, first, len) after each tile of a run.
    template <class Done>
    void run(const int64_t* at, Done&& done) {
        const int64_t all = of_.loops.run();
        for (int64_t first = 0; first < all; first += tile_) {
            const int64_t len = std::min(tile_, all - first);
            for (size_t k = 0; k < of_.reads.size(); k++) {
                const auto& read = of_.reads[k];
                const int64_t start = offset(read.strides, at);
                if (read.narrow) {
                    bring(read, start, first, len, k);
                    continue;
                }
                const T* from = read.data + start;
                if (contiguous(read.strides, of_.loops)) slots_[k] = const_cast<T*>(from + first);
                else if (!fixed_[k] || first == 0) gather(from, read.strides, of_.loops, first, len, slots_[k]);
            }
            for (const auto& write : of_.writes)
                if (!write.narrow) slots_[size_t(write.slot)] = write.data + offset(write.strides, at) + first;
            table_.pointwise(of_.program, of_.instructions, slots_.data(), len);
            for (const auto& write : of_.writes)
                if constexpr (std::is_same_v<T, float>)
                    if (write.narrow)
                        conversions().narrow(slots_[size_t(write.slot)], len, write.narrow + offset(write.strides, at) + first);
            done(first, len);
        }
    }

    const T* slot(int32_t s) const { return slots_[size_t(s)]; }

   private:
    // A tile of a narrow tensor.
    void bring(const PointwiseRead<T>& read, int64_t start, int64_t first, int64_t len, size_t k) {
        if constexpr (std::is_same_v<T, float>) {
            const bfloat16* from = read.narrow + start;
            if (contiguous(read.strides, of_.loops)) conversions().widen(from + first, len, slots_[k]);
            else if (!fixed_[k] || first == 0) gather(from, read.strides, of_.loops, first, len, slots_[k]);
        }
    }

    const Table<T>& table_;
    const Pointwise<T>& of_;
    std::vector<T> memory_;
    std::vector<char> fixed_;
    std::vector<T*> slots_;
    int64_t tile_;
};

// The sums of one channel: one number, or one for each sample.
template <class T>
struct Totals {
    const PointwiseSum<T>& of;
    std::vector<double> all;
};

// All runs of a channel, and what its slots sum up to.
template <class T>
void channel(const Table<T>& table, const Pointwise<T>& of, Worker<T>& worker, int64_t c) {
    const Loops5& loops = of.loops;
    const int along = loops.channel, first = along == 0 ? 1 : 0, second = 3 - along - first;
    std::vector<Totals<T>> totals;
    for (const auto& sum : of.sums) {
        const int64_t panels = sum.strides.outer[first] ? loops.outer[first] : 1;
        totals.push_back({sum, std::vector<double>(size_t(sum.strides.piece ? panels * loops.piece : 1))});
    }
    int64_t at[3];
    at[along] = c;
    for (at[first] = 0; at[first] < loops.outer[first]; at[first]++)
        for (at[second] = 0; at[second] < loops.outer[second]; at[second]++)
            worker.run(at, [&](int64_t begin, int64_t len) {
                for (Totals<T>& total : totals) {
                    const T* values = worker.slot(total.of.slot);
                    if (!total.of.strides.piece) {
                        total.all[0] += table.total(values, len);
                        continue;
                    }
                    double* sums = &total.all[size_t(total.of.strides.outer[first] ? at[first] * loops.piece : 0)];
                    int64_t p = begin % loops.piece;
                    for (int64_t i = 0; i < len; p = 0) {
                        const int64_t n = std::min(loops.piece - p, len - i);
                        for (int64_t j = 0; j < n; j++) sums[p + j] += double(values[i + j]);
                        i += n;
                    }
                }
            });
    for (const Totals<T>& total : totals) {
        if (total.of.raw) total.of.raw[c * total.of.raw_step] = total.all[0];
        if (!total.of.data && !total.of.narrow) continue;
        const int64_t start = c * total.of.strides.outer[along], pieces = total.of.strides.piece ? loops.piece : 1;
        for (size_t k = 0; k < total.all.size(); k++) {
            const int64_t to = start + int64_t(k) / pieces * total.of.strides.outer[first] + int64_t(k) % pieces;
            if (total.of.narrow) total.of.narrow[to] = bfloat16(total.all[k]);
            else total.of.data[to] = T(total.all[k]);
        }
    }
}

}  // namespace

template <class T>
void pointwise(const Table<T>& table, const Pointwise<T>& of, int threads) {
    const Loops5& loops = of.loops;
    const int64_t runs = loops.outer[0] * loops.outer[1] * loops.outer[2], length = runs * loops.run();
    threads = worth_sharing(length, threads);
    // A task is a few runs, one after another in memory, or all runs of some channels.
    const int64_t items = of.sums.empty() ? runs : loops.channels();
    const int64_t each = of.sums.empty() ? loops.run() : length / std::max<int64_t>(1, loops.channels());
    const int64_t block = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, each));
    pieces(items, block, threads, [&](int64_t begin, int64_t end) {
        Worker<T> worker(table, of);
        for (int64_t k = begin; k < end; k++) {
            if (!of.sums.empty()) {
                channel(table, of, worker, k);
                continue;
            }
            const int64_t rest = k / loops.outer[2], at[3] = {rest / loops.outer[1], rest % loops.outer[1], k % loops.outer[2]};
            worker.run(at, [](int64_t, int64_t) {});
        }
    });
}

template void pointwise<float>(const Table<float>&, const Pointwise<float>&, int);
template void pointwise<double>(const Table<double>&, const Pointwise<double>&, int);

}  // namespace rewire
