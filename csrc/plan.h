// How one pass over a layer is cut into work: which positions read which, in what order, from where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "layers.h"
#include "scratch.h"

namespace rewire {

// The lowest and the highest of some shifts, 0 among them if there are none.
struct Shifts {
    int64_t lowest, highest;
};

// One axis of an image: index i of what is computed reads source index i*stride + shift[k] through the
// k-th of `taps`, and lies at first + i*every in its own plane.
struct Axis {
    int64_t count, stride, source;
    int64_t first, every;
    std::vector<int32_t> taps;
    std::vector<int64_t> shift;  // ascending or descending
    int64_t divide = 1;          // then it is (i*stride + shift[k]) / divide, where that is whole

    // The source index of tap k, or -1 if it lies outside the image or between two places.
    int64_t at(int64_t i, size_t k) const;
    // The taps whose source lies inside the image; those that reach it from any of the indices [first, last).
    void valid(int64_t i, int32_t& begin, int32_t& end) const { reached(i, i + 1, begin, end); }
    void reached(int64_t first, int64_t last, int32_t& begin, int32_t& end) const;
    Shifts shifts() const;
};

Axis forward_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d);
// Input positions r, r + s, r + 2s, ... and the taps that connect them to output positions.
Axis backward_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d, int32_t r);
// All input positions and all taps, where what lies between two output positions counts as zero.
Axis spread_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d);

// Where the source is read from while a task runs.
//   direct: the tensor, as it comes.
//   rows:   the tensor, a few rows of one panel after the other: in panels they follow each other in memory.
//   window: a few rows of one panel of the image, [channel][row][column][panel], packed by each task
//           just before they are needed. A linear layer has one row of one position.
//   strip:  some columns of a few rows of the image with all samples, packed likewise, and zeros where taps lie outside of
//           it: each tap reads one run over all columns, and maybe rows, of a tile. For batches that fill no vectors.
// In batch-last memory the planes of a channel often lie a power of two apart and fall on each other in the
// cache; a window is compact, and in the cache of the core that reads it.
enum class Mode { direct, rows, window, strip };

// Where a tensor has what: column n of position (h, w) of a channel, n being the first of a panel, lies at
// n * columns + (channel * channels + h * rows + w) * lane. Batch-last, [channel][h][w][n], a lane is the batch; in
// panels, [n / panel][h][channel][w][panel], all channels of a row follow each other.
struct Memory {
    int64_t lane, columns, channels, rows;
    bool panels;
};

// How strips are cut, and what that costs: about as many vectors as each connection reads.
struct Strips {
    int64_t columns, rows;  // of a tile
    int64_t window_rows;
    bool ring, per_tap;     // whether rows are packed once for each tap across, at the columns where it is used
    double cost;
};

// Columns that are taken at once: a tile's, or of a batch that is no multiple of it about as many, in whole vectors.
int64_t panel_width(int64_t batch, int64_t tile);

struct Plan {
    Axis h, w;
    int64_t channels, height, width;  // of the source
    int64_t batch, panel;             // columns of the batch, and how many are taken at once
    Memory from, to;                  // the source, and what is computed
    Mode mode;
    Shifts rows;                          // of the rows that are read, by this pass or another one from the same window
    int64_t origin = 0, window_rows = 0;  // the lowest of them; rows a window holds
    // Whether row r of the source lies in place r % window_rows of a window: then nothing is moved as the window moves
    // down, and where taps read depends on its lowest row.
    bool ring = false;
    Strips strips{};

    // `connections` that each read the source in one pass over it, or -1 if it has to be packed to be read at all.
    Plan(Axis h_, Axis w_, Shifts rows_, int64_t channels_, int64_t batch_, int64_t panel_,
         Memory from_, Memory to_, int64_t element, int64_t connections);
    // One in strips.
    Plan(Axis h_, Axis w_, Shifts rows_, int64_t channels_, int64_t batch_, Memory from_, Memory to_, const Strips& strips_);

