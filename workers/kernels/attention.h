// Attention of packed queries over the paged pool.
//
// Keys are met in tiles of 64, counted from the beginning of the text, and a query's weights are kept as its
// largest score so far, their sum, and the values they weigh (online softmax, Milakov and Gimelshein 2018).
// A key that a query must not see changes nothing, to the bit. So what a query comes to does not
// depend on how its prompt was cut, nor on who else is in the step.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "team.h"

namespace dalsegno {

constexpr int KEYS = 64;
constexpr int MOST_ROWS = 32;  // heads that share keys times queries, computed together
constexpr int MOST_DIM = 256;

struct Shape {
  int heads, kv_heads, dim;
  int window;  // how many keys a query sees, its own included; 0 is all before it
  float scaling;
};

// What of a step attention needs: see `Step` in api.cpp.
struct Cells {
  const int32_t* table;  // (spans' rows, blocks)
  int table_stride;
  int block_size;
};

// Queries of one span that are computed together, for each head of keys.
struct QueryTile {
  int first, count;  // packed tokens
  int position;      // of the first, in its text
  int row;           // of the block table
};

#if defined(__AVX512F__)
// Sixteen sums at once, each in the same tree.
inline Floats sums(const Floats (&v)[16]) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; ++i) {
    const __m512 p = (__m512)v[2 * i], q = (__m512)v[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d p = _mm512_castps_pd(a[2 * i]), q = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  // A lane of 128 bits has four sums, each still in four parts.
  const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xDD));
  const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xDD));
  return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
}
#else
inline Floats sums(const Floats (&v)[16]) {
  Floats found;
  for (int i = 0; i < 16; ++i) found[i] = sum(v[i]);
  return found;
}
#endif

inline void add_products(Floats& into, const float* q, const float* k, int dim) {
  for (int at = 0; at < dim; at += LANES) into += load(q + at) * load(k + at);
}
inline void add_products(Floats& into, const bfloat16* q, const bfloat16* k, int dim) {
#if defined(__AVX512BF16__)
  for (int at = 0; at < dim; at += 2 * LANES)
    into = (Floats)_mm512_dpbf16_ps((__m512)into, (__m512bh)load_raw<Words>(q + at), (__m512bh)load_raw<Words>(k + at));
#else
  for (int at = 0; at < dim; at += 2 * LANES) {
    const Words a = load_raw<Words>(q + at), b = load_raw<Words>(k + at);
    into += as<Floats>(a << 16) * as<Floats>(b << 16);
    into += as<Floats>(a & 0xFFFF0000) * as<Floats>(b & 0xFFFF0000);
  }
#endif
}

// Scores of `rows` queries with `16 / rows` keys.
template <class T, int rows>
inline void score(const T* const* keys, const T* q, int dim, float scaling, float* scores) {
  constexpr int each = 16 / rows;
  Floats products[16];
  for (int row = 0; row < rows; ++row)
    for (int key = 0; key < each; ++key) {
      products[row * each + key] = Floats{};
      add_products(products[row * each + key], q + row * MOST_DIM, keys[key], dim);
    }
  const Floats found = sums(products) * scaling;
  for (int row = 0; row < rows; ++row)
    std::memcpy(scores + row * KEYS, reinterpret_cast<const float*>(&found) + row * each, each * sizeof(float));
}

// Add the values of `count` keys to what `rows` queries have, each by its weight; `vectors` of them at a time.
template <class T, int rows, int vectors>
inline void weigh(const T* const* values, const float* weights, int count, float* out) {
  Floats sums[rows][vectors];
  for (int row = 0; row < rows; ++row)
    for (int v = 0; v < vectors; ++v) sums[row][v] = load(out + row * MOST_DIM + v * LANES);
  for (int key = 0; key < count; ++key) {
    Floats value[vectors];
    for (int v = 0; v < vectors; ++v) value[v] = load(values[key] + v * LANES);
    for (int row = 0; row < rows; ++row)
      for (int v = 0; v < vectors; ++v) sums[row][v] += value[v] * weights[row * KEYS + key];
  }
  for (int row = 0; row < rows; ++row)
    for (int v = 0; v < vectors; ++v) store(out + row * MOST_DIM + v * LANES, sums[row][v]);
}

template <class T, int rows>
inline void score_tile(const T* const* keys, const T* q, int count, int dim, float scaling, float* scores) {
  for (int key = 0; key < count; key += 16 / rows) score<T, rows>(keys + key, q, dim, scaling, scores + key);
}

template <class T, int rows>
inline void weigh_tile(const T* const* values, const float* weights, int count, int dim, float* out) {
  constexpr int vectors = rows == 1 ? 8 : 4;
  const T* at[KEYS];
  for (int from = 0; from < dim;) {
    for (int key = 0; key < count; ++key) at[key] = values[key] + from;
    if (dim - from >= vectors * LANES) {
      weigh<T, rows, vectors>(at, weights, count, out + from);
      from += vectors * LANES;
    } else {
      weigh<T, rows, 1>(at, weights, count, out + from);
      from += LANES;
    }
  }
}

