// Weights of four to eight bits in groups, and their products with activations of eight bits.
//
// A weight is `scale * (number - zero)`, or `scale * number + minimum`, or `scale * value`, where a number of four bits
// chooses the value, an integer of eight bits, from a table of the matrix. Numbers are unsigned; scale and minimum are
// those of its column and of 32 consecutive k, a group; in some forms, each half of a group has a scale. Activations
// are rounded to eight bits with a scale for each row and group, as in llama.cpp. The products of a group are summed as
// integers, which is exact, and the groups' sums are added in order. So the result of a row has the same bits by all
// instructions, and in any batch.
//
// A group of a unit is, for each panel, its numbers as the instructions need them: in a vector four consecutive k
// of each of sixteen columns. Two vectors of four bits share 64 bytes: the first half of the group is in the low
// bits, the second half in the high ones. The fifth bits of a panel's numbers are in 64 bytes more: bit w of the byte of
// a column and k % 4 is that of k / 4 = w. Of six bits, the two high ones are in twice as many: first those of the first
// half of the group. Then come the scales of all columns (float16), and the minimums or those of second halves, if any.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "numbers.h"
#include "tiles.h"

#if !defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace dalsegno::grouped {

constexpr int GROUP = 32;
constexpr int WORDS = GROUP / 4;  // of four numbers
constexpr int COLUMNS = UNIT * LANES;

enum class Form {
  FOUR,          // numbers of four bits
  FOUR_HALVES,   // the same, each half of a group with a scale
  FIVE,          // of five bits
  SIX,           // of six bits, each half of a group with a scale
  EIGHT,         // of eight bits
  VALUE,         // of four bits, which choose a value
  VALUE_HALVES,  // the same, each half of a group with a scale
};

inline Form form_of(int bits, int parts, bool has_values) {
  if (has_values) return parts == 2 ? Form::VALUE_HALVES : Form::VALUE;
  if (bits == 4 && parts == 2) return Form::FOUR_HALVES;
  return bits == 4 ? Form::FOUR : bits == 5 ? Form::FIVE : bits == 6 ? Form::SIX : Form::EIGHT;
}
constexpr int bits_of(Form form) {
  return form == Form::EIGHT ? 8 : form == Form::SIX ? 6 : form == Form::FIVE ? 5 : 4;
}
constexpr int parts_of(Form form) {  // of a group, which have a scale each
  return form == Form::SIX || form == Form::FOUR_HALVES || form == Form::VALUE_HALVES ? 2 : 1;
}
constexpr bool chooses(Form form) { return form == Form::VALUE || form == Form::VALUE_HALVES; }
constexpr int multiplied_bits(Form form) { return chooses(form) ? 8 : bits_of(form); }  // of a product's factor
constexpr int zero_of(Form form, bool has_minimums) { return has_minimums ? 0 : 1 << (multiplied_bits(form) - 1); }
constexpr size_t panel_bytes(Form form) { return size_t(LANES) * GROUP * bits_of(form) / 8; }

constexpr int VALUES = 16;

struct Weights {
  const char* data;
  int n, k;
  Form form;
  bool has_minimums;
  const int8_t* values;  // (VALUES,), if numbers choose one
  float factor;  // of all scales and minimums: a power of two, so that they are in the range of float16 (`round_row`)
  int groups() const { return (k + GROUP - 1) / GROUP; }
  int units() const { return (n + COLUMNS - 1) / COLUMNS; }
  size_t group_bytes() const {
    return UNIT * panel_bytes(form) + COLUMNS * sizeof(uint16_t) * (parts_of(form) + has_minimums);
  }
  size_t unit_bytes() const { return groups() * group_bytes(); }
};

// Rows of activations.
struct Activations {
  int8_t* numbers;     // (rows, stride)
  float* scales;       // (groups, all_rows)
  float* scaled_sums;  // (groups, all_rows): of the numbers, times their scale
  int32_t* sums;       // (groups, 2, all_rows): of the numbers in each half of a group
  int groups, all_rows;
  size_t stride;

