#include "limits.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "parallel.h"

namespace rewire {
namespace {

Scratch<float> ones(int64_t count) {
    Scratch<float> memory(count);
    std::fill(memory.get(), memory.get() + count, 1.0f);
    return memory;
}

}  // namespace

Loops::Loops(const Table<float>& table, int64_t rows, double entries, int64_t pieces, int64_t count, int threads)
    : table_(table), rows_(rows), pieces_(pieces), count_(count), threads_(threads) {
    constexpr int64_t most = 1 << 24;  // far beyond any cache, and no product of these overflows
    const bool sizes = rows > 0 && rows <= most && count > 0 && count <= pieces && pieces <= most;
    if (!sizes || !(entries >= 0 && double(rows) * entries <= 1e9) || threads < 1 || threads > 1024)
        throw std::invalid_argument("Loops: rows, pieces and count must be at least 1, count at most pieces, entries at "
                                    "least 0, and threads 1 to 1024");
    ptr_.resize(size_t(rows + 1));
    for (int64_t row = 0; row <= rows; row++) ptr_[size_t(row)] = int32_t(std::llround(double(row) * entries));
    offset_.resize(size_t(ptr_.back()));
    const uint64_t places = uint64_t(pieces - count + 1);
    uint32_t state = 1;
    for (auto& offset : offset_) {
        state = state * 1664525u + 1013904223u;
        offset = int32_t((uint64_t(state) * places) >> 32);
    }
    for (int64_t row = 0; row < rows; row++)
        std::sort(offset_.begin() + ptr_[size_t(row)], offset_.begin() + ptr_[size_t(row + 1)]);
    const int64_t panel = table.sum_tile;
    weight_ = ones(ptr_.back());
    source_ = ones(threads * pieces * panel);
    factor_ = ones(threads * rows * count * panel);
    result_ = ones(threads * rows * count * panel);
    grad_ = ones(threads * int64_t(ptr_.back()));
    tile_ = {0, 0, panel, panel, int32_t(count), int32_t(panel), 0, 1, 0, 1};
}

template <class Body>
void Loops::share(int64_t times, Body&& body) const {
    parallel_for(threads_, threads_, [&](int64_t thread) {
        for (int64_t k = times * thread / threads_; k < times * (thread + 1) / threads_; k++) body(thread);
    });
}

void Loops::forward(int64_t times) const {
    const int64_t row = count_ * table_.sum_tile;
    share(times, [&](int64_t thread) {
        const Sum<float> sum{{ptr_.data(), offset_.data(), 1, 1},
                             weight_.get(),
                             source_.get() + thread * pieces_ * table_.sum_tile,
                             table_.sum_tile,
                             result_.get() + thread * rows_ * row,
                             row,
                             nullptr,
                             true,
                             nullptr};
        table_.sum(sum, &tile_, 1, 0, rows_);
    });
}

void Loops::backward(int64_t times) const {
    const int64_t row = count_ * table_.dots_tile;
    share(times, [&](int64_t thread) {
        const Dots<float> dots{{ptr_.data(), offset_.data(), 1, 1},
                               weight_.get(),
                               source_.get() + thread * pieces_ * table_.dots_tile,
                               table_.dots_tile,
                               factor_.get() + thread * rows_ * row,
                               result_.get() + thread * rows_ * row,
                               row,
                               grad_.get() + thread * int64_t(ptr_.back()),
                               {},
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
        table_.dots(dots, &tile_, 1, 0, rows_);
    });
}

}  // namespace rewire
