#include "plan.h"

#include <algorithm>
#include <utility>

namespace rewire {
namespace {

constexpr int64_t kPackMin = 128 << 10;  // bytes of a source that is worth packing,
constexpr int64_t kWindow = 384 << 10;   // of a window that stays in a core's own cache,
constexpr int64_t kPackMax = 8 << 20;    // and of one that no cache will hold
constexpr int64_t kNear = 4 << 20;       // and of a source that comes from near enough to be read in any order
// Connections of a channel that are not worth packing it for, and of one that is near by.
constexpr int64_t kFew = 24, kFewNear = 64;
constexpr int64_t kPast = 2 << 20;       // bytes of a result that threads would take from each other
constexpr int64_t kAtOnce = 32;          // positions that one row of outputs is computed at, if rows are short
constexpr int64_t kRing = 8;             // columns that are enough for one row of an image at a time

constexpr int64_t kSmallImage = 16;      // positions of an image that threads had better not share
constexpr int64_t kStrip = 768 << 10;    // bytes of a strip
constexpr double kPiece = 1.5;           // vectors that a run of at most eight of them costs besides

// What runs of so many elements cost.
double cost_of_run(int64_t elements, int64_t lanes) {
    const int64_t vectors = (elements + lanes - 1) / lanes;
    return double(vectors) + kPiece * double((vectors + 7) / 8);
}

}  // namespace

int64_t Axis::at(int64_t i, size_t k) const {
    const int64_t place = i * stride + shift[k];
    return place < 0 || place % divide || place / divide >= source ? -1 : place / divide;
}

void Axis::reached(int64_t first, int64_t last, int32_t& begin, int32_t& end) const {
    begin = 0;
    end = int32_t(taps.size());
    const auto inside = [&](int32_t k) {
        for (int64_t i = first; i < last; i++)
            if (at(i, size_t(k)) >= 0) return true;
        return false;
    };
    while (begin < end && !inside(begin)) begin++;
    while (end > begin && !inside(end - 1)) end--;
}

Shifts Axis::shifts() const {
    if (shift.empty()) return {0, 0};
    return {std::min(shift.front(), shift.back()), std::max(shift.front(), shift.back())};
}

Axis forward_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d) {
    Axis axis{out, s, size, 0, 1, {}, {}};
    for (int32_t t = 0; t < k; t++) {
        axis.taps.push_back(t);
        axis.shift.push_back(int64_t(t) * d - p);
    }
    return axis;
}

Axis backward_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d, int32_t r) {
    Axis axis{r < size ? (size - r + s - 1) / s : 0, 1, out, r, s, {}, {}};
    for (int32_t t = 0; t < k; t++) {
        const int64_t at = int64_t(r) + p - int64_t(t) * d;
        if (at % s) continue;
        axis.taps.push_back(t);
        axis.shift.push_back(at / s);
    }
    return axis;
}

Axis spread_axis(int64_t size, int64_t out, int32_t k, int32_t s, int32_t p, int32_t d) {
    Axis axis{size, 1, out, 0, 1, {}, {}, s};
    for (int32_t t = 0; t < k; t++) {
        axis.taps.push_back(t);
        axis.shift.push_back(p - int64_t(t) * d);
    }
    return axis;
}

int64_t panel_width(int64_t batch, int64_t tile) {
    const int64_t lanes = tile / 4, rest = batch % tile;
    if (batch <= tile || !rest) return std::min(batch, tile);
    const int64_t panels = std::max<int64_t>(1, batch / tile + (rest > lanes));
    return ((batch + panels - 1) / panels + lanes - 1) / lanes * lanes;
}

