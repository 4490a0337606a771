// Matrices packed into panels of sixteen columns, and their products.
//
// y = x W^T for weights W (n, k) as in checkpoints. A panel holds sixteen of the n rows next to each other, k by k
// (for bfloat16 two k at a time, as the instructions need them), so a product reads memory sequentially. Each
// number of y is summed over k in order, in one accumulator, for any number of rows of x. So the result of a row
// does not depend on the other rows of the step.
//
// Reading weights takes as long as the arithmetic of a few rows. The first rows of a step wait for memory, the
// others find the weights in the cache; meanwhile the next weights are prefetched.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "numbers.h"
#include "squeezed.h"
#include "team.h"

#if defined(__AMX_BF16__) || defined(DALSEGNO_EMULATED_AMX)
#define DALSEGNO_AMX 1
#include "amx.h"
#endif

namespace dalsegno {

constexpr int UNITS_IN_A_ROW = 4;
constexpr size_t BLOCK_BYTES = 384 << 10;  // of x, that fit into a core's cache together with a panel
constexpr int MOST_ROWS_OF_BLOCK = 192;

inline constexpr int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

// The distance between rows of this many numbers: an odd number of cache lines. Rows 2 KiB apart would compete for
// the same few sets of the L1 cache.
template <class T>
constexpr int row_stride(int numbers) {
  constexpr int LINE = 64 / sizeof(T);
  return ((numbers + LINE - 1) / LINE | 1) * LINE;
}

template <class T>
struct Format;
template <>
struct Format<float> {
  static constexpr int DEPTH = 1;      // number of k next to each other
  static constexpr int GRAIN = LANES;  // k is padded to a multiple of it
};
template <>
struct Format<bfloat16> {
  static constexpr int DEPTH = 2;
  static constexpr int GRAIN = 32;
};

// The number of rows of x computed at once, limited by registers.
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
  const int32_t* lists = nullptr;  // if squeezed: the first patch of each unit; else null
  const Patch* patches = nullptr;
  int depth() const { return round_up(k, Format<T>::GRAIN); }  // x's rows must be zero-padded to it
  int units() const { return (n + UNIT * LANES - 1) / (UNIT * LANES); }
  size_t unit_bytes() const {
    return lists ? squeezed_unit_bytes(depth()) : size_t(UNIT) * LANES * depth() * sizeof(T);
  }
  const char* unit(int number) const { return reinterpret_cast<const char*>(data) + number * unit_bytes(); }
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

// Reads the vectors of an unsqueezed unit, panel by panel.
template <class T>
class Plain {
 public:
  using Vector = decltype(weights_at(static_cast<const T*>(nullptr)));
  Plain(const T* unit, int depth) : at_(unit), panel_(size_t(LANES) * depth) {}
  void next(Vector (&now)[UNIT]) {
    for (int panel = 0; panel < UNIT; ++panel) now[panel] = weights_at(at_ + panel * panel_);
    at_ += LANES * Format<T>::DEPTH;
  }

 private:
  const T* at_;
  const size_t panel_;
};

// Memory to prefetch: `lines` cache lines in each step, from `from` on.
struct Ahead {
  const char* from;
  int lines;
};

// Multiplies `rows` rows of x with the next `depth` k of a unit; adds to y (rows, UNIT) or overwrites it.
template <class T, class Weights, int rows>
void multiply_rows(const T* x, size_t stride, Weights w, int depth, bool adds, Ahead ahead, Floats* y) {
  constexpr int STEP = Format<T>::DEPTH;
  Floats sums[rows][UNIT];
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < UNIT; ++panel) sums[row][panel] = adds ? y[row * UNIT + panel] : Floats{};
  for (const T* end = x + depth; x != end; x += STEP) {
    for (int line = 0; line < ahead.lines; ++line, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
    typename Weights::Vector now[UNIT];
    w.next(now);
    for (int row = 0; row < rows; ++row)
      for (int panel = 0; panel < UNIT; ++panel) multiply(sums[row][panel], x + row * stride, now[panel]);
  }
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < UNIT; ++panel) y[row * UNIT + panel] = sums[row][panel];
}

template <class T, class Weights, int... rows>
constexpr auto multiplies(std::integer_sequence<int, rows...>) {
  return std::array{multiply_rows<T, Weights, rows + 1>...};
}
template <class T, class Weights>
constexpr auto BY_ROWS = multiplies<T, Weights>(std::make_integer_sequence<int, ROWS>());

