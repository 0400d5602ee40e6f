// A strip: some columns of a few rows of an image, all channels and samples of them, as [channel][tap][row][column][N] or
// [channel][row][column][N], with zeros for what lies outside of the image.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "plan.h"
#include "scratch.h"

namespace rewire {

// A tensor, and what it is read through.
template <class T>
struct Source {
    const T* tensor;
    Reading<T> reading{};
};

template <class T>
class Strip {
   public:
    // Columns [first, last) of what is computed.
    Strip(const Table<T>& table, const Plan& plan, const Source<T>& source, int64_t first, int64_t last)
        : table_(table), plan_(plan), source_(source), elements_(plan.channels * plan.plane() * plan.batch), rows_(elements_) {
        std::memset(rows_.get(), 0, sizeof(T) * size_t(elements_));
        if (!plan.strips.per_tap) {
            const int64_t left = first + plan.w.shifts().lowest, right = last + plan.w.shifts().highest;
            const int64_t begin = std::max<int64_t>(left, 0), end = std::min(right, plan.width);
            if (begin < end) pieces_.push_back({begin, begin - left, 1, 1, 1, end - begin});
        }
        for (size_t k = 0; plan.strips.per_tap && k < plan.w.taps.size(); k++) {
            int64_t begin = first, count = 0;
            while (begin < last && plan.w.at(begin, k) < 0) begin++;
            for (int64_t j = begin; j < last && plan.w.at(j, k) >= 0; j += plan.w.divide) count++;
            if (!count) continue;
            Piece piece{plan.w.at(begin, k), int64_t(k) * plan.window_rows * plan.row() + begin - first,
                        plan.w.stride, plan.w.divide, count, 1};
            if (piece.every == 1 && piece.apart == 1) std::swap(piece.count, piece.columns);
            pieces_.push_back(piece);
        }
        // A row that is packed more than once is read once.
        if (!source.reading.plain() && (pieces_.size() > 1 || (pieces_.size() == 1 && pieces_[0].count > 1)))
            line_ = Scratch<T>(plan.width * plan.batch);
    }

    // The element where the first tap of row i reads, once all is there that rows i to `last` read.
    const T* at(int64_t i, int64_t last) {
        const int64_t low = i * plan_.h.stride + plan_.origin, high = last * plan_.h.stride + plan_.rows.highest + 1;
        const int64_t begin = std::max<int64_t>({low, 0, plan_.ring ? packed_ : 0}), end = std::min(high, plan_.height);
        for (int64_t c = 0; c < plan_.channels; c++)
            for (int64_t r = begin; r < end; r++) {
                const int64_t place = plan_.ring ? plan_.phase(r) : plan_.strip_row(r - low);
                pack(c, r, rows_.get() + (c * plan_.plane() + place * plan_.row()) * plan_.batch);
            }
        packed_ = std::max(packed_, end);
        return rows_.get();
    }

   private:
    // `count` pieces of so many columns: where they are, where they go, and how far apart they lie here and there.
    struct Piece {
        int64_t from, to, every, apart, count, columns;
    };

    void pack(int64_t channel, int64_t row, T* to) const {
        const int64_t n = plan_.batch, at = (channel * plan_.from.channels + row * plan_.from.rows) * n;
        const T* from = source_.tensor + at;
        if (line_.get()) {
            table_.read(source_.reading.from(at), channel, from, 0, line_.get(), 0, 1, plan_.width * n);
            from = line_.get();
        }
        for (const Piece& p : pieces_) {
            if (source_.reading.plain() || line_.get())
                table_.copy(from + p.from * n, p.every * n, to + p.to * n, p.apart * n, p.count, p.columns * n);
            else
                table_.read(source_.reading.from(at + p.from * n), channel, from + p.from * n, 0, to + p.to * n, 0, 1,
                            p.columns * n);
        }
    }

    const Table<T>& table_;
    const Plan& plan_;
    const Source<T>& source_;
    int64_t elements_, packed_ = 0;
    Scratch<T> rows_, line_;
    std::vector<Piece> pieces_;
};

}  // namespace rewire
