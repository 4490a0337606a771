// Matrices packed into panels of sixteen columns, and products with them.
//
// y = x W^T for weights W (n, k) as checkpoints have them. A panel holds sixteen of the n rows side by side, k
// after k (of bfloat16: two k at a time, as the instructions want them), so that a product reads memory from
// front to back. Each number of y is summed up over k from the first to the last, in one accumulator,
// however many rows x has: so what a row comes to does not depend on who is computed beside it.
//
// Weights come from memory at the pace of a few rows' arithmetic. The first rows of a step wait for them, the
// others find them in the cache; while these are computed, what comes next is brought from memory already.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "numbers.h"
#include "team.h"

#if defined(__AMX_BF16__) || defined(DALSEGNO_EMULATED_AMX)
#define DALSEGNO_AMX 1
#include "amx.h"
#endif

namespace dalsegno {

constexpr int UNIT = 4;              // panels that are computed together
constexpr int UNITS_IN_A_ROW = 4;
constexpr size_t BLOCK_BYTES = 384 << 10;  // of x, that stay in a core's cache beside a panel
constexpr int MOST_ROWS_OF_BLOCK = 192;

inline constexpr int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

// How far apart rows of so many numbers stand: an odd number of cache lines. Rows 2 KiB apart would all want the
// same few places of the first cache.
template <class T>
constexpr int row_stride(int numbers) {
  constexpr int LINE = 64 / sizeof(T);
  return ((numbers + LINE - 1) / LINE | 1) * LINE;
}

template <class T>
struct Format;
template <>
struct Format<float> {
  static constexpr int DEPTH = 1;      // how many k stand together
  static constexpr int GRAIN = LANES;  // k is filled up to a multiple of it
};
template <>
struct Format<bfloat16> {
  static constexpr int DEPTH = 2;
  static constexpr int GRAIN = 32;
};

// How many rows of x are computed at once: what registers allow.
#if defined(__AVX512F__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 1;
#endif

template <class T>
struct Packed {
  const T* data;
  int n;
  int k;
  int depth() const { return round_up(k, Format<T>::GRAIN); }  // what x's rows must be filled up to, with zeros
  int units() const { return (n + UNIT * LANES - 1) / (UNIT * LANES); }
  const T* panel(int number) const { return data + size_t(number) * LANES * depth(); }
};

inline void multiply(Floats& into, const float* x, Floats w) { into += w * *x; }

inline void multiply(Floats& into, const bfloat16* x, Words w) {
#if defined(__AVX512BF16__)
  into = (Floats)_mm512_dpbf16_ps((__m512)into, (__m512bh)w, (__m512bh)_mm512_set1_epi32(load_raw<int>(x)));
#else
  into += as<Floats>(w << 16) * to_float(x[0]);
  into += as<Floats>(w & 0xFFFF0000) * to_float(x[1]);
#endif
}

inline Floats weights_at(const float* at) { return load(at); }
inline Words weights_at(const bfloat16* at) { return load_raw<Words>(at); }

// Memory to bring into the cache meanwhile: so many lines at each step, from there on.
struct Ahead {
  const char* from;
  int lines;
};

// `rows` rows of x times a unit: y (rows, UNIT).
template <class T, int rows>
void multiply_rows(const T* x, size_t stride, const T* w, int depth, Ahead ahead, Floats* y) {
  constexpr int STEP = Format<T>::DEPTH;
  Floats sums[rows][UNIT] = {};
  for (const T* end = w + size_t(LANES) * depth; w != end; w += LANES * STEP, x += STEP) {
    for (int line = 0; line < ahead.lines; ++line, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
    decltype(weights_at(w)) now[UNIT];
    for (int panel = 0; panel < UNIT; ++panel) now[panel] = weights_at(w + size_t(panel) * LANES * depth);
    for (int row = 0; row < rows; ++row)
      for (int panel = 0; panel < UNIT; ++panel) multiply(sums[row][panel], x + row * stride, now[panel]);
  }
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < UNIT; ++panel) y[row * UNIT + panel] = sums[row][panel];
}

template <class T, int... rows>
constexpr auto multiplies(std::integer_sequence<int, rows...>) {
  return std::array{multiply_rows<T, rows + 1>...};
}

// All rows of a block times one unit: y (rows, UNIT). `next` is the unit that follows, or null.
template <class T>
void multiply_unit(const T* x, size_t stride, int rows, const T* w, int depth, const T* next, Floats* y) {
#if defined(DALSEGNO_AMX)
  if constexpr (sizeof(T) == 2) return amx::multiply_unit(x, stride, rows, w, depth, next, y);
#endif
  static constexpr auto by_rows = multiplies<T>(std::make_integer_sequence<int, ROWS>());
  const int tiles = (rows + ROWS - 1) / ROWS, lines = (UNIT + tiles - 1) / tiles;
  const size_t bytes = size_t(UNIT) * LANES * depth * sizeof(T), each = bytes / UNIT * lines;
  for (int tile = 0; tile < tiles; ++tile) {
    // As even as can be: eight rows are four and four, not six and two.
    const int first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    const Ahead ahead{reinterpret_cast<const char*>(next) + tile * each,
                      next && tiles > 1 && tile * each < bytes ? lines : 0};
    by_rows[count - 1](x + first * stride, stride, w, depth, ahead, y + first * UNIT);
  }
}

// All members: y = x W^T, for x (rows, depth). `put(row, column, vectors)` is told of each row of a unit; columns
// beyond n are among them.
template <class T, class Put>
void product(Team& team, int phase, const T* x, size_t stride, int rows, const Packed<T>& w, const Put& put) {
  const int depth = w.depth(), units = w.units();
  const int most = std::clamp<int>(BLOCK_BYTES / (sizeof(T) * depth), ROWS, MOST_ROWS_OF_BLOCK);
  // As even as can be: a block of two rows would read all weights once more.
  const int fewest = (rows + most - 1) / most;
  const int block = std::min(round_up((rows + fewest - 1) / fewest, ROWS), MOST_ROWS_OF_BLOCK);
  const int blocks = (rows + block - 1) / block;
  const int run = std::clamp(units / (8 * team.size()), 1, UNITS_IN_A_ROW), runs = (units + run - 1) / run;
  Floats y[MOST_ROWS_OF_BLOCK * UNIT];
  for (int piece; (piece = team.take(phase)) < blocks * runs;) {
    // All of a matrix for one block before the next: x comes from the cache, the weights once for each block.
    const int first = piece / runs * block, count = std::min(block, rows - first);
    const int end = std::min(units, (piece % runs + 1) * run);
    for (int unit = piece % runs * run; unit < end; ++unit) {
      const T* next = unit + 1 < end ? w.panel((unit + 1) * UNIT) : nullptr;
      multiply_unit(x + first * stride, stride, count, w.panel(unit * UNIT), depth, next, y);
      for (int row = 0; row < count; ++row) put(first + row, unit * UNIT * LANES, y + row * UNIT);
    }
  }
}

// Where the rows of a matrix go among the columns of the packed one.
enum class Columns : int {
  PLAIN = 0,  // behind one another, from an offset on
  GATE = 1,   // sixteen of these,
  UP = 2,     // and sixteen of those beside them, so that a unit has both
};

inline int packed_column(Columns columns, int number, int offset) {
  if (columns == Columns::PLAIN) return offset + number;
  return number / LANES * 2 * LANES + number % LANES + (columns == Columns::UP ? LANES : 0);
}

// All members: put the rows of `w` (n, k) where they belong. What is not put anywhere has to be zero already.
template <class T>
void pack(Team& team, int phase, T* into, const T* w, int n, int k, size_t stride, Columns columns, int offset) {
  constexpr int STEP = Format<T>::DEPTH, AT_ONCE = 32;
  const size_t depth = round_up(k, Format<T>::GRAIN);
  const int groups = (n + LANES - 1) / LANES;
  for (int group; (group = team.take(phase)) < groups;) {
    const int end = std::min(n, (group + 1) * LANES);
    for (int from = 0; from < k; from += AT_ONCE)
      for (int number = group * LANES; number < end; ++number) {
        const int column = packed_column(columns, number, offset);
        T* to = into + column / LANES * LANES * depth + column % LANES * STEP;
        for (int at = from; at < std::min(k, from + AT_ONCE); ++at)
          to[size_t(at / STEP) * LANES * STEP + at % STEP] = w[number * stride + at];
      }
  }
}

}  // namespace dalsegno
