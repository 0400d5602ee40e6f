// Products over the connections of a layer.

namespace rewire::REWIRE_ISA {

// The runs of entries of one row whose taps are valid in a tile: run r lies between two places of the
// row's pointers, which move by `step` from run to run.
struct Runs {
    int32_t count, begin, end, step;

    Runs() = default;
    REWIRE_INLINE Runs(const Entries& entries, const Tile& tile) {
        const int32_t w = entries.taps_w;
        const bool whole = tile.kw1 - tile.kw0 == w;  // then the rows of taps follow each other
        count = whole ? 1 : tile.kh1 - tile.kh0;
        begin = tile.kh0 * w + tile.kw0;
        end = (whole ? tile.kh1 - 1 : tile.kh0) * w + tile.kw1;
        step = w;
    }
};

// V vectors at each of P positions, `step` elements apart; the last of V cut to `rest` lanes if kPart. Of bfloat16, each two
// vectors that are whole hold the halves of a register.
template <class T, int V, int P, bool kPart>
struct Places {
    static constexpr bool kPaired = std::is_same_v<T, bfloat16> && !kPart && V % 2 == 0;

    static REWIRE_INLINE Vec<T> get(const T* p, int64_t step, int i, int rest) {
        if constexpr (kPaired) {
            const Words words = load_words(p + i / V * step + i % V / 2 * (2 * kLanes<T>));
            return i % 2 ? second_half(words) : first_half(words);
        }
        p += i / V * step + i % V * kLanes<T>;
        if constexpr (kPart) {
            if (i % V == V - 1) return load_part(p, rest);
        }
        return load<T>(p);
    }
    // `past`: the caches.
    static REWIRE_INLINE void put(T* p, int64_t step, const Vec<T> (&v)[V * P], int rest, bool past) {
        if constexpr (kPaired) {
#pragma GCC unroll 8
            for (int i = 0; i < V * P; i += 2) {
                T* const to = p + i / V * step + i % V * kLanes<T>;
                const Words both = joined(v[i], v[i + 1]);
                if (__builtin_expect(past, false)) store_past(to, both);
                else std::memcpy(to, &both, sizeof both);
            }
            return;
        } else {
            put_each(p, step, v, rest, past);
        }
    }

   private:
    static REWIRE_INLINE void put_each(T* p, int64_t step, const Vec<T> (&v)[V * P], int rest, bool past) {
        const auto at = [=](int i) { return p + i / V * step + i % V * kLanes<T>; };
        if (!kPart && __builtin_expect(past, false)) {
#pragma GCC unroll 8
            for (int i = 0; i < V * P; i++) {
                if constexpr (std::is_same_v<T, bfloat16>) store<T>(at(i), v[i]);
                else store_past(at(i), v[i]);
            }
            return;
        }
#pragma GCC unroll 8
        for (int i = 0; i < V * P; i++) kPart && i % V == V - 1 ? store_part(at(i), v[i], rest) : store<T>(at(i), v[i]);
    }
};

// Calls body(V, lanes of the last one) for the V vectors, at most `most`, that hold so many elements; V is a constant.
template <class T, int most, class Body>
REWIRE_INLINE void by_vectors(int32_t elements, Body&& body) {
    constexpr int lanes = kLanes<T>;
    const int vectors = (elements + lanes - 1) / lanes, rest = elements - (vectors - 1) * lanes;
    switch (vectors) {
        case 1: return body(std::integral_constant<int, 1>{}, rest);
        case 2: return body(std::integral_constant<int, 2>{}, rest);
        case 3: return body(std::integral_constant<int, 3>{}, rest);
        case 4: return body(std::integral_constant<int, 4>{}, rest);
    }
    if constexpr (most == 8) {
        switch (vectors) {
            case 5: return body(std::integral_constant<int, 5>{}, rest);
            case 6: return body(std::integral_constant<int, 6>{}, rest);
            case 7: return body(std::integral_constant<int, 7>{}, rest);
            case 8: return body(std::integral_constant<int, 8>{}, rest);
        }
    }
}

// Asks for what is read soon, a part of it at a time.
class Asking {
   public:
    Asking(const Soon& soon, int64_t times)
        : at_(soon.first), left_(soon.lines), each_(left_ ? (left_ + times - 1) / times : 0) {}
    REWIRE_INLINE void ask() {
        if (__builtin_expect(left_ > 0, false)) go_on();
    }

