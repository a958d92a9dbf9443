// The CPU kernel without torch, for sanitizers and emulators: ffn_test SEED COUNT
//
// Each random problem is compared with loops in double precision. Every tensor ends, or begins, at a page that
// must not be touched. A row alone, other numbers of threads and other gaps in memory must give the same bits.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "given.h"

enum class Order { rows, gaps, columns, columns_apart };  // contiguous in memory, or nothing is

struct Weights {  // [E, R, C], with values that do not depend on the order in memory
    static Matrices strides(Order order, int64_t r, int64_t c) {
        switch (order) {
            case Order::rows: return {nullptr, r * c, c, 1};
            case Order::gaps: return {nullptr, r * c * 2, c * 2, 2};
            case Order::columns: return {nullptr, r * c, 1, r};
            case Order::columns_apart: return {nullptr, (r + 3) * c, 1, r + 3};
        }
        std::abort();
    }
    Weights(Dtype dtype, const std::vector<float>& values, int64_t e, int64_t r, int64_t c, Order order, bool at_end)
        : form(strides(order, r, c)),
          memory(((e - 1) * form.expert + (r - 1) * form.row + (c - 1) * form.column + 1) * size_of(dtype), at_end) {
        form.data = memory.data;
        for (int64_t i = 0; i < e; ++i)
            for (int64_t j = 0; j < r; ++j)
                for (int64_t k = 0; k < c; ++k)
                    write(dtype, memory.data, i * form.expert + j * form.row + k * form.column, values[(i * r + j) * c + k]);
    }
    Matrices form;
    Guarded memory;
};

static void fail(const char* what, const Ffn& f, int64_t rows) {
    std::printf("%s: dtype %d, H %ld, I %ld, E %ld, rows %ld; offsets", what, static_cast<int>(f.dtype), static_cast<long>(f.hidden),
                static_cast<long>(f.intermediate), static_cast<long>(f.experts), static_cast<long>(rows));
    for (int64_t e = 0; e <= f.experts; ++e) std::printf(" %ld", static_cast<long>(f.offsets[e]));
    std::printf("\n");
    std::exit(1);
}

