// The grouped SwiGLU FFN for one instruction set, the one that the compiler is told; simd.h knows the rest.
//
// A product C = A W adds A[r, k] * W[k, n] to C[r, n] for k = 0, 1, 2, ... in fp32, one rounding a step,
// wherever and however often C is put down in between. A row's bits are therefore the same whatever
// other rows there are, however the work is cut, and in either layout of W.
//
// Rows of one expert form blocks. Two ways lead through a product:
//   direct  few rows, W's rows contiguous: a few rows of W are read side by side from end to end;
//   packed  otherwise: a piece of a panel of W's columns is widened (and transposed, where W's columns are contiguous)
//           into a buffer in the L1 cache, for all rows of the block.
// With few rows, reading W is what takes the time, and a core waits for memory whenever it has not asked for the next
// lines early enough. So both ways ask for what comes next while they compute, in an order that memory likes.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

#include "ffn.h"
#include "simd.h"

// So early that what the loop indexes lives in registers.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace npu_moe {
namespace {

using simd::Bf16;
using simd::Half;
using simd::TILE_ROWS;
using simd::TILE_VECTORS;
using simd::Vec;
using simd::WIDTH;
using simd::Words;

constexpr int PANEL = WIDTH * TILE_VECTORS;
constexpr int64_t BLOCK_ROWS = 96;      // of one expert; their tokens stay in the L2 cache
constexpr int64_t ROUND_ROWS = 512;     // for each thread, between gate/up and down: h stays in the cache
constexpr int64_t FEW_ROWS = 12;        // up to here reading W takes longer than computing
constexpr int DIRECT_DEPTH = 16;        // rows of W that are read side by side
constexpr int PIECE = 4096;             // units of a packed piece: 16 KiB
constexpr int LINE = 64;                // bytes
constexpr int64_t READ_COST = 8;        // what reading a weight costs, in rows that it is multiplied with
constexpr int64_t SERIAL_COST = 1 << 14;  // panels' steps along k that one thread does sooner than two
constexpr int CHUNKS = 4;               // a thread, so that one that is held up can be helped

// How the 16-bit and 32-bit types are multiplied. A step along k takes STEP elements of a token, in one 32-bit unit.

template <class T>
struct Widen {  // to fp32
    using Element = T;
    static constexpr int STEP = 1;
    using Unit = float;
    using Lanes = Vec;
    static Vec broadcast(const float* token) { return simd::set1(*token); }
    static Vec multiply(Vec token, Vec weight, Vec sum) { return simd::fma(token, weight, sum); }
    static Vec load(const Unit* packed) { return simd::load(packed); }
    static void store(Unit* packed, Vec v) { simd::store(packed, v); }
    // A step along k of neighbouring columns of W, whose rows are contiguous.
    template <int VECTORS>
    static void rows(const T* w, int64_t, int, Vec (&to)[VECTORS]) {
        for (int j = 0; j < VECTORS; ++j) to[j] = simd::load(w + j * WIDTH);
    }
    // The same, faster, in an order of columns that unshuffle() puts right.
    template <int VECTORS>
    static void shuffled_rows(const T* w, int64_t stride, int count, Vec (&to)[VECTORS]) {
        if constexpr (std::is_same_v<T, Bf16>) {
            for (int j = 0; j < VECTORS; j += 2) simd::widen_shuffled(w + j * WIDTH, to[j], to[j + 1]);
        } else {
            rows(w, stride, count, to);
        }
    }
    static void unshuffle(float* sums) {
        if constexpr (std::is_same_v<T, Bf16>) simd::unshuffle(sums);
    }
    static void put(Unit* token, Vec v) {  // in the precision of T
        T rounded[WIDTH];
        simd::store(rounded, v);
        simd::store(token, simd::load(rounded));
    }
    static void unpack(Words w, Unit* to, int64_t stride) {  // words as transposed -> rows of units
        if constexpr (sizeof(T) == 4) {
            simd::store_words(to, w);
        } else {
            simd::store(to, simd::first(w, T{}));
            simd::store(to + stride, simd::second(w, T{}));
        }
    }
};

#ifdef NPU_MOE_HAS_DOT
struct Pairs {  // bf16 as it is, two at a time
    using Element = Bf16;
    static constexpr int STEP = 2;
    using Unit = uint32_t;
    using Lanes = Words;
    static Words broadcast(const uint32_t* token) { return simd::broadcast(token); }
    static Vec multiply(Words token, Words weight, Vec sum) { return simd::dot(token, weight, sum); }
    static Words load(const Unit* packed) { return simd::load_words(packed); }
    static void store(Unit* packed, Words w) { simd::store_words(packed, w); }
    template <int VECTORS>
    static void rows(const Bf16* w, int64_t stride, int count, Words (&to)[VECTORS]) {
        static_assert(VECTORS % 2 == 0);
        static const Bf16 zeros[VECTORS * WIDTH] = {};
        const Bf16* second = count > 1 ? w + stride : zeros;
        for (int j = 0; j < VECTORS; j += 2) {
            Words pairs[2];
            simd::pair_up(simd::load_words(w + j * WIDTH), simd::load_words(second + j * WIDTH), pairs);
            to[j] = pairs[0], to[j + 1] = pairs[1];
        }
    }
    template <int VECTORS>
    static void shuffled_rows(const Bf16* w, int64_t stride, int count, Words (&to)[VECTORS]) {
        static const Bf16 zeros[VECTORS * WIDTH] = {};
        const Bf16* second = count > 1 ? w + stride : zeros;
        for (int j = 0; j < VECTORS; j += 2)
            simd::pair_up_shuffled(simd::load_words(w + j * WIDTH), simd::load_words(second + j * WIDTH), to[j], to[j + 1]);
    }
    static void unshuffle(float* sums) { simd::unshuffle(sums); }
    static void put(Unit* token, Vec v) { simd::store(reinterpret_cast<Bf16*>(token), v); }
    static void unpack(Words w, Unit* to, int64_t) { simd::store_words(to, w); }
};
#endif

template <class How>
int64_t units(int64_t elements) {
    return (elements + How::STEP - 1) / How::STEP;
}

// Units between rows of tokens: not a multiple of 4 KiB, or all rows would share a few cache lines.
template <class How>
int64_t token_stride(int64_t elements) {
    return (units<How>(elements) + WIDTH) / WIDTH * WIDTH + WIDTH;
}

class Buffer {  // kept by its thread from call to call
public:
    ~Buffer() { std::free(data_); }
    template <class U>
    U* get(int64_t count) {
        const size_t bytes = (count * sizeof(U) + 127) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            data_ = std::aligned_alloc(64, bytes);
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<U*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct Scratch {
    Buffer tokens, sums, packed;
};

class Ahead {  // asks for the lines of a rectangle of memory, one at a time
public:
    Ahead(const void* first, int64_t stride, int64_t rows, int64_t bytes)
        : row_(static_cast<const char*>(first)), stride_(stride), rows_(rows), bytes_(bytes) {}
    void next() {
        if (rows_ <= 0) return;
        __builtin_prefetch(row_ + at_, 0, 2);  // to the L2 cache: lines 4 KiB apart would evict one another from L1
        at_ += LINE;
        if (at_ >= bytes_) at_ = 0, row_ += stride_, --rows_;
    }

private:
    const char* row_;
    int64_t stride_, rows_, bytes_, at_ = 0;
};

// Tiles of up to ROWS x (VECTORS * WIDTH) sums. EVERY: steps along k for each line that is asked for ahead.
template <class How, int ROWS, int VECTORS, int EVERY>
struct Product {
    using T = typename How::Element;
    using Unit = typename How::Unit;
    using Lanes = typename How::Lanes;
    static constexpr int COLUMNS = WIDTH * VECTORS, DEPTH = PIECE / COLUMNS;

    // Adds to sums[rows, stride of `width`] what `depth` steps along k of a tile give.
    template <int NOW, class Source>
    static void tile(const Unit* tokens, int64_t stride, Source weights, int depth, float* sums, int64_t width, Ahead& ahead) {
        Vec sum[NOW][VECTORS];
        UNROLL for (int r = 0; r < NOW; ++r) {
            UNROLL for (int j = 0; j < VECTORS; ++j) sum[r][j] = simd::load(sums + r * width + j * WIDTH);
        }
        for (int k = 0; k < depth; ++k) {
            if (k % EVERY == 0) ahead.next();
            Lanes weight[VECTORS];
            weights(k, weight);
            UNROLL for (int r = 0; r < NOW; ++r) {
                const auto token = How::broadcast(tokens + r * stride + k);
                UNROLL for (int j = 0; j < VECTORS; ++j) sum[r][j] = How::multiply(token, weight[j], sum[r][j]);
            }
        }
        UNROLL for (int r = 0; r < NOW; ++r) {
            UNROLL for (int j = 0; j < VECTORS; ++j) simd::store(sums + r * width + j * WIDTH, sum[r][j]);
        }
    }

    template <int NOW, class Source>
    static void tile_of(int64_t rows, const Unit* tokens, int64_t stride, Source weights, int depth, float* sums, int64_t width, Ahead& ahead) {
        if constexpr (NOW > 1) {
            if (rows < NOW) return tile_of<NOW - 1>(rows, tokens, stride, weights, depth, sums, width, ahead);
        }
        tile<NOW>(tokens, stride, weights, depth, sums, width, ahead);
    }

    template <class Source>
    static void tiles(const Unit* tokens, int64_t stride, int64_t rows, Source weights, int depth, float* sums, int64_t width, Ahead& ahead) {
        int64_t done = 0;
        for (int64_t left = (rows + ROWS - 1) / ROWS; left > 0; --left) {  // evenly: 7 rows are 4 and 3
            const int64_t now = (rows - done + left - 1) / left;
            tile_of<ROWS>(now, tokens + done * stride, stride, weights, depth, sums + done * width, width, ahead);
            done += now;
        }
    }

    // A piece of W, elements x columns, into packed[elements / STEP][COLUMNS], zeros around it.
    static void pack(const T* w, const Matrices& form, int elements, int columns, Unit* packed, Ahead& ahead) {
        if (form.column == 1) {
            pack_rows(w, form.row, elements, columns, packed);
        } else if (form.row == 1) {
            pack_columns(w, form.column, elements, columns, packed, ahead);
        } else {
            pack_any(w, form.row, form.column, elements, columns, packed);
        }
    }

    static void pack_rows(const T* w, int64_t stride, int elements, int columns, Unit* packed) {
        for (int k = 0; k < elements; k += How::STEP, packed += COLUMNS) {
            const int count = std::min<int>(How::STEP, elements - k);
            if (columns == COLUMNS) {
                put(w + k * stride, stride, count, packed);
            } else {
                T edge[How::STEP * COLUMNS] = {};
                for (int i = 0; i < count; ++i) std::memcpy(edge + i * COLUMNS, w + (k + i) * stride, columns * sizeof(T));
                put(edge, COLUMNS, count, packed);
            }
        }
    }

    static void pack_columns(const T* w, int64_t stride, int elements, int columns, Unit* packed, Ahead& ahead) {
        constexpr int IN_WORD = 4 / sizeof(T), IN_LINE = IN_WORD * WIDTH, UNITS = IN_WORD / How::STEP;
        for (int first = 0; first < COLUMNS; first += WIDTH) {
            const T* from = w + first * stride;
            const int lines = std::min(columns - first, WIDTH);
            for (int k = 0; k < elements; k += IN_LINE) {
                Words words[WIDTH];
                const int there = std::min(elements - k, IN_LINE);
                if (there == IN_LINE && lines == WIDTH) {
                    simd::transpose(reinterpret_cast<const char*>(from + k), stride * sizeof(T), words);
                } else {
                    T edge[WIDTH][IN_LINE] = {};
                    for (int i = 0; i < lines; ++i) std::memcpy(edge[i], from + i * stride + k, there * sizeof(T));
                    simd::transpose(reinterpret_cast<const char*>(edge), sizeof(edge[0]), words);
                }
                Unit* to = packed + k / How::STEP * COLUMNS + first;
                for (int i = 0; i < WIDTH; ++i) {
                    How::unpack(words[i], to + i * UNITS * COLUMNS, COLUMNS);
                    if (EVERY > 1 && i % 2) ahead.next();  // or the lines would come while there is too little to compute
                }
            }
        }
    }

    static void pack_any(const T* w, int64_t row, int64_t column, int elements, int columns, Unit* packed) {
        for (int k = 0; k < elements; k += How::STEP, packed += COLUMNS) {
            T edge[How::STEP * COLUMNS] = {};
            for (int i = 0; i < std::min<int>(How::STEP, elements - k); ++i)
                for (int n = 0; n < columns; ++n) edge[i * COLUMNS + n] = w[(k + i) * row + n * column];
            put(edge, COLUMNS, How::STEP, packed);
        }
    }

    static void put(const T* rows, int64_t stride, int count, Unit* packed) {
        if constexpr (VECTORS % How::STEP == 0) {
            Lanes lanes[VECTORS];
            How::rows(rows, stride, count, lanes);
            for (int j = 0; j < VECTORS; ++j) How::store(packed + j * WIDTH, lanes[j]);
        } else {
            T edge[How::STEP * 2 * COLUMNS] = {};
            for (int i = 0; i < count; ++i) std::memcpy(edge + i * 2 * COLUMNS, rows + i * stride, COLUMNS * sizeof(T));
            Lanes lanes[2 * VECTORS];
            How::rows(edge, 2 * COLUMNS, How::STEP, lanes);
            for (int j = 0; j < VECTORS; ++j) How::store(packed + j * WIDTH, lanes[j]);
        }
    }

    static Ahead piece(const T* w, const Matrices& form, int64_t elements, int64_t columns) {
        const int64_t size = sizeof(T);
        return form.column == 1 ? Ahead(w, form.row * size, elements, columns * size) : Ahead(w, form.column * size, columns, elements * size);
    }

    // sums[p][rows][width] += tokens[rows, k] times columns [from[p], from[p] + columns) of w, for each part p.
    static void packed(const Unit* tokens, int64_t stride, int64_t rows, int64_t k, const T* w, const Matrices& form,
                       std::initializer_list<int64_t> from, int64_t begin, int64_t columns, float* sums, int64_t width, Unit* buffer) {
        constexpr int64_t STEPS = DEPTH * How::STEP;
        auto weights = [buffer](int step, Lanes(&to)[VECTORS]) {
            for (int j = 0; j < VECTORS; ++j) to[j] = How::load(buffer + step * COLUMNS + j * WIDTH);
        };
        for (const int64_t& start : from) {
            float* part = sums + (&start - from.begin()) * rows * width;
            for (int64_t n = begin; n < columns; n += COLUMNS) {
                const int64_t there = std::min<int64_t>(COLUMNS, columns - n);
                const T* panel = w + (start + n) * form.column;
                for (int64_t at = 0; at < k; at += STEPS) {
                    const int elements = static_cast<int>(std::min(STEPS, k - at));
                    const int64_t later = at + STEPS;
                    Ahead ahead = later < k ? piece(panel + later * form.row, form, std::min(STEPS, k - later), there)
                                            : piece(panel + COLUMNS * form.column, form, std::min(STEPS, k), std::min<int64_t>(COLUMNS, columns - n - COLUMNS));
                    pack(panel + at * form.row, form, elements, static_cast<int>(there), buffer, ahead);
                    tiles(tokens + at / How::STEP, stride, rows, weights, static_cast<int>(units<How>(elements)), part + n, width, ahead);
                }
            }
        }
    }

    // The same for whole panels of a W with contiguous rows, without a buffer.
    static void direct(const Unit* tokens, int64_t stride, int64_t rows, int64_t k, const T* w, const Matrices& form,
                       std::initializer_list<int64_t> from, int64_t columns, float* sums, int64_t width) {
        for (int64_t at = 0; at < k; at += DIRECT_DEPTH) {
            const int elements = static_cast<int>(std::min<int64_t>(DIRECT_DEPTH, k - at));
            const int64_t later = std::min<int64_t>(DIRECT_DEPTH, k - at - DIRECT_DEPTH);
            for (const int64_t& start : from) {
                const T* row = w + at * form.row + start;
                float* part = sums + (&start - from.begin()) * rows * width;
                for (int64_t n = 0; n < columns; n += COLUMNS) {
                    Ahead ahead(row + n + DIRECT_DEPTH * form.row, form.row * sizeof(T), later, COLUMNS * sizeof(T));
                    for (int i = 0; i < DIRECT_DEPTH * COLUMNS * static_cast<int>(sizeof(T)) / LINE; ++i) ahead.next();
                    auto weights = [&](int step, Lanes(&to)[VECTORS]) {
                        How::shuffled_rows(row + n + step * How::STEP * form.row, form.row, elements - step * How::STEP, to);
                    };
                    tiles(tokens + at / How::STEP, stride, rows, weights, static_cast<int>(units<How>(elements)), part + n, width, ahead);
                }
            }
        }
        for (float* row = sums; row < sums + from.size() * rows * width; row += width)
            for (int64_t n = 0; n < columns; n += 2 * WIDTH) How::unshuffle(row + n);
    }
};

// sums[p][rows][width] = tokens[rows, k] times columns [from[p], from[p] + columns) of w, for each part p.
// width: columns, rounded up to whole panels.
template <class How>
void multiply(const typename How::Unit* tokens, int64_t stride, int64_t rows, int64_t k, const typename How::Element* w, const Matrices& form,
              std::initializer_list<int64_t> from, int64_t columns, float* sums, int64_t width, typename How::Unit* buffer) {
    using Many = Product<How, TILE_ROWS, TILE_VECTORS, 1>;
    using Few = Product<How, simd::FEW_ROWS, simd::FEW_VECTORS, 4>;
    std::fill(sums, sums + from.size() * rows * width, 0.0f);
    if (rows > FEW_ROWS) return Many::packed(tokens, stride, rows, k, w, form, from, 0, columns, sums, width, buffer);
    const int64_t whole = form.column == 1 ? columns / PANEL * PANEL : 0;
    if (whole > 0) Many::direct(tokens, stride, rows, k, w, form, from, whole, sums, width);
    Few::packed(tokens, stride, rows, k, w, form, from, whole, columns, sums, width, buffer);
}

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

template <class Function>
void in_parallel(const Pool& pool, int threads, Function&& function) {
    if (threads == 1) return function();
    pool.run(threads, [](void* context) { (*static_cast<std::remove_reference_t<Function>*>(context))(); }, &function);
}

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
            const int64_t end = ffn_.offsets[e + 1];
            const int64_t pieces = (end - ffn_.offsets[e] + BLOCK_ROWS - 1) / BLOCK_ROWS;
            int64_t start = ffn_.offsets[e];
            for (int64_t left = pieces; left > 0; --left) {
                const int64_t now = (end - start + left - 1) / left;
                if (rows + now > most) finish();
                round.push_back({e, start, now});
                rows += now;
                start += now;
            }
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
        const int64_t columns = to - from, width = (columns + PANEL - 1) / PANEL * PANEL + WIDTH, stride = token_stride<How>(ffn_.hidden);
        Unit* tokens = scratch.tokens.get<Unit>(block.rows * stride);
        for (int64_t r = 0; r < block.rows; ++r) read_token(block.start + r, tokens + r * stride);
        float* sums = scratch.sums.get<float>(2 * block.rows * width);
        multiply<How>(tokens, stride, block.rows, ffn_.hidden, expert(ffn_.w13, block.expert), ffn_.w13,
                                      {from, ffn_.intermediate + from}, columns, sums, width, buffer());
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
        const int64_t columns = to - from, width = (columns + PANEL - 1) / PANEL * PANEL + WIDTH;
        float* sums = scratch.sums.get<float>(block.rows * width);
        multiply<How>(h_ + (block.start - first_row_) * h_stride_, h_stride_, block.rows, ffn_.intermediate,
                                      expert(ffn_.w2, block.expert), ffn_.w2, {from}, columns, sums, width, buffer());
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
            for (int64_t i = 0; i < hidden; i += WIDTH) {
                const int count = static_cast<int>(std::min<int64_t>(WIDTH, hidden - i));
                if (ffn_.token_step == 1 && count == WIDTH) {
                    simd::store(to + i, simd::load(from + i));
                    continue;
                }
                T some[WIDTH] = {};
                for (int j = 0; j < count; ++j) some[j] = from[(i + j) * ffn_.token_step];
                simd::store(to + i, simd::load(some));
            }
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
    static Unit* buffer() { return scratch.packed.get<Unit>(PIECE); }

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
