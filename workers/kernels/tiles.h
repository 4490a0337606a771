// Matrices packed into panels of 64 columns, and products with them.
//
// y = x W^T for weights W (n, k) as checkpoints have them. A panel holds 64 of the n rows side by side, k after
// k (of bfloat16: two k at a time, as the instructions want them), so that a product reads memory from
// front to back, once. Each number of y is summed up over k from the first to the last, in one accumulator,
// however many rows x has: so what a row comes to does not depend on who is computed beside it.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "team.h"

#if defined(__AMX_BF16__) || defined(DALSEGNO_EMULATED_AMX)
#define DALSEGNO_AMX 1
#include "amx.h"
#endif

namespace dalsegno {

constexpr int PANEL = 64;
constexpr int PANEL_VECTORS = PANEL / LANES;
constexpr size_t BLOCK_BYTES = 384 << 10;  // of x, that stay in a core's cache beside a panel

inline constexpr int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

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

// How many rows of x and vectors of columns are computed at once: as many as there are registers for.
#if defined(__AVX512F__)
constexpr int WIDTH = 4;
#if defined(__AVX512BF16__)
constexpr int BFLOAT_ROWS = 6;
#else
constexpr int BFLOAT_ROWS = 4;
#endif
constexpr int FLOAT_ROWS = 6;
#else
constexpr int WIDTH = 2;
constexpr int BFLOAT_ROWS = 2;
constexpr int FLOAT_ROWS = 2;
#endif

template <class T>
constexpr int ROWS = sizeof(T) == 2 ? BFLOAT_ROWS : FLOAT_ROWS;

template <class T>
struct Packed {
  const T* data;
  int n;
  int k;
  int depth() const { return round_up(k, Format<T>::GRAIN); }  // what x's rows must be filled up to, with zeros
  int panels() const { return (n + PANEL - 1) / PANEL; }
  const T* panel(int number) const { return data + static_cast<size_t>(number) * PANEL * depth(); }
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

// `rows` rows of x times `width` vectors of columns.
template <class T, int rows, int width>
inline __attribute__((always_inline)) void multiply_tile(const T* x, size_t stride, const T* w, int depth,
                                                         Floats (&y)[rows][width]) {
  constexpr int STEP = Format<T>::DEPTH;
  for (auto& row : y)
    for (auto& vector : row) vector = Floats{};
  for (int k = 0; k < depth; k += STEP, w += PANEL * STEP) {
    if (width == PANEL_VECTORS && rows <= 2)
      for (int line = 0; line < PANEL_VECTORS; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(w) + 4096 + 64 * line);
    decltype(weights_at(w)) now[width];
    for (int v = 0; v < width; ++v) now[v] = weights_at(w + v * LANES * STEP);
    for (int row = 0; row < rows; ++row)
      for (int v = 0; v < width; ++v) multiply(y[row][v], x + row * stride + k, now[v]);
  }
}

template <class T, int rows, int width, class Put>
inline void multiply_rows(const T* x, size_t stride, const T* w, int depth, int first, int column, const Put& put) {
  Floats y[rows][width];
  multiply_tile<T, rows, width>(x + first * stride, stride, w, depth, y);
  for (int row = 0; row < rows; ++row) put(first + row, column, y[row]);
}

template <class T, int width, class Put>
inline void multiply_span(const T* x, size_t stride, const T* w, int depth, int first, int end, int column,
                          const Put& put) {
  const int tiles = (end - first + ROWS<T> - 1) / ROWS<T>;
  for (int tile = 0; tile < tiles; ++tile) {
    // As even as can be: eight rows are four and four, not six and two.
    const int from = first + (end - first) * tile / tiles, count = first + (end - first) * (tile + 1) / tiles - from;
    switch (count) {
      case 1: multiply_rows<T, 1, width>(x, stride, w, depth, from, column, put); break;
      case 2: multiply_rows<T, 2, width>(x, stride, w, depth, from, column, put); break;
#if defined(__AVX512F__)
      case 3: multiply_rows<T, 3, width>(x, stride, w, depth, from, column, put); break;
      case 4: multiply_rows<T, 4, width>(x, stride, w, depth, from, column, put); break;
      case 5: multiply_rows<T, 5, width>(x, stride, w, depth, from, column, put); break;
      case 6: multiply_rows<T, 6, width>(x, stride, w, depth, from, column, put); break;
#endif
    }
  }
}

// All members: y = x W^T, for x (rows, depth). `put(row, column, vectors)` is told `WIDTH` vectors of a row,
// or two where the columns are shared out more finely; columns beyond n are among them.
template <class T, class Put>
void product(Team& team, int phase, const T* x, size_t stride, int rows, const Packed<T>& w, const Put& put) {
  const int depth = w.depth(), panels = w.panels();
  const int block = std::max<int>(ROWS<T>, BLOCK_BYTES / (sizeof(T) * depth) / ROWS<T> * ROWS<T>);
  const int blocks = (rows + block - 1) / block;
  const int cuts = WIDTH == 2 || panels * blocks < 4 * team.size() ? 2 : 1;
  for (int piece; (piece = team.take(phase)) < blocks * panels * cuts;) {
    // All panels of one block before the next: x comes from the cache, the weights once for each block.
    const int at = piece / (panels * cuts), panel = piece / cuts % panels, cut = piece % cuts;
    const int first = at * block, end = std::min(rows, first + block), column = panel * PANEL + cut * PANEL / 2;
    const T* from = w.panel(panel) + cut * (PANEL / 2) * Format<T>::DEPTH;
#if defined(DALSEGNO_AMX)
    if constexpr (sizeof(T) == 2) {
      amx::multiply_span(x, stride, from, depth, first, end, column, cuts == 1 ? 4 : 2, put);
      continue;
    }
#endif
    if constexpr (WIDTH == 4) {
      if (cuts == 1) {
        multiply_span<T, 4>(x, stride, from, depth, first, end, column, put);
        continue;
      }
    }
    multiply_span<T, 2>(x, stride, from, depth, first, end, column, put);
  }
}

// Where the columns of a matrix go among those of the packed one.
enum class Columns : int {
  PLAIN = 0,  // behind one another, from an offset on
  GATE = 1,   // sixteen of these,
  UP = 2,     // and sixteen of those beside them, so that one product has both
};

inline int packed_column(Columns columns, int number, int offset) {
  if (columns == Columns::PLAIN) return offset + number;
  return number / LANES * 2 * LANES + number % LANES + (columns == Columns::UP ? LANES : 0);
}

// All members: put the rows of `w` (n, k) where they belong. What is not put anywhere has to be zero already.
template <class T>
void pack(Team& team, int phase, T* into, const T* w, int n, int k, size_t stride, Columns columns, int offset) {
  constexpr int STEP = Format<T>::DEPTH;
  const int depth = round_up(k, Format<T>::GRAIN), groups = (n + LANES - 1) / LANES;
  for (int group; (group = team.take(phase)) < groups;) {
    const int end = std::min(n, (group + 1) * LANES);
    for (int from = 0; from < k; from += 32)
      for (int number = group * LANES; number < end; ++number) {
        const int column = packed_column(columns, number, offset);
        T* to = into + static_cast<size_t>(column / PANEL) * PANEL * depth + column % PANEL * STEP;
        for (int at = from; at < std::min(k, from + 32); ++at)
          to[static_cast<size_t>(at / STEP) * PANEL * STEP + at % STEP] = w[number * stride + at];
      }
  }
}

}  // namespace dalsegno
