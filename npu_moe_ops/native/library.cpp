// What torch sees: the library npu_moe_<isa>, over torch's stable ABI, so that one build serves several releases.
//
// It computes what it knows to be right. Anything else (fp64, a bad offset, a strange stride of `out`) it leaves
// untouched for the implementation in torch, which has the error messages too.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <vector>

#include "ffn.h"
#include "routing.h"

namespace npu_moe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void in_pool(int threads, Body body, void* context) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(context); });
}

Pool pool() { return {static_cast<int>(torch::stable::get_num_threads()), in_pool}; }

std::optional<Dtype> dtype_of(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::BFloat16: return Dtype::bf16;
        case ScalarType::Half: return Dtype::fp16;
        case ScalarType::Float: return Dtype::fp32;
        default: return std::nullopt;
    }
}

Tensor empty_as(const Tensor& matrix) {  // contiguous; torch::stable::empty looks its op up by name, 8 us long
    const int64_t sizes[] = {matrix.size(0), matrix.size(1)}, strides[] = {matrix.size(1), 1};
    int32_t dtype;
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(matrix.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

// [E*rows, columns] or [E, rows, columns]
std::optional<Matrices> matrices(const Tensor& w, int64_t experts, int64_t rows, int64_t columns) {
    const auto sizes = w.sizes(), strides = w.strides();
    if (sizes.size() == 2 && sizes[0] == experts * rows && sizes[1] == columns)
        return Matrices{w.const_data_ptr(), rows * strides[0], strides[0], strides[1]};
    if (sizes.size() == 3 && sizes[0] == experts && sizes[1] == rows && sizes[2] == columns)
        return Matrices{w.const_data_ptr(), strides[0], strides[1], strides[2]};
    return std::nullopt;
}

template <class Index>
bool read_offsets(const Tensor& cumsum, int64_t rows, std::vector<int64_t>& offsets) {
    const Index* values = static_cast<const Index*>(cumsum.const_data_ptr());
    const int64_t step = cumsum.stride(0);
    for (size_t e = 0; e < offsets.size(); ++e) {
        offsets[e] = values[e * step];
        if (offsets[e] < (e ? offsets[e - 1] : 0)) return false;
    }
    return offsets.front() == 0 && offsets.back() <= rows;
}

// What out must hold is computed into it; or nothing is done, and the answer is false.
bool ffn_into(const Tensor& out, const Tensor& tokens, const Tensor& w13, const Tensor& w2, const Tensor& cumsum,
              const std::optional<double>& limit, double alpha, double beta) {
    const int64_t rows = tokens.size(0), hidden = tokens.size(1), experts = cumsum.size(0) - 1;
    const int64_t intermediate = w13.size(w13.dim() - 1) / 2;
    const auto up = matrices(w13, experts, hidden, 2 * intermediate), down = matrices(w2, experts, intermediate, hidden);
    if (hidden < 1 || intermediate < 1 || !up || !down) return false;

    std::vector<int64_t> offsets(experts + 1);
    const ScalarType index = cumsum.scalar_type();
    const bool valid = index == ScalarType::Int    ? read_offsets<int32_t>(cumsum, rows, offsets)
                       : index == ScalarType::Long ? read_offsets<int64_t>(cumsum, rows, offsets)
                                                   : false;
    if (!valid) return false;

    const Ffn problem{*dtype_of(tokens), tokens.const_data_ptr(), tokens.stride(0), tokens.stride(1), *up, *down, out.mutable_data_ptr(),
                  hidden, intermediate, experts, offsets.data(), limit.has_value(), static_cast<float>(limit.value_or(0)),
                  static_cast<float>(alpha), static_cast<float>(beta)};
    grouped_swiglu_ffn(problem, pool());
    const size_t row_bytes = hidden * out.element_size();
    std::memset(static_cast<char*>(out.mutable_data_ptr()) + offsets.back() * row_bytes, 0, (rows - offsets.back()) * row_bytes);
    return true;
}

bool on_cpu(std::initializer_list<const Tensor*> tensors) {  // and strided
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const Tensor* t) { return t->defined() && t->is_cpu() && t->layout() == torch::headeronly::Layout::Strided; });
}

bool knows(const Tensor& tokens, const Tensor& w13, const Tensor& w2, const Tensor& cumsum, const std::optional<double>& limit,
           double alpha, double beta) {
    if (!on_cpu({&tokens, &w13, &w2, &cumsum})) return false;
    const auto dtype = dtype_of(tokens);
    return dtype && dtype_of(w13) == dtype && dtype_of(w2) == dtype && tokens.dim() == 2 && w13.dim() >= 2 && w13.dim() <= 3 &&
           w13.size(w13.dim() - 1) % 2 == 0 && cumsum.dim() == 1 && cumsum.size(0) >= 2 && (!limit || *limit >= 0) &&
           std::isfinite(alpha) && std::isfinite(beta);
}

std::optional<Tensor> ffn(Tensor tokens, Tensor w13, Tensor w2, Tensor cumsum, std::optional<double> limit,
                                         double alpha, double beta) {
    if (!knows(tokens, w13, w2, cumsum, limit, alpha, beta)) return std::nullopt;
    Tensor out = empty_as(tokens);
    if (!ffn_into(out, tokens, w13, w2, cumsum, limit, alpha, beta)) return std::nullopt;
    return out;
}

bool ffn_out(Tensor tokens, Tensor w13, Tensor w2, Tensor cumsum, std::optional<double> limit, double alpha,
                            double beta, Tensor out) {
    return knows(tokens, w13, w2, cumsum, limit, alpha, beta) && out.is_cpu() && dtype_of(out) == dtype_of(tokens) && out.dim() == 2 &&
           out.is_contiguous() && out.size(0) == tokens.size(0) && out.size(1) == tokens.size(1) &&
           ffn_into(out, tokens, w13, w2, cumsum, limit, alpha, beta);
}

