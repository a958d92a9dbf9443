// The CPU kernel without torch, for sanitizers and emulators: ffn_test SEED COUNT
//
// Each random problem is compared with loops in double precision. Every tensor ends, or begins, at a page that
// must not be touched. A row alone, other numbers of threads and the other layout must give the same bits.

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../npu_moe_ops/native/ffn.h"

using namespace npu_moe;

static std::mt19937 rng;
static int below(int n) { return static_cast<int>(rng() % n); }
template <size_t N>
static int one_of(const int (&values)[N]) { return values[below(N)]; }

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

static float widen_bf16(uint16_t x) {
    const uint32_t bits = uint32_t{x} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static float widen_half(uint16_t x) {
    const int exponent = x >> 10 & 31, fraction = x & 1023;
    const float value = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
    return x >> 15 ? -value : value;
}

static uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_half(float f) {  // of values that are neither huge nor tiny
    if (std::fabs(f) < 6.2e-5f) return 0;
    int exponent;
    const float fraction = std::frexp(std::fabs(f), &exponent);
    const auto bits = static_cast<uint16_t>(std::nearbyint(std::ldexp(fraction, 11)) + ((exponent + 13) << 10));
    return static_cast<uint16_t>(bits | (f < 0 ? 0x8000 : 0));
}

static size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

static void write(Dtype dtype, void* at, int64_t index, float value) {
    if (dtype == Dtype::fp32) static_cast<float*>(at)[index] = value;
    else static_cast<uint16_t*>(at)[index] = dtype == Dtype::bf16 ? to_bf16(value) : to_half(value);
}

static double read(Dtype dtype, const void* at, int64_t index) {
    if (dtype == Dtype::fp32) return static_cast<const float*>(at)[index];
    const uint16_t bits = static_cast<const uint16_t*>(at)[index];
    return dtype == Dtype::bf16 ? widen_bf16(bits) : widen_half(bits);
}

static void run_on_threads(int threads, Body body, void* context) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(body, context);
    body(context);
    for (auto& thread : others) thread.join();
}

struct Weights {  // [E, R, C] in one of three memory orders, with values that do not depend on it
    Weights(Dtype dtype, const std::vector<float>& values, int64_t e, int64_t r, int64_t c, int order, bool at_end)
        : memory((order == 2 ? 2 * values.size() - 1 : values.size()) * size_of(dtype), at_end) {
        const int64_t step = order == 2 ? 2 : 1;
        form = order == 1 ? Matrices{memory.data, r * c, 1, r} : Matrices{memory.data, r * c * step, c * step, step};
        for (int64_t i = 0; i < e; ++i)
            for (int64_t j = 0; j < r; ++j)
                for (int64_t k = 0; k < c; ++k)
                    write(dtype, memory.data, i * form.expert + j * form.row + k * form.column, values[(i * r + j) * c + k]);
    }
    Guarded memory;
    Matrices form;
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
    const int64_t hidden = one_of({1, 2, 7, 15, 16, 17, 33, 64, 65, 128, 129, 200}), inner = one_of({1, 3, 8, 16, 31, 64, 65, 130});
    std::vector<int64_t> offsets{0};
    for (int64_t e = 0; e < experts; ++e) offsets.push_back(offsets.back() + one_of({0, 0, 1, 2, 3, 5, 6, 7, 12, 13, 40, 97}));
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
    Weights w13(dtype, up_values, experts, hidden, 2 * inner, below(3), at_end);
    Weights w2(dtype, down_values, experts, inner, hidden, below(3), at_end);
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

    Weights w13_again(dtype, up_values, experts, hidden, 2 * inner, below(3), at_end);
    Weights w2_again(dtype, down_values, experts, inner, hidden, below(3), at_end);
    ffn.w13 = w13_again.form, ffn.w2 = w2_again.form;
    grouped_swiglu_ffn(ffn, Pool{1, run_on_threads});
    if (bytes && std::memcmp(first.data(), out.data, bytes)) fail("other bits in another layout", ffn, rows);

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
