#include "topology.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "bands.h"
#include "dispatch.h"
#include "parallel.h"
#include "scratch.h"

namespace rewire {
namespace {

bool sound(const ByOutput& a, int64_t row, int64_t inputs, int64_t count) {
    const int32_t begin = a.ptr[row], end = a.ptr[row + 1];
    if (begin < 0 || end < begin || end > count) return false;
    bool good = true;
    for (int32_t e = begin, last = -1; e < end; last = a.indices[e++]) good &= a.indices[e] > last;
    return good && (begin == end || a.indices[end - 1] < inputs);
}

}  // namespace

int64_t first_bad_row(const ByOutput& a, int64_t rows, int64_t inputs, int64_t count, int threads) {
    if (a.ptr[0] != 0) return 0;
    const int64_t piece = 1 << 12;
    std::atomic<int64_t> first{rows};
    parallel_for((rows + piece - 1) / piece, worth_sharing(count + rows, threads), [&](int64_t p) {
        int64_t r = p * piece;
        const int64_t end = std::min(rows, r + piece);
        while (r < end && sound(a, r, inputs, count)) r++;
        if (r == end) return;
        for (int64_t seen = first; r < seen && !first.compare_exchange_weak(seen, r);) {
        }
    });
    if (first < rows) return first;
    return a.ptr[rows] == count ? -1 : rows - 1;
}

Problem find_problem(const ByOutput& a, int64_t rows, int64_t limit, Order order, const int32_t* places, int threads) {
    const int32_t step = int32_t(order);
    const Bounds& look = bounds();
    const int64_t count = a.ptr[rows], piece = 1 << 16;
    bool rises = true;
    for (int64_t r = 0; r < rows; r++) rises &= a.ptr[r] <= a.ptr[r + 1];
    if (!rises) return Problem::count;
    std::atomic<bool> units{true}, in_places{true};
    std::atomic<int64_t> falls{0};
    pieces(count, piece, worth_sharing(count, threads), [&](int64_t begin, int64_t end) {
        if (!look.within(a.indices + begin, end - begin, 0, limit)) units = false;
        if (places && !look.within(places + begin, end - begin, 0, count)) in_places = false;
        const int64_t from = std::max<int64_t>(0, begin - 1);
        if (order != Order::any) falls += look.falls(a.indices + from, end - from, step);
    });
    if (order != Order::any) {  // between rows they may fall
        for (int64_t r = 0; r < rows; r++) {
            const int64_t begin = a.ptr[r];
            falls -= begin > 0 && a.ptr[r + 1] > begin && a.indices[begin] < int64_t(a.indices[begin - 1]) + step;
        }
        if (falls) units = false;
    }
    return !units ? Problem::units : !in_places ? Problem::places : Problem::none;
}

void index_by_input(const ByOutput& a, int64_t in_channels, int64_t out_channels, int64_t taps, int32_t* ptr,
                    int32_t* outputs, int32_t* order, int threads) {
    const int64_t slots = in_channels * taps, count = a.ptr[out_channels];
    std::fill(ptr, ptr + (count ? 0 : slots + 1), 0);
    if (!count) return;
    threads = worth_sharing(count, threads);
    auto slot = [&](int32_t index) { return taps == 1 ? index : index % in_channels * taps + index / in_channels; };
    Bands bands(slots, count);
    // Parts are runs of rows with about as many connections each.
    auto row = [&](int64_t part) {
        return std::lower_bound(a.ptr, a.ptr + out_channels, int32_t(count * part / bands.parts())) - a.ptr;
    };
    parallel_for(bands.parts(), threads, [&](int64_t p) {
        int64_t* here = bands.of(p);
        const int32_t end = a.ptr[row(p + 1)];
        for (int32_t e = a.ptr[row(p)]; e < end; e++) here[slot(a.indices[e]) >> bands.shift()]++;
    });
    bands.place();
    struct Entry {
        int32_t slot, output, place;
    };
    const Scratch<Entry> dealt(count);
    parallel_for(bands.parts(), threads, [&](int64_t p) {
        int64_t* next = bands.of(p);
        const int64_t end = row(p + 1);
        for (int64_t o = row(p); o < end; o++)
            for (int32_t e = a.ptr[o]; e < a.ptr[o + 1]; e++) {
                const int32_t to = slot(a.indices[e]);
                dealt[next[to >> bands.shift()]++] = {to, int32_t(o), e};
            }
    });
    ptr[slots] = int32_t(count);
    parallel_for(bands.count(), threads, [&](int64_t b) {
        const Entry *begin = &dealt[bands.start(b)], *end = &dealt[bands.start(b + 1)];
        const Scratch<int32_t> mine(bands.units(b));
        int32_t* const next = mine.get() - bands.unit(b);  // by slot
        std::fill_n(mine.get(), bands.units(b), 0);
        for (const Entry* it = begin; it < end; it++) next[it->slot]++;
        auto total = int32_t(bands.start(b));
        for (int64_t s = bands.unit(b); s < bands.unit(b) + bands.units(b); s++) {
            ptr[s] = total;
            total += std::exchange(next[s], total);
        }
        for (const Entry* it = begin; it < end; it++) {
            const int32_t k = next[it->slot]++;
            outputs[k] = it->output;
            order[k] = it->place;
        }
    });
}

}  // namespace rewire
