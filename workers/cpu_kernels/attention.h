// Attention of packed queries over the paged pool.
//
// Keys are read in tiles of 64, counted from the beginning of the text. For each query the largest score so far,
// the sum of weights and the weighted values are kept (online softmax, Milakov and Gimelshein 2018). A key that a
// query must not see has exactly no effect. So the result of a query does not depend on how its prompt was split
// nor on the other sequences of the step.
//
// A query sees one range of keys: `Seen`. Without `ends` the mask is causal. Tokens of a full part, such as those of
// an image, see one another in both directions, so their ranges end after their part, and begin with it at the latest.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "numbers.h"
#include "team.h"

namespace dalsegno {

constexpr int KEYS = 64;
constexpr int MOST_ROWS = 32;  // heads times queries computed together
constexpr int MOST_DIM = 256;

struct Shape {
  int heads, kv_heads, dim;
  int window;  // number of keys that a query sees, its own included; 0 is all
  float scaling, softcap;  // scores are at most `softcap`, unless it is 0
  const float* sinks;  // (heads,): the score of a key that all queries see, whose value is zero; or null
};

// A number of a key or a value of eight bits. Those of a head are followed by what one of them stands for, a float.
struct Byte {
  int8_t number;
};

// By hand, because GCC converts bytes one by one.
inline Floats load(const Byte* at) {
  const __m128i bytes = load_raw<__m128i>(at);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  const __m256 halves[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
  return load_raw<Floats>(halves);
#endif
}
inline float scale_of(const Byte* head, int dim) { return load_raw<float>(head + dim); }

// Numbers of type `Cell` from one head of a slot to the next.
template <class Cell>
constexpr int cell_stride(int dim) {
  return std::is_same_v<Cell, Byte> ? dim + static_cast<int>(sizeof(float)) : dim;
}

// Keeps the key or the value of a head in a cell.
template <class Cell>
inline void keep_head(const float* from, int dim, Cell* to) {
  for (int at = 0; at < dim; at += LANES) store(to + at, load(from + at));
}
// Rounds to 127 steps of the largest number. A number that is not finite makes all NaN.
inline void keep_head(const float* from, int dim, Byte* to) {
  int32_t bits = 0;
  for (int at = 0; at < dim; at += LANES) bits = std::max(bits, most_bits(load(from + at), Floats{}));
  const float most = as<float>(bits);
  const bool has_any = bits < INFINITE && most >= LEAST;
  const Floats inverse = splat(has_any ? 127.0f / most : 0.0f);
  for (int at = 0; at < dim; at += LANES) {
    const Ints numbers = has_any ? rounded_product(load(from + at), inverse) : Ints{};
    const Bytes bytes = __builtin_convertvector(numbers, Bytes);
    std::memcpy(to + at, &bytes, sizeof bytes);
  }
  const float scale = bits >= INFINITE ? NAN : has_any ? most / 127.0f : 0.0f;
  std::memcpy(to + dim, &scale, sizeof scale);
}

// The part of `Step` (body.cpp) that attention needs.
struct Cells {
  const int32_t* table;  // (spans' rows, blocks)
  int table_stride;
  int block_size;
};

// The keys that each packed token sees, counted from the beginning of its text; null is causal.
struct Seen {
  const int32_t* ends;    // (tokens,): the number of keys
  const int32_t* starts;  // (tokens,): the first token of its full part, or itself
};

// Queries of one span and key heads that are computed together.
struct QueryTile {
  int first, count;  // packed tokens
  int position;      // of the first query in its text
  int row;           // of the block table
  int head, heads;   // first key head, and their number
};

#if defined(__AVX512F__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // a false positive in GCC's own intrinsics
// Sixteen sums at once, each in the same order, as a tree.
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
  // Each 128-bit lane has four sums, each of them still split over the four lanes.
  const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xDD));
  const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xDD));
  return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
}
#pragma GCC diagnostic pop
#else
inline Floats sums(const Floats (&v)[16]) {
  Floats found;
  for (int i = 0; i < 16; ++i) found[i] = sum(v[i]);
  return found;
}
#endif