static void one_problem(unsigned seed) {
    rng.seed(seed);
    const Dtype dtype = static_cast<Dtype>(below(3));
    const int64_t experts = 1 + below(4);
    const bool long_sums = below(8) == 0;  // which the kernel cuts
    const int64_t hidden = long_sums ? one_of({1025, 2100}) : one_of({1, 2, 7, 15, 16, 17, 33, 64, 65, 128, 129, 200});
    const int64_t inner = one_of({1, 3, 8, 16, 31, 64, 65, 130});
    std::vector<int64_t> offsets{0};
    for (int64_t e = 0; e < experts; ++e)
        offsets.push_back(offsets.back() + (long_sums ? one_of({0, 1, 2, 14}) : one_of({0, 0, 1, 2, 3, 5, 6, 7, 12, 13, 40, 97})));
    const int64_t rows = offsets.back();

    auto draw = [&](int64_t count, double scale) {
        std::normal_distribution<float> normal(0, static_cast<float>(scale));
        std::vector<float> values(count);
        for (float& v : values) v = normal(rng);
        return values;
    };
    const bool at_end = below(2), strided = below(3) == 0;
    const auto token_values = draw(rows * hidden, 1), up_values = draw(experts * hidden * 2 * inner, std::pow(hidden, -0.5)),
               down_values = draw(experts * inner * hidden, std::pow(inner, -0.5));
    const int64_t step = strided ? 2 : 1;
    Guarded tokens(std::max<int64_t>(rows * hidden * step - (step - 1), 0) * size_of(dtype), at_end);
    for (int64_t i = 0; i < rows * hidden; ++i) write(dtype, tokens.data, i * step, token_values[i]);
    // Pairs of orders in which the kernel adds in the same order.
    constexpr Order orders[2][2] = {{Order::rows, Order::gaps}, {Order::columns, Order::columns_apart}};
    const int up_order = hidden > 1 && below(2), down_order = inner > 1 && below(2);
    Weights w13(dtype, up_values, experts, hidden, 2 * inner, orders[up_order][below(2)], at_end);
    Weights w2(dtype, down_values, experts, inner, hidden, orders[down_order][below(2)], at_end);
    const size_t bytes = rows * hidden * size_of(dtype);
    Guarded out(bytes, at_end);

    Ffn ffn{dtype, tokens.data, hidden * step, step, w13.form, w2.form, out.data, hidden, inner, experts, offsets.data(),
            below(2) == 1, 0.7f, below(2) ? 1.7f : 1.0f, below(2) ? 1.0f : 0.0f};
    grouped_swiglu_ffn(ffn, Pool{1 + below(3), run_on_threads});

    for (int64_t e = 0; e < experts; ++e) {
        auto up_at = [&](int64_t k, int64_t n) { return read(dtype, w13.form.data, e * w13.form.expert + k * w13.form.row + n * w13.form.column); };
        auto down_at = [&](int64_t k, int64_t n) { return read(dtype, w2.form.data, e * w2.form.expert + k * w2.form.row + n * w2.form.column); };
        for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
            // What rounding may cost is bounded with the sizes of all that was added: sums may cancel, their errors do not.
            const double one_rounding = std::ldexp(1.0, -24), sum_over_hidden = hidden * one_rounding, sum_over_inner = inner * one_rounding;
            const double element = dtype == Dtype::fp32 ? 8 * one_rounding : dtype == Dtype::bf16 ? 1.0 / 256 : 1.0 / 2048;
            std::vector<double> h(inner), slack(inner);
            for (int64_t i = 0; i < inner; ++i) {
                double gate = 0, up = 0, gate_size = 0, up_size = 0;
                for (int64_t k = 0; k < hidden; ++k) {
                    const double x = read(dtype, tokens.data, (r * hidden + k) * step), g = x * up_at(k, i), u = x * up_at(k, inner + i);
                    gate += g, up += u, gate_size += std::fabs(g), up_size += std::fabs(u);
                }
                if (ffn.has_limit) gate = std::fmin(gate, ffn.limit), up = std::fmax(-ffn.limit, std::fmin(up, ffn.limit));
                const double activated = gate / (1 + std::exp(-ffn.alpha * gate)), factor = up + ffn.beta;
                h[i] = activated * factor;
                slack[i] = sum_over_hidden * (1.1 * gate_size * std::fabs(factor) + std::fabs(activated) * up_size) + element * std::fabs(h[i]);
            }
            for (int64_t n = 0; n < hidden; ++n) {
                double right = 0, most = 0;
                for (int64_t i = 0; i < inner; ++i) {
                    const double weight = down_at(i, n);
                    right += h[i] * weight;
                    most += std::fabs(weight) * (slack[i] + sum_over_inner * std::fabs(h[i]));
                }
                if (!(std::fabs(read(dtype, out.data, r * hidden + n) - right) <= most + element * std::fabs(right) + 1e-7))
                    fail("wrong", ffn, rows);
            }
        }
    }

    std::vector<char> first(out.data, out.data + bytes);
    grouped_swiglu_ffn(ffn, Pool{4, run_on_threads});
    if (bytes && std::memcmp(first.data(), out.data, bytes)) fail("other bits with other threads", ffn, rows);

    Weights w13_again(dtype, up_values, experts, hidden, 2 * inner, orders[up_order][below(2)], at_end);
    Weights w2_again(dtype, down_values, experts, inner, hidden, orders[down_order][below(2)], at_end);
    ffn.w13 = w13_again.form, ffn.w2 = w2_again.form;
    grouped_swiglu_ffn(ffn, Pool{1, run_on_threads});
    if (bytes && std::memcmp(first.data(), out.data, bytes)) fail("other bits with other gaps", ffn, rows);

    for (int64_t e = 0; e < experts; ++e) {
        if (offsets[e] == offsets[e + 1]) continue;
        const int64_t r = offsets[e] + below(static_cast<int>(offsets[e + 1] - offsets[e]));
        std::vector<int64_t> alone(experts + 1, 0);
        std::fill(alone.begin() + e + 1, alone.end(), 1);
        Ffn row = ffn;
        row.tokens = tokens.data + r * hidden * step * size_of(dtype), row.offsets = alone.data();
        grouped_swiglu_ffn(row, Pool{1, run_on_threads});
        if (std::memcmp(first.data() + r * hidden * size_of(dtype), out.data, hidden * size_of(dtype))) fail("other bits alone", row, 1);
    }
}

int main(int, char** args) {
    const int seed = std::atoi(args[1]), count = std::atoi(args[2]);
    for (int i = 0; i < count; ++i) one_problem(seed + i);
    std::printf("%d problems\n", count);
}
