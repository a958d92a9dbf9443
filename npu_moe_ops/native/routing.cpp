// Router, permute and unpermute for one instruction set: what is large is read once and written once.

#include "routing.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "pool.h"
#include "product.h"

namespace npu_moe {
namespace {

constexpr int64_t BLOCK_TOKENS = 96;       // whose logits are computed at once
constexpr int64_t GRAIN = 16;              // tokens that a thread takes at a time
constexpr int64_t SERIAL_BYTES = 1 << 17;  // that one thread moves sooner than several
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;

thread_local Scratch scratch;

// function(first, last) for all of [0, count), in pieces of `grain`.
template <class Function>
void in_pieces(const Pool& pool, bool serial, int64_t count, int64_t grain, const Function& function) {
    std::atomic<int64_t> taken{0};
    in_parallel(pool, serial || count <= grain ? 1 : pool.threads, [&] {
        for (int64_t first; (first = taken.fetch_add(grain, std::memory_order_relaxed)) < count;) function(first, std::min(first + grain, count));
    });
}

void read_token(const Router& r, int64_t row, float* to) {
    auto read = [&](auto* tokens) { widen_row(tokens + row * r.token_stride, r.token_step, r.hidden, to); };
    switch (r.token_dtype) {
        case Dtype::bf16: return read(static_cast<const Bf16*>(r.tokens));
        case Dtype::fp16: return read(static_cast<const Half*>(r.tokens));
        case Dtype::fp32: return read(static_cast<const float*>(r.tokens));
    }
}

template <class T>
void logits(const Router& r, const Pool& pool) {
    using How = Widen<T>;
    const int64_t blocks = (r.count + BLOCK_TOKENS - 1) / BLOCK_TOKENS, panels = (r.experts + PANEL - 1) / PANEL;
    const int64_t cuts = blocks >= 2 * pool.threads ? 1 : panels;  // of the experts
    in_pieces(pool, r.count * r.experts * r.hidden < SERIAL_PRODUCTS, blocks * cuts, 1, [&](int64_t piece, int64_t) {
        const int64_t start = piece / cuts * BLOCK_TOKENS, rows = std::min(BLOCK_TOKENS, r.count - start);
        const int64_t from = piece % cuts * panels / cuts * PANEL, to = std::min((piece % cuts + 1) * panels / cuts * PANEL, r.experts);
        const int64_t stride = token_stride<How>(r.hidden), width = sums_width(to - from);
        float* tokens = scratch.tokens.get<float>(rows * stride);
        for (int64_t i = 0; i < rows; ++i) read_token(r, start + i, tokens + i * stride);
        float* sums = scratch.sums.get<float>(rows * width);
        multiply<How>(tokens, stride, rows, r.hidden, static_cast<const T*>(r.weight.data), r.weight, {from}, to - from, sums, width, scratch);
        for (int64_t i = 0; i < rows; ++i) std::copy_n(sums + i * width, to - from, r.logits + (start + i) * r.experts + from);
    });
}

bool better(float a, float b) {  // as torch sorts: NaN is the largest
    return a > b || (std::isnan(a) && !std::isnan(b));
}

// The k best, best first, the lowest index first among equals.
void best_first(const float* values, int64_t count, int64_t k, int64_t* to) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (found == k && !better(values[i], values[to[k - 1]])) continue;
        int64_t place = found < k ? found++ : k - 1;
        for (; place > 0 && better(values[i], values[to[place - 1]]); --place) to[place] = to[place - 1];
        to[place] = i;
    }
}

