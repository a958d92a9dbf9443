// The vector type of one instruction set, and the few operations that the kernels are written in.
//
// Each translation unit is compiled for one instruction set and sees one of these. All widen bf16 and
// fp16 exactly, and multiply and add with one rounding.
#pragma once

#include <cstdint>
#include <cstring>

namespace simd {

struct Bf16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

}  // namespace simd

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#error "no vector type for this instruction set"
#endif

namespace simd {

// The first n < WIDTH elements; the others are 0 and are neither read nor written.
template <class T>
inline Vec load_first(const T* from, int n) {
    T all[WIDTH] = {};
    std::memcpy(all, from, n * sizeof(T));
    return load(all);
}

template <class T>
inline void store_first(T* to, Vec value, int n) {
    T all[WIDTH];
    store(all, value);
    std::memcpy(to, all, n * sizeof(T));
}

// e^x to 2 ulp; +inf from x = 88.38 on, where 1 + e^x would lose nothing; NaN stays NaN.
// Cody and Waite's reduction with the minimax polynomial of Cephes' expf.
inline Vec exp(Vec x) {
    x = max(set1(-87.3f), min(set1(89.0f), x));
    const Vec n = round(mul(x, set1(1.44269504088896341f)));
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return mul(p, power_of_two(n));
}

}  // namespace simd
