// Products of bfloat16 by the tile unit of Intel's Advanced Matrix Extensions.
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

#define DALSEGNO_SUMS(tile)                                                                         \
  DALSEGNO_FACTOR(tile)                                                                             \
  template <> inline void zero<tile>() { _tile_zero(tile); }                                        \
  template <> inline void store<tile>(void* to, size_t stride) { _tile_stored(tile, to, stride); }
#define DALSEGNO_FACTOR(tile) \
  template <> inline void load<tile>(const void* from, size_t stride) { _tile_loadd(tile, from, stride); }
#define DALSEGNO_PRODUCT(into, x, w) \
  template <> inline void multiply<into, x, w>() { _tile_dpbf16ps(into, x, w); }

DALSEGNO_SUMS(0) DALSEGNO_SUMS(1) DALSEGNO_SUMS(2) DALSEGNO_SUMS(3)
DALSEGNO_FACTOR(4) DALSEGNO_FACTOR(5) DALSEGNO_FACTOR(6) DALSEGNO_FACTOR(7)
DALSEGNO_PRODUCT(0, 4, 5) DALSEGNO_PRODUCT(1, 4, 6) DALSEGNO_PRODUCT(2, 4, 7) DALSEGNO_PRODUCT(3, 4, 5)

#undef DALSEGNO_SUMS
#undef DALSEGNO_FACTOR
#undef DALSEGNO_PRODUCT

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

}  // namespace dalsegno::amx