  // Tiles of rows read up to this many rows beyond the last; their results are dropped.
  static constexpr int SPARE_ROWS = 16;
  static size_t bytes(int rows, int depth) {
    const size_t groups = (depth + GROUP - 1) / GROUP;
    const size_t row = row_stride<int8_t>(static_cast<int>(groups) * GROUP) + groups * 4 * sizeof(float);
    return (rows + SPARE_ROWS) * row;
  }
  // In `bytes(rows, depth)` bytes at `room`.
  static Activations at(char* room, int rows, int depth) {
    Activations found;
    found.groups = (depth + GROUP - 1) / GROUP;
    found.all_rows = rows + SPARE_ROWS;
    found.stride = row_stride<int8_t>(found.groups * GROUP);
    const size_t scales = size_t(found.all_rows) * found.groups;
    found.numbers = reinterpret_cast<int8_t*>(room);
    found.scales = reinterpret_cast<float*>(room + found.all_rows * found.stride);
    found.scaled_sums = found.scales + scales;
    found.sums = reinterpret_cast<int32_t*>(found.scaled_sums + scales);
    return found;
  }
  Activations from(int row) const {
    return {numbers + row * stride, scales + row, scaled_sums + row, sums + row, groups, all_rows, stride};
  }
  size_t place(int group) const { return size_t(group) * all_rows; }  // of the first row's scale
  // The sum of a row's numbers in a half of a group. Unsigned: a thread that is late may read any number here.
  uint32_t sum(int group, int half, int row) const {
    return static_cast<uint32_t>(sums[(2 * size_t(group) + half) * all_rows + row]);
  }
};

// Rounds row `row` of `to`, from k numbers: a multiple of LANES. A number that is not finite makes its row NaN.
// `factor` is that of the weights.
template <class T>
void round_row(const T* x, int k, float factor, const Activations& to, int row) {
  const Activations mine = to.from(row);
  for (int group = 0; group < to.groups; ++group) {
    const int at = group * GROUP;
    const Floats a = load(x + at), b = at + LANES < k ? load(x + at + LANES) : Floats{};
    const int32_t bits = most_bits(a, b);
    const float most = as<float>(bits);
    const bool is_finite = bits < INFINITE, has_any = is_finite && most >= LEAST;
    const Floats inverse = splat(has_any ? 127.0f / most : 0.0f);
    const Ints first = has_any ? rounded_product(a, inverse) : Ints{};
    const Ints second = has_any ? rounded_product(b, inverse) : Ints{};
    const Bytes halves[2] = {__builtin_convertvector(first, Bytes), __builtin_convertvector(second, Bytes)};
    std::memcpy(mine.numbers + at, halves, sizeof halves);
    const float scale = !is_finite ? NAN : has_any ? most / 127.0f * factor : 0.0f;
    const auto sum_of = [](Ints numbers) { return reduced(numbers, [](auto p, auto q) { return p + q; }); };
    const int32_t sums[2] = {sum_of(first), sum_of(second)};
    mine.scales[to.place(group)] = scale;
    for (int half = 0; half < 2; ++half) mine.sums[(2 * size_t(group) + half) * to.all_rows] = sums[half];
    mine.scaled_sums[to.place(group)] = scale * (sums[0] + sums[1]);
  }
}

// Adds to each lane the products of its four numbers of `w`, unsigned, and those of `x`, signed.
template <int bits>
inline void add_products(Ints& into, Words w, const int8_t* x) {
  const int32_t word = load_raw<int32_t>(x);
#if defined(__AVX512VNNI__)
  into = (Ints)_mm512_dpbusd_epi32((__m512i)into, (__m512i)w, _mm512_set1_epi32(word));
#elif defined(__AVX512BW__)
  const __m512i numbers = (__m512i)w, other = _mm512_set1_epi32(word);
  if constexpr (bits < 8) {  // sums of two fit into sixteen bits
    into += (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(numbers, other), _mm512_set1_epi16(1));
  } else {
    const __m512i even = _mm512_and_si512(numbers, _mm512_set1_epi16(0xFF)), odd = _mm512_srli_epi16(numbers, 8);
    into += (Ints)_mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(other, 8), 8));
    into += (Ints)_mm512_madd_epi16(odd, _mm512_srai_epi16(other, 8));
  }
