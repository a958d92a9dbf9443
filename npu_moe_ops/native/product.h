// Products of few rows, or many, with a matrix of weights, for the instruction set that the compiler is told.
//
// A row's bits are the same whatever other rows there are, and however the work is cut. Where W's columns are not contiguous,
// C = A W adds A[r, k] * W[k, n] to C[r, n] for k = 0, 1, 2, ... in fp32, one rounding a step, wherever and however often C is put
// down in between (Product); where they are, the order is that of Columns.
//
// With few rows, reading W is what takes the time, and a core waits for memory whenever it has not asked for the next
// lines early enough. So W is read as it lies, in an order that memory likes, and what comes next is asked for while
// computing. With many rows, pieces of W are widened, and transposed where need be, into the L1 cache, for all rows of a block.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <type_traits>

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
constexpr int64_t FEW_ROWS = 12;        // up to here reading W takes longer than computing
constexpr int64_t DOT_ROWS = 16;        // up to here W with contiguous columns is not transposed
constexpr int DIRECT_DEPTH = 16;        // rows of W that are read side by side
constexpr int PIECE = 4096;             // units of a packed piece: 16 KiB
constexpr int LINE = 64;                // bytes

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
    // A line of W along k -> the units of its words, word m in lane m.
    static constexpr int IN_WORD = 4 / sizeof(T), UNITS_IN_WORD = IN_WORD;
    static Vec unit(Words line, int which) {
        if constexpr (sizeof(T) == 4) return simd::as_floats(line);
        else return which == 0 ? simd::first(line, T{}) : simd::second(line, T{});
    }
    static void put(Unit* token, Vec v) {  // in the precision of T
        T rounded[WIDTH];
        simd::store(rounded, v);
        simd::store(token, simd::load(rounded));
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
    static constexpr int IN_WORD = 2, UNITS_IN_WORD = 1;
    static Words unit(Words line, int) { return line; }
    static void put(Unit* token, Vec v) { simd::store(reinterpret_cast<Bf16*>(token), v); }
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

// Floats between rows of sums for so many columns: whole panels, and room beyond.
inline int64_t sums_width(int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL + WIDTH; }

// function(start, count) for [0, all) in as few parts of at most `most` as there can be, evenly: 7 by 6 are 4 and 3.
template <class Function>
void evenly(int64_t all, int64_t most, const Function& function) {
    int64_t start = 0;
    for (int64_t left = (all + most - 1) / most; left > 0; --left) {
        const int64_t now = (all - start + left - 1) / left;
        function(start, now);
        start += now;
    }
}

// function(integral_constant<int, rows>), for 1 <= rows <= MOST.
template <int MOST, class Function>
[[gnu::always_inline]] inline void with_constant(int64_t rows, const Function& function) {
    if constexpr (MOST > 1) {
        if (rows < MOST) return with_constant<MOST - 1>(rows, function);
    }
    function(std::integral_constant<int, MOST>{});
}

template <class T>
void widen_row(const T* from, int64_t step, int64_t count, float* to) {  // zeros up to a multiple of WIDTH
    for (int64_t i = 0; i < count; i += WIDTH) {
        const int now = static_cast<int>(std::min<int64_t>(WIDTH, count - i));
        if (step == 1 && now == WIDTH) {
            simd::store(to + i, simd::load(from + i));
            continue;
        }
        T some[WIDTH] = {};
        for (int j = 0; j < now; ++j) some[j] = from[(i + j) * step];
        simd::store(to + i, simd::load(some));
    }
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
    Buffer tokens, sums, packed, arranged, transposed;
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

// Tiles of up to TILE_ROWS x COLUMNS sums; with each step along k a line is asked for ahead.
template <class How>
struct Product {
    using T = typename How::Element;
    using Unit = typename How::Unit;
    using Lanes = typename How::Lanes;
    static constexpr int VECTORS = TILE_VECTORS, COLUMNS = WIDTH * VECTORS, DEPTH = PIECE / COLUMNS;

    // Adds to sums[rows, stride of `width`] what `depth` steps along k of a tile give.
    // FRESH: as one sum from 0, added at the end. Inlined, or products of one row take a tenth longer.
    template <int NOW, bool FRESH, class Source>
    [[gnu::always_inline]] static inline void tile(const Unit* tokens, int64_t stride, Source weights, int depth, float* sums, int64_t width, Ahead& ahead) {
        Vec sum[NOW][VECTORS];
        UNROLL for (int r = 0; r < NOW; ++r) {
            UNROLL for (int j = 0; j < VECTORS; ++j) sum[r][j] = FRESH ? simd::set1(0.0f) : simd::load(sums + r * width + j * WIDTH);
        }
        for (int k = 0; k < depth; ++k) {
            ahead.next();
            Lanes weight[VECTORS];
            weights(k, weight);
            UNROLL for (int r = 0; r < NOW; ++r) {
                const auto token = How::broadcast(tokens + r * stride + k);
                UNROLL for (int j = 0; j < VECTORS; ++j) sum[r][j] = How::multiply(token, weight[j], sum[r][j]);
            }
        }
        UNROLL for (int r = 0; r < NOW; ++r) {
            UNROLL for (int j = 0; j < VECTORS; ++j) {
                float* place = sums + r * width + j * WIDTH;
                simd::store(place, FRESH ? simd::add(simd::load(place), sum[r][j]) : sum[r][j]);
            }
        }
    }

    template <bool FRESH = false, class Source>
    static void tiles(const Unit* tokens, int64_t stride, int64_t rows, Source weights, int depth, float* sums, int64_t width, Ahead& ahead) {
        evenly(rows, TILE_ROWS, [&](int64_t start, int64_t now) {
            with_constant<TILE_ROWS>(now, [&](auto count) {
                tile<count(), FRESH>(tokens + start * stride, stride, weights, depth, sums + start * width, width, ahead);
            });
        });
    }

    // A piece of W, elements x columns, into packed[elements / STEP][COLUMNS], zeros around it.
    static void pack(const T* w, const Matrices& form, int elements, int columns, Unit* packed) {
        if (form.column == 1) pack_rows(w, form.row, elements, columns, packed);
        else pack_any(w, form.row, form.column, elements, columns, packed);
    }

    static void pack_rows(const T* w, int64_t stride, int elements, int columns, Unit* packed) {
        for (int k = 0; k < elements; k += How::STEP, packed += COLUMNS) {
            const int count = std::min<int>(How::STEP, elements - k);
            if (columns == COLUMNS) {
                put(w + k * stride, stride, count, packed);
            } else if constexpr (How::STEP == 1) {
                for (int j = 0; j < VECTORS; ++j) {
                    const T* from = w + k * stride + j * WIDTH;
                    const int there = columns - j * WIDTH;
                    How::store(packed + j * WIDTH, there >= WIDTH ? simd::load(from) : there > 0 ? simd::load_first(from, there) : simd::set1(0.0f));
                }
            } else {
                T edge[How::STEP * COLUMNS] = {};
                for (int i = 0; i < count; ++i) std::memcpy(edge + i * COLUMNS, w + (k + i) * stride, columns * sizeof(T));
                put(edge, COLUMNS, count, packed);
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
        Lanes lanes[VECTORS];
        How::rows(rows, stride, count, lanes);
        for (int j = 0; j < VECTORS; ++j) How::store(packed + j * WIDTH, lanes[j]);
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
                    pack(panel + at * form.row, form, elements, static_cast<int>(there), buffer);
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

// A W whose columns are contiguous. A line of it holds neighbours along k, so WIDTH sums are kept for each result, one for each word
// of a line: sum m adds what word m of each line gives, in the order of the lines. The result adds them, 0 first. After LINES lines
// that begins anew. Few rows keep the WIDTH sums in the lanes of a vector and read W as it lies; many transpose W,
// and go through the lines for word 0, then for word 1, and so on.
template <class How>
struct Columns {
    using T = typename How::Element;
    using Unit = typename How::Unit;
    using Lanes = typename How::Lanes;
    using Transposed = Product<How>;
    static constexpr int UNITS = How::UNITS_IN_WORD, IN_LINE = How::IN_WORD * WIDTH, LINES = 64 / UNITS, BESIDE = 4;

    static int64_t lines(int64_t k) { return (k + IN_LINE - 1) / IN_LINE; }

    // A row of units -> for each line, for each unit of a word, the words.
    static void by_lines(const Unit* from, int64_t k, Unit* to) {
        each_line(from, k, [to](int64_t l, const Unit* line) {
            for (int m = 0; m < WIDTH; ++m)
                for (int u = 0; u < UNITS; ++u) to[(l * UNITS + u) * WIDTH + m] = line[m * UNITS + u];
        });
    }

    // A row of units -> for each LINES lines, for each word, the lines.
    static void by_words(const Unit* from, int64_t k, Unit* to) {
        const int64_t all = lines(k);
        each_line(from, k, [=](int64_t l, const Unit* line) {
            const int64_t first = l / LINES * LINES, now = std::min<int64_t>(LINES, all - first);
            Unit* place = to + (first * WIDTH + l - first) * UNITS;
            for (int m = 0; m < WIDTH; ++m) std::memcpy(place + m * now * UNITS, line + m * UNITS, UNITS * sizeof(Unit));
        });
    }

    // function(number, units) for each line, the last filled up with zeros.
    template <class Function>
    static void each_line(const Unit* from, int64_t k, const Function& function) {
        constexpr int64_t SIZE = WIDTH * UNITS;
        const int64_t there = units<How>(k), whole = there / SIZE;
        for (int64_t l = 0; l < whole; ++l) function(l, from + l * SIZE);
        if (whole * SIZE == there) return;
        Unit edge[SIZE] = {};
        std::copy(from + whole * SIZE, from + there, edge);
        function(whole, edge);
    }

    // lanes[row][BESIDE of WIDTH columns][WIDTH] of lines [first, last).
    template <int ROWS>
    static void tile(const Unit* tokens, int64_t stride, const T* const (&w)[BESIDE], int64_t first, int64_t last, int64_t k, int64_t ahead, float* lanes) {
        Vec sum[ROWS][BESIDE];
        UNROLL for (int r = 0; r < ROWS; ++r) {
            UNROLL for (int c = 0; c < BESIDE; ++c) sum[r][c] = simd::set1(0.0f);
        }
        auto step = [&](const T* const (&line)[BESIDE], const Unit* token) {
            UNROLL for (int u = 0; u < UNITS; ++u) {
                Lanes weight[BESIDE];
                UNROLL for (int c = 0; c < BESIDE; ++c) weight[c] = How::unit(simd::load_words(line[c]), u);
                UNROLL for (int r = 0; r < ROWS; ++r) {
                    const Lanes x = How::load(token + r * stride + u * WIDTH);
                    UNROLL for (int c = 0; c < BESIDE; ++c) sum[r][c] = How::multiply(x, weight[c], sum[r][c]);
                }
            }
        };
        const int64_t whole = std::min(last, k / IN_LINE);
        const Unit* token = tokens + first * WIDTH * UNITS;
        for (int64_t l = first; l < whole; ++l, token += WIDTH * UNITS) {
            const T* line[BESIDE];
            UNROLL for (int c = 0; c < BESIDE; ++c) {
                line[c] = w[c] + l * IN_LINE;
                __builtin_prefetch(line[c] + ahead, 0, 3);
            }
            step(line, token);
        }
        if (whole < last) {
            T edge[BESIDE][IN_LINE] = {};
            const T* line[BESIDE];
            for (int c = 0; c < BESIDE; ++c) {
                std::memcpy(edge[c], w[c] + whole * IN_LINE, (k - whole * IN_LINE) * sizeof(T));
                line[c] = edge[c];
            }
            step(line, token);
        }
        UNROLL for (int r = 0; r < ROWS; ++r) {
            UNROLL for (int c = 0; c < BESIDE; ++c) simd::store(lanes + (r * WIDTH + c) * WIDTH, sum[r][c]);
        }
    }

    // Tokens by lines.
    static void few(const Unit* tokens, int64_t stride, int64_t rows, int64_t k, const T* w, const Matrices& form,
                    std::initializer_list<int64_t> from, int64_t columns, float* sums, int64_t width, Buffer& scratch) {
        const int64_t all = lines(k), blocks = (all + LINES - 1) / LINES;
        constexpr int64_t SIZE = WIDTH * WIDTH;
        float* lanes = scratch.get<float>(blocks * rows * SIZE);  // [blocks][rows][WIDTH columns][WIDTH]
        for (const int64_t& start : from) {
            float* part = sums + (&start - from.begin()) * rows * width;
            for (int64_t n = 0; n < columns; n += WIDTH) {
                const int64_t there = std::min<int64_t>(WIDTH, columns - n);
                for (int c = 0; c < there; c += BESIDE) {
                    const T* beside[BESIDE];
                    for (int i = 0; i < BESIDE; ++i) beside[i] = w + (start + n + std::min<int64_t>(c + i, there - 1)) * form.column;
                    evenly(rows, TILE_ROWS, [&](int64_t row, int64_t now) {
                        for (int64_t b = 0; b < blocks; ++b)
                            with_constant<TILE_ROWS>(now, [&](auto count) {
                                tile<count()>(tokens + row * stride, stride, beside, b * LINES, std::min(all, (b + 1) * LINES), k, BESIDE * form.column,
                                              lanes + (b * rows + row) * SIZE + c * WIDTH);
                            });
                    });
                }
                for (int64_t r = 0; r < rows; ++r) {
                    Vec total = simd::set1(0.0f);
                    for (int64_t b = 0; b < blocks; ++b) {
                        Words words[WIDTH];
                        simd::transpose(reinterpret_cast<const char*>(lanes + (b * rows + r) * SIZE), WIDTH * sizeof(float), words);
                        UNROLL for (int m = 0; m < WIDTH; ++m) total = simd::add(total, simd::as_floats(words[m]));
                    }
                    simd::store(part + r * width + n, total);
                }
            }
        }
    }

    // Tokens by words; sums are 0.
    static void many(const Unit* tokens, int64_t stride, int64_t rows, int64_t k, const T* w, const Matrices& form,
                     std::initializer_list<int64_t> from, int64_t columns, float* sums, int64_t width, Buffer& scratch, Buffer& transposed) {
        constexpr int COLUMNS = Transposed::COLUMNS;
        uint32_t* words = transposed.get<uint32_t>(WIDTH * LINES * COLUMNS);
        Unit* piece = scratch.get<Unit>(LINES * UNITS * COLUMNS);
        const Unit* source = piece;
        auto weights = [&source](int step, Lanes(&to)[TILE_VECTORS]) {
            for (int j = 0; j < TILE_VECTORS; ++j) to[j] = How::load(source + step * COLUMNS + j * WIDTH);
        };
        const int64_t all = lines(k);
        for (const int64_t& start : from) {
            float* part = sums + (&start - from.begin()) * rows * width;
            for (int64_t n = 0; n < columns; n += COLUMNS) {
                const int there = static_cast<int>(std::min<int64_t>(COLUMNS, columns - n));
                const T* panel = w + (start + n) * form.column;
                for (int64_t first = 0; first < all; first += LINES) {
                    const int now = static_cast<int>(std::min<int64_t>(LINES, all - first));
                    const int64_t later = (first + LINES) * IN_LINE;
                    Ahead ahead = later < k ? Transposed::piece(panel + later, form, std::min<int64_t>(LINES * IN_LINE, k - later), there)
                                            : Transposed::piece(panel + COLUMNS * form.column, form, std::min<int64_t>(LINES * IN_LINE, k),
                                                          std::min<int64_t>(COLUMNS, columns - n - COLUMNS));
                    transpose(panel + first * IN_LINE, form.column, k - first * IN_LINE, now, there, words);
                    const Unit* token = tokens + first * WIDTH * UNITS;
                    for (int m = 0; m < WIDTH; ++m, token += now * UNITS) {
                        const uint32_t* word = words + m * now * COLUMNS;
                        if constexpr (UNITS == 1) {
                            source = reinterpret_cast<const Unit*>(word);
                        } else {
                            for (int at = 0; at < now * COLUMNS; at += WIDTH) {
                                const Words some = simd::load_words(word + at);
                                Unit* place = piece + at / COLUMNS * UNITS * COLUMNS + at % COLUMNS;
                                for (int u = 0; u < UNITS; ++u) How::store(place + u * COLUMNS, How::unit(some, u));
                            }
                        }
                        Transposed::template tiles<true>(token, stride, rows, weights, now * UNITS, part + n, width, ahead);
                    }
                }
            }
        }
    }

    // Lines of columns -> words[WIDTH][lines][Transposed::COLUMNS].
    static void transpose(const T* w, int64_t stride, int64_t elements, int lines, int columns, uint32_t* words) {
        constexpr int COLUMNS = Transposed::COLUMNS;
        for (int first = 0; first < COLUMNS; first += WIDTH) {
            const T* from = w + first * stride;
            const int there = std::min(columns - first, WIDTH);
            for (int l = 0; l < lines; ++l) {
                Words line[WIDTH];
                const int64_t left = elements - l * IN_LINE;
                if (left >= IN_LINE && there == WIDTH) {
                    simd::transpose(reinterpret_cast<const char*>(from + l * IN_LINE), stride * sizeof(T), line);
                } else {
                    T edge[WIDTH][IN_LINE] = {};
                    for (int i = 0; i < there; ++i) std::memcpy(edge[i], from + i * stride + l * IN_LINE, std::min<int64_t>(left, IN_LINE) * sizeof(T));
                    simd::transpose(reinterpret_cast<const char*>(edge), sizeof(edge[0]), line);
                }
                UNROLL for (int m = 0; m < WIDTH; ++m) simd::store_words(words + (m * lines + l) * COLUMNS + first, line[m]);
            }
        }
    }
};

// sums[p][rows][width] = tokens[rows, k] times columns [from[p], from[p] + columns) of w, for each part p.
// width: sums_width(columns).
template <class How>
void multiply(const typename How::Unit* tokens, int64_t stride, int64_t rows, int64_t k, const typename How::Element* w, const Matrices& form,
              std::initializer_list<int64_t> from, int64_t columns, float* sums, int64_t width, Scratch& scratch) {
    using Unit = typename How::Unit;
    const bool by_columns = form.row == 1 && form.column != 1, few = rows <= (by_columns ? DOT_ROWS : FEW_ROWS);
    if (!(by_columns && few)) std::fill(sums, sums + from.size() * rows * width, 0.0f);
    if (by_columns) {
        const int64_t whole = token_stride<How>(Columns<How>::lines(k) * Columns<How>::IN_LINE);
        Unit* arranged = scratch.arranged.template get<Unit>(rows * whole);
        for (int64_t r = 0; r < rows; ++r) (few ? Columns<How>::by_lines : Columns<How>::by_words)(tokens + r * stride, k, arranged + r * whole);
        if (few) Columns<How>::few(arranged, whole, rows, k, w, form, from, columns, sums, width, scratch.packed);
        else Columns<How>::many(arranged, whole, rows, k, w, form, from, columns, sums, width, scratch.packed, scratch.transposed);
        return;
    }
    const int64_t whole = form.column == 1 && few ? columns / PANEL * PANEL : 0;
    if (whole > 0) Product<How>::direct(tokens, stride, rows, k, w, form, from, whole, sums, width);
    Product<How>::packed(tokens, stride, rows, k, w, form, from, whole, columns, sums, width, scratch.packed.template get<Unit>(PIECE));
}

}  // namespace
}  // namespace npu_moe
