// Going over the source of a pass: the tiles in the order in which they are worked on, each with what it reads at hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "deal.h"
#include "plan.h"
#include "strip.h"

namespace rewire {

constexpr int64_t kSoon = 4 << 20;  // bytes of a source that comes from near enough without being asked for

// Where some tiles read: the element for tap shift 0 of position 0, which way a window lies in its ring, and what the
// tiles after them will read.
template <class T>
struct Place {
    const T* source;
    int64_t phase;
    Soon soon;
};

// Rows of one panel of an image, packed as [channel][row][column][panel]. It moves down the image.
template <class T>
class Window {
   public:
    // `totals`, or null: takes in the sum of each channel over the rows from `own` on.
    Window(const Table<T>& table, const Plan& plan, const Source<T>& source, int64_t n, int64_t own, double* totals)
        : table_(table),
          plan_(plan),
          source_(source),
          n_(n),
          len_(std::min(plan.panel, plan.batch - n)),
          own_(own),
          totals_(totals),
          rows_(plan.packed() ? plan.channels * plan.plane() * plan.panel : 0) {}

    // The element where tap shift 0 of row i, column 0 reads, once all is there that rows i to `last` read.
    const T* at(int64_t i, int64_t last) {
        const int64_t low = i * plan_.h.stride + plan_.origin;
        if (!plan_.packed()) return source_.tensor + n_ * plan_.from.columns + low * plan_.row() * plan_.panel;
        hold(std::max<int64_t>(low, 0),
             std::min(plan_.height, last * plan_.h.stride + plan_.rows.highest + 1));
        return rows_.get() + (plan_.ring ? 0 : low - first_) * plan_.row() * plan_.panel;
    }

   private:
    void hold(int64_t low, int64_t high) {
        if (plan_.height * plan_.width == 1 && !source_.reading.scale) return hold_units(high);
        const Memory& from = plan_.from;
        const int64_t row = plan_.row() * plan_.panel, plane = plan_.plane() * plan_.panel;
        if (plan_.ring) {
            last_ = std::max(last_, low);
        } else if (high > first_ + plan_.window_rows) {  // full: keep what is still needed
            const int64_t kept = std::max<int64_t>(0, last_ - low);
            for (int64_t c = 0; kept && c < plan_.channels; c++)
                std::memmove(&rows_[c * plane], &rows_[c * plane + (low - first_) * row],
                             sizeof(T) * size_t(kept * row));
            first_ = low;
            last_ = std::max(last_, low);
        }
        const auto fetch = [&](int64_t c, int64_t r) {
            T* to = &rows_[c * plane + (plan_.ring ? plan_.phase(r) : r - first_) * row];
            pack(c, n_ * from.columns + (c * from.channels + r * from.rows) * from.lane, to);
            if (totals_ && r >= own_) totals_[c] += total(to);
        };
        if (from.panels)  // in the order in which they lie in memory
            for (int64_t r = last_; r < high; r++)
                for (int64_t c = 0; c < plan_.channels; c++) fetch(c, r);
        else
            for (int64_t c = 0; c < plan_.channels; c++)
                for (int64_t r = last_; r < high; r++) fetch(c, r);
        last_ = std::max(last_, high);
    }

    // All units of a linear layer at once.
    void hold_units(int64_t high) {
        if (last_ >= high) return;
        const int64_t at = n_ * plan_.from.columns;
        pack_pieces(0, at, rows_.get(), plan_.channels, len_);
        if (totals_ && own_ <= 0) table_.totals(rows_.get(), plan_.panel, plan_.channels, len_, totals_);
        last_ = high;
    }

    void pack(int64_t channel, int64_t at, T* to) const {
        const bool whole = plan_.from.lane == plan_.panel;  // then a row is one run
        pack_pieces(channel, at, to, whole ? 1 : plan_.width, whole ? plan_.width * len_ : len_);
    }

    void pack_pieces(int64_t channel, int64_t at, T* to, int64_t count, int64_t len) const {
        const T* from = source_.tensor + at;
        if (source_.reading.plain()) return table_.copy(from, plan_.from.lane, to, plan_.panel, count, len);
        table_.read(source_.reading.from(at), channel, from, plan_.from.lane, to, plan_.panel, count, len);
    }

    double total(const T* row) const {
        if (len_ == plan_.panel) return table_.total(row, plan_.width * len_);
        double sum = 0;
        for (int64_t j = 0; j < plan_.width; j++) sum += table_.total(row + j * plan_.panel, len_);
        return sum;
    }

