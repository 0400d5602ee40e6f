// Moving data: pieces from one spacing to another, and rows into columns, 16 x 16 at a time.

namespace rewire::REWIRE_ISA {

constexpr int64_t kPieces = 16;  // how many pieces ahead to ask for the next ones

template <int N, class T>
void copy_short(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t count) {
    for (int64_t k = 0; k < count; k++) std::memcpy(to + k * to_step, from + k * from_step, sizeof(T) * N);
}

template <class T>
void copy(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t count, int64_t len) {
    constexpr int lanes = kLanes<T>;
    switch (count > 1 ? len : 0) {
        case 1: return copy_short<1>(from, from_step, to, to_step, count);
        case 2: return copy_short<2>(from, from_step, to, to_step, count);
        case 3: return copy_short<3>(from, from_step, to, to_step, count);
        case 4: return copy_short<4>(from, from_step, to, to_step, count);
        case 8: return copy_short<8>(from, from_step, to, to_step, count);
        case 16: return copy_short<16>(from, from_step, to, to_step, count);
    }
    if (std::is_same_v<T, bfloat16> && len == 4 * lanes) {
        for (int64_t k = 0; k < count; k++, from += from_step, to += to_step) {
            if (from_step != len) read_soon<4>(from, kPieces * from_step);
            std::memcpy(to, from, sizeof(T) * 4 * lanes);
        }
        return;
    }
    if (len == 4 * lanes) {
        for (int64_t k = 0; k < count; k++, from += from_step, to += to_step) {
            if (from_step != len) read_soon<4>(from, kPieces * from_step);
            const Vec<T> a = load<T>(from), b = load<T>(from + lanes), c = load<T>(from + 2 * lanes),
                         d = load<T>(from + 3 * lanes);
            store<T>(to, a);
            store<T>(to + lanes, b);
            store<T>(to + 2 * lanes, c);
            store<T>(to + 3 * lanes, d);
        }
        return;
    }
    for (int64_t k = 0; k < count; k++) std::memcpy(to + k * to_step, from + k * from_step, sizeof(T) * size_t(len));
}

// value(element, element of another tensor)
template <class T, class Value>
REWIRE_INLINE void read_as(const T* from, const T* other, int64_t from_step, T* to, int64_t to_step, int64_t count,
                           int64_t len, Value&& value) {
    constexpr int lanes = kLanes<T>;
    constexpr int64_t ahead = 4096 / sizeof(T);
    if (len == 4 * lanes) {
        for (int64_t k = 0; k < count; k++) {
            const T *x = from + k * from_step, *y = other + k * from_step;
            T* out = to + k * to_step;
            read_soon<4>(x, kPieces * from_step);
            if (x != y) read_soon<4>(y, kPieces * from_step);
#pragma GCC unroll 4
            for (int i = 0; i < 4 * lanes; i += lanes) store<T>(out + i, value(load<T>(x + i), load<T>(y + i)));
        }
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const T *x = from + k * from_step, *y = other + k * from_step;
        T* out = to + k * to_step;
        int64_t i = 0;
        for (; i + 4 * lanes <= len; i += 4 * lanes) {
            read_soon<4>(x + i, ahead);
            if (x != y) read_soon<4>(y + i, ahead);
            for (int64_t q = i; q < i + 4 * lanes; q += lanes) store<T>(out + q, value(load<T>(x + q), load<T>(y + q)));
        }
        for (; i + lanes <= len; i += lanes) store<T>(out + i, value(load<T>(x + i), load<T>(y + i)));
        if (i < len) {
            const int rest = int(len - i);
            store_part(out + i, value(load_part(x + i, rest), load_part(y + i, rest)), rest);
        }
    }
}

template <class T>
void read(const Reading<T>& reading, int64_t channel, const T* from, int64_t from_step, T* to, int64_t to_step,
          int64_t count, int64_t len) {
    if (!reading.scale)
        return read_as<T>(from, reading.gate, from_step, to, to_step, count, len,
                          [](Vec<T> x, Vec<T> gate) { return gate <= Vec<T>{} ? Vec<T>{} : x; });
    const Vec<T> scale = broadcast<T>(reading.scale[channel]), shift = broadcast<T>(reading.shift[channel]);
    if (reading.other) {
        const Vec<T> other = broadcast<T>(reading.other_scale[channel]);
        return read_as<T>(from, reading.other, from_step, to, to_step, count, len,
                          [=](Vec<T> x, Vec<T> y) { return x * scale + (y * other + shift); });
    }
    if (reading.relu)
        return read_as<T>(from, from, from_step, to, to_step, count, len,
                          [=](Vec<T> x, Vec<T>) { return rectify<T>(x * scale + shift); });
    read_as<T>(from, from, from_step, to, to_step, count, len, [=](Vec<T> x, Vec<T>) { return x * scale + shift; });
}

constexpr int64_t kBlock = 16;

template <class T>
REWIRE_INLINE void transpose_block(const T* in, int64_t in_row, T* out, int64_t out_row) {
    for (int64_t j = 0; j < kBlock; j++)
        for (int64_t i = 0; i < kBlock; i++) out[j * out_row + i] = in[i * in_row + j];
}

#if defined(REWIRE_AVX2) || defined(REWIRE_AVX512)
REWIRE_INLINE void transpose_8x8(const float* in, int64_t in_row, float* out, int64_t out_row) {
    __m256 r[8], s[8];
    for (int i = 0; i < 4; i++) {  // rows i and i + 4 share a register, four columns each
        const float *a = in + i * in_row, *b = in + (i + 4) * in_row;
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
        r[i + 4] =
            _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a + 4)), _mm_loadu_ps(b + 4), 1);
    }
    for (int h = 0; h < 8; h += 4) {
        s[h] = _mm256_unpacklo_ps(r[h], r[h + 1]);
        s[h + 1] = _mm256_unpackhi_ps(r[h], r[h + 1]);
        s[h + 2] = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
        s[h + 3] = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
        _mm256_storeu_ps(out + (h + 0) * out_row, _mm256_shuffle_ps(s[h], s[h + 2], 0x44));
        _mm256_storeu_ps(out + (h + 1) * out_row, _mm256_shuffle_ps(s[h], s[h + 2], 0xEE));
        _mm256_storeu_ps(out + (h + 2) * out_row, _mm256_shuffle_ps(s[h + 1], s[h + 3], 0x44));
        _mm256_storeu_ps(out + (h + 3) * out_row, _mm256_shuffle_ps(s[h + 1], s[h + 3], 0xEE));
    }
}

