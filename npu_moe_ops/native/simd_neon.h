#pragma once

#include <arm_neon.h>

namespace simd {

constexpr int WIDTH = 4;
constexpr int TILE_ROWS = 6;     // of a product: 6 x 4 sums, 4 weights and a token in 32 registers
constexpr int TILE_VECTORS = 4;
using Vec = float32x4_t;
using Words = uint32x4_t;

inline Vec load(const float* p) { return vld1q_f32(p); }
inline Vec load(const Bf16* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
inline Vec load(const Half* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}

inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline void store(Bf16* p, Vec v) {  // to nearest, ties to even; NaN to the NaN that torch writes
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t even = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(even, vdupq_n_u32(0x7fff)));
    const uint32x4_t high = vbslq_u32(vceqq_f32(v, v), vshrq_n_u32(rounded, 16), vdupq_n_u32(0x7fc0));
    vst1_u16(reinterpret_cast<uint16_t*>(p), vmovn_u32(high));
}
inline void store(Half* p, Vec v) {
    vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v)));
}

inline Vec set1(float x) { return vdupq_n_f32(x); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec min(Vec limit, Vec x) { return vminq_f32(limit, x); }  // NaN where x is NaN
inline Vec max(Vec limit, Vec x) { return vmaxq_f32(limit, x); }
inline Vec round(Vec x) { return vrndnq_f32(x); }
inline Vec power_of_two(Vec n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

inline Words load_words(const void* p) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline Vec as_floats(Words w) { return vreinterpretq_f32_u32(w); }
inline void store_words(void* p, Words w) { vst1q_u32(static_cast<uint32_t*>(p), w); }
inline Vec first(Words w, Bf16) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }
inline Vec second(Words w, Bf16) { return vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000))); }
inline Vec first(Words w, Half) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(w))); }
inline Vec second(Words w, Half) { return vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(w, 16))); }

inline void transpose(const char* from, int64_t stride, Words (&to)[WIDTH]) {  // 4 x 4 words
    uint32x4_t row[4];
    for (int i = 0; i < 4; ++i) row[i] = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from + i * stride)));
    const uint32x4_t a = vzip1q_u32(row[0], row[2]), b = vzip2q_u32(row[0], row[2]);
    const uint32x4_t c = vzip1q_u32(row[1], row[3]), d = vzip2q_u32(row[1], row[3]);
    to[0] = vzip1q_u32(a, c);
    to[1] = vzip2q_u32(a, c);
    to[2] = vzip1q_u32(b, d);
    to[3] = vzip2q_u32(b, d);
}

inline void widen_shuffled(const Bf16* p, Vec& a, Vec& b) {  // in order
    a = load(p);
    b = load(p + WIDTH);
}
inline void unshuffle(float*) {}

}  // namespace simd
