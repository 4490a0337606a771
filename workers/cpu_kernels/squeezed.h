// Squeezed weights: bfloat16 in three quarters of the memory, without loss. The time of a step of few rows is the
// time to read the weights.
//
// The weights of a model have few magnitudes: fifteen consecutive exponents cover nearly all weights of a unit. A
// weight is stored as its sign and mantissa (8 bits) and the index of its exponent in a table of these fifteen and
// zero (4 bits). A weight with another exponent is a patch in a separate list. (Zhang et al. 2025, "70% Size, 100%
// Accuracy", show that exponents hold nearly all of the redundancy; their codes have variable length.)
//
// A squeezed unit is its exponent table, then for each two k its four vectors: 64 bytes of exponent indices (four
// per lane, one per vector), 64 bytes of signs and mantissas of the first two vectors, and 64 of the other two.
#pragma once

#include "numbers.h"

#if defined(__AVX512BW__)
#define DALSEGNO_SQUEEZES 1
#else
#define DALSEGNO_SQUEEZES 0
#endif

namespace dalsegno {

// A weight whose exponent is not in the unit's table.
struct Patch {
  int32_t step;    // the pair of k
  uint16_t place;  // the index among the 128 weights of the pair
  uint16_t bits;
};
constexpr int32_t NO_STEP = INT32_MAX;  // marks the end of a unit's list

constexpr int EXPONENTS = 16;
constexpr int SQUEEZED_STEP = 3 * 64;  // bytes of two k
constexpr int TABLE_BYTES = 64;        // the table twice: a lookup uses five bits, and only four are index

inline size_t squeezed_unit_bytes(int depth) { return TABLE_BYTES + size_t(depth) / 2 * SQUEEZED_STEP; }

struct SqueezedUnit {
  const char* data;
  const Patch* patches;
};

#if DALSEGNO_SQUEEZES

// Reads the vectors of a unit, from the first k to the last.
class Unsqueezing {
 public:
  using Vector = Words;
  explicit Unsqueezing(const SqueezedUnit& unit)
      : at_(unit.data + TABLE_BYTES),
        patch_(unit.patches),
        table_(_mm512_loadu_si512(unit.data)),
        due_(unit.patches->step) {}

  const char* at() const { return at_; }

  void next(Words (&now)[UNIT]) {
    // Prefetch some microseconds ahead, also across pages, which the processor's prefetcher does not do.
    constexpr int AHEAD = 32 * SQUEEZED_STEP;
    for (int line = 0; line < SQUEEZED_STEP; line += 64) __builtin_prefetch(at_ + AHEAD + line, 0, 3);
    const __m512i numbers = _mm512_loadu_si512(at_);
    const __m512i first = _mm512_loadu_si512(at_ + 64), second = _mm512_loadu_si512(at_ + 128);
    now[0] = joined(numbers, _mm512_slli_epi16(first, 8), first);
    now[1] = joined(_mm512_srli_epi16(numbers, 4), first, _mm512_srli_epi16(first, 8));
    now[2] = joined(_mm512_srli_epi16(numbers, 8), _mm512_slli_epi16(second, 8), second);
    now[3] = joined(_mm512_srli_epi16(numbers, 12), second, _mm512_srli_epi16(second, 8));
    at_ += SQUEEZED_STEP;
    if (step_++ == due_) [[unlikely]] {
      Words copy[UNIT];  // without the copy, `now` would be in memory in every step
      std::memcpy(copy, now, sizeof copy);
      patch_ = patched(copy, patch_);
      due_ = patch_->step;
      std::memcpy(now, copy, sizeof copy);
    }
  }

 private:
  // Joins exponents (by the index in each lane's low bits), signs (highest bits) and mantissas (lowest bits).
  Words joined(__m512i numbers, __m512i signs, __m512i mantissas) const {
    constexpr int BY_MASK = 0xCA, OR_MASKED = 0xF8;  // a ? b : c;  a | (b & c)
    const __m512i exponents = _mm512_permutexvar_epi16(numbers, table_);
    const __m512i signed_ = _mm512_ternarylogic_epi32(_mm512_set1_epi16(INT16_MIN), signs, exponents, BY_MASK);
    return (Words)_mm512_ternarylogic_epi32(signed_, mantissas, _mm512_set1_epi16(0x7F), OR_MASKED);
  }

  // Applies the patches of a step, and returns the next patch.
  __attribute__((noinline)) static const Patch* patched(Words (&vectors)[UNIT], const Patch* patch) {
    uint16_t all[UNIT * 32];
    std::memcpy(all, vectors, sizeof all);
    for (const int32_t step = patch->step; patch->step == step; ++patch) all[patch->place] = patch->bits;
    std::memcpy(vectors, all, sizeof all);
    return patch;
  }