#else
  __m256i half[2], sum[2];
  std::memcpy(half, &w, sizeof half);
  std::memcpy(sum, &into, sizeof sum);
  const __m256i other = _mm256_set1_epi32(word);
  for (int which = 0; which < 2; ++which) {
#if defined(__AVXVNNI__)
    sum[which] = _mm256_dpbusd_avx_epi32(sum[which], half[which], other);
#else
    const auto add = [&](__m256i products) { sum[which] = _mm256_add_epi32(sum[which], products); };
    if constexpr (bits < 8) {
      add(_mm256_madd_epi16(_mm256_maddubs_epi16(half[which], other), _mm256_set1_epi16(1)));
    } else {
      const __m256i even = _mm256_and_si256(half[which], _mm256_set1_epi16(0xFF)), odd = _mm256_srli_epi16(half[which], 8);
      add(_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(other, 8), 8)));
      add(_mm256_madd_epi16(odd, _mm256_srai_epi16(other, 8)));
    }
#endif
  }
  std::memcpy(&into, sum, sizeof into);
#endif
}

inline Floats load_halves(const uint16_t* at) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
  const auto part = [&](int half) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + half)); };
  const __m256 both[2] = {part(0), part(1)};
  return load_raw<Floats>(both);
#endif
}

// The scales of a group of a unit, and its minimums or the scales of second halves.
class Scales {
 public:
  explicit Scales(const char* at) : at_(reinterpret_cast<const uint16_t*>(at)) {}
  Floats scale(int panel, int part) const { return load_halves(at_ + part * COLUMNS + panel * LANES); }
  Floats minimum(int panel) const { return scale(panel, 1); }

 private:
  const uint16_t* at_;
};

// Adds the sum of a group's products to y.
inline void add_group(Floats& y, Ints products, Floats scale, float scale_of_x) {
  y = multiply_add(__builtin_convertvector(products, Floats), scale * scale_of_x, y);
}

// The values that numbers choose: a byte `offset` plus each, for every sixteen bytes of a vector.
inline Words table_of(const int8_t* values, int offset) {
  Words table;
  auto* bytes = reinterpret_cast<uint8_t*>(&table);
  for (size_t at = 0; at < sizeof table; ++at) bytes[at] = static_cast<uint8_t>(values[at % VALUES] + offset);
  return table;
}

// The byte of a table for each byte of `numbers`, which are less than sixteen.
inline Words chosen_from(Words table, Words numbers) {
#if defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8((__m512i)table, (__m512i)numbers);
#else
  __m256i from[2], at[2];
  std::memcpy(from, &table, sizeof from), std::memcpy(at, &numbers, sizeof at);
  for (int half = 0; half < 2; ++half) at[half] = _mm256_shuffle_epi8(from[half], at[half]);
  return load_raw<Words>(at);
#endif
}

// The numbers of two words of a panel: those of the word at `word`, and of the one half a group later.
template <Form form>
inline std::array<Words, 2> numbers_at(const char* panel, int word, Words table) {
  const Words both = load_raw<Words>(panel + word * sizeof(Words));
  std::array<Words, 2> found{both & 0x0F0F0F0F, both >> 4 & 0x0F0F0F0F};
  if constexpr (chooses(form))
    for (Words& numbers : found) numbers = chosen_from(table, numbers);
  if constexpr (form == Form::FIVE) {
    const Words fifths = load_raw<Words>(panel + WORDS / 2 * sizeof(Words)) >> word;
    found[0] |= (fifths & 0x01010101) << 4;
    found[1] |= (fifths >> WORDS / 2 & 0x01010101) << 4;
  }
  if constexpr (form == Form::SIX)
    for (int half = 0; half < 2; ++half) {
      const Words high = load_raw<Words>(panel + (WORDS / 2 + half) * sizeof(Words));
      found[half] |= (high >> 2 * word & 0x03030303) << 4;
    }
  return found;
}