Strips best_strips(const Axis& h, const Axis& w, Shifts rows, bool join, int64_t channels, int64_t batch, int64_t lanes,
                   int64_t element, double connections) {
    const int64_t span = rows.highest - rows.lowest + 1, taps = int64_t(w.taps.size());
    const bool apart = w.stride > 1 || w.divide > 1;
    const auto total = [&](const Strips& s, int64_t row, double packed) {
        const double runs = double(h.count) / double(s.rows) * double(w.count) / double(s.columns);
        return runs * (connections * cost_of_run(s.rows * s.columns * batch, lanes) + 2 * packed * double(row * batch) / double(lanes));
    };
    // One row after the other: as many columns as fit.
    const int64_t beside = apart ? 0 : w.shifts().highest - w.shifts().lowest, copies = apart ? taps : 1;
    const int64_t fit = kStrip / (channels * copies * span * batch * element) - beside;
    const int64_t least = std::min(w.count, (8 * lanes + batch - 1) / batch);
    const int64_t blocks = (w.count + std::max(fit, least) - 1) / std::max(fit, least);
    Strips best{(w.count + blocks - 1) / blocks, 1, span, true, apart, 0};
    best.cost = total(best, best.columns + beside, double(copies));
    // Or several rows together, which have to be packed for each tap.
    for (int64_t together = join ? h.count : 1, parts = 1; together > 1; parts++, together = (h.count + parts - 1) / parts) {
        const int64_t below = ((together - 1) * h.stride + span + h.stride - 1) / h.stride * h.stride;
        Strips joined{w.count, together, below, false, true, 0};
        if (channels * taps * below * w.count * batch * element > kStrip) continue;
        joined.cost = total(joined, w.count, double(taps * below));
        if (joined.cost < best.cost) best = joined;
        break;
    }
    best.cost /= connections;
    return best;
}

double cost_by_position(const Axis& h, const Axis& w, int64_t batch, int64_t lanes) {
    const auto reads = [](const Axis& axis) {
        int64_t count = 0;
        for (size_t k = 0; k < axis.taps.size(); k++)
            for (int64_t i = 0; i < axis.count; i++) count += axis.at(i, k) >= 0;
        return double(count) / double(axis.taps.size());
    };
    return reads(h) * reads(w) * cost_of_run(batch, lanes);
}

Plan::Plan(Axis h_, Axis w_, Shifts rows_, int64_t channels_, int64_t batch_, Memory from_, Memory to_, const Strips& strips_)
    : h(std::move(h_)),
      w(std::move(w_)),
      channels(channels_),
      height(h.source),
      width(w.source),
      batch(batch_),
      panel(batch_),
      from(from_),
      to(to_),
      mode(Mode::strip),
      rows(rows_),
      origin(rows_.lowest),
      window_rows(strips_.window_rows),
      ring(strips_.ring),
      strips(strips_) {}

Plan::Plan(Axis h_, Axis w_, Shifts rows_, int64_t channels_, int64_t batch_, int64_t panel_,
           Memory from_, Memory to_, int64_t element, int64_t connections)
    : h(std::move(h_)),
      w(std::move(w_)),
      channels(channels_),
      height(h.source),
      width(w.source),
      batch(batch_),
      panel(panel_),
      from(from_),
      to(to_),
      mode(Mode::direct),
      rows(rows_) {
    const int64_t bytes = channels * height * width * batch * element;
    if (batch == panel || bytes <= kPackMin) return;
    // Few connections read an image where it is faster than it can be packed, if they read whole samples.
    const bool runs = !from.panels && !to.panels;
    const int64_t few = bytes <= kNear ? kFewNear : kFew;
    if (height * width > 1 && connections >= 0 && runs && connections <= few * channels) {
        panel = batch;
        return;
    }
    mode = from.panels && connections >= 0 ? Mode::rows : Mode::window;
    origin = rows.lowest;
    const int64_t span = rows.highest - origin + 1, row_bytes = channels * (width + 1) * panel * element;
    window_rows = std::min(height, std::max(span + 1, std::min(span + 8, kWindow / row_bytes)));
    if (mode == Mode::window && width >= kRing && window_rows < height) {
        ring = true;
        window_rows = span;
    }
    if (mode == Mode::rows || window_rows * row_bytes <= kPackMax) return;
    // No cache holds the source: then all of a unit that lies in one place in memory is read at once.
    mode = Mode::direct;
    ring = false;
    origin = 0;
    if (runs) panel = batch;
}

