// The grouped SwiGLU FFN, without torch: what library.cpp hands to the kernel of one instruction set.
#pragma once

#include <cstdint>

namespace npu_moe {

enum class Dtype { bf16, fp16, fp32 };

struct Matrices {  // one a expert; strides in elements
    const void* data;
    int64_t expert, row, column;
};

struct Ffn {
    Dtype dtype;
    const void* tokens;
    int64_t token_stride, token_step;  // between rows, between the elements of a row
    Matrices w13, w2;
    void* out;  // contiguous
    int64_t hidden, intermediate, experts;
    const int64_t* offsets;  // experts + 1; rows from the last one on are not written
    bool has_limit;
    float limit, alpha, beta;
};

// Runs body(context) on up to `threads` threads at once, at least on the calling one.
using Body = void (*)(void* context);
struct Pool {
    int threads;
    void (*run)(int threads, Body body, void* context);
};

void grouped_swiglu_ffn(const Ffn&, const Pool&);

}  // namespace npu_moe