    int64_t panels() const { return (batch + panel - 1) / panel; }
    // Contiguous runs of the source: a channel, or one row of a panel of it; the k-th is of channel k % channels.
    int64_t runs() const { return channels * (from.panels ? panels() * height : 1); }
    int64_t run() const { return (from.panels ? width : height * width) * from.lane; }
    bool packed() const { return mode == Mode::window || mode == Mode::strip; }
    // Where the source is read: elements from one position to the next, positions from one row or channel to the next.
    int64_t step() const { return packed() ? panel : from.lane; }
    int64_t row() const {
        if (mode == Mode::strip) return strips.columns + (strips.per_tap ? 0 : w.shifts().highest - w.shifts().lowest);
        return !packed() ? from.rows : width > 1 ? width + 1 : width;
    }
    int64_t copies() const { return mode == Mode::strip && strips.per_tap ? int64_t(w.taps.size()) : 1; }
    int64_t plane() const { return packed() ? copies() * window_rows * row() : from.channels; }
    // In how many ways a window can lie in its ring, and in which it does if row `lowest` of the source is its first.
    int64_t phases() const { return ring ? window_rows : 1; }
    int64_t phase(int64_t lowest) const { return ring ? (lowest % window_rows + window_rows) % window_rows : 0; }
    // Positions from where a tile reads to where the i-th row of taps reads, and where tap (i, j) does.
    int64_t down(std::size_t i, int64_t phase) const {
        const int64_t rows_down = h.shift[i] - origin + phase;
        if (mode == Mode::strip && !ring) return strip_row(rows_down) * row();
        return (ring ? rows_down % window_rows : rows_down) * row();
    }
    int64_t across(std::size_t j) const {
        if (mode != Mode::strip) return w.shift[j];
        return strips.per_tap ? int64_t(j) * window_rows * row() : w.shift[j] - w.shifts().lowest;
    }
    int64_t shift(std::size_t i, std::size_t j) const { return down(i, 0) + across(j); }
    // The place of the k-th row of a strip that is no ring: those that one tap reads follow each other.
    int64_t strip_row(int64_t k) const { return k % h.stride * (window_rows / h.stride) + k / h.stride; }
    // Strips beside each other.
    int64_t blocks() const { return (w.count + strips.columns - 1) / strips.columns; }

    // Rows of the plane that are computed together: they read nothing but what is at hand at one time.
    int64_t rows_at_once() const;
    // Whether tasks are runs of channels of what is computed, not of positions.
    bool by_channel() const;
    // A task is a band of rows of one panel, unless the mode is direct.
    int64_t bands() const;
    // The k-th of all rows (or bands of rows, `count` in an image) of all panels, in an order that gives each thread memory
    // of its own, panel after panel if there are any: which it is, and the first column of its panel.
    std::pair<int64_t, int64_t> place(int64_t k, int64_t count) const;
    // Whether so many channels of what is computed are written past the caches: threads that write pieces of the same
    // samples by turns would take each other's lines.
    bool past(int64_t channels_computed, int64_t element) const;
    // One row of the plane: the runs of columns that share their taps.
    std::vector<Tile> columns() const;
    // The tiles of the direct mode.
    std::vector<Tile> cut() const;
    // One for each block of columns.
    std::vector<Tile> strip_tiles() const;
};

// Entries of one pass with the positions they read, once for each phase; for a linear layer, the connections as they are.
struct Offsets {
    Scratch<int32_t> ptr, offset, order;
    Entries entries;
    const int32_t* places;  // by input: where each entry stands by output
    int64_t count;
};

// The best strips for a pass that computes rows of `h` from rows in the given span, with so many connections of a channel.
// `join`: whether rows that are computed follow each other in memory.
Strips best_strips(const Axis& h, const Axis& w, Shifts rows, bool join, int64_t channels, int64_t batch, int64_t lanes,
                   int64_t element, double connections);
// The same cost where whole samples are read, a position at a time; `count` of them in the result.
double cost_by_position(const Axis& h, const Axis& w, int64_t batch, int64_t lanes);

Offsets forward_offsets(const Geometry&, const ByOutput&, const Plan&);
Offsets backward_offsets(const Geometry&, const ByInput&, const Plan&);

// The rows cut into at most `blocks` runs of about the same work.
std::vector<int64_t> cut_rows(const Entries&, int64_t rows, int64_t blocks);

}  // namespace rewire