// The order in which a core reads a group fastest from memory. Those with a tile unit (Intel's) read all panels side by
// side, with the next unit on its way to the L2 cache. Others (measured on AMD's Zen 4 alone) read two panels after each
// other, or one of eight bits: their own prefetchers follow few short strides, and a unit of prefetches would take the
// places of outstanding loads.
#if defined(DALSEGNO_AMX)
constexpr bool IS_SIDE_BY_SIDE = true;
#else
constexpr bool IS_SIDE_BY_SIDE = false;
#endif
constexpr int panels_of(Form form, int rows) { return IS_SIDE_BY_SIDE ? UNIT : form == Form::EIGHT && rows < 3 ? 1 : 2; }
constexpr size_t NEAR = 2048;  // bytes from what is multiplied to what is prefetched otherwise

// Multiplies rows of x with a unit: y (rows, UNIT).
template <Form form, bool has_minimums, int rows>
void multiply_rows(const Activations& x, const char* unit, size_t group_bytes, const int8_t* values, Ahead ahead,
                   Floats* y) {
  constexpr size_t PANEL = panel_bytes(form);
  constexpr int ZERO = zero_of(form, has_minimums), BITS = multiplied_bits(form), PARTS = parts_of(form);
  constexpr int PANELS = panels_of(form, rows);
  const Words table = chooses(form) ? table_of(values, ZERO) : Words{};
  Floats sums[rows][UNIT] = {};
  for (int group = 0; group < x.groups; ++group, unit += group_bytes) {
    for (int line = 0; line < ahead.lines; ++line, ahead.from += 64)
      __builtin_prefetch(ahead.from, 0, IS_SIDE_BY_SIDE ? 2 : 3);
    Ints start[rows][PARTS];
    for (int row = 0; row < rows; ++row) {
      uint32_t sums_of_x[PARTS] = {x.sum(group, 0, row)};
      sums_of_x[PARTS - 1] += x.sum(group, 1, row);
      for (int part = 0; part < PARTS; ++part) start[row][part] = as<Ints>(Words{} - uint32_t{ZERO} * sums_of_x[part]);
    }
    const int8_t* numbers = x.numbers + group * GROUP;
    const Scales scales(unit + UNIT * PANEL);
#pragma GCC unroll 2
    for (int first = 0; first < UNIT; first += PANELS) {
      Ints products[rows][PANELS][PARTS];
      for (int row = 0; row < rows; ++row)
        for (int panel = 0; panel < PANELS; ++panel) std::copy_n(start[row], PARTS, products[row][panel]);
      const auto add = [&](int panel, int word) {
        const char* at = unit + (first + panel) * PANEL;
        if constexpr (form != Form::EIGHT) {
          const auto [low, high] = numbers_at<form>(at, word, table);
          for (int row = 0; row < rows; ++row) {
            const int8_t* mine = numbers + row * x.stride + word * 4;
            add_products<BITS>(products[row][panel][0], low, mine);
            add_products<BITS>(products[row][panel][PARTS - 1], high, mine + GROUP / 2);
          }
        } else {
          const Words w = load_raw<Words>(at + word * sizeof(Words));
          for (int row = 0; row < rows; ++row)
            add_products<BITS>(products[row][panel][0], w, numbers + row * x.stride + word * 4);
        }
      };
      constexpr int LOADS = form != Form::EIGHT ? WORDS / 2 : WORDS;
      if constexpr (IS_SIDE_BY_SIDE) {
        for (int word = 0; word < LOADS; ++word)
          for (int panel = 0; panel < PANELS; ++panel) add(panel, word);
      } else {
        for (int panel = 0; panel < PANELS; ++panel)
          for (int word = 0; word < LOADS; ++word) add(panel, word);
      }
      for (int panel = 0; panel < PANELS; ++panel) {
        Floats scale[PARTS];
        for (int part = 0; part < PARTS; ++part) scale[part] = scales.scale(first + panel, part);
        for (int row = 0; row < rows; ++row) {
          const size_t at = x.place(group) + row;
          Floats& sum = sums[row][first + panel];
          for (int part = 0; part < PARTS; ++part)
            add_group(sum, products[row][panel][part], scale[part], x.scales[at]);
          if constexpr (has_minimums) sum = multiply_add(scales.minimum(first + panel), splat(x.scaled_sums[at]), sum);
        }
      }
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int panel = 0; panel < UNIT; ++panel) y[row * UNIT + panel] = sums[row][panel];
}

// The number of rows computed at once, limited by registers.
#if defined(__AVX512F__)
constexpr int at_once(Form form) { return 4 / parts_of(form); }
#else
constexpr int at_once(Form) { return 1; }
#endif

template <Form form, bool has_minimums, int... rows>
constexpr auto multiplies(std::integer_sequence<int, rows...>) {
  return std::array{multiply_rows<form, has_minimums, rows + 1>...};
}
template <Form form, bool has_minimums>
constexpr auto BY_ROWS = multiplies<form, has_minimums>(std::make_integer_sequence<int, at_once(form)>());

#if defined(DALSEGNO_AMX)
constexpr int LEAST_FOR_TILES = 14;  // fewer rows are faster without the tile unit
constexpr int BATCH = 4;             // groups whose integers are computed at a time
constexpr int PIECE = 8;             // groups of a unit that are unpacked at a time, into the L1 cache

struct alignas(64) Unpacked {
  uint8_t words[PIECE * UNIT * WORDS][64];
};

// The place in `Unpacked` of a word of a group's panel: parts of groups follow each other.
template <int parts>
constexpr int place_of(int group, int panel, int word) {
  constexpr int EACH = WORDS / parts;
  return ((group * parts + word / EACH) * UNIT + panel) * EACH + word % EACH;
}

// Unpacks groups of a unit for the tile unit: less the zero, as signed numbers, unless there are minimums.
template <Form form, bool has_minimums>
void unpack(const char* unit, size_t group_bytes, int groups, const int8_t* values, Unpacked& to) {
  constexpr size_t PANEL = panel_bytes(form);
  const Words table = chooses(form) ? table_of(values, 0) : Words{};
  for (int group = 0; group < groups; ++group, unit += group_bytes)
    for (int panel = 0; panel < UNIT; ++panel) {
      const char* from = unit + panel * PANEL;
      const auto put = [&](int word, Words numbers) {
        if constexpr (!chooses(form) && !has_minimums) {
          // The zero is the highest bit, so subtracting it is flipping it, and extending it as the sign.
          const __m512i zero = _mm512_set1_epi8(static_cast<char>(zero_of(form, false)));
          numbers = (Words)_mm512_sub_epi8((__m512i)numbers, zero);
        }
        std::memcpy(to.words[place_of<parts_of(form)>(group, panel, word)], &numbers, sizeof numbers);
      };
      if constexpr (form == Form::EIGHT) {
        for (int word = 0; word < WORDS; ++word) put(word, load_raw<Words>(from + word * sizeof(Words)));
      } else {
        for (int word = 0; word < WORDS / 2; ++word) {
          const auto numbers = numbers_at<form>(from, word, table);
          put(word, numbers[0]), put(word + WORDS / 2, numbers[1]);
        }
      }
    }
}

// Multiplies `rows` rows, at most sixteen, with `groups` groups of a panel, the first of them `from`. Adds to y, whose
// rows are UNIT apart, or overwrites it with the first group of all. The tile unit computes the integers of four groups,
// or parts of groups, while the vector unit scales those of the four before.
template <int parts, bool has_minimums, int rows>
void multiply_panel(const Activations& x, int from, int groups, const Unpacked& w, const char* scales, size_t group_bytes,
                    int panel, Ahead ahead, Floats* y) {
  alignas(64) int32_t products[2][BATCH][rows][LANES];
  Floats sums[rows];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) sums[row] = from ? y[row * UNIT] : Floats{};
  const auto compute = [&](int part) {
    constexpr int EACH = WORDS / parts;
    amx::multiply_groups<!has_minimums, rows, EACH>(
        x.numbers + from * GROUP + part * (4 * EACH), x.stride,
        reinterpret_cast<const char*>(w.words[(part * UNIT + panel) * EACH]), UNIT * EACH * sizeof w.words[0],
        std::min(BATCH, groups * parts - part), products[part / BATCH % 2]);
  };
  compute(0);
  for (int part = 0; part < groups * parts; ++part) {
    if (part % parts == 0)
      for (int line = 0; line < ahead.lines; ++line, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
    if (part % BATCH == 0 && part + BATCH < groups * parts) compute(part + BATCH);
    const Scales here(scales + part / parts * group_bytes);
    const Floats scale = here.scale(panel, part % parts);
    const size_t place = x.place(from + part / parts);
    const float *of_x = x.scales + place, *sums_of_x = x.scaled_sums + place;
    const auto& integers = products[part / BATCH % 2][part % BATCH];
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) add_group(sums[row], load_raw<Ints>(integers[row]), scale, of_x[row]);
    if constexpr (has_minimums) {
      const Floats minimum = here.minimum(panel);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) sums[row] = multiply_add(minimum, splat(sums_of_x[row]), sums[row]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) y[row * UNIT] = sums[row];
}

// The same as `multiply_rows` by the tile unit, for any number of rows.
template <Form form, bool has_minimums>
void multiply_tiles(const Activations& x, int rows, const char* unit, size_t group_bytes, const int8_t* values,
                    const char* next, size_t bytes, Floats* y) {
  constexpr size_t SCALES = UNIT * panel_bytes(form);
  constexpr int ALL = amx::TILE_ROWS, HALF = ALL / 2, PARTS = parts_of(form);
  const int tiles = (rows + ALL - 1) / ALL;
  const size_t lines = (bytes / 64 + size_t(tiles) * x.groups - 1) / (size_t(tiles) * x.groups);
  Unpacked piece;
  int shaped = 0;
  for (int from = 0; from < x.groups; from += PIECE) {
    const int groups = std::min(PIECE, x.groups - from);
    const char* packed = unit + from * group_bytes;
    unpack<form, has_minimums>(packed, group_bytes, groups, values, piece);
    for (int first = 0; first < rows; first += ALL) {
      const int count = rows - first <= HALF ? HALF : ALL;
      if (std::exchange(shaped, count) != count) amx::shape_for_groups<WORDS / PARTS>(count);
      for (int panel = 0; panel < UNIT; ++panel) {
        const Ahead ahead{next, panel ? 0 : static_cast<int>(lines)};
        const auto compute =
            count == ALL ? multiply_panel<PARTS, has_minimums, ALL> : multiply_panel<PARTS, has_minimums, HALF>;
        compute(x.from(first), from, groups, piece, packed + SCALES, group_bytes, panel, ahead, y + first * UNIT + panel);
      }
      next += lines * groups * 64;
    }
  }
}
#endif

template <Form form, bool has_minimums>
void multiply_unit(const Activations& x, int rows, const Weights& w, int number, bool is_followed, Floats* y) {
  const size_t unit_bytes = w.unit_bytes(), group_bytes = w.group_bytes();
  const char* unit = w.data + number * unit_bytes;
#if defined(DALSEGNO_AMX)
  if (rows >= LEAST_FOR_TILES)
    return multiply_tiles<form, has_minimums>(x, rows, unit, group_bytes, w.values, unit + unit_bytes,
                                              is_followed ? unit_bytes : 0, y);
#endif
  constexpr int AT_ONCE = at_once(form);
  const int tiles = (rows + AT_ONCE - 1) / AT_ONCE;
  const int lines = static_cast<int>(group_bytes / 64);
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    const bool fetches = IS_SIDE_BY_SIDE ? is_followed && tile + 1 == tiles : tile == 0;
    BY_ROWS<form, has_minimums>[count - 1](x.from(first), unit, group_bytes, w.values,
                                           {unit + (IS_SIDE_BY_SIDE ? unit_bytes : NEAR), fetches ? lines : 0},
                                           y + first * UNIT);
  }
}