// The rows of a block, in tiles of at most ROWS rows.
struct RowTiles {
  explicit RowTiles(int rows) : rows(rows), count((rows + ROWS - 1) / ROWS) {}
  // Tiles are as even as possible: eight rows are four and four, not six and two.
  int first(int tile) const { return rows * tile / count; }
  const int rows, count;
};

// Multiplies all rows of a block with `depth` k of a unit, tile by tile, and prefetches `bytes` from `next`.
template <class T>
void multiply_plain(const T* x, size_t stride, const RowTiles& tiles, const T* unit, int depth, bool adds,
                    const char* next, size_t bytes, Floats* y) {
  const int steps = depth / Format<T>::DEPTH;
  const int lines = static_cast<int>((bytes / 64 + steps - 1) / steps + tiles.count - 1) / tiles.count;
  for (int tile = 0; tile < tiles.count; ++tile, next += size_t(steps) * lines * 64) {
    const int first = tiles.first(tile);
    const bool is_left = size_t(tile) * steps * lines * 64 < bytes;
    BY_ROWS<T, Plain<T>>[tiles.first(tile + 1) - first - 1](x + first * stride, stride, {unit, depth}, depth, adds,
                                                            {next, is_left ? lines : 0}, y + first * UNIT);
  }
}

#if DALSEGNO_SQUEEZES
// The same with a squeezed unit. It is unpacked piece by piece, so the tiles share each piece in the L1 cache.
inline void multiply_squeezed(const bfloat16* x, size_t stride, const RowTiles& tiles, const SqueezedUnit& unit,
                              int depth, bool is_followed, Floats* y) {
  Unsqueezing weights(unit);
#if defined(DALSEGNO_AMX)
  constexpr int PIECE = 1024;
#else
  constexpr int PIECE = 512;
  if (tiles.count == 1)
    return BY_ROWS<bfloat16, Unsqueezing>[tiles.rows - 1](x, stride, weights, depth, false, {}, y);
#endif
  alignas(64) bfloat16 piece[UNIT * LANES * PIECE];
  for (int from = 0; from < depth; from += PIECE) {
    const int deep = std::min(PIECE, depth - from);
    for (bfloat16* to = piece; to != piece + LANES * deep; to += LANES * Format<bfloat16>::DEPTH) {
      Words now[UNIT];
      weights.next(now);
      for (int panel = 0; panel < UNIT; ++panel) std::memcpy(to + panel * LANES * deep, &now[panel], sizeof now[panel]);
    }
    const bool goes_on = is_followed || from + deep < depth;
    const size_t bytes = goes_on ? size_t(std::min(PIECE, depth)) / 2 * SQUEEZED_STEP : 0;
#if defined(DALSEGNO_AMX)
    amx::multiply_unit(x + from, stride, tiles.rows, piece, deep, from > 0, weights.at(), bytes, y);
#else
    multiply_plain(x + from, stride, tiles, piece, deep, from > 0, weights.at(), bytes, y);
#endif
  }
}
#endif

// Multiplies all rows of a block with one unit: y (rows, UNIT). Prefetches the next unit if this thread computes
// it.
template <class T>
void multiply_unit(const T* x, size_t stride, int rows, const Packed<T>& w, int number, bool is_followed, Floats* y) {
  const int depth = w.depth();
  const char* unit = w.unit(number);
  const RowTiles tiles(rows);
#if DALSEGNO_SQUEEZES
  if constexpr (sizeof(T) == 2)
    if (w.lists)
      return multiply_squeezed(x, stride, tiles, {unit, w.patches + w.lists[number]}, depth, is_followed, y);
#endif
  // With one tile, the product itself reads at the speed of memory.
  const size_t ahead = is_followed && tiles.count > 1 ? w.unit_bytes() : 0;
  const T* weights = reinterpret_cast<const T*>(unit);
#if defined(DALSEGNO_AMX)
  if constexpr (sizeof(T) == 2)
    return amx::multiply_unit(x, stride, rows, weights, depth, false, unit + w.unit_bytes(), ahead, y);
#endif
  multiply_plain(x, stride, tiles, weights, depth, false, unit + w.unit_bytes(), ahead, y);
}

// A block of rows of x, and the matrix that it is multiplied by, if there are several.
struct Rows {
  int32_t first, count, matrix;
};

