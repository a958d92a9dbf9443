// Router, permute and unpermute without torch, for sanitizers and emulators: routing_test SEED COUNT
//
// Each random problem is compared with plain loops. Every tensor ends, or begins, at a page that must not be touched.

#include "../../npu_moe_ops/native/routing.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "given.h"

static void expect(bool right, const char* what, unsigned seed) {
    if (right) return;
    std::printf("%s, seed %u\n", what, seed);
    std::exit(1);
}

struct Drawn : Guarded {
    Drawn(Dtype dtype, int64_t count, bool at_end) : Guarded(count * size_of(dtype), at_end) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; ++i) write(dtype, data, i, normal(rng));
    }
};

template <class T>
static T* as(const Guarded& memory) {
    return reinterpret_cast<T*>(memory.data);
}

static void route(unsigned seed) {
    const Dtype token_dtype = static_cast<Dtype>(below(3)), weight_dtype = static_cast<Dtype>(below(3));
    const bool at_end = below(2), softmax = below(2), renormalize = below(2), biased = below(2);
    const int64_t count = one_of({0, 1, 2, 5, 13, 17, 100}), hidden = one_of({1, 3, 16, 31, 33, 64, 130, 1030});
    const int64_t groups = one_of({1, 1, 2, 4}), size = one_of({1, 2, 7, 16, 33}), experts = groups * size;
    const int64_t kept_groups = 1 + below(static_cast<int>(groups)), top_k = 1 + below(static_cast<int>(std::min<int64_t>(kept_groups * size, 9)));
    const Drawn tokens(token_dtype, count * hidden, at_end), weight(weight_dtype, experts * hidden, at_end), bias(Dtype::fp32, experts, at_end);
    const Guarded weights(count * top_k * 4, at_end), ids(count * top_k * 8, at_end), logits(count * experts * 4, at_end);
    Router router{token_dtype, tokens.data, hidden, 1, weight_dtype, Matrices{weight.data, 0, 1, hidden}, biased ? as<float>(bias) : nullptr,
                  count, hidden, experts, top_k, groups, kept_groups, softmax, renormalize, 2.5f, as<float>(weights), as<int64_t>(ids), as<float>(logits)};
    topk_router(router, Pool{1 + below(3), run_on_threads});
    for (int64_t t = 0; t < count; ++t) {
        const float* row = as<float>(logits) + t * experts;
        double most = -INFINITY, sum = 0;
        std::vector<double> scores(experts), choice(experts);
        for (int64_t e = 0; e < experts; ++e) {
            double right = 0, all = 0;
            for (int64_t k = 0; k < hidden; ++k) {
                const double product = read(token_dtype, tokens.data, t * hidden + k) * read(weight_dtype, weight.data, e * hidden + k);
                right += product, all += std::fabs(product);
            }
            expect(std::fabs(row[e] - right) <= hidden * std::ldexp(1.0, -24) * all + 1e-7, "wrong logit", seed);
            most = std::max<double>(most, row[e]);
        }
        for (int64_t e = 0; e < experts; ++e) sum += scores[e] = softmax ? std::exp(row[e] - most) : 1 / (1 + std::exp(-double{row[e]}));
        for (int64_t e = 0; e < experts; ++e) scores[e] /= softmax ? sum : 1, choice[e] = scores[e] + (biased ? as<float>(bias)[e] : 0);
        // The chosen are no worse than any other expert of their groups, best first.
        const int64_t* chosen = as<int64_t>(ids) + t * top_k;
        double total = 0;
        std::vector<int64_t> inside;
        for (int64_t k = 0; k < top_k; ++k) {
            expect(chosen[k] >= 0 && chosen[k] < experts && std::count(chosen, chosen + top_k, chosen[k]) == 1, "no expert, or one twice", seed);
            if (k) expect(choice[chosen[k]] <= choice[chosen[k - 1]] + 1e-5, "not best first", seed);
            inside.push_back(chosen[k] / size);
            total += scores[chosen[k]];
        }
        std::sort(inside.begin(), inside.end());
        expect(std::unique(inside.begin(), inside.end()) - inside.begin() <= kept_groups, "too many groups", seed);
        for (int64_t e = 0; e < experts; ++e)
            if ((groups == 1 || std::count(inside.begin(), inside.end(), e / size)) && !std::count(chosen, chosen + top_k, e))
                expect(choice[e] <= choice[chosen[top_k - 1]] + 1e-5, "a better expert left out", seed);
        for (int64_t k = 0; k < top_k; ++k) {
            const double right = 2.5 * scores[chosen[k]] / (renormalize && top_k > 1 ? total + 1e-20 : 1);
            expect(std::fabs(as<float>(weights)[t * top_k + k] - right) <= 1e-5, "wrong weight", seed);
        }
    }
    if (!count) return;
    const float* row = as<float>(logits) + count / 2 * experts;
    const std::vector<float> first(row, row + experts);
    router.tokens = tokens.data + count / 2 * hidden * size_of(token_dtype), router.count = 1;
    topk_router(router, Pool{4, run_on_threads});
    expect(!std::memcmp(first.data(), logits.data, experts * 4), "other bits alone", seed);
}