   private:
    __attribute__((noinline)) void go_on() {
        const int64_t some = left_ < each_ ? left_ : each_;
        for (const char* end = at_ + 64 * some; at_ < end; at_ += 64) __builtin_prefetch(at_);
        left_ -= some;
    }

    const char* at_;
    int64_t left_, each_;
};

// Sums about a pivot, in registers.
template <class T>
struct SpreadRow {
    Vec<T> middle = {}, sum = {}, squares = {};

    REWIRE_INLINE void add(Vec<T> v) {
        const Vec<T> d = v - middle;
        sum += d;
        squares += d * d;
    }
};

#if defined(REWIRE_BF16)
// acc += the products of entries [e, end), two at a time: V vectors at each of P positions.
template <int V, int P>
REWIRE_INLINE void add_pairs(const bfloat16* weight, const int32_t* offset, int32_t e, int32_t end, const bfloat16* src,
                             int64_t step, int64_t src_step, Vec<float> (&acc)[V * P]) {
    constexpr int64_t words = 2 * kLanes<bfloat16>;
    for (; e + 2 <= end; e += 2) {
        const bfloat16 *from = src + offset[e] * step, *next = src + offset[e + 1] * step;
        const Words w = broadcast_pair(weight + e);
#pragma GCC unroll 8
        for (int i = 0; i < V * P; i += 2) {
            const int64_t at = i / V * src_step + i % V / 2 * words;
            const Words a = load_words(from + at), b = load_words(next + at);
            acc[i] = add_products(acc[i], interleave_low(a, b), w);
            acc[i + 1] = add_products(acc[i + 1], interleave_high(a, b), w);
        }
    }
    if (e < end) {
        const bfloat16* from = src + offset[e] * step;
        const Vec<float> w = broadcast<float>(weight[e]);
#pragma GCC unroll 8
        for (int i = 0; i < V * P; i += 2) {
            const Words a = load_words(from + i / V * src_step + i % V / 2 * words);
            acc[i] += w * first_half(a);
            acc[i + 1] += w * second_half(a);
        }
    }
}
#endif

// V vectors at each of P positions. The results go into `spread` too if kSpread.
template <class T, int V, int P, bool kPart, bool kSpread>
REWIRE_INLINE void sum_tile(const Sum<T>& p, const Runs& runs, const int32_t* ptr, const T* src, int64_t src_step,
                            T* dst, int64_t dst_step, Number<T> start, int rest, SpreadRow<T>& spread, int64_t ahead) {
    using L = Places<T, V, P, kPart>;
    const int32_t* offset = p.entries.offset;
    const Number<T>* weight = p.weight;
    const int64_t step = p.step;
    const bool past = p.past;
    for (int q = 0; !past && q < P; q++) write_soon<V>(dst + q * dst_step, ahead);
    Vec<T> acc[V * P];
#pragma GCC unroll 8
    for (int i = 0; i < V * P; i++) acc[i] = broadcast<T>(start);
    Vec<T> other[V * P] = {};  // every second entry: one sum alone waits for its own last addition
    for (int32_t r = 0; r < runs.count; r++) {
        int32_t e = ptr[runs.begin + r * runs.step];
        const int32_t end = ptr[runs.end + r * runs.step];
#if defined(REWIRE_BF16)
        if constexpr (L::kPaired) {
            add_pairs<V, P>(p.narrow_weight, offset, e, end, src, step, src_step, acc);
            continue;
        }
#endif
        for (; V * P <= 4 && e + 2 <= end; e += 2) {
            const T *from = src + offset[e] * step, *next = src + offset[e + 1] * step;
            const Vec<T> w = broadcast<T>(weight[e]), v = broadcast<T>(weight[e + 1]);
#pragma GCC unroll 8
            for (int i = 0; i < V * P; i++) {
                acc[i] += w * L::get(from, src_step, i, rest);
                other[i] += v * L::get(next, src_step, i, rest);
            }
        }
        for (; e < end; e++) {
            const T* from = src + offset[e] * step;
            const Vec<T> w = broadcast<T>(weight[e]);
#pragma GCC unroll 8
            for (int i = 0; i < V * P; i++) acc[i] += w * L::get(from, src_step, i, rest);
        }
    }
    if constexpr (V * P <= 4) {
#pragma GCC unroll 8
        for (int i = 0; i < V * P; i++) acc[i] += other[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < V * P; i++) {
        if (p.relu) acc[i] = rectify<T>(acc[i]);
        if constexpr (kSpread) spread.add(stored<T>(acc[i]));
    }
    L::put(dst, dst_step, acc, rest, past);
}

// A single column: batch-1 inference.
template <class T>
REWIRE_INLINE void sum_column(const Sum<T>& p, const Runs& runs, const int32_t* ptr, const T* src, T* dst, Number<T> start,
                              int64_t step) {
    constexpr int some = 16 / sizeof(Number<T>);
    Short<T> acc[2] = {}, weight[2];
    Number<T> sum = start;
    for (int32_t r = 0; r < runs.count; r++) {
        int32_t e = ptr[runs.begin + r * runs.step];
        const int32_t end = ptr[runs.end + r * runs.step];
        for (; e + 2 * some <= end; e += 2 * some) {
            std::memcpy(weight, p.weight + e, sizeof weight);
            for (int q = 0; q < 2; q++) acc[q] += weight[q] * collect(src, p.entries.offset + e + some * q, step);
        }
        if (e + some <= end) {
            std::memcpy(weight, p.weight + e, sizeof weight[0]);
            acc[0] += weight[0] * collect(src, p.entries.offset + e, step);
            e += some;
        }
        for (; e < end; e++) sum += p.weight[e] * src[p.entries.offset[e] * step];
    }
    acc[0] += acc[1];
    for (int i = 0; i < some; i++) sum += acc[0][i];
    *dst = T(p.relu && sum < 0 ? Number<T>(0) : sum);
}

// All rows of it at one position.
template <class T>
REWIRE_INLINE void sum_columns(const Sum<T>& p, const Tile& tile, const Runs& runs, int64_t row0, int64_t row1,
                               int64_t step) {
    const Sum<T> own = p;  // which no store can change
    const int64_t taps = own.entries.taps_h * own.entries.taps_w;
    for (int64_t row = row0; row < row1; row++)
        sum_column(own, runs, own.entries.ptr + row * taps, own.src + tile.src, own.dst + row * own.row + tile.dst,
                   own.start ? own.start[row] : 0, step);
}

// Adds what a row has just written, while it is in the nearest cache.
template <class T>
void spread_row(const T* x, int64_t step, int32_t count, int32_t len, Spread& to) {
    constexpr int lanes = kLanes<T>;
    if (!to.count) {
        for (int32_t i = 0; i < len; i++) to.pivot += double(x[i]);
        to.pivot = double(Number<T>(to.pivot / len));
    }
    SpreadRow<T> row{broadcast<T>(Number<T>(to.pivot)), {}, {}};
    Number<T> rest_sum = 0, rest_squares = 0;
    for (int32_t k = 0; k < count; k++, x += step) {
        int32_t i = 0;
        for (; i + lanes <= len; i += lanes) row.add(load<T>(x + i));
        for (; i < len; i++) {
            const Number<T> d = x[i] - Number<T>(to.pivot);
            rest_sum += d;
            rest_squares += d * d;
        }
    }
    to.sum += double(sum_lanes<T>(row.sum)) + double(rest_sum);
    to.squares += double(sum_lanes<T>(row.squares)) + double(rest_squares);
    to.count += int64_t(count) * len;
}

// The valid entries of each of some tiles, and whether the tiles consist of whole vectors.
template <class T>
struct Group {
    static constexpr int64_t kNear = 2048 / sizeof(T);
    Runs runs[kTiles];
    int32_t pieces = 0;  // that stay in registers, at all positions
    int32_t steps = 0;   // of one or two positions
    bool whole = true;
    int32_t near[kTiles];  // positions of each tile that others follow by more than kNear elements
    int64_t jump = kNear;  // how far it is to as many elements behind the next rows' tiles

    Group(const Entries& entries, const Tile* tiles, int64_t count, int64_t row) {
        int64_t first = tiles[0].dst, end = first;
        for (int64_t t = 0; t < count; t++) {
            runs[t] = Runs(entries, tiles[t]);
            pieces += tiles[t].count * ((tiles[t].len + 4 * kLanes<T> - 1) / (4 * kLanes<T>));
            steps += tiles[t].len == 4 * kLanes<T> ? (tiles[t].count + 1) / 2 : tiles[t].count;
            whole = whole && tiles[t].len % kLanes<T> == 0;
            first = tiles[t].dst < first ? tiles[t].dst : first;
            const int64_t last = tiles[t].dst + tiles[t].count * step(tiles[t]);
            end = last > end ? last : end;
        }
        const int64_t span = end - first;
        if (row > span) jump = span < kNear ? (kNear + span - 1) / span * row : kNear + row - span;
        for (int64_t t = 0; t < count; t++) {
            near[t] = row > span ? int32_t((end - kNear - tiles[t].dst) / step(tiles[t])) : tiles[t].count;
        }
    }

    static int64_t step(const Tile& tile) { return tile.dst_step ? tile.dst_step : tile.len; }

    // How far ahead of position k of a tile to ask for what is read and written in order. What follows the tiles may be
    // another thread's, and asking for it would take it away: the next row's tiles come next.
    REWIRE_INLINE int64_t ahead(int64_t tile, int32_t k) const { return k < near[tile] ? kNear : jump; }
};

template <class T, bool kSpread>
REWIRE_INLINE void sum_row(const Sum<T>& p, const Group<T>& group, const Tile* tiles, int64_t t, int64_t row,
                           SpreadRow<T>& spread, Asking& asking) {
    const Tile& tile = tiles[t];
    const Runs& runs = group.runs[t];
    constexpr int lanes = kLanes<T>;
    const int32_t* ptr = p.entries.ptr + row * p.entries.taps_h * p.entries.taps_w;
    const Number<T> start = p.start ? p.start[row] : 0;
    const T* src = p.src + tile.src;
    T* dst = p.dst + row * p.row + tile.dst;
    int32_t left = tile.count;
    for (; tile.len == 4 * lanes && left >= 2; left -= 2, src += 2 * tile.src_step, dst += 2 * tile.dst_step) {
        asking.ask();
        sum_tile<T, 4, 2, false, kSpread>(p, runs, ptr, src, tile.src_step, dst, tile.dst_step, start, 0, spread,
                                          group.ahead(t, tile.count - left));
    }
    for (; left; left--, src += tile.src_step, dst += tile.dst_step) {
        asking.ask();
        if (tile.len == 1) {
            p.step == 1 ? sum_column(p, runs, ptr, src, dst, start, 1)
                        : sum_column(p, runs, ptr, src, dst, start, p.step);
            continue;
        }
        const int64_t ahead = group.ahead(t, tile.count - left);
        if (tile.len == 4 * lanes) {
            sum_tile<T, 4, 1, false, kSpread>(p, runs, ptr, src, 0, dst, 0, start, 0, spread, ahead);
            continue;
        }
        int32_t at = 0;
        for (; tile.len - at >= 8 * lanes; at += 8 * lanes)
            sum_tile<T, 8, 1, false, kSpread>(p, runs, ptr, src + at, 0, dst + at, 0, start, 0, spread, ahead);
        by_vectors<T, 8>(tile.len - at, [&](auto vectors, int rest) REWIRE_BODY {
            sum_tile<T, decltype(vectors)::value, 1, true, kSpread>(p, runs, ptr, src + at, 0, dst + at, 0, start, rest, spread, ahead);
        });
    }
}

// Rows outside, positions inside: what a row reads and writes then moves through memory in order, and what
// is added up over positions is added up once.
template <class T>
void sum(const Sum<T>& p, const Tile* tiles, int64_t count, int64_t row0, int64_t row1) {
    if (count == 1 && tiles[0].len == 1 && tiles[0].count == 1 && !p.spread) {
        const Runs runs(p.entries, tiles[0]);
        return p.step == 1 ? sum_columns(p, tiles[0], runs, row0, row1, 1) : sum_columns(p, tiles[0], runs, row0, row1, p.step);
    }
    if (row0 >= row1) return;
    const Group<T> group(p.entries, tiles, count, p.row);
    Asking asking(p.soon, (row1 - row0) * group.steps);
    for (int64_t row = row0; row < row1; row++) {
        SpreadRow<T> spread;
        Spread* const to = p.spread ? p.spread + row : nullptr;
        int64_t t = 0;
        for (; t < count && !(to && to->count && group.whole); t++) {  // no pivot yet, or lanes that hold nothing
            const Tile& tile = tiles[t];
            sum_row<T, false>(p, group, tiles, t, row, spread, asking);
            if (to) spread_row(p.dst + row * p.row + tile.dst, tile.dst_step, tile.count, tile.len, *to);
        }
        if (t == count) continue;
        spread.middle = broadcast<T>(Number<T>(to->pivot));
        for (; t < count; t++) {
            sum_row<T, true>(p, group, tiles, t, row, spread, asking);
            to->count += int64_t(tiles[t].count) * tiles[t].len;
        }
        to->sum += double(sum_lanes<T>(spread.sum));
        to->squares += double(sum_lanes<T>(spread.squares));
    }
    if (p.past) stores_done();
}

// dot + <factor, src of entry e>, lane by lane; the same loads feed acc += weight * src if kDst.
template <class T, int V, int P, bool kPart, bool kDst>
REWIRE_INLINE Vec<T> dot_entry(const T* from, int64_t step, Number<T> weight, const Vec<T> (&factor)[V * P],
                               Vec<T> (&acc)[V * P], int rest, Vec<T> dot = Vec<T>{}) {
    const Vec<T> w = broadcast<T>(weight);
#pragma GCC unroll 8
    for (int i = 0; i < V * P; i++) {
        Vec<T> v = Places<T, V, P, kPart>::get(from, step, i, rest);
        if constexpr (kDst) hold<T>(v);
        if constexpr (kDst) acc[i] += w * v;
        dot += factor[i] * v;
    }
    return dot;
}

// The sums of a row's first entries, whose lanes are added once for all pieces of the row.
template <class T>
struct Held {
    static constexpr int32_t kMost = 256;
    int32_t first, end;  // entries
    Vec<T> dots[kMost];

    // Of a row whose entries lie in [first_, end_).
    REWIRE_INLINE Held(int32_t first_, int32_t end_, int32_t pieces)
        : first(first_), end(pieces < 2 ? first_ : end_ - first_ < kMost ? end_ : first_ + kMost) {
        for (int32_t k = 0; k < end - first; k++) dots[k] = Vec<T>{};
        for (int32_t k = end - first; k % 4; k++) dots[k] = Vec<T>{};
    }
    REWIRE_INLINE void add_to(Number<T>* grad) const {
        for (int32_t e = first; e < end; e += 4) {
            const Vec<T>* d = dots + (e - first);
            Number<T> sums[4] = {};
            add_sums(sums, {d[0], d[1], d[2], d[3]});
            for (int32_t q = 0; q < 4 && e + q < end; q++) grad[e + q] += sums[q];
        }
    }
};

// Whether there are registers for two positions at once, factors and sums of both.
#if defined(REWIRE_AVX512)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// What the factor is: an input of which nothing is known, the output of a rectifier, or of a batch norm; or something
// that is to be read as said, and added up.
enum class Input { any, rectified, normed, read };

// What a row needs where dst is the gradient of what came before the factor, and the sums of that gradient.
template <class T>
struct BeforeRow {
    static constexpr int kRun = 64;  // vectors that are added up before they count as doubles
    Number<T> scale = 0, shift = 0, mean = 0, other = 0;
    bool scaled = false, relu = false;
    Vec<T> sum = {}, sum_x = {};
    double total = 0, total_x = 0;
    int added = 0;

    REWIRE_INLINE void settle() {
        total += double(sum_lanes<T>(sum));
        total_x += double(sum_lanes<T>(sum_x));
        sum = sum_x = Vec<T>{};
        added = 0;
    }
};

#if defined(REWIRE_BF16)
// The dot products of two entries with the factor; with kDst acc += both entries times their weights. The second entry may
// be zeros.
template <int V, int P, bool kDst>
REWIRE_INLINE void dot_pair(const bfloat16* from, const bfloat16* next, int64_t step, int64_t next_step, Words w,
                            const Words (&factor)[V * P / 2], Vec<float> (&acc)[V * P], Vec<float>& dot, Vec<float>& other) {
#pragma GCC unroll 4
    for (int i = 0; i < V * P; i += 2) {
        const int64_t at = i % V / 2 * (2 * kLanes<bfloat16>);
        Words a = load_words(from + i / V * step + at), b = load_words(next + i / V * next_step + at);
        asm("" : "+v"(a), "+v"(b));  // loaded once
        dot = add_products(dot, factor[i / 2], a);
        other = add_products(other, factor[i / 2], b);
        if constexpr (kDst) {
            acc[i] = add_products(acc[i], interleave_low(a, b), w);
            acc[i + 1] = add_products(acc[i + 1], interleave_high(a, b), w);
        }
    }
}

// Entries [e, end) of a row, two at a time.
template <int V, int P, bool kDst>
REWIRE_INLINE void dot_pairs(const Dots<bfloat16>& p, int32_t e, int32_t end, const bfloat16* src, int64_t src_step,
                             const Words (&factor)[V * P / 2], Vec<float> (&acc)[V * P], Held<bfloat16>& held) {
    static const bfloat16 zeros[V * kLanes<bfloat16>] = {};
    const auto at = [&](int32_t k) REWIRE_BODY { return src + p.entries.offset[k] * p.step; };
    const auto weights = [&](int32_t k) REWIRE_BODY { return kDst ? broadcast_pair(p.narrow_weight + k) : Words{}; };
    const int32_t near = end < held.end ? end : held.end;
    for (; e + 2 <= near; e += 2) {
        Vec<float>* dots = held.dots + (e - held.first);
        dot_pair<V, P, kDst>(at(e), at(e + 1), src_step, src_step, weights(e), factor, acc, dots[0], dots[1]);
    }
    for (; e < end; e += 2) {
        const bool both = e + 1 < end, kept = e < near;
        Vec<float> dot[4] = {};
        uint32_t w = 0;
        if (kDst) std::memcpy(&w, p.narrow_weight + e, both ? 4 : 2);
        dot_pair<V, P, kDst>(at(e), both ? at(e + 1) : zeros, src_step, both ? src_step : 0, Words{} + w, factor, acc, dot[0],
                             dot[1]);
        if (kept) held.dots[e - held.first] += dot[0];
        float sums[4] = {};
        add_sums(sums, dot);
        if (!kept) p.grad[e] += sums[0];
        if (both) p.grad[e + 1] += sums[1];
    }
}
#endif

template <class T, int V, int P, bool kPart, bool kDst, Input kInput>
REWIRE_INLINE void dots_tile(const Dots<T>& p, const Tile& tile, const Runs& runs, const int32_t* ptr, const T* src,
                             int64_t here, int rest, Held<T>& held, BeforeRow<T>& before, int64_t ahead) {
    using L = Places<T, V, P, kPart>;
    constexpr int n = V * P;
    const int32_t* offset = p.entries.offset;
    const Number<T>* weight = p.weight;
    const int64_t step = p.step, src_step = tile.src_step, dst_step = tile.dst_step;
    Number<T>* grad = p.grad;
    for (int q = 0; q < P; q++) {
        const int64_t at = here + q * dst_step;
        read_soon<V>(p.factor + at, ahead);
        if (kInput == Input::normed && p.normed != p.factor) read_soon<V>(p.normed + at, ahead);
        if (kInput == Input::normed && p.more) read_soon<V>(p.more + at, ahead);
        if (kInput == Input::read && p.reading.other) read_soon<V>(p.reading.other + at, ahead);
        if (kDst && !p.past) write_soon<V>(p.dst + at, ahead);
    }
    Vec<T> factor[n], acc[n];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        factor[i] = L::get(p.factor + here, dst_step, i, rest);
        if constexpr (kInput == Input::normed) {
            if (before.scaled) factor[i] = factor[i] * before.scale + before.shift;
            if (before.scaled && before.relu) factor[i] = rectify<T>(factor[i]);
        }
        if constexpr (kInput == Input::read) {
            if (p.reading.gate)
                factor[i] = L::get(p.reading.gate + here, dst_step, i, rest) <= Vec<T>{} ? Vec<T>{} : factor[i];
            if (p.reading.other) {
                const Vec<T> other = L::get(p.reading.other + here, dst_step, i, rest);
                factor[i] = factor[i] * before.scale + (other * before.other + before.shift);
            }
            if (kPart && i % V == V - 1) factor[i] = keep_part(factor[i], rest);
            before.sum += factor[i];
        }
        acc[i] = Vec<T>{};
    }
#if defined(REWIRE_BF16)
    Words narrow[(n + 1) / 2];  // the factor as such
    if constexpr (L::kPaired) {
#pragma GCC unroll 4
        for (int i = 0; i < n; i += 2)
            narrow[i / 2] = kInput == Input::any || kInput == Input::rectified
                                ? load_words(p.factor + here + i / V * dst_step + i % V / 2 * (2 * kLanes<T>))
                                : joined(factor[i], factor[i + 1]);
    }
#endif
    const auto entry = [&](const T* from, Number<T> w, Vec<T> dot) REWIRE_BODY {
        return dot_entry<T, V, P, kPart, kDst>(from, src_step, w, factor, acc, rest, dot);
    };
    for (int32_t r = 0; r < runs.count; r++) {
        int32_t e = ptr[runs.begin + r * runs.step];
        const int32_t end = ptr[runs.end + r * runs.step];
#if defined(REWIRE_BF16)
        if constexpr (L::kPaired) {
            dot_pairs<V, P, kDst>(p, e, end, src, src_step, narrow, acc, held);
            continue;
        }
#endif
        for (const int32_t near = end < held.end ? end : held.end; e < near; e++) {
            Vec<T>& dot = held.dots[e - held.first];
            dot = entry(src + offset[e] * step, kDst ? weight[e] : 0, dot);
        }
        for (; e + 4 <= end; e += 4) {
            Vec<T> dot[4];
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++)
                dot[q] = entry(src + offset[e + q] * step, kDst ? weight[e + q] : 0, Vec<T>{});
            add_sums(grad + e, dot);
        }
        if (e < end) {  // one to three more, and nothing in place of the others: which it is cannot be foreseen
            static const T zeros[V * kLanes<T>] = {};
            Vec<T> dot[4] = {};
#pragma GCC unroll 3
            for (int q = 0; q < 3; q++) {
                const bool here = e + q < end;
                const int32_t k = here ? e + q : e;
                const T* from = src + offset[k] * step;
                dot[q] = dot_entry<T, V, P, kPart, kDst>(here ? from : zeros, here ? src_step : 0,
                                                         kDst && here ? weight[k] : 0, factor, acc, rest);
            }
            Number<T> sums[4] = {};
            add_sums(sums, dot);
            for (int q = 0; e + q < end; q++) grad[e + q] += sums[q];
        }
    }
    if constexpr (kInput == Input::rectified) {
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            acc[i] = factor[i] <= Vec<T>{} ? Vec<T>{} : acc[i];
            before.sum += acc[i];
        }
    }
    if constexpr (kInput == Input::normed) {
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            if (p.more) acc[i] += L::get(p.more + here, dst_step, i, rest);
            if (before.relu) acc[i] = factor[i] <= Vec<T>{} ? Vec<T>{} : acc[i];
            before.sum += acc[i];
            before.sum_x += acc[i] * (L::get(p.normed + here, dst_step, i, rest) - before.mean);
        }
    }
    if constexpr (kDst) L::put(p.dst + here, dst_step, acc, rest, p.past);
}