    const Table<T>& table_;
    const Plan& plan_;
    const Source<T>& source_;
    int64_t n_, len_, own_, first_ = 0, last_ = 0;
    double* totals_;
    Scratch<T> rows_;
};

// The tiles of some passes over one source in the order in which they are worked on, cut into tasks. Several passes
// read one window; the first of them has the most rows and columns.
template <class T>
class Sweep {
   public:
    Sweep(const Table<T>& table, const std::vector<const Plan*>& plans, const Source<T>& source, int threads)
        : table_(table), plans_(plans), plan_(*plans.front()), source_(source) {
        if (plan_.mode == Mode::strip) {
            for (const Plan* plan : plans) tiles_.push_back(plan->strip_tiles());
            tasks_ = plan_.h.count ? int64_t(tiles_.front().size()) * plan_.bands() : 0;
            return;
        }
        if (plan_.mode != Mode::direct) {
            for (const Plan* plan : plans) tiles_.push_back(plan->columns());
            tasks_ = tiles_.front().empty() || !plan_.h.count ? 0 : plan_.panels() * plan_.bands();
            return;
        }
        for (const Plan* plan : plans) tiles_.push_back(plan->cut());
        const int64_t tiles = int64_t(tiles_.front().size());  // some of them in each task, if there are enough
        tasks_ = plan_.by_channel() ? 1 : std::max(std::min<int64_t>(8, tiles), std::min<int64_t>(64, tiles / 8));
        if (!source.reading.plain()) settle(threads);
    }

    int64_t tasks() const { return tasks_; }
    // How many blocks the rows of each of so many parts of the tasks are cut into.
    int64_t row_blocks(int64_t parts, int threads) const {
        return plan_.by_channel() ? 4 * threads : rewire::row_blocks(parts, threads);
    }
    int64_t elements() const { return plan_.h.count * plan_.w.count * plan_.batch; }

    // Whether the tasks together read all rows of the source, and can add up its channels on the way.
    bool totals() const {
        return plan_.mode == Mode::window && plan_.h.stride == 1 && plan_.origin <= 0 &&
               plan_.h.count - 1 + plan_.rows.highest >= plan_.height - 1;
    }
    // Whether they can do so beforehand, each for some of what it reads next.
    bool totals_first() const { return plan_.mode == Mode::direct && !plan_.from.panels; }
    // A task's share of this, of some of the channels.
    void add_totals(int64_t task, int64_t first, int64_t last, double* totals) const {
        const int64_t row = plan_.width * plan_.batch, plane = plan_.height * row;
        const int64_t begin = plan_.height * task / tasks_ * row, end = plan_.height * (task + 1) / tasks_ * row;
        for (int64_t c = first; begin < end && c < last; c++)
            totals[c] += table_.total(source_.tensor + c * plane + begin, end - begin);
    }
    const Source<T>& source() const { return source_; }

    // Calls body(pass, place, tiles, count) for the tiles of one task. `totals`, or null: takes in the sums of
    // the channels over what no other task adds.
    template <class Body>
    void run(int64_t task, double* totals, Body&& body) const {
        if (plan_.mode == Mode::strip) return along_strip(task, body);
        if (plan_.mode != Mode::direct) return slide(task, totals, body);
        for (size_t pass = 0; pass < plans_.size(); pass++) {
            const auto& tiles = tiles_[pass];
            const int64_t count = int64_t(tiles.size()), last = count * (task + 1) / tasks_;
            for (int64_t t = count * task / tasks_; t < last; t += kTiles)
                body(pass, Place<T>{source_.tensor, 0, {}}, &tiles[size_t(t)], std::min(kTiles, last - t));
        }
    }

   private:
    // What rows [first, end) of the plane read where it lies and the rows before them did not, in the panel that starts at
    // column n. A source that is near anyway need not be asked for.
    Soon soon(int64_t n, int64_t first, int64_t end) const {
        const Memory& from = plan_.from;
        if (plan_.packed() || plan_.runs() * plan_.run() * int64_t(sizeof(T)) <= kSoon) return {};
        const int64_t low = std::max<int64_t>(0, (first - 1) * plan_.h.stride + plan_.rows.highest + 1);
        const int64_t rows = std::min(plan_.height, (end - 1) * plan_.h.stride + plan_.rows.highest + 1) - low;
        if (rows <= 0) return {};
        const T* start = source_.tensor + n * from.columns + low * from.rows * from.lane;
        return {reinterpret_cast<const char*>(start), rows * from.rows * from.lane * int64_t(sizeof(T)) / 64};
    }

