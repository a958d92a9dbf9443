// The grouped SwiGLU FFN for one instruction set: rows of one expert form blocks; gate/up of all blocks, then down, in rounds.

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "ffn.h"
#include "pool.h"
#include "product.h"

namespace npu_moe {
namespace {

constexpr int64_t BLOCK_ROWS = 96;      // of one expert; their tokens stay in the L2 cache
constexpr int64_t ROUND_ROWS = 512;     // for each thread, between gate/up and down: h stays in the cache
constexpr int64_t READ_COST = 8;        // what reading a weight costs, in rows that it is multiplied with
constexpr int64_t SERIAL_COST = 1 << 14;  // panels' steps along k that one thread does sooner than two
constexpr int CHUNKS = 4;               // a thread, so that one that is held up can be helped

struct Block {  // rows of one expert
    int64_t expert, start, rows;
};

// Chunks of (block, panels) of about equal cost, taken by whoever is free.
class Work {
public:
    Work(const std::vector<Block>& blocks, int64_t panels, int64_t depth, int threads) : blocks_(blocks), panels_(panels) {
        for (const Block& block : blocks) total_ += (block.rows + READ_COST) * panels;
        threads_ = total_ * depth < SERIAL_COST ? 1 : threads;
        chunks_ = threads_ == 1 ? 1 : threads_ * CHUNKS;
    }
    int threads() const { return threads_; }

    // For the next chunk: function(block, first panel, last panel) for its part of each block.
    template <class Function>
    bool next(const Function& function) {
        const int64_t chunk = taken_.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= chunks_) return false;
        const int64_t first = total_ * chunk / chunks_, last = total_ * (chunk + 1) / chunks_;
        int64_t before = 0;
        for (const Block& block : blocks_) {
            const int64_t cost = block.rows + READ_COST, end = before + cost * panels_;
            if (end > first && before < last) {
                auto panel = [&](int64_t at) { return std::clamp<int64_t>((at - before + cost - 1) / cost, 0, panels_); };
                const int64_t from = at_least_zero(first - before) == 0 ? 0 : panel(first), to = panel(last);
                if (from < to) function(block, from, to);
            }
            before = end;
        }
        return true;
    }

private:
    static int64_t at_least_zero(int64_t x) { return std::max<int64_t>(x, 0); }
    const std::vector<Block>& blocks_;
    const int64_t panels_;
    int64_t total_ = 0, chunks_ = 1;
    int threads_ = 1;
    std::atomic<int64_t> taken_{0};
};

thread_local Scratch scratch;

template <class How>
class Kernel {
    using T = typename How::Element;
    using Unit = typename How::Unit;

public:
    Kernel(const Ffn& ffn, const Pool& pool) : ffn_(ffn), pool_(pool), h_stride_(token_stride<How>(ffn.intermediate)) {}

    void run() {
        static thread_local Buffer h_buffer;
        std::vector<Block> round;
        int64_t rows = 0;
        const int64_t most = ROUND_ROWS * pool_.threads;
        auto finish = [&] {
            if (round.empty()) return;
            first_row_ = round.front().start;
            h_ = h_buffer.get<Unit>(rows * h_stride_);
            both_products(round);
            round.clear();
            rows = 0;
        };
        for (int64_t e = 0; e < ffn_.experts; ++e) {
            evenly(ffn_.offsets[e + 1] - ffn_.offsets[e], BLOCK_ROWS, [&](int64_t start, int64_t now) {
                if (rows + now > most) finish();
                round.push_back({e, ffn_.offsets[e] + start, now});
                rows += now;
            });
        }
        finish();
    }

private:
    void both_products(const std::vector<Block>& blocks) {
        const int64_t hidden = ffn_.hidden, intermediate = ffn_.intermediate;
        Work up(blocks, (intermediate + PANEL - 1) / PANEL, 2 * hidden, pool_.threads);
        in_parallel(pool_, up.threads(), [&] {
            while (up.next([&](const Block& b, int64_t from, int64_t to) { gate_up(b, from * PANEL, std::min(to * PANEL, intermediate)); })) {}
        });
        Work down(blocks, (hidden + PANEL - 1) / PANEL, intermediate, pool_.threads);
        in_parallel(pool_, down.threads(), [&] {
            while (down.next([&](const Block& b, int64_t from, int64_t to) { this->down(b, from * PANEL, std::min(to * PANEL, hidden)); })) {}
        });
    }

