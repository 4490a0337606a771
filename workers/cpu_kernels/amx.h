// Products of bfloat16, and of bytes, by the tile unit of Intel's Advanced Matrix Extensions.
//
// A tile is sixteen rows of 64 bytes. Weights packed by `tiles.h` have the unit's layout: a row holds two k of
// sixteen columns. With DALSEGNO_EMULATED_AMX the unit is emulated in C++, so that the code around it can be
// tested on processors without AMX.
#pragma once

#include "numbers.h"

#if !defined(DALSEGNO_EMULATED_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dalsegno::amx {

constexpr int TILE_ROWS = 16;
constexpr int TILE_DEPTH = 32;  // k of one product

struct alignas(64) Palette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if defined(DALSEGNO_EMULATED_AMX)

struct Tile {
  uint32_t words[TILE_ROWS][16];
};
struct Unit {
  Palette shape;
  Tile tile[8] = {};
};
inline thread_local Unit unit;

inline void shape(const Palette& palette) { unit.shape = palette; }
template <int tile>
inline void zero() {
  unit.tile[tile] = {};
}
template <int tile>
inline void load(const void* from, size_t stride) {
  unit.tile[tile] = {};
  for (int row = 0; row < unit.shape.rows[tile]; ++row)
    std::memcpy(unit.tile[tile].words[row], static_cast<const char*>(from) + row * stride, unit.shape.row_bytes[tile]);
}
template <int tile>
inline void store(void* to, size_t stride) {
  for (int row = 0; row < unit.shape.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, unit.tile[tile].words[row], unit.shape.row_bytes[tile]);
}
template <int into, int x, int w>
inline void multiply() {
  for (int row = 0; row < unit.shape.rows[into]; ++row)
    for (int pair = 0; pair < unit.shape.rows[w]; ++pair)
      for (int column = 0; column < 16; ++column) {
        const uint32_t a = unit.tile[x].words[row][pair], b = unit.tile[w].words[pair][column];
        float sum = as<float>(unit.tile[into].words[row][column]);
        sum += as<float>(a << 16) * as<float>(b << 16);
        sum += as<float>(a & 0xFFFF0000) * as<float>(b & 0xFFFF0000);
        unit.tile[into].words[row][column] = as<uint32_t>(sum);
      }
}
template <int into, int x, int w, bool is_signed>
inline void multiply_bytes() {
  for (int row = 0; row < unit.shape.rows[into]; ++row)
    for (int word = 0; word < unit.shape.rows[w]; ++word)
      for (int column = 0; column < 16; ++column)
        for (int shift = 0; shift < 32; shift += 8) {
          const auto a = static_cast<int8_t>(unit.tile[x].words[row][word] >> shift);
          const auto b = static_cast<uint8_t>(unit.tile[w].words[word][column] >> shift);
          const int factor = is_signed ? static_cast<int8_t>(b) : b;
          unit.tile[into].words[row][column] += static_cast<uint32_t>(a * factor);
        }
}
inline bool allowed() { return true; }

#else

inline void shape(const Palette& palette) {
  asm volatile("" ::: "memory");  // GCC's tile loads do not declare what they read, so flush all writes here
  _tile_loadconfig(&palette);
}

// The intrinsics require tile numbers as literals, so there is one function per tile in use.
template <int tile>
void zero();
template <int tile>
void load(const void* from, size_t stride);
template <int tile>
void store(void* to, size_t stride);
template <int into, int x, int w>
void multiply();
template <int into, int x, int w, bool is_signed>
void multiply_bytes();  // x is signed, and w if `is_signed`

#define DALSEGNO_SUMS(tile)                                                                         \
  DALSEGNO_FACTOR(tile)                                                                             \
  template <> inline void zero<tile>() { _tile_zero(tile); }                                        \
  template <> inline void store<tile>(void* to, size_t stride) { _tile_stored(tile, to, stride); }
#define DALSEGNO_FACTOR(tile) \
  template <> inline void load<tile>(const void* from, size_t stride) { _tile_loadd(tile, from, stride); }
#define DALSEGNO_PRODUCT(into, x, w) \
  template <> inline void multiply<into, x, w>() { _tile_dpbf16ps(into, x, w); }
#define DALSEGNO_PRODUCT_OF_BYTES(into, x, w)                                                 \
  template <> inline void multiply_bytes<into, x, w, true>() { _tile_dpbssd(into, x, w); }    \
  template <> inline void multiply_bytes<into, x, w, false>() { _tile_dpbsud(into, x, w); }

DALSEGNO_SUMS(0) DALSEGNO_SUMS(1) DALSEGNO_SUMS(2) DALSEGNO_SUMS(3)
DALSEGNO_FACTOR(4) DALSEGNO_FACTOR(5) DALSEGNO_FACTOR(6) DALSEGNO_FACTOR(7)
DALSEGNO_PRODUCT(0, 4, 5) DALSEGNO_PRODUCT(1, 4, 6) DALSEGNO_PRODUCT(2, 4, 7) DALSEGNO_PRODUCT(3, 4, 5)

