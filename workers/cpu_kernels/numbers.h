// Vectors of sixteen floats, bfloat16 numbers, and functions of them.
//
// The code uses the compiler's vector types, so the same lines compile to AVX-512, two AVX2 registers or NEON.
// Intrinsics are used only for bfloat16 instructions.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace dalsegno {

constexpr int LANES = 16;
constexpr int UNIT = 4;  // panels of a matrix, one vector of each, computed together

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct bfloat16 {
  uint16_t bits;
};

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
inline Vector load_raw(const void* at) {
  Vector found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* at) { return load_raw<Floats>(at); }
inline Floats load(const bfloat16* at) {
  return as<Floats>(__builtin_convertvector(load_raw<Halves>(at), Words) << 16);
}

inline float to_float(bfloat16 value) { return as<float>(static_cast<uint32_t>(value.bits) << 16); }

inline void store(float* at, Floats values) { std::memcpy(at, &values, sizeof values); }
// Rounds to nearest, ties to even.
inline void store(bfloat16* at, Floats values) {
  const Words bits = as<Words>(values);
  const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Words is_nan = (Words)((bits & 0x7FFFFFFF) > 0x7F800000);
  const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (0x7FC0 & is_nan), Halves);
  std::memcpy(at, &halves, sizeof halves);
}

template <class Vector>
struct Parts;
template <>
struct Parts<Floats> {
  typedef float One;
  typedef float Four __attribute__((vector_size(16)));
  typedef float Eight __attribute__((vector_size(32)));
};
template <>
struct Parts<Ints> {
  typedef int32_t One;
  typedef int32_t Four __attribute__((vector_size(16)));
  typedef int32_t Eight __attribute__((vector_size(32)));
};

// Reduces a vector half by half: always in the same order, as a tree.
template <class Vector, class Operation>
inline auto reduced(Vector values, const Operation& operation) {
  using Part = Parts<Vector>;
  const auto eight = as<std::array<typename Part::Eight, 2>>(values);
  const auto four = as<std::array<typename Part::Four, 2>>(operation(eight[0], eight[1]));
  const auto each = as<std::array<typename Part::One, 4>>(operation(four[0], four[1]));
  return operation(operation(each[0], each[2]), operation(each[1], each[3]));
}

inline float sum(Floats values) {
  return reduced(values, [](auto a, auto b) { return a + b; });
}

inline Floats larger(Floats a, Floats b) {
  const Words which = (Words)(a > b);
  return as<Floats>((as<Words>(a) & which) | (as<Words>(b) & ~which));
}

inline float largest(Floats values) {
  float part[LANES];
  store(part, values);
  float found = part[0];
  for (int lane = 1; lane < LANES; ++lane) found = part[lane] > found ? part[lane] : found;
  return found;
}

// The exponential: 2^n times a polynomial of degree 6 for half an octave on either side (relative error 2e-7).
// Results below the smallest normal number are clamped near it; NaN stays NaN.
inline Floats exponential(Floats x) {
  const Words is_low = (Words)(x < splat(-87.0f)), is_high = (Words)(x > splat(88.0f));
  Floats bounded = as<Floats>((as<Words>(splat(-87.0f)) & is_low) | (as<Words>(x) & ~is_low));
  bounded = as<Floats>((as<Words>(splat(88.0f)) & is_high) | (as<Words>(bounded) & ~is_high));
  // Adding and subtracting 1.5 * 2^23 rounds to an integer, which is in the lowest bits of the sum.
  const Floats shift = splat(12582912.0f);
  const Floats sum = bounded * 1.44269504088896341f + shift;
  const Floats n = sum - shift;
  const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return as<Floats>(as<Ints>(p) + (as<Ints>(sum) << 23));
}

// ---- rounding to eight bits ----

// a * b + c, rounded once: the compiler is not asked, so that all variants have the same bits.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  __m256 of[3][2];
  std::memcpy(of[0], &a, sizeof a), std::memcpy(of[1], &b, sizeof b), std::memcpy(of[2], &c, sizeof c);
  for (int half = 0; half < 2; ++half) of[0][half] = _mm256_fmadd_ps(of[0][half], of[1][half], of[2][half]);
  return load_raw<Floats>(of[0]);
#endif
}

inline Ints rounded_product(Floats a, Floats b) {  // |a b| < 2^22; ties to even
  const Floats shift = splat(12582912.0f);
  return as<Ints>(multiply_add(a, b, shift)) - as<Ints>(shift);
}

constexpr int32_t INFINITE = 0x7F800000;  // the bits of infinity: larger ones are NaN
constexpr float LEAST = 1e-30f;           // smaller ones count as zero

// The bits of the largest magnitude: those of positive floats have the order of integers.
inline int32_t most_bits(Floats a, Floats b) {
  const auto larger = [](auto p, auto q) { return p > q ? p : q; };
  return reduced(larger(as<Ints>(a) & INT32_MAX, as<Ints>(b) & INT32_MAX), larger);
}

}  // namespace dalsegno