    void gate_up(const Block& block, int64_t from, int64_t to) {
        const int64_t columns = to - from, width = sums_width(columns), stride = token_stride<How>(ffn_.hidden);
        Unit* tokens = scratch.tokens.get<Unit>(block.rows * stride);
        for (int64_t r = 0; r < block.rows; ++r) read_token(block.start + r, tokens + r * stride);
        float* sums = scratch.sums.get<float>(2 * block.rows * width);
        multiply<How>(tokens, stride, block.rows, ffn_.hidden, expert(ffn_.w13, block.expert), ffn_.w13,
                                      {from, ffn_.intermediate + from}, columns, sums, width, scratch);
        for (int64_t r = 0; r < block.rows; ++r) {
            const float* gate = sums + r * width;
            const float* up = gate + block.rows * width;
            T* h = reinterpret_cast<T*>(h_ + (block.start + r - first_row_) * h_stride_);
            for (int64_t i = 0; i < columns; i += WIDTH) {
                const Vec value = swiglu(simd::load(gate + i), simd::load(up + i));
                put(h, from + i, value, std::min<int64_t>(WIDTH, columns - i));
            }
            if (How::STEP > 1 && to == ffn_.intermediate) h[to] = T{};  // the other half of a last pair
        }
    }

    void put(T* h, int64_t at, Vec value, int64_t count) {
        Unit* row = reinterpret_cast<Unit*>(h);
        if constexpr (How::STEP == 1) {
            How::put(row + at, value);  // beyond the last column there is room
        } else if (count == WIDTH) {
            simd::store(h + at, value);
        } else {
            simd::store_first(h + at, value, static_cast<int>(count));
        }
    }

    void down(const Block& block, int64_t from, int64_t to) {
        const int64_t columns = to - from, width = sums_width(columns);
        float* sums = scratch.sums.get<float>(block.rows * width);
        multiply<How>(h_ + (block.start - first_row_) * h_stride_, h_stride_, block.rows, ffn_.intermediate,
                                      expert(ffn_.w2, block.expert), ffn_.w2, {from}, columns, sums, width, scratch);
        for (int64_t r = 0; r < block.rows; ++r) {
            T* out = static_cast<T*>(ffn_.out) + (block.start + r) * ffn_.hidden + from;
            const float* sum = sums + r * width;
            int64_t n = 0;
            for (; n + WIDTH <= columns; n += WIDTH) store(out + n, simd::load(sum + n));
            if (n < columns) simd::store_first(out + n, simd::load(sum + n), static_cast<int>(columns - n));
        }
    }

    static void store(float* to, Vec v) { simd::store(to, v); }
    template <class U>
    static void store(U* to, Vec v) { simd::store(to, v); }

    void read_token(int64_t row, Unit* to) const {
        const T* from = static_cast<const T*>(ffn_.tokens) + row * ffn_.token_stride;
        const int64_t hidden = ffn_.hidden;
        if constexpr (How::STEP > 1) {
            T* place = reinterpret_cast<T*>(to);
            if (ffn_.token_step == 1) std::memcpy(place, from, hidden * sizeof(T));
            else for (int64_t i = 0; i < hidden; ++i) place[i] = from[i * ffn_.token_step];
            place[hidden] = T{};
        } else {
            widen_row(from, ffn_.token_step, hidden, to);
        }
    }

    Vec swiglu(Vec gate, Vec up) const {
        if (ffn_.has_limit) {
            gate = simd::min(simd::set1(ffn_.limit), gate);
            up = simd::max(simd::set1(-ffn_.limit), simd::min(simd::set1(ffn_.limit), up));
        }
        const Vec sigmoid = simd::div(simd::set1(1.0f), simd::add(simd::set1(1.0f), simd::exp(simd::mul(simd::set1(-ffn_.alpha), gate))));
        return simd::mul(simd::mul(gate, sigmoid), simd::add(up, simd::set1(ffn_.beta)));
    }

    static const T* expert(const Matrices& w, int64_t e) { return static_cast<const T*>(w.data) + e * w.expert; }

    const Ffn& ffn_;
    const Pool& pool_;
    const int64_t h_stride_;
    Unit* h_ = nullptr;
    int64_t first_row_ = 0;
};

}  // namespace

void grouped_swiglu_ffn(const Ffn& ffn, const Pool& pool) {
    switch (ffn.dtype) {
        case Dtype::bf16:
#ifdef NPU_MOE_HAS_DOT
            return Kernel<Pairs>(ffn, pool).run();
#else
            return Kernel<Widen<Bf16>>(ffn, pool).run();
#endif
        case Dtype::fp16: return Kernel<Widen<Half>>(ffn, pool).run();
        case Dtype::fp32: return Kernel<Widen<float>>(ffn, pool).run();
    }
}

}  // namespace npu_moe