// Multiplies all rows of a block with one unit: y (rows, UNIT).
inline void multiply(const Activations& x, int rows, const Weights& w, int unit, bool is_followed, Floats* y) {
  const auto compute = [&] {
    switch (w.form) {
      case Form::FOUR:
        return w.has_minimums ? multiply_unit<Form::FOUR, true> : multiply_unit<Form::FOUR, false>;
      case Form::FOUR_HALVES:
        return multiply_unit<Form::FOUR_HALVES, false>;
      case Form::FIVE:
        return w.has_minimums ? multiply_unit<Form::FIVE, true> : multiply_unit<Form::FIVE, false>;
      case Form::SIX:
        return multiply_unit<Form::SIX, false>;
      case Form::VALUE:
        return multiply_unit<Form::VALUE, false>;
      case Form::VALUE_HALVES:
        return multiply_unit<Form::VALUE_HALVES, false>;
      default:
        return w.has_minimums ? multiply_unit<Form::EIGHT, true> : multiply_unit<Form::EIGHT, false>;
    }
  }();
  compute(x, rows, w, unit, is_followed, y);
}

// Computes y = x W^T for `rows` rows of x, by all members; `put` is that of `product`.
template <class Put>
void product(Team::Member& member, int phase, const Activations& x, int rows, const Weights& w, const Put& put) {
  share_units(
      member, phase, rows, x.stride, w.units(),
      [&](int first, int count, int unit, bool is_followed, Floats* y) {
        multiply(x.from(first), count, w, unit, is_followed, y);
      },
      put);
}