// The number of elements of a head that `add_products` multiplies at once.
template <class T>
constexpr int FACTORS = sizeof(T) == 2 ? 2 * LANES : LANES;
inline void add_products(Floats& into, Floats q, Floats k) { into += q * k; }
inline void add_products(Floats& into, Words q, Words k) {
#if defined(__AVX512BF16__)
  into = (Floats)_mm512_dpbf16_ps((__m512)into, (__m512bh)q, (__m512bh)k);
#else
  into += as<Floats>(q << 16) * as<Floats>(k << 16);
  into += as<Floats>(q & 0xFFFF0000) * as<Floats>(k & 0xFFFF0000);
#endif
}
inline Floats factors(const float* at) { return load(at); }
inline Words factors(const bfloat16* at) { return load_raw<Words>(at); }
inline Floats factors(const Byte* at) { return load(at); }
// The last `LANES` elements of a head, if `FACTORS` does not divide its size.
inline Words last_factors(const bfloat16* at) {
  Words found{};
  std::memcpy(&found, at, LANES * sizeof *at);
  return found;
}
template <class T>
inline Floats last_factors(const T* at) {
  return load(at);
}

// The hyperbolic tangent.
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

// Computes the scores of `rows` queries with `16 / rows` keys.
template <class Cell, int rows, class T>
inline void score(const Cell* const* keys, const T* q, const Shape& shape, float* scores) {
  constexpr int each = 16 / rows;
  Floats products[16] = {};
  const auto add = [&](int at, const auto& read) {
    decltype(factors(q)) mine[rows];
    for (int row = 0; row < rows; ++row) mine[row] = read(q + row * MOST_DIM + at);
    for (int key = 0; key < each; ++key) {
      const auto k = read(keys[key] + at);
      for (int row = 0; row < rows; ++row) add_products(products[row * each + key], mine[row], k);
    }
  };
  int at = 0;
  for (; at + FACTORS<T> <= shape.dim; at += FACTORS<T>) add(at, [](const auto* from) { return factors(from); });
  if (at < shape.dim) add(at, [](const auto* from) { return last_factors(from); });
  Floats found = sums(products) * shape.scaling;
  if constexpr (std::is_same_v<Cell, Byte>) {
    float scales[16];
    for (int key = 0; key < each; ++key) scales[key] = scale_of(keys[key], shape.dim);
    for (int at = each; at < 16; ++at) scales[at] = scales[at - each];
    found *= load(scales);
  }
  if (shape.softcap) found = tanh(found / shape.softcap) * shape.softcap;
  for (int row = 0; row < rows; ++row)
    std::memcpy(scores + row * KEYS, reinterpret_cast<const float*>(&found) + row * each, each * sizeof(float));
}

// Adds the weighted values of `count` keys to the sums of `rows` queries, `vectors` vectors at a time.
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

template <class Cell, int rows, class T>
inline void score_keys(const Cell* const* keys, const T* q, int count, const Shape& shape, float* scores) {
  for (int key = 0; key < count; key += 16 / rows) score<Cell, rows>(keys + key, q, shape, scores + key);
}