  const char* at_;
  const Patch* patch_;
  const __m512i table_;
  int32_t step_ = 0, due_;
};

// Squeezes a unit. The last index of its table is zero; the others are consecutive exponents, chosen by a sample.
class Squeezing {
 public:
  Squeezing(const bfloat16* unit, int depth) : unit_(unit), depth_(depth) {
    constexpr int SAMPLE = 7;  // every seventh weight, so all columns are sampled
    int seen[256] = {};
    for (size_t at = 0; at < size_t(UNIT) * LANES * depth; at += SAMPLE) ++seen[unit[at].bits >> 7 & 0xFF];
    int most = -1;
    for (int base = 1; base + IN_A_ROW <= 256; ++base) {
      int here = 0;
      for (int exponent = base; exponent < base + IN_A_ROW; ++exponent) here += seen[exponent];
      if (here > most) most = here, base_ = base;
    }
  }

  // The number of weights that need a patch.
  int32_t patches() const {
    int32_t found = 0;
    for (int32_t step = 0; step < depth_ / 2; ++step)
      for (int vector = 0; vector < UNIT; ++vector) found += __builtin_popcount(numbered(weights(step, vector)).others);
    return found;
  }

  // Writes the unit, its patches, and the end marker of the list: one entry more than there are patches.
  void write(char* into, Patch* patches) const {
    uint16_t table[EXPONENTS];
    for (int number = 0; number < IN_A_ROW; ++number) table[number] = static_cast<uint16_t>((base_ + number) << 7);
    table[IN_A_ROW] = 0;
    for (int half = 0; half < 2; ++half) std::memcpy(into + half * sizeof table, table, sizeof table);
    into += TABLE_BYTES;
    for (int32_t step = 0; step < depth_ / 2; ++step, into += SQUEEZED_STEP) {
      __m512i numbers = _mm512_setzero_si512(), rest[2] = {numbers, numbers};
      for (int vector = 0; vector < UNIT; ++vector) {
        const __m512i w = weights(step, vector);
        const Numbered found = numbered(w);
        for (uint32_t others = found.others; others; others &= others - 1) {
          const int lane = __builtin_ctz(others);
          const size_t at = (size_t(vector) * depth_ / 2 + step) * 32 + lane;
          *patches++ = {step, static_cast<uint16_t>(vector * 32 + lane), unit_[at].bits};
        }
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(w, 8), _mm512_set1_epi16(0x80));
        const __m512i mantissa = _mm512_and_si512(w, _mm512_set1_epi16(0x7F));
        const auto shifted = [](__m512i lanes, int bits) { return _mm512_sll_epi16(lanes, _mm_cvtsi32_si128(bits)); };
        numbers = _mm512_or_si512(numbers, shifted(found.numbers, 4 * vector));
        rest[vector / 2] = _mm512_or_si512(rest[vector / 2], shifted(_mm512_or_si512(sign, mantissa), vector % 2 * 8));
      }
      _mm512_storeu_si512(into, numbers);
      _mm512_storeu_si512(into + 64, rest[0]);
      _mm512_storeu_si512(into + 128, rest[1]);
    }
    *patches = {NO_STEP, 0, 0};
  }

 private:
  static constexpr int IN_A_ROW = EXPONENTS - 1;

  struct Numbered {
    __m512i numbers;
    __mmask32 others;  // lanes whose exponent is not in the table
  };

  __m512i weights(int32_t step, int vector) const {
    return _mm512_loadu_si512(unit_ + (size_t(vector) * depth_ / 2 + step) * 32);
  }

  Numbered numbered(__m512i weights) const {
    const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(weights, 7), _mm512_set1_epi16(0xFF));
    const __m512i numbers = _mm512_sub_epi16(exponents, _mm512_set1_epi16(static_cast<int16_t>(base_)));
    const __m512i last = _mm512_set1_epi16(IN_A_ROW);
    const __mmask32 in_a_row = _mm512_cmplt_epu16_mask(numbers, last), zero = _mm512_testn_epi16_mask(exponents, exponents);
    return {_mm512_mask_mov_epi16(_mm512_maskz_mov_epi16(in_a_row, numbers), zero, last), ~(in_a_row | zero)};
  }

  const bfloat16* unit_;
  const int depth_;
  int base_ = 1;
};

#else

class Squeezing {
 public:
  Squeezing(const bfloat16*, int) {}
  int32_t patches() const { return 0; }
  void write(char*, Patch*) const {}
};

#endif

}  // namespace dalsegno