    // The source as it is read: where nothing is packed, this is done beforehand.
    void settle(int threads) {
        const int64_t len = plan_.run(), runs = plan_.runs();
        settled_ = Scratch<T>(runs * len);
        parallel_for(runs, worth(runs * len / 4, threads), [&](int64_t k) {
            table_.read(source_.reading.from(k * len), k % plan_.channels, source_.tensor + k * len, len,
                        &settled_[k * len], len, 1, len);
        });
        source_ = {settled_.get()};
    }

    template <class Body>
    void slide(int64_t task, double* totals, Body&& body) const {
        const int64_t bands = plan_.bands();
        const auto [band, n] = plan_.place(task, bands);
        const int64_t first = plan_.h.count * band / bands;
        // The band before has read up to here.
        const int64_t own = band ? (first - 1) * plan_.h.stride + plan_.rows.highest + 1 : 0;
        Window<T> window(table_, plan_, source_, n, own, totals);
        const int64_t end = plan_.h.count * (band + 1) / bands, each = int64_t(tiles_.front().size());
        const int64_t rows = std::max<int64_t>(1, std::min(plan_.rows_at_once(), kTiles / each));
        for (int64_t i = first; i < end; i += rows) {
            const int64_t next = std::min(end, i + rows);
            Place<T> from{window.at(i, next - 1), plan_.phase(i * plan_.h.stride + plan_.origin), {}};
            if (next < end) from.soon = soon(n, next, std::min(end, next + rows));
            for (size_t pass = 0; pass < plans_.size(); pass++, from.soon = {})
                place(pass, n, i, std::min(next, plans_[pass]->h.count), from, body);
        }
    }

    template <class Body>
    void along_strip(int64_t task, Body&& body) const {
        const int64_t blocks = plan_.blocks(), bands = plan_.bands(), band = task / blocks, block = task % blocks;
        const int64_t left = block * plan_.strips.columns, right = std::min(left + plan_.strips.columns, plan_.w.count);
        Strip<T> strip(table_, plan_, source_, left, right);
        const int64_t end = plan_.h.count * (band + 1) / bands, rows = plan_.strips.rows;
        for (int64_t i = plan_.h.count * band / bands; i < end; i += rows) {
            const int64_t next = std::min(end, i + rows);
            const Place<T> from{strip.at(i, next - 1), plan_.phase(i * plan_.h.stride + plan_.origin), {}};
            for (size_t pass = 0; pass < plans_.size(); pass++) {
                const Plan& plan = *plans_[pass];
                if (i >= plan.h.count) continue;
                Tile tile = tiles_[pass][size_t(block)];
                plan.h.reached(i, next, tile.kh0, tile.kh1);
                tile.dst += (plan.h.first + i * plan.h.every) * plan.to.rows * plan.to.lane;
                tile.len *= int32_t(next - i);
                body(pass, from, &tile, 1);
            }
        }
    }

    // The tiles of rows [first, end) of one pass, for the panel that starts at column n.
    template <class Body>
    void place(size_t pass, int64_t n, int64_t first, int64_t end, Place<T> from, Body&& body) const {
        const Plan& plan = *plans_[pass];
        Tile group[kTiles];
        int64_t count = 0;
        for (int64_t row = first; row < end; row++)
            for (Tile tile : tiles_[pass]) {
                plan.h.valid(row, tile.kh0, tile.kh1);
                tile.len = int32_t(std::min(plan.panel, plan.batch - n));
                tile.src += (row - first) * plan.h.stride * plan.row() * plan.panel;
                tile.dst += (plan.h.first + row * plan.h.every) * plan.to.rows * plan.to.lane + n * plan.to.columns;
                group[count++] = tile;
                if (count < kTiles) continue;
                body(pass, from, group, std::exchange(count, 0));
                from.soon = {};
            }
        if (count) body(pass, from, group, count);
    }

    const Table<T>& table_;
    const std::vector<const Plan*> plans_;
    const Plan& plan_;  // the first
    Source<T> source_;
    Scratch<T> settled_;
    std::vector<std::vector<Tile>> tiles_;  // of each pass; in a window: of one row
    int64_t tasks_;
};

}  // namespace rewire
