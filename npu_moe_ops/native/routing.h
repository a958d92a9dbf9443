// Router, permute and unpermute, without torch. Each is done whole, or answers false and has written nothing that counts.
#pragma once

#include <cstdint>

#include "ffn.h"

namespace npu_moe {

struct Router {
    Dtype token_dtype;
    const void* tokens;
    int64_t token_stride, token_step;  // in elements
    Dtype weight_dtype;
    Matrices weight;    // one matrix, [hidden, experts]
    const float* bias;  // or null
    int64_t count, hidden, experts, top_k, groups, kept_groups;
    bool softmax, renormalize;
    float factor;
    float* weights;  // [count, top_k]
    int64_t* ids;    // [count, top_k]
    float* logits;   // [count, experts]
};
void topk_router(const Router&, const Pool&);

struct Permutation {
    const char* tokens;
    int64_t token_stride, row_bytes;  // in bytes
    const void* ids;                  // [count, top_k], contiguous
    bool long_ids;
    int64_t count, top_k, experts;
    char* sorted;     // [count * top_k] rows
    int32_t* cumsum;  // [experts + 1]
    int64_t* row_of;  // [count, top_k]
};
void permute(const Permutation&, const Pool&);

struct Combination {
    Dtype dtype;
    const void* rows;  // [row_count, hidden]
    int64_t row_count, row_stride, hidden;
    const int64_t* row_of;  // [count, top_k]; negative: of no expert
    const float* weights;   // [count, top_k]
    int64_t count, top_k;
    void* out;  // [count, hidden]
};
bool unpermute(const Combination&, const Pool&);  // false: a row that is not there

}  // namespace npu_moe