static void permute_and_back(unsigned seed) {
    const Dtype dtype = static_cast<Dtype>(below(3));
    const bool at_end = below(2), long_ids = below(2);
    const int64_t count = one_of({0, 1, 3, 16, 17, 200}), top_k = below(9), experts = one_of({1, 2, 8, 300}), hidden = one_of({1, 5, 16, 64, 100, 257});
    const int64_t slots = count * top_k, stride = hidden + below(2) * 3;
    const Drawn tokens(dtype, count * stride, at_end);
    const Guarded ids(slots * (long_ids ? 8 : 4), at_end), sorted(slots * hidden * size_of(dtype), at_end);
    const Guarded cumsum((experts + 1) * 4, at_end), row_of(slots * 8, at_end);
    std::vector<int64_t> id(slots);
    for (int64_t s = 0; s < slots; ++s) {
        id[s] = below(static_cast<int>(experts) + 2) - 1;
        if (long_ids) as<int64_t>(ids)[s] = id[s];
        else as<int32_t>(ids)[s] = static_cast<int32_t>(id[s]);
    }
    permute({tokens.data, stride * static_cast<int64_t>(size_of(dtype)), hidden * static_cast<int64_t>(size_of(dtype)), ids.data, long_ids, count, top_k,
             experts, sorted.data, as<int32_t>(cumsum), as<int64_t>(row_of)},
            Pool{1 + below(3), run_on_threads});
    auto of_expert = [&](int64_t s) { return id[s] >= 0 && id[s] < experts ? id[s] : experts; };
    std::vector<int64_t> order(slots);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return of_expert(a) < of_expert(b); });
    for (int64_t e = 0; e <= experts; ++e)
        expect(as<int32_t>(cumsum)[e] == std::count_if(order.begin(), order.end(), [&](int64_t s) { return of_expert(s) < e; }), "wrong cumsum", seed);
    for (int64_t row = 0; row < slots; ++row) {
        const int64_t slot = order[row];
        const bool there = of_expert(slot) < experts;
        expect(as<int64_t>(row_of)[slot] == (there ? row : row - slots), "wrong row_of", seed);
        for (int64_t h = 0; h < hidden; ++h)
            expect(read(dtype, sorted.data, row * hidden + h) == (there ? read(dtype, tokens.data, slot / top_k * stride + h) : 0), "wrong row", seed);
    }

    const Drawn weights(Dtype::fp32, slots, at_end);
    const Guarded out(count * hidden * size_of(dtype), at_end);
    Combination combination{dtype, sorted.data, slots, hidden, hidden, as<int64_t>(row_of), as<float>(weights), count, top_k, out.data};
    expect(unpermute(combination, Pool{1 + below(3), run_on_threads}), "refused", seed);
    const double element = dtype == Dtype::fp32 ? 1e-6 : dtype == Dtype::bf16 ? 1.0 / 256 : 1.0 / 2048;
    for (int64_t t = 0; t < count; ++t)
        for (int64_t h = 0; h < hidden; ++h) {
            double right = 0, all = 0;
            for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
                const double part = of_expert(s) < experts ? read(dtype, tokens.data, t * stride + h) * as<float>(weights)[s] : 0;
                right += part, all += std::fabs(part);
            }
            expect(std::fabs(read(dtype, out.data, t * hidden + h) - right) <= element * std::fabs(right) + 1e-6 * (all + 1), "wrong sum", seed);
        }
    if (!slots) return;
    for (const int64_t bad : {slots, -slots - 1}) {
        as<int64_t>(row_of)[below(static_cast<int>(slots))] = bad;
        expect(!unpermute(combination, Pool{1, run_on_threads}), "a row that is not there", seed);
    }
}

int main(int, char** args) {
    const int seed = std::atoi(args[1]), count = std::atoi(args[2]);
    for (int i = 0; i < count; ++i) {
        rng.seed(seed + i);
        route(seed + i);
        permute_and_back(seed + i);
    }
    std::printf("%d problems\n", count);
}