// The most rows of a block, whose rows have this many bytes.
inline int most_rows_of_block(size_t row_bytes) {
  return std::clamp<int>(static_cast<int>(BLOCK_BYTES / row_bytes), ROWS, MOST_ROWS_OF_BLOCK);
}

// Shares the units of the products of blocks among all members; a matrix has `units` units. `multiply(row, count,
// unit, is_followed, y)` computes `count` rows of a unit from `row` on, and `put(matrix, row, column, vectors)` receives
// each row of it, with columns beyond n.
template <class BlockOf, class Multiply, class Put>
void share_units(Team::Member& member, int phase, int blocks, const BlockOf& block_of, int units,
                 const Multiply& multiply, const Put& put) {
  const int at_once = std::clamp(blocks * units / (8 * member.team_size()), 1, UNITS_IN_A_ROW);
  Floats y[MOST_ROWS_OF_BLOCK * UNIT];
  // All of the matrix for one block before the next: x stays in the cache, weights are read once per block.
  member.share(
      phase, blocks * units, at_once,
      [&](int piece, bool is_followed) {
        const Rows block = block_of(piece / units);
        const int unit = piece % units;
        multiply(block.first, block.count, block.matrix * units + unit, is_followed && unit + 1 < units, y);
      },
      [&](int piece) {
        const Rows block = block_of(piece / units);
        for (int row = 0; row < block.count; ++row)
          put(block.matrix, block.first + row, piece % units * UNIT * LANES, y + row * UNIT);
      });
}

// The same for all rows of x and one matrix; `row_bytes` is the size of a row of x, and `put` gets no matrix.
template <class Multiply, class Put>
void share_units(Team::Member& member, int phase, int rows, size_t row_bytes, int units, const Multiply& multiply,
                 const Put& put) {
  const int most = most_rows_of_block(row_bytes);
  // Blocks are as even as possible: a block of two rows would read all weights once more.
  const int fewest = (rows + most - 1) / most;
  const int block = std::min(round_up((rows + fewest - 1) / fewest, ROWS), MOST_ROWS_OF_BLOCK);
  share_units(
      member, phase, (rows + block - 1) / block,
      [&](int number) -> Rows { return {number * block, std::min(block, rows - number * block), 0}; }, units, multiply,
      [&](int, int row, int column, const Floats* vectors) { put(row, column, vectors); });
}

// Computes y = x W^T for x (rows, depth), by all members; `put` is that of `share_units`.
template <class T, class Put>
void product(Team::Member& member, int phase, const T* x, size_t stride, int rows, const Packed<T>& w, const Put& put) {
  share_units(
      member, phase, rows, sizeof(T) * w.depth(), w.units(),
      [&](int first, int count, int unit, bool is_followed, Floats* y) {
        multiply_unit(x + first * stride, stride, count, w, unit, is_followed, y);
      },
      put);
}

// The mapping of the rows of a matrix to the columns of the packed one, from an offset on.
enum class Columns : int {
  PLAIN = 0,  // consecutive
  GATE = 1,   // sixteen gate columns,
  UP = 2,     // then sixteen up columns, so that a unit has both
};

inline int packed_column(Columns columns, int number, int offset) {
  if (columns == Columns::PLAIN) return offset + number;
  return offset + number / LANES * 2 * LANES + number % LANES + (columns == Columns::UP ? LANES : 0);
}

// Packs the rows of `w` (n, k), by all members. Padding is not written, so `into` must be zero before.
template <class T>
void pack(Team::Member& member, int phase, T* into, const T* w, int n, int k, size_t stride, Columns columns, int offset) {
  constexpr int STEP = Format<T>::DEPTH, AT_ONCE = 32;
  const size_t depth = round_up(k, Format<T>::GRAIN);
  const int groups = (n + LANES - 1) / LANES;
  member.each(phase, groups, [&](int group) {
    const int end = std::min(n, (group + 1) * LANES);
    for (int from = 0; from < k; from += AT_ONCE)
      for (int number = group * LANES; number < end; ++number) {
        const int column = packed_column(columns, number, offset);
        T* to = into + column / LANES * LANES * depth + column % LANES * STEP;
        for (int at = from; at < std::min(k, from + AT_ONCE); ++at)
          to[size_t(at / STEP) * LANES * STEP + at % STEP] = w[number * stride + at];
      }
  });
}

}  // namespace dalsegno