template <class T>
inline void fetch(const T* from, int count) {
  for (int at = 0; at < count; at += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(from + at, 0, 2);
}

// One tile of queries, and one head of keys: the heads that share it, of `query` (tokens, heads * dim) in float32.
template <class T>
void attend(const Shape& shape, const Cells& cells, const QueryTile& tile, int kv_head, const float* query,
            size_t query_stride, const T* pool_keys, const T* pool_values, T* out, size_t out_stride) {
  const int group = shape.heads / shape.kv_heads, rows = tile.count * group, dim = shape.dim;
  const size_t cell = static_cast<size_t>(shape.kv_heads) * dim;
  alignas(64) T q[MOST_ROWS][MOST_DIM];
  alignas(64) float sums[MOST_ROWS][MOST_DIM], scores[MOST_ROWS][KEYS];
  float most[MOST_ROWS], total[MOST_ROWS];
  int position[MOST_ROWS];
  for (int row = 0; row < rows; ++row) {
    const int token = tile.first + row / group, head = kv_head * group + row % group;
    const float* from = query + token * query_stride + static_cast<size_t>(head) * dim;
    for (int at = 0; at < dim; at += LANES) store(&q[row][at], load(from + at)), store(&sums[row][at], Floats{});
    most[row] = -INFINITY, total[row] = 0;
    position[row] = tile.position + row / group;
  }
  const int last = tile.position + tile.count - 1;
  const int seen_from = shape.window ? std::max(0, tile.position - shape.window + 1) : 0;
  const int32_t* blocks = cells.table + static_cast<size_t>(tile.row) * cells.table_stride;
  const auto cell_of = [&](int at) {
    const size_t slot = static_cast<size_t>(blocks[at / cells.block_size]) * cells.block_size + at % cells.block_size;
    return slot * cell + kv_head * dim;
  };
  const T *keys[KEYS], *values[KEYS];
  for (int begin = seen_from / KEYS * KEYS; begin <= last; begin += KEYS) {
    const int count = std::min(KEYS, last + 1 - begin);
    for (int key = 0; key < count; ++key) {
      const size_t at = cell_of(begin + key);
      keys[key] = pool_keys + at;
      values[key] = pool_values + at;
      // A head's part of a cell is too short for the processor to see what is read next.
      fetch(values[key], dim);
    }
    for (int at = begin + KEYS; at < std::min(begin + 2 * KEYS, last + 1); ++at) fetch(pool_keys + cell_of(at), dim);
    for (int key = count; key < KEYS; ++key) keys[key] = keys[count - 1];  // some are scored, none is seen
    for (int row = 0; row < rows;) {
      const int left = rows - row;
      if (left >= 4) {
        score_tile<T, 4>(keys, q[row], count, dim, shape.scaling, scores[row]), row += 4;
      } else if (left >= 2) {
        score_tile<T, 2>(keys, q[row], count, dim, shape.scaling, scores[row]), row += 2;
      } else {
        score_tile<T, 1>(keys, q[row], count, dim, shape.scaling, scores[row]), row += 1;
      }
    }
    for (int row = 0; row < rows; ++row) {
      const int end = std::min(count, position[row] + 1 - begin);
      const int from = shape.window ? std::max(0, position[row] - shape.window + 1 - begin) : 0;
      float* mine = scores[row];
      for (int key = 0; key < std::min(from, KEYS); ++key) mine[key] = -INFINITY;
      for (int key = std::max(end, 0); key < KEYS; ++key) mine[key] = -INFINITY;
      Floats top = load(mine);
      for (int at = LANES; at < KEYS; at += LANES) top = larger(top, load(mine + at));
      const float here = largest(top);
      if (here == -INFINITY) {  // it sees none of them
        std::memset(mine, 0, sizeof scores[row]);
        continue;
      }
      const float now = std::max(most[row], here);
      const float shrunk = most[row] == -INFINITY ? 0.0f : exponential(splat(most[row] - now))[0];
      Floats sum = Floats{};
      for (int at = 0; at < KEYS; at += LANES) {
        const Floats raw = load(mine + at);
        const Words is_seen = (Words)(raw != splat(-INFINITY));
        const Floats weight = as<Floats>(as<Words>(exponential(raw - now)) & is_seen);
        store(mine + at, weight);
        sum += weight;
      }
      if (shrunk != 1.0f)
        for (int at = 0; at < dim; at += LANES) store(&sums[row][at], load(&sums[row][at]) * shrunk);
      total[row] = total[row] * shrunk + dalsegno::sum(sum);
      most[row] = now;
    }
    for (int row = 0; row < rows;) {
      const int left = rows - row;
      if (left >= 4) {
        weigh_tile<T, 4>(values, scores[row], count, dim, sums[row]), row += 4;
      } else if (left >= 2) {
        weigh_tile<T, 2>(values, scores[row], count, dim, sums[row]), row += 2;
      } else {
        weigh_tile<T, 1>(values, scores[row], count, dim, sums[row]), row += 1;
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    const int token = tile.first + row / group, head = kv_head * group + row % group;
    T* to = out + token * out_stride + static_cast<size_t>(head) * dim;
    for (int at = 0; at < dim; at += LANES) store(to + at, load(&sums[row][at]) * (1.0f / total[row]));
  }
}

}  // namespace dalsegno