int64_t Plan::rows_at_once() const {
    const int64_t held = (window_rows - (rows.highest - rows.lowest + 1)) / h.stride + 1;
    return std::max<int64_t>(1, std::min(held, kAtOnce / std::max<int64_t>(1, w.count)));
}

bool Plan::by_channel() const {
    return mode == Mode::direct && !from.panels && !to.panels && to.channels > 1 && to.channels <= kSmallImage;
}

int64_t Plan::bands() const {
    if (mode == Mode::strip && !ring) return (h.count + strips.rows - 1) / strips.rows;
    const int64_t least = 4 * std::max<int64_t>(1, (rows.highest - rows.lowest) / std::max<int64_t>(1, h.stride));
    const int64_t beside = mode == Mode::strip ? blocks() : panels();
    return std::max<int64_t>(1, std::min(h.count / least, (32 + beside - 1) / beside));
}

std::pair<int64_t, int64_t> Plan::place(int64_t k, int64_t count) const {
    return to.panels || from.panels ? std::pair{k % count, k / count * panel} : std::pair{k / panels(), k % panels() * panel};
}

bool Plan::past(int64_t channels_computed, int64_t element) const {
    return !to.panels && panel < batch && batch * element % 64 == 0 &&
           channels_computed * to.channels * to.lane * element >= kPast;
}

std::vector<Tile> Plan::columns() const {
    std::vector<Tile> tiles;
    for (int64_t j = 0; j < w.count; j++) {
        Tile tile{};
        w.valid(j, tile.kw0, tile.kw1);
        tile.count = 1;
        if (!tiles.empty() && tiles.back().kw0 == tile.kw0 && tiles.back().kw1 == tile.kw1) {
            tiles.back().count++;
            continue;
        }
        tile.src = w.stride * j * step();
        tile.dst = (w.first + j * w.every) * to.lane;
        tile.src_step = w.stride * step();
        tile.dst_step = w.every * to.lane;
        tiles.push_back(tile);
    }
    return tiles;
}

std::vector<Tile> Plan::cut() const {
    std::vector<Tile> tiles;
    const auto row = columns();
    for (int64_t k = 0; k < panels() * h.count; k++) {
        const auto [i, n] = place(k, h.count);
        for (Tile tile : row) {
            h.valid(i, tile.kh0, tile.kh1);
            tile.dst += (h.first + i * h.every) * to.rows * to.lane + n * to.columns;
            tile.src += i * h.stride * from.rows * from.lane + n * from.columns;
            tile.len = int32_t(std::min(panel, batch - n));
            tiles.push_back(tile);
        }
    }
    return tiles;
}

std::vector<Tile> Plan::strip_tiles() const {
    std::vector<Tile> tiles;
    for (int64_t j = 0; j < w.count; j += strips.columns) {
        const int64_t columns = std::min(strips.columns, w.count - j);
        Tile tile{j * to.lane, 0, 0, 0, 1, int32_t(columns * batch), 0, 0, 0, 0};
        w.reached(j, j + columns, tile.kw0, tile.kw1);
        tiles.push_back(tile);
    }
    return tiles;
}

namespace {

// The offsets of the phases after the first: a row of taps reads another row of the window.
void add_phases(Offsets& out, int64_t rows, const Plan& plan) {
    const Entries& of = out.entries;
    for (int64_t phase = 1; phase < plan.phases(); phase++)
        for (int64_t k = 0; k < rows * of.taps_h; k++) {
            const size_t i = size_t(k % of.taps_h);
            const auto further = int32_t(plan.down(i, phase) - plan.down(i, 0));
            for (int32_t e = of.ptr[k * of.taps_w]; e < of.ptr[(k + 1) * of.taps_w]; e++)
                out.offset[phase * out.count + e] = of.offset[e] + further;
        }
}

}  // namespace