// Where the numbers of a matrix come from: rows of one byte per number, and scales and minimums (float16) in rows of
// groups, scales of their parts; no minimums if null.
struct Source {
  const uint8_t* numbers;
  const uint16_t *scales, *minimums;
};

// Packs n rows, by all members. Padding is not written, so `into` must be zero before.
inline void pack(Team::Member& member, int phase, char* into, const Weights& w, const Source& from, int n,
                 Columns columns, int offset) {
  const int panels = (n + LANES - 1) / LANES;
  member.each(phase, panels, [&](int panel) {
    for (int number = panel * LANES; number < std::min(n, (panel + 1) * LANES); ++number) {
      const int column = packed_column(columns, number, offset);
      const int lane = column % LANES, place = column % COLUMNS;
      char* unit = into + column / COLUMNS * w.unit_bytes();
      for (int group = 0; group < w.groups(); ++group) {
        char* block = unit + group * w.group_bytes();
        auto* to = reinterpret_cast<uint8_t*>(block + place / LANES * panel_bytes(w.form));
        uint32_t words[WORDS] = {};
        const uint8_t* numbers = from.numbers + number * size_t(w.k) + group * GROUP;
        if (const int count = w.k - group * GROUP; count < GROUP)
          std::memcpy(words, numbers, count);
        else
          std::memcpy(words, numbers, GROUP);
        const auto put = [&](int at, uint32_t word) {
          std::memcpy(to + at * sizeof(Words) + lane * sizeof word, &word, sizeof word);
        };
        if (w.form == Form::EIGHT) {
          for (int word = 0; word < WORDS; ++word) put(word, words[word]);
        } else {
          for (int word = 0; word < WORDS / 2; ++word)
            put(word, (words[word] & 0x0F0F0F0F) | (words[word + WORDS / 2] & 0x0F0F0F0F) << 4);
        }
        if (w.form == Form::FIVE) {
          uint32_t fifths = 0;
          for (int word = 0; word < WORDS; ++word) fifths |= (words[word] >> 4 & 0x01010101) << word;
          put(WORDS / 2, fifths);
        }
        if (w.form == Form::SIX)
          for (int half = 0; half < 2; ++half) {
            uint32_t high = 0;
            for (int word = 0; word < WORDS / 2; ++word)
              high |= (words[half * WORDS / 2 + word] >> 4 & 0x03030303) << 2 * word;
            put(WORDS / 2 + half, high);
          }
        auto* halves = reinterpret_cast<uint16_t*>(block + UNIT * panel_bytes(w.form));
        const int parts = parts_of(w.form);
        for (int part = 0; part < parts; ++part)
          halves[part * COLUMNS + place] = from.scales[(number * size_t(w.groups()) + group) * parts + part];
        if (from.minimums) halves[COLUMNS + place] = from.minimums[number * size_t(w.groups()) + group];
      }
    }
  });
}