// Eight rows and columns of 16 bits.
REWIRE_INLINE void transpose_8x8(const bfloat16* in, int64_t in_row, bfloat16* out, int64_t out_row) {
    __m128i r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm_loadu_si128((const __m128i*)(in + i * in_row));
    for (int i = 0; i < 8; i += 2) {  // columns 0..3 and 4..7 of two rows
        s[i] = _mm_unpacklo_epi16(r[i], r[i + 1]);
        s[i + 1] = _mm_unpackhi_epi16(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)  // two columns each of four rows
        for (int h = 0; h < 2; h++) {
            r[i + 2 * h] = _mm_unpacklo_epi32(s[i + h], s[i + 2 + h]);
            r[i + 2 * h + 1] = _mm_unpackhi_epi32(s[i + h], s[i + 2 + h]);
        }
    for (int j = 0; j < 4; j++) {
        _mm_storeu_si128((__m128i*)(out + 2 * j * out_row), _mm_unpacklo_epi64(r[j], r[4 + j]));
        _mm_storeu_si128((__m128i*)(out + (2 * j + 1) * out_row), _mm_unpackhi_epi64(r[j], r[4 + j]));
    }
}

template <>
REWIRE_INLINE void transpose_block<bfloat16>(const bfloat16* in, int64_t in_row, bfloat16* out, int64_t out_row) {
    for (int64_t j = 0; j < kBlock; j += 8)
        for (int64_t i = 0; i < kBlock; i += 8)
            transpose_8x8(in + i * in_row + j, in_row, out + j * out_row + i, out_row);
}

template <>
REWIRE_INLINE void transpose_block<float>(const float* in, int64_t in_row, float* out, int64_t out_row) {
    for (int64_t j = 0; j < kBlock; j += 8)
        for (int64_t i = 0; i < kBlock; i += 8)
            transpose_8x8(in + i * in_row + j, in_row, out + j * out_row + i, out_row);
}
#endif

// kSide x kSide.
template <int kSide, class T>
REWIRE_INLINE void transpose_square(const T* in, int64_t in_row, T* out, int64_t out_row) {
#if defined(REWIRE_AVX2) || defined(REWIRE_AVX512)
    if constexpr (!std::is_same_v<T, double> && kSide == 8) return transpose_8x8(in, in_row, out, out_row);
    if constexpr (std::is_same_v<T, float> && kSide == 4) {
        __m128 r0 = _mm_loadu_ps(in), r1 = _mm_loadu_ps(in + in_row), r2 = _mm_loadu_ps(in + 2 * in_row),
               r3 = _mm_loadu_ps(in + 3 * in_row);
        _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
        _mm_storeu_ps(out, r0);
        _mm_storeu_ps(out + out_row, r1);
        _mm_storeu_ps(out + 2 * out_row, r2);
        _mm_storeu_ps(out + 3 * out_row, r3);
        return;
    }
#endif
    T held[kSide][kSide];
    for (int i = 0; i < kSide; i++)
        for (int j = 0; j < kSide; j++) held[j][i] = in[i * in_row + j];
    for (int j = 0; j < kSide; j++) std::memcpy(out + j * out_row, held[j], sizeof held[j]);
}

// Squares of this side, and smaller ones for what they leave.
template <int kSide, class T>
void transpose_part(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows, int64_t cols) {
    const int64_t down = rows / kSide * kSide, across = cols / kSide * kSide;
    for (int64_t r = 0; r < down; r += kSide)
        for (int64_t c = 0; c < across; c += kSide)
            transpose_square<kSide>(in + r * in_row + c, in_row, out + c * out_row + r, out_row);
    if constexpr (kSide > 1) {
        if (across < cols) transpose_part<kSide / 2>(in + across, in_row, out + across * out_row, out_row, down, cols - across);
        if (down < rows) transpose_part<kSide / 2>(in + down * in_row, in_row, out + down, out_row, rows - down, cols);
    }
}

template <class T>
void transpose(const T* in, int64_t in_row, T* out, int64_t out_row, int64_t rows, int64_t cols) {
    for (int64_t c = 0; c < cols; c += kBlock) {
        const int64_t width = cols - c < kBlock ? cols - c : kBlock;
        for (int64_t r = 0; r < rows; r += kBlock) {
            const int64_t height = rows - r < kBlock ? rows - r : kBlock;
            if (height == kBlock && width == kBlock) {
                transpose_block(in + r * in_row + c, in_row, out + c * out_row + r, out_row);
                continue;
            }
            transpose_part<8>(in + r * in_row + c, in_row, out + c * out_row + r, out_row, height, width);
        }
    }
}

}  // namespace rewire::REWIRE_ISA
