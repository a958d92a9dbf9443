#pragma once

#include <immintrin.h>

namespace simd {

constexpr int WIDTH = 8;
constexpr int TILE_ROWS = 6;     // of a product: 6 x 2 sums, 2 weights and a token in 16 registers
constexpr int TILE_VECTORS = 2;
using Vec = __m256;
using Words = __m256i;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline __m128i low_halves(__m256i words) {  // of which none is above 0xffff
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
    return _mm256_castsi256_si128(packed);
}

inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void store(Bf16* p, Vec v) {  // to nearest, ties to even; NaN to the NaN that torch writes
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low_halves(high));
}
inline void store(Half* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec min(Vec limit, Vec x) { return _mm256_min_ps(limit, x); }  // x where it is NaN
inline Vec max(Vec limit, Vec x) { return _mm256_max_ps(limit, x); }
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

inline Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Vec as_floats(Words w) { return _mm256_castsi256_ps(w); }
inline void store_words(void* p, Words w) { _mm256_storeu_si256(static_cast<__m256i*>(p), w); }
inline Vec first(Words w, Bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline Vec second(Words w, Bf16) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff0000))); }
inline Vec first(Words w, Half) {
    return _mm256_cvtph_ps(low_halves(_mm256_and_si256(w, _mm256_set1_epi32(0xffff))));
}
inline Vec second(Words w, Half) { return _mm256_cvtph_ps(low_halves(_mm256_srli_epi32(w, 16))); }

// 8 x 8 words, loaded in pieces of 128 bits to where they belong.
inline void transpose(const char* from, int64_t stride, Words (&to)[WIDTH]) {
    for (int column = 0; column < 2; ++column) {
        __m256i row[4];
        for (int i = 0; i < 4; ++i) {
            const char* p = from + i * stride + column * 16;
            const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4 * stride));
            row[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), high, 1);
        }
        const __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpackhi_epi32(row[0], row[1]);
        const __m256i c = _mm256_unpacklo_epi32(row[2], row[3]), d = _mm256_unpackhi_epi32(row[2], row[3]);
        to[4 * column] = _mm256_unpacklo_epi64(a, c);
        to[4 * column + 1] = _mm256_unpackhi_epi64(a, c);
        to[4 * column + 2] = _mm256_unpacklo_epi64(b, d);
        to[4 * column + 3] = _mm256_unpackhi_epi64(b, d);
    }
}

// 16 columns as the cheapest instructions give them: 0-3, 8-11, then those in between.
inline void widen_shuffled(const Bf16* p, Vec& a, Vec& b) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), zero = _mm256_setzero_si256();
    a = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, both));
    b = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, both));
}
inline void unshuffle(float* p) {
    const __m256 a = load(p), b = load(p + WIDTH);
    store(p, _mm256_permute2f128_ps(a, b, 0x20));
    store(p + WIDTH, _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace simd