template <class T>
void clear(T* dst, const Tile& tile) {
    for (int32_t k = 0; k < tile.count; k++)
        std::memset(dst + tile.dst + k * tile.dst_step, 0, sizeof(T) * size_t(tile.len));
}

template <class T, bool kDst, Input kInput>
void dots_rows(const Dots<T>& p, const Tile* tiles, int64_t count, int64_t row0, int64_t row1) {
    constexpr int lanes = kLanes<T>;
    if (row0 >= row1) return;
    const Group<T> group(p.entries, tiles, count, p.row);
    const int64_t taps = p.entries.taps_h * p.entries.taps_w;
    Asking asking(p.soon, (row1 - row0) * group.steps);
    for (int64_t row = row0; row < row1; row++) {
        const int32_t* ptr = p.entries.ptr + row * taps;
        if (kInput != Input::normed && kInput != Input::read && ptr[0] == ptr[taps]) {  // its factor need not be read
            for (int64_t t = 0; kDst && t < count; t++) clear(p.dst + row * p.row, tiles[t]);
            continue;
        }
        Held<T> held(ptr[0], ptr[taps], group.pieces);
        BeforeRow<T> before;
        if constexpr (kInput == Input::normed) {
            before.scaled = p.reading.scale != nullptr;
            if (before.scaled) {
                before.scale = p.reading.scale[row];
                before.shift = p.reading.shift[row];
            }
            before.mean = p.mean[row];
            before.relu = p.reading.relu;
        }
        if constexpr (kInput == Input::read)
            if (p.reading.other) {
                before.scale = p.reading.scale[row];
                before.shift = p.reading.shift[row];
                before.other = p.reading.other_scale[row];
            }
        for (int64_t t = 0; t < count; t++) {
            const Tile& tile = tiles[t];
            const Runs& runs = group.runs[t];
            const T* src = p.src + tile.src;
            int64_t here = row * p.row + tile.dst;
            int32_t k = 0;
            if constexpr (kPairs)
                for (; tile.len == 4 * lanes && k + 2 <= tile.count; k += 2) {
                    const int64_t ahead = group.ahead(t, k);
                    asking.ask();
                    dots_tile<T, 4, 2, false, kDst, kInput>(p, tile, runs, ptr, src, here, 0, held, before, ahead);
                    src += 2 * tile.src_step;
                    here += 2 * tile.dst_step;
                    if constexpr (kInput != Input::any)
                        if ((before.added += 8) >= before.kRun) before.settle();
                }
            for (; k < tile.count; k++, src += tile.src_step, here += tile.dst_step) {
                const int64_t ahead = group.ahead(t, k);
                asking.ask();
                if (tile.len == 4 * lanes) {
                    dots_tile<T, 4, 1, false, kDst, kInput>(p, tile, runs, ptr, src, here, 0, held, before, ahead);
                } else {
                    constexpr int most = kPairs ? 8 : 4;
                    int32_t at = 0;
                    for (; tile.len - at >= most * lanes; at += most * lanes)
                        dots_tile<T, most, 1, false, kDst, kInput>(p, tile, runs, ptr, src + at, here + at, 0, held, before,
                                                                   ahead);
                    by_vectors<T, most>(tile.len - at, [&](auto vectors, int rest) REWIRE_BODY {
                        dots_tile<T, decltype(vectors)::value, 1, true, kDst, kInput>(p, tile, runs, ptr, src + at, here + at, rest, held, before,
                                                               ahead);
                    });
                }
                if constexpr (kInput != Input::any)
                    if ((before.added += (tile.len + lanes - 1) / lanes) >= before.kRun) before.settle();
            }
        }
        held.add_to(p.grad);
        if constexpr (kInput != Input::any) {
            before.settle();
            p.sums[2 * row] += before.total;
            p.sums[2 * row + 1] += before.total_x;
        }
    }
    if (p.past) stores_done();
}

template <class T>
void dots(const Dots<T>& p, const Tile* tiles, int64_t count, int64_t row0, int64_t row1) {
    if (p.sums && !p.dst) return dots_rows<T, false, Input::read>(p, tiles, count, row0, row1);
    if (p.sums)
        return p.normed ? dots_rows<T, true, Input::normed>(p, tiles, count, row0, row1)
                        : dots_rows<T, true, Input::rectified>(p, tiles, count, row0, row1);
    p.dst ? dots_rows<T, true, Input::any>(p, tiles, count, row0, row1)
          : dots_rows<T, false, Input::any>(p, tiles, count, row0, row1);
}

}  // namespace rewire::REWIRE_ISA