template <class T, int rows>
inline void weigh_keys(const T* const* values, const float* weights, int count, int dim, float* out) {
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

// Splits rows into groups of 4, 2 and 1; `work` receives the size and the first row of each.
template <class Work>
inline void by_rows(int rows, const Work& work) {
  for (int row = 0; row < rows;) {
    const int left = rows - row;
    if (left >= 4)
      work(std::integral_constant<int, 4>{}, row), row += 4;
    else if (left >= 2)
      work(std::integral_constant<int, 2>{}, row), row += 2;
    else
      work(std::integral_constant<int, 1>{}, row), row += 1;
  }
}

// Computes attention for one query tile after another: some key heads and all query heads that share them, of
// `query` (tokens, heads * dim) in float32. A row is the query of one head; rows are ordered by head, and there are
// at most `MOST_ROWS`. Keys and values are `Cell`s; queries are compared as numbers of the same type, or as floats with
// those of eight bits.
template <class Cell>
class Attending {
  using Query = std::conditional_t<std::is_same_v<Cell, Byte>, float, Cell>;

 public:
  Attending(const Shape& shape, const Cells& cells, const Seen& seen, const Cell* keys, const Cell* values)
      : shape_(shape), cells_(cells), seen_(seen), pool_keys_(keys), pool_values_(values) {}

  void compute(const QueryTile& tile, const float* query, size_t query_stride) {
    tile_ = tile;
    for (int row = 0; row < rows(); ++row) {
      const float* from = query + token_of(row) * query_stride + head_of(row) * shape_.dim;
      for (int at = 0; at < shape_.dim; at += LANES) store(&q_[row][at], load(from + at)), store(&sums_[row][at], Floats{});
      most_[row] = shape_.sinks ? shape_.sinks[head_of(row)] : -INFINITY;
      total_[row] = shape_.sinks ? 1.0f : 0.0f;
    }
    int seen_from = first_key(0), end = end_of_keys(tile_.count - 1);
    if (seen_.ends)
      for (int query = 0; query < tile_.count; ++query)
        seen_from = std::min(seen_from, first_key(query)), end = std::max(end, end_of_keys(query));
    for (int begin = seen_from / KEYS * KEYS; begin < end; begin += KEYS) {
      count_ = std::min(KEYS, end - begin);
      look_up(begin, seen_from, end);
      for (int from = 0; from < count_; from += keys_at_once()) score_some(from);
      for (int row = 0; row < rows(); ++row) soften(row, begin);
      for (int from = 0; from < count_; from += keys_at_once()) weigh_some(from);
    }
  }

  // Stores the result computed last.
  template <class T>
  void keep(T* out, size_t out_stride) const {
    for (int row = 0; row < rows(); ++row) {
      T* to = out + token_of(row) * out_stride + head_of(row) * shape_.dim;
      for (int at = 0; at < shape_.dim; at += LANES) store(to + at, load(&sums_[row][at]) * (1.0f / total_[row]));
    }
  }

 private:
  int group() const { return shape_.heads / shape_.kv_heads; }
  int stride() const { return cell_stride<Cell>(shape_.dim); }
  int rows_of_head() const { return tile_.count * group(); }
  int rows() const { return tile_.heads * rows_of_head(); }
  int query_of(int row) const { return row % rows_of_head() / group(); }
  size_t token_of(int row) const { return tile_.first + query_of(row); }

  // The range of keys that a query of the tile sees.
  int end_of_keys(int query) const {
    return seen_.ends ? seen_.ends[tile_.first + query] : tile_.position + query + 1;
  }
  int first_key(int query) const {
    if (!shape_.window) return 0;
    const int by_window = std::max(0, tile_.position + query - shape_.window + 1);
    return seen_.ends ? std::min(by_window, seen_.starts[tile_.first + query]) : by_window;
  }

  size_t head_of(int row) const {
    return static_cast<size_t>(tile_.head + row / rows_of_head()) * group() + row % group();
  }

  // The number of keys read at once. Several heads are read in memory order: some keys of all heads, then the next
  // keys. Fewer keys load memory more evenly, but at least as many as are scored together: 16 for one row, 8 for
  // two. A single head reads a whole tile at once.
  int keys_at_once() const { return std::max<int>(group() % 2 ? 16 : 8, std::bit_floor<unsigned>(KEYS / tile_.heads)); }

  // Finds the addresses of the tile's keys and values, and of the next tile's first keys. In place of keys before
  // `seen_from`, whose blocks may have been given to others, it has the first one that is seen.
  void look_up(int begin, int seen_from, int end) {
    const int32_t* blocks = cells_.table + static_cast<size_t>(tile_.row) * cells_.table_stride;
    const auto offset_of = [&](int at) {
      const size_t slot = static_cast<size_t>(blocks[at / cells_.block_size]) * cells_.block_size + at % cells_.block_size;
      return (slot * shape_.kv_heads + tile_.head) * stride();
    };
    for (int key = 0; key < count_; ++key) {
      const size_t at = offset_of(std::max(begin + key, seen_from));
      keys_[key] = pool_keys_ + at;
      values_[key] = pool_values_ + at;
    }
    for (int key = count_; key < KEYS; ++key) keys_[key] = keys_[count_ - 1];  // padding: may be scored, is never seen
    following_ = std::clamp(end - begin - KEYS, 0, keys_at_once());
    for (int key = 0; key < following_; ++key) next_[key] = pool_keys_ + offset_of(begin + KEYS + key);
  }

  // Prefetches slots: a head's part of a slot is too short for the processor's own prefetcher.
  void fetch(const Cell* const* cells, int count, int head) const {
    for (int cell = 0; cell < count; ++cell)
      for (int at = 0; at < stride(); at += 64 / static_cast<int>(sizeof(Cell)))
        __builtin_prefetch(cells[cell] + head * stride() + at, 0, 2);
  }

  void score_some(int from) {
    const int count = std::min(keys_at_once(), count_ - from), next = from + count;
    for (int head = 0; head < tile_.heads; ++head) {
      if (next < count_)
        fetch(keys_ + next, std::min(keys_at_once(), count_ - next), head);
      else
        fetch(values_, std::min(keys_at_once(), count_), head);
      const Cell* keys[KEYS];
      for (int key = 0; key < keys_at_once(); ++key) keys[key] = keys_[from + key] + head * stride();
      by_rows(rows_of_head(), [&](auto rows, int row) {
        row += head * rows_of_head();
        score_keys<Cell, rows>(keys, q_[row], count, shape_, scores_[row] + from);
      });
    }
  }

  void weigh_some(int from) {
    const int count = std::min(keys_at_once(), count_ - from), next = from + count;
    for (int head = 0; head < tile_.heads; ++head) {
      if (next < count_)
        fetch(values_ + next, std::min(keys_at_once(), count_ - next), head);
      else
        fetch(next_, following_, head);
      const Cell* values[KEYS];
      for (int key = 0; key < count; ++key) values[key] = values_[from + key] + head * stride();
      if constexpr (std::is_same_v<Cell, Byte>) scale_weights(values, count, head, from);
      by_rows(rows_of_head(), [&](auto rows, int row) {
        row += head * rows_of_head();
        weigh_keys<Cell, rows>(values, scores_[row] + from, count, shape_.dim, sums_[row]);
      });
    }
  }

  // Multiplies the weights of values by what one of their numbers stands for.
  void scale_weights(const Cell* const* values, int count, int head, int from) {
    float scales[KEYS];
    for (int key = 0; key < count; ++key) scales[key] = scale_of(values[key], shape_.dim);
    for (int row = head * rows_of_head(); row < (head + 1) * rows_of_head(); ++row)
      for (int key = 0; key < count; ++key) scores_[row][from + key] *= scales[key];
  }

  // Turns a row's scores into weights, and rescales its sums so far to the new maximum.
  void soften(int row, int begin) {
    const int end = std::min(count_, end_of_keys(query_of(row)) - begin);
    const int from = std::max(0, first_key(query_of(row)) - begin);
    float* mine = scores_[row];
    for (int key = 0; key < std::min(from, KEYS); ++key) mine[key] = -INFINITY;
    for (int key = std::max(end, 0); key < KEYS; ++key) mine[key] = -INFINITY;
    Floats top = load(mine);
    for (int at = LANES; at < KEYS; at += LANES) top = larger(top, load(mine + at));
    const float here = largest(top);
    if (here == -INFINITY) {  // the row sees none of the keys
      std::memset(mine, 0, sizeof scores_[row]);
      return;
    }
    const float now = std::max(most_[row], here);
    const float shrunk = most_[row] == -INFINITY ? 0.0f : exponential(splat(most_[row] - now))[0];
    Floats sum = Floats{};
    for (int at = 0; at < KEYS; at += LANES) {
      const Floats raw = load(mine + at);
      const Words is_seen = (Words)(raw != splat(-INFINITY));
      const Floats weight = as<Floats>(as<Words>(exponential(raw - now)) & is_seen);
      store(mine + at, weight);
      sum += weight;
    }
    if (shrunk != 1.0f)
      for (int at = 0; at < shape_.dim; at += LANES) store(&sums_[row][at], load(&sums_[row][at]) * shrunk);
    total_[row] = total_[row] * shrunk + dalsegno::sum(sum);
    most_[row] = now;
  }

  const Shape& shape_;
  const Cells& cells_;
  const Seen& seen_;
  QueryTile tile_{};
  const Cell *pool_keys_, *pool_values_;
  int count_ = 0, following_ = 0;  // keys of the tile, and prefetched keys of the next one
  const Cell *keys_[KEYS], *values_[KEYS], *next_[KEYS];
  alignas(64) Query q_[MOST_ROWS][MOST_DIM];
  alignas(64) float sums_[MOST_ROWS][MOST_DIM];
  alignas(64) float scores_[MOST_ROWS][KEYS];
  float most_[MOST_ROWS], total_[MOST_ROWS];
};

}  // namespace dalsegno