void score(const Router& r, const float* logits, float* scores) {
    const int64_t n = r.experts;
    if (!r.softmax) {
        for (int64_t e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
        return;
    }
    float most = logits[0], sum = 0;
    for (int64_t e = 1; e < n; ++e) most = better(logits[e], most) ? logits[e] : most;
    for (int64_t e = 0; e < n; ++e) sum += scores[e] = std::exp(logits[e] - most);
    for (int64_t e = 0; e < n; ++e) scores[e] /= sum;
}

// -inf for the experts outside the groups whose two best add up to most.
void keep_best_groups(const Router& r, float* choice, std::vector<float>& sums, std::vector<int64_t>& kept) {
    const int64_t size = r.experts / r.groups;
    sums.resize(r.groups), kept.resize(r.kept_groups);
    for (int64_t g = 0; g < r.groups; ++g) {
        int64_t two[2];
        const float* group = choice + g * size;
        best_first(group, size, std::min<int64_t>(2, size), two);
        sums[g] = size > 1 ? group[two[0]] + group[two[1]] : group[two[0]];
    }
    best_first(sums.data(), r.groups, r.kept_groups, kept.data());
    for (int64_t g = 0; g < r.groups; ++g)
        if (std::find(kept.begin(), kept.end(), g) == kept.end()) std::fill_n(choice + g * size, size, -INFINITY);
}

template <class T>
void combine(const Combination& c, const Pool& pool) {
    const int64_t bytes = c.count * c.top_k * c.hidden * static_cast<int64_t>(sizeof(T));
    in_pieces(pool, bytes < SERIAL_BYTES, c.count, GRAIN, [&](int64_t first, int64_t last) {
        std::vector<const T*> rows(c.top_k);
        std::vector<float> weights(c.top_k);
        for (int64_t t = first; t < last; ++t) {
            int64_t there = 0;
            for (int64_t k = 0; k < c.top_k; ++k) {
                const int64_t row = c.row_of[t * c.top_k + k];
                if (row < 0) continue;
                rows[there] = static_cast<const T*>(c.rows) + row * c.row_stride;
                weights[there++] = c.weights[t * c.top_k + k];
            }
            T* out = static_cast<T*>(c.out) + t * c.hidden;
            int64_t h = 0;
            for (; h + 4 * WIDTH <= c.hidden; h += 4 * WIDTH) {
                Vec sum[4];
                UNROLL for (int j = 0; j < 4; ++j) sum[j] = simd::set1(0.0f);
                for (int64_t k = 0; k < there; ++k) {
                    const Vec weight = simd::set1(weights[k]);
                    UNROLL for (int j = 0; j < 4; ++j) sum[j] = simd::fma(simd::load(rows[k] + h + j * WIDTH), weight, sum[j]);
                }
                UNROLL for (int j = 0; j < 4; ++j) simd::store(out + h + j * WIDTH, sum[j]);
            }
            for (; h < c.hidden; h += WIDTH) {
                const int count = static_cast<int>(std::min<int64_t>(WIDTH, c.hidden - h));
                Vec sum = simd::set1(0.0f);
                for (int64_t k = 0; k < there; ++k) sum = simd::fma(simd::load_first(rows[k] + h, count), simd::set1(weights[k]), sum);
                simd::store_first(out + h, sum, count);
            }
        }
    });
}

}  // namespace

void topk_router(const Router& r, const Pool& pool) {
    switch (r.weight_dtype) {
        case Dtype::bf16: logits<Bf16>(r, pool); break;
        case Dtype::fp16: logits<Half>(r, pool); break;
        case Dtype::fp32: logits<float>(r, pool); break;
    }
    in_pieces(pool, r.count * r.experts * 16 < SERIAL_BYTES, r.count, GRAIN, [&](int64_t first, int64_t last) {
        std::vector<float> scores(r.experts), choice(r.experts), sums;
        std::vector<int64_t> kept;
        for (int64_t t = first; t < last; ++t) {
            score(r, r.logits + t * r.experts, scores.data());
            for (int64_t e = 0; e < r.experts; ++e) choice[e] = r.bias ? scores[e] + r.bias[e] : scores[e];
            if (r.groups > 1) keep_best_groups(r, choice.data(), sums, kept);
            int64_t* ids = r.ids + t * r.top_k;
            float* weights = r.weights + t * r.top_k;
            best_first(choice.data(), r.experts, r.top_k, ids);
            float sum = 0;
            for (int64_t k = 0; k < r.top_k; ++k) sum += weights[k] = scores[ids[k]];
            for (int64_t k = 0; k < r.top_k; ++k) {
                if (r.renormalize && r.top_k > 1) weights[k] /= sum + 1e-20f;
                weights[k] *= r.factor;
            }
        }
    });
}

void permute(const Permutation& p, const Pool& pool) {
    const int64_t slots = p.count * p.top_k;
    auto expert = [&](int64_t slot) {  // slots of no expert sort last
        const int64_t id = p.long_ids ? static_cast<const int64_t*>(p.ids)[slot] : static_cast<const int32_t*>(p.ids)[slot];
        return id >= 0 && id < p.experts ? id : p.experts;
    };
    std::vector<int64_t> next(p.experts + 2);
    for (int64_t slot = 0; slot < slots; ++slot) ++next[expert(slot) + 1];
    for (int64_t e = 0; e <= p.experts; ++e) {
        next[e + 1] += next[e];
        p.cumsum[e] = static_cast<int32_t>(next[e]);
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t e = expert(slot), row = next[e]++;
        p.row_of[slot] = e < p.experts ? row : row - slots;
    }
    in_pieces(pool, slots * p.row_bytes < SERIAL_BYTES, p.count, GRAIN, [&](int64_t first, int64_t last) {
        for (int64_t slot = first * p.top_k; slot < last * p.top_k; ++slot) {
            const int64_t row = p.row_of[slot];
            if (row < 0) std::memset(p.sorted + (row + slots) * p.row_bytes, 0, p.row_bytes);
            else std::memcpy(p.sorted + row * p.row_bytes, p.tokens + slot / p.top_k * p.token_stride, p.row_bytes);
        }
    });
}

bool unpermute(const Combination& c, const Pool& pool) {
    for (int64_t slot = 0; slot < c.count * c.top_k; ++slot)
        if (c.row_of[slot] >= c.row_count || c.row_of[slot] < -c.row_count) return false;
    switch (c.dtype) {
        case Dtype::bf16: combine<Bf16>(c, pool); break;
        case Dtype::fp16: combine<Half>(c, pool); break;
        case Dtype::fp32: combine<float>(c, pool); break;
    }
    return true;
}

}  // namespace npu_moe