// The results of the others are allocated by their callers, who have checked sizes.

bool is_block(const Tensor& t, ScalarType type) { return t.scalar_type() == type && t.is_contiguous(); }

bool has_whole_rows(const Tensor& matrix) { return matrix.size(1) <= 1 || matrix.stride(1) == 1; }

bool router(Tensor tokens, Tensor weight, std::optional<Tensor> bias, int64_t groups, int64_t kept_groups, bool softmax, bool renormalize,
            double factor, Tensor weights, Tensor ids, Tensor logits) {
    if (!on_cpu({&tokens, &weight, &weights, &ids, &logits}) || (bias && !(on_cpu({&*bias}) && is_block(*bias, ScalarType::Float)))) return false;
    const auto token_dtype = dtype_of(tokens), weight_dtype = dtype_of(weight);
    if (!token_dtype || !weight_dtype || !is_block(weights, ScalarType::Float) || !is_block(ids, ScalarType::Long) ||
        !is_block(logits, ScalarType::Float))
        return false;
    topk_router({*token_dtype, tokens.const_data_ptr(), tokens.stride(0), tokens.stride(1), *weight_dtype,
                 Matrices{weight.const_data_ptr(), 0, weight.stride(1), weight.stride(0)}, bias ? bias->const_data_ptr<float>() : nullptr,
                 tokens.size(0), tokens.size(1), weight.size(0), ids.size(1), groups, kept_groups, softmax, renormalize,
                 static_cast<float>(factor), weights.mutable_data_ptr<float>(), ids.mutable_data_ptr<int64_t>(), logits.mutable_data_ptr<float>()},
                pool());
    return true;
}

bool permuted(Tensor tokens, Tensor ids, int64_t experts, Tensor sorted, Tensor cumsum, Tensor row_of) {
    if (!on_cpu({&tokens, &ids, &sorted, &cumsum, &row_of}) || !has_whole_rows(tokens) || !ids.is_contiguous() ||
        (ids.scalar_type() != ScalarType::Long && ids.scalar_type() != ScalarType::Int) || sorted.size(0) > INT32_MAX ||
        !is_block(sorted, tokens.scalar_type()) || !is_block(cumsum, ScalarType::Int) || !is_block(row_of, ScalarType::Long))
        return false;
    const int64_t element = tokens.element_size();
    permute({static_cast<const char*>(tokens.const_data_ptr()), tokens.stride(0) * element, tokens.size(1) * element, ids.const_data_ptr(),
             ids.scalar_type() == ScalarType::Long, ids.size(0), ids.size(1), experts, static_cast<char*>(sorted.mutable_data_ptr()),
             cumsum.mutable_data_ptr<int32_t>(), row_of.mutable_data_ptr<int64_t>()},
            pool());
    return true;
}

bool unpermuted(Tensor rows, Tensor row_of, Tensor weights, Tensor out) {
    if (!on_cpu({&rows, &row_of, &weights, &out}) || !has_whole_rows(rows) || !is_block(row_of, ScalarType::Long) ||
        !is_block(weights, ScalarType::Float) || !is_block(out, rows.scalar_type()))
        return false;
    const auto dtype = dtype_of(rows);
    return dtype && unpermute({*dtype, rows.const_data_ptr(), rows.size(0), rows.stride(0), rows.size(1), row_of.const_data_ptr<int64_t>(),
                               weights.const_data_ptr<float>(), row_of.size(0), row_of.size(1), out.mutable_data_ptr()},
                              pool());
}

}  // namespace
}  // namespace npu_moe

#define DEFINE(name, m) STABLE_TORCH_LIBRARY(name, m)
#define IMPLEMENT(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define JOIN(a, b) a##b
#define LIBRARY(isa) JOIN(npu_moe_, isa)

#define FFN_ARGUMENTS \
    "Tensor sorted_tokens, Tensor w13, Tensor w2, Tensor expert_cumsum, float? swiglu_limit, float swiglu_alpha, float swiglu_beta"

DEFINE(LIBRARY(NPU_MOE_ISA), m) {
    m.def("grouped_swiglu_ffn(" FFN_ARGUMENTS ") -> Tensor?");
    m.def("grouped_swiglu_ffn_out(" FFN_ARGUMENTS ", Tensor(a!) out) -> bool");
    m.def(
        "topk_router(Tensor hidden_states, Tensor router_weight, Tensor? bias, int groups, int kept_groups, bool softmax, bool renormalize, "
        "float factor, Tensor(a!) topk_weights, Tensor(b!) topk_ids, Tensor(c!) router_logits) -> bool");
    m.def(
        "permute(Tensor hidden_states, Tensor topk_ids, int num_experts, Tensor(a!) sorted_tokens, Tensor(b!) expert_cumsum, "
        "Tensor(c!) row_of) -> bool");
    m.def("unpermute(Tensor expert_out, Tensor row_of, Tensor topk_weights, Tensor(a!) out) -> bool");
}
IMPLEMENT(LIBRARY(NPU_MOE_ISA), CompositeExplicitAutograd, m) {
    m.impl("grouped_swiglu_ffn", TORCH_BOX(&npu_moe::ffn));
    m.impl("grouped_swiglu_ffn_out", TORCH_BOX(&npu_moe::ffn_out));
    m.impl("topk_router", TORCH_BOX(&npu_moe::router));
    m.impl("permute", TORCH_BOX(&npu_moe::permuted));
    m.impl("unpermute", TORCH_BOX(&npu_moe::unpermuted));
}