// Writes the n rows of a matrix as floats, by all members: each weight is `values[number] * scale + minimum`. Scales
// and minimums are in rows of groups, or of `parts` of groups; no minimums if null.
template <class T>
void dequantise(Team::Member& member, int phase, const uint8_t* numbers, const float* values, const float* scales,
                const float* minimums, int parts, int n, int k, T* to) {
  const size_t groups = (k + GROUP - 1) / GROUP * parts;
  member.each(phase, n, [&](int row) {
    for (int at = 0; at < k; at += LANES) {
      const size_t group = row * groups + at / (GROUP / parts), first = row * size_t(k) + at;
      const int count = std::min(LANES, k - at);
      uint8_t here[LANES] = {};
      if (count < LANES)
        std::memcpy(here, numbers + first, count);
      else
        std::memcpy(here, numbers + first, LANES);
      float some[LANES];
      for (int lane = 0; lane < LANES; ++lane) some[lane] = values[here[lane]];
      T rounded[LANES];
      store(rounded, load(some) * scales[group] + (minimums ? minimums[group] : 0.0f));
      std::memcpy(to + first, rounded, count * sizeof(T));
    }
  });
}

// Chooses the numbers and the scale of a group of weights: those with the least squared error, weighted by
// `importance` unless null, among some scales near that of the largest weight. Returns the scale; NaN if a weight is not finite.
template <int bits>
float choose(const float* w, int count, const float* importance, uint8_t* numbers) {
  constexpr int ZERO = 1 << (bits - 1), TRIES = bits == 4 ? 4 : 0;
  float x[GROUP] = {}, weight[GROUP] = {};
  float extreme = 0.0f;
  for (int k = 0; k < count; ++k) {
    x[k] = w[k];
    weight[k] = importance ? importance[k] : 1.0f;
    if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
  }
  std::fill_n(numbers, count, static_cast<uint8_t>(ZERO));
  const Floats a = load(x), b = load(x + LANES), of_a = load(weight), of_b = load(weight + LANES);
  if (most_bits(a, b) >= INFINITE) return NAN;
  if (std::fabs(extreme) < LEAST) return 0.0f;
  const auto bounded = [](Ints v) {
    v = v < -ZERO ? Ints{} - ZERO : v;
    return v > ZERO - 1 ? Ints{} + (ZERO - 1) : v;
  };
  const Floats along_a = of_a * a, along_b = of_b * b;
  float best = -1.0f, chosen = 0.0f;
  Ints numbers_a{}, numbers_b{};
  for (int attempt = -TRIES; attempt <= TRIES; ++attempt) {
    // With four bits the largest weight is -8: one step more than +7.
    const Floats inverse = splat((bits == 4 ? -(ZERO + 0.2f * attempt) : ZERO - 1) / extreme);
    const Ints p = bounded(rounded_product(a, inverse)), q = bounded(rounded_product(b, inverse));
    const Floats fp = __builtin_convertvector(p, Floats), fq = __builtin_convertvector(q, Floats);
    const float along = sum(multiply_add(along_a, fp, along_b * fq));
    const float length = sum(multiply_add(of_a * fp, fp, of_b * fq * fq));
    if (!(length > 0.0f)) continue;
    const float gain = along * along / length;  // what the error is less than without any number
    if (gain > best) best = gain, chosen = along / length, numbers_a = p, numbers_b = q;
  }
  int32_t all[GROUP];
  std::memcpy(all, &numbers_a, sizeof numbers_a);
  std::memcpy(all + LANES, &numbers_b, sizeof numbers_b);
  for (int k = 0; k < count; ++k) numbers[k] = static_cast<uint8_t>(all[k] + ZERO);
  return chosen;
}

// Quantises the rows of `w` (n, k), by all members: numbers (n, k), scales (n, groups).
template <class T>
void quantise(Team::Member& member, int phase, const T* w, int n, int k, int bits, const float* importance,
              uint8_t* numbers, float* scales) {
  const int groups = (k + GROUP - 1) / GROUP;
  member.each(phase, n, [&](int row) {
    for (int group = 0; group < groups; ++group) {
      const int at = group * GROUP, count = std::min(GROUP, k - at);
      float all[GROUP];
      for (int number = 0; number < count; ++number) {
        if constexpr (sizeof(T) == 2)
          all[number] = to_float(w[row * size_t(k) + at + number]);
        else
          all[number] = w[row * size_t(k) + at + number];
      }
      const auto chosen = bits == 4 ? choose<4> : choose<8>;
      scales[row * size_t(groups) + group] =
          chosen(all, count, importance ? importance + at : nullptr, numbers + row * size_t(k) + at);
    }
  });
}

}  // namespace dalsegno::grouped