DALSEGNO_PRODUCT_OF_BYTES(0, 4, 5) DALSEGNO_PRODUCT_OF_BYTES(1, 6, 7)
DALSEGNO_PRODUCT_OF_BYTES(2, 4, 5) DALSEGNO_PRODUCT_OF_BYTES(3, 6, 7)

#undef DALSEGNO_SUMS
#undef DALSEGNO_FACTOR
#undef DALSEGNO_PRODUCT
#undef DALSEGNO_PRODUCT_OF_BYTES

// The operating system saves the unit's registers only for processes that have requested it.
inline bool allowed() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

#endif

// Multiplies rows of x with the next `depth` k of a unit of four panels, and adds to y or overwrites it.
// Tiles 0 to 3 are sums, 4 is x, 5 to 7 are weights.
inline void multiply_unit(const bfloat16* x, size_t stride, int rows, const bfloat16* w, int depth, bool adds,
                          const char* next, size_t bytes, Floats* y) {
  constexpr size_t TILE_ROW = 64, Y_ROW = UNIT * sizeof(Floats);
  const size_t panel = size_t(LANES) * depth;
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, lines = (TILE_ROWS * UNIT + tiles - 1) / tiles;
  const char *ahead = next, *end = next + bytes;
  Palette palette;
  for (int tile = 0; tile < 8; ++tile) palette.row_bytes[tile] = 64, palette.rows[tile] = TILE_ROWS;
  int shaped = 0;
  for (int first = 0; first < rows; first += TILE_ROWS) {
    const int count = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
    if (count != shaped) {
      for (int tile = 0; tile < 5; ++tile) palette.rows[tile] = static_cast<uint8_t>(count);
      shape(palette);
      shaped = count;
    }
    Floats* to = y + first * UNIT;
    if (adds)
      load<0>(to, Y_ROW), load<1>(to + 1, Y_ROW), load<2>(to + 2, Y_ROW), load<3>(to + 3, Y_ROW);
    else
      zero<0>(), zero<1>(), zero<2>(), zero<3>();
    for (int k = 0; k < depth; k += TILE_DEPTH) {
      for (int line = 0; line < lines && ahead < end; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      const bfloat16* at = w + size_t(k) * LANES;
      load<4>(x + first * stride + k, stride * sizeof(bfloat16));
      load<5>(at, TILE_ROW), multiply<0, 4, 5>();
      load<6>(at + panel, TILE_ROW), multiply<1, 4, 6>();
      load<7>(at + 2 * panel, TILE_ROW), multiply<2, 4, 7>();
      load<5>(at + 3 * panel, TILE_ROW), multiply<3, 4, 5>();
    }
    store<0>(to, Y_ROW), store<1>(to + 1, Y_ROW), store<2>(to + 2, Y_ROW), store<3>(to + 3, Y_ROW);
  }
}

// Shapes the tiles for `multiply_groups` of so many rows.
template <int words>
inline void shape_for_groups(int rows) {
  Palette palette;
  for (int tile = 0; tile < 8; ++tile) palette.row_bytes[tile] = 64, palette.rows[tile] = static_cast<uint8_t>(rows);
  for (int x : {4, 6}) palette.row_bytes[x] = 4 * words;
  for (int w : {5, 7}) palette.rows[w] = words;
  shape(palette);
}

// Multiplies the signed bytes of `count` groups, at most four: rows of four times `words` bytes of x, by as many words of
// sixteen columns, groups `w_stride` bytes apart. Products (rows, 16) are `rows` rows apart.
template <bool is_signed, int rows, int words>
inline void multiply_groups(const int8_t* x, size_t stride, const char* w, size_t w_stride, int count, void* products) {
  constexpr int X = 4 * words, W = 64;
  constexpr size_t EACH = size_t(rows) * 64;
  char* to = static_cast<char*>(products);
  if (count < 4) {
    for (int group = 0; group < count; ++group) {
      zero<0>(), load<4>(x + group * X, stride), load<5>(w + group * w_stride, W);
      multiply_bytes<0, 4, 5, is_signed>(), store<0>(to + group * EACH, 64);
    }
    return;
  }
  // A product takes several times as long as the unit needs to begin the next one, so four are under way.
  zero<0>(), load<4>(x, stride), load<5>(w, W), multiply_bytes<0, 4, 5, is_signed>();
  zero<1>(), load<6>(x + X, stride), load<7>(w + w_stride, W), multiply_bytes<1, 6, 7, is_signed>();
  zero<2>(), load<4>(x + 2 * X, stride), load<5>(w + 2 * w_stride, W), multiply_bytes<2, 4, 5, is_signed>();
  zero<3>(), load<6>(x + 3 * X, stride), load<7>(w + 3 * w_stride, W), multiply_bytes<3, 6, 7, is_signed>();
  store<0>(to, 64), store<1>(to + EACH, 64), store<2>(to + 2 * EACH, 64), store<3>(to + 3 * EACH, 64);
}

}  // namespace dalsegno::amx
