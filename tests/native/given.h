// For tests of the kernels without torch: random draws, memory between guard pages, the 16-bit types, threads.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../npu_moe_ops/native/ffn.h"

using namespace npu_moe;

inline std::mt19937 rng;
inline int below(int n) { return static_cast<int>(rng() % n); }
template <size_t N>
inline int one_of(const int (&values)[N]) { return values[below(N)]; }

class Guarded {  // memory between two pages that must not be touched, close to one of them
public:
    Guarded(size_t bytes, bool at_end) {
        const size_t page = sysconf(_SC_PAGESIZE), inside = (bytes + page - 1) / page * page + page;
        size_ = inside + 2 * page;
        map_ = static_cast<char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (map_ == MAP_FAILED || mprotect(map_ + page, inside, PROT_READ | PROT_WRITE)) std::abort();
        data = at_end ? map_ + page + inside - bytes : map_ + page;
    }
    ~Guarded() { munmap(map_, size_); }
    Guarded(const Guarded&) = delete;
    char* data;

private:
    char* map_;
    size_t size_;
};

inline float widen_bf16(uint16_t x) {
    const uint32_t bits = uint32_t{x} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline float widen_half(uint16_t x) {
    const int exponent = x >> 10 & 31, fraction = x & 1023;
    const float value = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
    return x >> 15 ? -value : value;
}

inline uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_half(float f) {  // of values that are neither huge nor tiny
    if (std::fabs(f) < 6.2e-5f) return 0;
    int exponent;
    const float fraction = std::frexp(std::fabs(f), &exponent);
    const auto bits = static_cast<uint16_t>(std::nearbyint(std::ldexp(fraction, 11)) + ((exponent + 13) << 10));
    return static_cast<uint16_t>(bits | (f < 0 ? 0x8000 : 0));
}

inline size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

inline void write(Dtype dtype, void* at, int64_t index, float value) {
    if (dtype == Dtype::fp32) static_cast<float*>(at)[index] = value;
    else static_cast<uint16_t*>(at)[index] = dtype == Dtype::bf16 ? to_bf16(value) : to_half(value);
}

inline double read(Dtype dtype, const void* at, int64_t index) {
    if (dtype == Dtype::fp32) return static_cast<const float*>(at)[index];
    const uint16_t bits = static_cast<const uint16_t*>(at)[index];
    return dtype == Dtype::bf16 ? widen_bf16(bits) : widen_half(bits);
}

inline void run_on_threads(int threads, Body body, void* context) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(body, context);
    body(context);
    for (auto& thread : others) thread.join();
}
