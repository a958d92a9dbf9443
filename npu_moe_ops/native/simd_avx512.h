#pragma once

#include <immintrin.h>

namespace simd {

constexpr int WIDTH = 16;
constexpr int TILE_ROWS = 6;     // of a product: 6 x 4 sums, 4 weights and a token fill the 32 registers
constexpr int TILE_VECTORS = 4;
using Vec = __m512;
using Words = __m512i;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(Bf16* p, Vec v) {  // to nearest, ties to even; NaN to the NaN that torch writes
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}
inline void store(Half* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec min(Vec limit, Vec x) { return _mm512_min_ps(limit, x); }  // x where it is NaN
inline Vec max(Vec limit, Vec x) { return _mm512_max_ps(limit, x); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec power_of_two(Vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

// 32-bit words that hold one fp32, or two neighbours of a 16-bit type, the first one low.
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Vec as_floats(Words w) { return _mm512_castsi512_ps(w); }
inline void store_words(void* p, Words w) { _mm512_storeu_si512(p, w); }
inline Vec first(Words w, Bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline Vec second(Words w, Bf16) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff0000))); }
inline Vec first(Words w, Half) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
inline Vec second(Words w, Half) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16))); }

// 16 x 16 words. Rows are often 4 KiB apart, so that their lines evict one another from the L1 cache: each is read once.
inline void transpose(const char* from, int64_t stride, Words (&to)[WIDTH]) {
    __m512i pair[16], quad[16];  // of rows: 4-word pieces, each of neighbouring rows
    for (int i = 0; i < 16; i += 2) {
        const __m512i a = load_words(from + i * stride), b = load_words(from + (i + 1) * stride);
        pair[i] = _mm512_unpacklo_epi32(a, b);
        pair[i + 1] = _mm512_unpackhi_epi32(a, b);
    }
    for (int i = 0; i < 16; i += 4) {
        quad[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
        quad[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
        quad[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
        quad[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // quad[4r + i]: words i, i + 4, i + 8, i + 12 of rows 4r to 4r + 3
        const __m512i a = _mm512_shuffle_i32x4(quad[i], quad[i + 4], 0x88), b = _mm512_shuffle_i32x4(quad[i], quad[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(quad[i + 8], quad[i + 12], 0x88), d = _mm512_shuffle_i32x4(quad[i + 8], quad[i + 12], 0xdd);
        to[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        to[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        to[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        to[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

// 32 columns as the cheapest instructions give them: 0-3, 8-11, 16-19, 24-27, then those in between.
inline void widen_shuffled(const Bf16* p, Vec& a, Vec& b) {
    const __m512i both = load_words(p), zero = _mm512_setzero_si512();
    a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, both));
    b = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, both));
}
inline void unshuffle(float* p) {
    const __m512 a = load(p), b = load(p + WIDTH);
    const __m512i order = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    store(p, _mm512_permutex2var_ps(a, order, b));
    store(p + WIDTH, _mm512_permutex2var_ps(a, _mm512_add_epi32(order, _mm512_set1_epi32(8)), b));
}

#if defined(__AVX512BF16__) || defined(NPU_MOE_EMULATE_BF16_DOT)
#define NPU_MOE_HAS_DOT 1
// sum + token pair * weight pair
inline Vec dot(Words token, Words weight, Vec sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(token), reinterpret_cast<__m512bh>(weight));
#else  // for tests where the instruction is missing
    const Vec odd = fma(second(token, Bf16{}), second(weight, Bf16{}), sum);
    return fma(first(token, Bf16{}), first(weight, Bf16{}), odd);
#endif
}
inline Words broadcast(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

// Two rows of 32 elements -> 32 pairs, in order.
inline void pair_up(Words low, Words high, Words (&to)[2]) {
    const __m512i order = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    to[0] = _mm512_permutex2var_epi16(low, order, high);
    to[1] = _mm512_permutex2var_epi16(low, _mm512_add_epi16(order, _mm512_set1_epi16(16)), high);
}
inline void pair_up_shuffled(Words low, Words high, Words& a, Words& b) {
    a = _mm512_unpacklo_epi16(low, high);
    b = _mm512_unpackhi_epi16(low, high);
}
#endif

}  // namespace simd