Offsets forward_offsets(const Geometry& g, const ByOutput& a, const Plan& plan) {
    Offsets out;
    const int64_t taps = g.taps(), plane = plan.plane();
    out.places = nullptr;
    out.count = a.ptr[g.out_channels];
    if (taps == 1 && plane == 1 && plan.shift(0, 0) == 0) {
        out.entries = {a.ptr, a.indices, 1, 1};
        return out;
    }
    std::vector<int64_t> shift;
    for (int64_t t = 0; t < taps; t++) shift.push_back(plan.shift(size_t(t / g.kw), size_t(t % g.kw)));
    out.ptr = Scratch<int32_t>(g.out_channels * taps + 1);
    out.offset = Scratch<int32_t>(plan.phases() * out.count);
    int32_t e = 0;
    for (int64_t o = 0; o < g.out_channels; o++)
        for (int64_t t = 0; t < taps; t++) {
            out.ptr[o * taps + t] = e;
            const int64_t first = t * g.in_channels, last = first + g.in_channels;
            for (; e < a.ptr[o + 1] && a.indices[e] < last; e++)
                out.offset[e] = int32_t((a.indices[e] - first) * plane + shift[size_t(t)]);
        }
    out.ptr[g.out_channels * taps] = e;
    out.entries = {out.ptr.get(), out.offset.get(), g.kh, g.kw};
    add_phases(out, g.out_channels, plan);
    return out;
}

Offsets backward_offsets(const Geometry& g, const ByInput& a, const Plan& plan) {
    Offsets out;
    const int64_t taps = g.taps(), plane = plan.plane(), all = a.ptr[g.in_channels * taps];
    const auto taps_h = int32_t(plan.h.taps.size()), taps_w = int32_t(plan.w.taps.size());
    const bool whole = taps_h * taps_w == taps;  // then the taps are in order
    if (taps == 1 && plane == 1 && whole && plan.shift(0, 0) == 0) {
        out.entries = {a.ptr, a.outputs, 1, 1};
        out.places = a.order;
        out.count = all;
        return out;
    }
    std::vector<int64_t> slot, shift;  // of each tap
    for (int32_t i = 0; i < taps_h; i++)
        for (int32_t j = 0; j < taps_w; j++) {
            slot.push_back(int64_t(plan.h.taps[size_t(i)]) * g.kw + plan.w.taps[size_t(j)]);
            shift.push_back(plan.shift(size_t(i), size_t(j)));
        }
    const int64_t rows = g.in_channels * int64_t(slot.size());
    out.offset = Scratch<int32_t>(plan.phases() * all);
    if (!whole) {
        out.ptr = Scratch<int32_t>(rows + 1);
        out.order = Scratch<int32_t>(all);
    }
    int64_t count = 0, row = 0;
    for (int64_t c = 0; c < g.in_channels; c++)
        for (size_t t = 0; t < slot.size(); t++, row++) {
            const int32_t first = a.ptr[c * taps + slot[t]], last = a.ptr[c * taps + slot[t] + 1];
            if (!whole) {
                out.ptr[row] = int32_t(count);
                std::copy(a.order + first, a.order + last, out.order.get() + count);
            }
            for (int32_t k = first; k < last; k++) out.offset[count++] = int32_t(a.outputs[k] * plane + shift[t]);
        }
    if (!whole) out.ptr[rows] = int32_t(count);
    out.entries = {whole ? a.ptr : out.ptr.get(), out.offset.get(), taps_h, taps_w};
    out.places = whole ? a.order : out.order.get();
    out.count = count;
    add_phases(out, g.in_channels, plan);
    return out;
}

std::vector<int64_t> cut_rows(const Entries& entries, int64_t rows, int64_t blocks) {
    const int64_t taps = entries.taps_h * entries.taps_w;
    blocks = std::max<int64_t>(1, std::min(blocks, rows));
    auto load = [&](int64_t row) { return int64_t(entries.ptr[row * taps]) + 2 * row; };
    std::vector<int64_t> cuts{0};
    for (int64_t b = 1; b < blocks; b++) {
        const int64_t goal = load(rows) * b / blocks;
        int64_t low = cuts.back(), high = rows;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            load(middle) < goal ? low = middle + 1 : high = middle;
        }
        cuts.push_back(low);
    }
    cuts.push_back(rows);
    return cuts;
}

}  // namespace rewire
