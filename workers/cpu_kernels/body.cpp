// The layers of a Llama-like decoder in one call: all of a step between its embeddings and its logits. Python
// calls them as C functions over plain structures (`workers/cpu_kernels/library.py`).
//
// Activations are float32 between products. The inputs of products have the weights' type, as have the keys and values
// in the pool, unless they are rounded to eight bits.

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "grouped.h"
#include "numbers.h"
#include "team.h"
#include "tiles.h"

namespace dalsegno {
namespace {

extern "C" {
struct Matrix {
  const void* data;
  const int32_t* lists;  // if squeezed: the first patch of each unit; else null
  const Patch* patches;
  int32_t n, k;
  int32_t bits;  // if its weights are in groups (`grouped.h`); else 0
  int32_t parts;  // of a group, which have a scale each
  int32_t has_minimums, has_values;
  float factor;
  int8_t values[grouped::VALUES];
};

// The matrices of all experts of a layer, one expert after the other, each from a whole unit on.
struct Experts {
  // (count, hidden). One more row is the gate of the MLP for all tokens, if that has one. From row `rest` on, if that
  // is not 0, is what rounding took from the router, whose weights have more bits than the others.
  Matrix router;
  Matrix gate_up, down;
  const float *router_bias, *gate_up_bias, *down_bias;  // in the columns of their products, or null
  Choice choice;
  int32_t gates_mlp, rest;
  float limit, slope;  // of `clamped`; without a limit, experts are activated as an MLP
};

// The weights of norms: of what attention and the MLP read, and of their results. Any may be null; layers with experts
// have none of results.
struct Norms {
  const float *before_attention, *after_attention, *before_mlp, *after_mlp;
};

struct Layer {
  Matrix qkv, v, o, gate_up, down;  // `qkv` has all three if `v` has no rows; without `gate_up`, only experts
  Experts experts;
  Norms norms;
  const float *q_norm, *k_norm;  // (dim,) for each head, or for all of them as one, or null
  const float* sinks;            // (heads,), or null
  const float *qkv_bias, *o_bias;
  int32_t window;
  int32_t angles;  // the set of angles of queries and keys; negative if they have no positions
};

struct Model {
  int32_t dtype;  // 0 float32, 1 bfloat16
  int32_t layers, hidden, heads, kv_heads, dim, intermediate;
  int32_t activation;         // of MLPs: 0 silu, 1 the approximation of gelu by tanh
  int32_t norms_whole_heads;  // `q_norm` and `k_norm` are those of all heads as one
  int32_t turns_neighbours;   // which numbers of a head turn against each other, see `rotate`
  int32_t cell_bits;          // of keys and values in the pool: 8, or 0 for numbers of the type of the weights
  float eps, scaling, softcap;  // without a limit of scores, `softcap` is 0
  float residual;               // the factor of what a layer adds to the states; 1 with experts
  const Layer* layer;
  const float* norm;
};

struct Step {
  int32_t tokens, spans, block_size, table_stride;
  int32_t turned;                                      // the first numbers of a head that turn, an even number
  const int32_t* slots;                                // (tokens,)
  const int32_t *rows, *query_offsets, *kv_lengths;    // (spans,), (spans + 1,), (spans,)
  const int32_t* block_table;                          // (rows, table_stride)
  const float *cos, *sin;                              // (sets, tokens, turned)
  void* const* keys;                                   // by layer: (slots, kv_heads, `cell_stride`)
  void* const* values;
  float* hidden;  // (tokens, hidden): input embeddings; output states after the last norm
  const int32_t *key_ends, *full_starts;  // (tokens,), as in `Seen`; null is causal
  const int32_t* added_rows;              // (tokens,): a row of `added`, or negative; null if nothing is added
  const float* added;                     // rows of `added_stride` numbers: hidden for each of the first layers
  int32_t added_stride, added_layers;
};
}

// Memory for activations, which only grows from step to step.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* room(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
      std::memset(data_, 0, bytes);
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct Context {
  explicit Context(int threads) : team(threads) {}
  Team team;
  Scratch scratch;
  std::vector<QueryTile> tiles;
  std::vector<Routing> routings;
};

template <class T>
Packed<T> packed(const Matrix& matrix) {
  return {static_cast<const T*>(matrix.data), matrix.n, matrix.k, matrix.lists, matrix.patches};
}

inline grouped::Weights grouped_weights(const Matrix& w) {
  const auto form = grouped::form_of(w.bits, w.parts, w.has_values != 0);
  return {static_cast<const char*>(w.data), w.n, w.k, form, w.has_minimums != 0, w.values, w.factor};
}

// Computes y = x W^T for rows of numbers that are padded with zeros, in one phase, or in two if the weights are in
// groups: x is then rounded into `rounded`.
template <class T, class Put>
void multiply(Team::Member& member, int& phase, const T* x, size_t stride, int rows, const Matrix& w, char* rounded,
              const Put& put) {
  if (!w.bits) return product(member, phase++, x, stride, rows, packed<T>(w), put);
  const auto narrow = grouped::Activations::at(rounded, rows, w.k);
  member.each(phase++, rows,
              [&](int row) { grouped::round_row(x + row * stride, round_up(w.k, LANES), w.factor, narrow, row); });
  grouped::product(member, phase++, narrow, rows, grouped_weights(w), put);
}

// What root mean square norm (Zhang and Sennrich 2019) multiplies `size` numbers with, a multiple of LANES.
inline float norm_scale(const float* x, int size, float eps) {
  Floats squares = Floats{};
  for (int at = 0; at < size; at += LANES) squares += load(x + at) * load(x + at);
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class T>
void norm(const float* x, const float* weight, int size, float eps, T* out) {
  const float scale = norm_scale(x, size, eps);
  for (int at = 0; at < size; at += LANES) store(out + at, load(x + at) * scale * load(weight + at));
}

// Rotary embedding (Su et al. 2021) of the first `turned` numbers of a head, whose halves rotate against each other.
inline void rotate(float* x, const float* cos, const float* sin, int turned) {
  const int half = turned / 2;
  int at = 0;
  for (; at + LANES <= half; at += LANES) {
    const Floats a = load(x + at), b = load(x + half + at);
    store(x + at, a * load(cos + at) - b * load(sin + at));
    store(x + half + at, b * load(cos + half + at) + a * load(sin + half + at));
  }
  for (; at < half; ++at) {
    const float a = x[at], b = x[half + at];
    x[at] = a * cos[at] - b * sin[at];
    x[half + at] = b * cos[half + at] + a * sin[half + at];
  }
}

// The same, where each number turns against its neighbour; the first half of the angles are those of the pairs.
inline void rotate_neighbours(float* x, const float* cos, const float* sin, int turned) {
  for (int pair = 0; pair < turned / 2; ++pair) {
    const float a = x[2 * pair], b = x[2 * pair + 1];
    x[2 * pair] = a * cos[pair] - b * sin[pair];
    x[2 * pair + 1] = b * cos[pair] + a * sin[pair];
  }
}

inline Floats silu(Floats x) { return x / (exponential(-x) + 1.0f); }

// The approximation of gelu by tanh (Hendrycks and Gimpel 2016): (1 + tanh(u)) / 2 is the sigmoid of 2 u.
inline Floats gelu_tanh(Floats x) {
  const Floats u = x * 0.7978845608028654f * (x * x * 0.044715f + 1.0f);
  return x / (exponential(u * -2.0f) + 1.0f);
}

// The activation of gpt-oss (OpenAI 2025): gate and up are limited, and one is added to up.
inline Floats clamped(Floats gate, Floats up, float limit, float slope) {
  const Floats most = splat(limit), least = -most;
  gate = gate > most ? most : gate;
  up = up > most ? most : up < least ? least : up;
  return (up + 1.0f) * (gate / (exponential(gate * -slope) + 1.0f));
}

inline void put_floats(float* to, const Floats* unit) {
  for (int v = 0; v < UNIT; ++v) store(to + v * LANES, unit[v]);
}

// The same, plus the numbers of `bias` from a place on, unless it is null.
inline void put_sum(float* to, const Floats* unit, const float* bias, size_t at) {
  for (int v = 0; v < UNIT; ++v) store(to + v * LANES, bias ? unit[v] + load(bias + at + v * LANES) : unit[v]);
}

// The data of one step that the members of a team share.
template <class T>
struct Body {
  const Model& model;
  const Step& step;
  const std::vector<QueryTile>& tiles;
  float* qkv = nullptr;    // (tokens, qkv_width)
  T* narrow = nullptr;     // (tokens, hidden_depth or heads * dim): the input of qkv, o and gate_up
  T* wide = nullptr;       // (tokens or choices, intermediate_depth)
  float* state = nullptr;  // (tokens, hidden_width)
  float* branch = nullptr; // the same: the result of attention or an MLP until it is normalised
  char* rounded = nullptr;  // (tokens or choices,): the input of a product with weights in groups
  // Of layers with experts; a choice is a token and one of its experts.
  float* scores = nullptr;   // (tokens, scores_width)
  T* picked = nullptr;       // (choices, narrow_width): the states of tokens, in the order of experts
  float* partial = nullptr;  // (choices, state_width): the results, in this order
  const Routing* routings = nullptr;  // by layer
  int qkv_width = 0, narrow_width = 0, wide_width = 0, state_width = 0, scores_width = 0;

  static constexpr int PHASES = 24;  // per layer, at most
  static constexpr int NO_LAYER = -1;

  void operator()(Team::Member& member) const {
    int phase = 0;
    const int tokens = step.tokens;
    member.each(phase++, tokens, [&](int token) {
      std::memcpy(state + token * size_t(state_width), step.hidden + token * size_t(model.hidden),
                  model.hidden * sizeof(float));
    });
    for (int number = 0; number < model.layers; ++number) {
      const Layer& layer = model.layer[number];
      normalise(member, phase++, layer.norms.before_attention, rest_of(number - 1));
      multiply(member, phase, narrow, narrow_width, tokens, layer.qkv, rounded, keeping_from(0));
      if (layer.v.n) multiply(member, phase, narrow, narrow_width, tokens, layer.v, rounded, keeping_from(layer.qkv.n));
      if (model.cell_bits)
        attend<Byte>(member, phase, layer, number);
      else
        attend<T>(member, phase, layer, number);
      multiply(member, phase, narrow, narrow_width, tokens, layer.o, rounded,
               adding(layer.norms.after_attention, layer.o_bias, layer.o.n));
      normalise(member, phase++, layer.norms.before_mlp, {layer.norms.after_attention, NO_LAYER});
      if (layer.experts.choice.count) choose(member, phase, layer.experts, routings[number]);
      if (layer.gate_up.n) {
        multiply(member, phase, narrow, narrow_width, tokens, layer.gate_up, rounded, activating());
        if (layer.experts.gates_mlp)
          multiply(member, phase, wide, wide_width, tokens, layer.down, rounded, adding_gated(layer.experts.choice.count));
        else
          multiply(member, phase, wide, wide_width, tokens, layer.down, rounded, adding(layer.norms.after_mlp, nullptr, 0));
      }
      if (layer.experts.choice.count) add_experts(member, phase, layer.experts, routings[number]);
    }
    member.each(phase++, tokens, [&](int token) {
      add_rest(token, rest_of(model.layers - 1));
      norm(state + token * size_t(state_width), model.norm, model.hidden, model.eps,
           step.hidden + token * size_t(model.hidden));
    });
  }

  // What is still to be added to the states: the last result, if a norm of it is not null, and the rows that follow
  // a layer.
  struct Rest {
    const float* norm;
    int layer;
  };

  Rest rest_of(int layer) const { return {layer < 0 ? nullptr : model.layer[layer].norms.after_mlp, layer}; }

  void add_rest(int token, const Rest& rest) const {
    if (rest.norm) {
      float* mine = state + token * size_t(state_width);
      const float* result = branch + token * size_t(state_width);
      const float scale = norm_scale(result, model.hidden, model.eps);
      for (int at = 0; at < model.hidden; at += LANES)
        store(mine + at, load(mine + at) + load(result + at) * scale * load(rest.norm + at) * model.residual);
    }
    add_rows(token, rest.layer);
  }

  // Normalises the states, if `weight` is not null, after the rest was added to them.
  void normalise(Team::Member& member, int phase, const float* weight, const Rest& rest) const {
    member.each(phase, step.tokens, [&](int token) {
      add_rest(token, rest);
      const float* from = state + token * size_t(state_width);
      T* to = narrow + token * size_t(narrow_width);
      if (weight)
        norm(from, weight, model.hidden, model.eps, to);
      else
        for (int at = 0; at < model.hidden; at += LANES) store(to + at, load(from + at));
      std::memset(to + model.hidden, 0, (round_up(model.hidden, Format<T>::GRAIN) - model.hidden) * sizeof(T));
    });
  }

  // Adds a token's row to its state after a layer (DeepStack, Meng et al. 2024).
  void add_rows(int token, int layer) const {
    if (!step.added_rows || layer < 0 || layer >= step.added_layers || step.added_rows[token] < 0) return;
    const float* row = step.added + step.added_rows[token] * size_t(step.added_stride) + layer * size_t(model.hidden);
    float* mine = state + token * size_t(state_width);
    for (int at = 0; at < model.hidden; at += LANES) store(mine + at, load(mine + at) + load(row + at));
  }

  // Keeps a product in `qkv`, from a column on.
  auto keeping_from(int first) const {
    return [this, first](int row, int column, const Floats* y) {
      put_floats(qkv + row * size_t(qkv_width) + first + column, y);
    };
  }

  // Adds a product to the residual stream, or keeps it for a norm of results.
  auto adding(const float* norm, const float* bias, int biased) const {
    return [this, norm, bias, biased](int row, int column, const Floats* y) {
      float* to = (norm ? branch : state) + row * size_t(state_width) + column;
      for (int v = 0; v < UNIT; ++v) {
        const bool has_bias = bias && column + v * LANES < biased;
        const Floats sum = has_bias ? y[v] + load(bias + column + v * LANES) : y[v];
        store(to + v * LANES, norm ? sum : load(to + v * LANES) + sum * model.residual);
      }
    };
  }

  // Adds a product to the residual stream, times the gate of each token.
  auto adding_gated(int gate) const {
    return [this, gate](int row, int column, const Floats* y) {
      const float opened = 1.0f / (1.0f + std::exp(-scores[row * size_t(scores_width) + gate]));
      float* to = state + row * size_t(state_width) + column;
      for (int v = 0; v < UNIT; ++v) store(to + v * LANES, load(to + v * LANES) + y[v] * opened);
    };
  }

  // Keeps the inner states of MLPs.
  auto activating() const {
    return [this](int row, int column, const Floats* y) {
      T* to = wide + row * size_t(wide_width) + column / 2;
      for (int pair = 0; pair < UNIT / 2; ++pair) {
        const Floats gate = y[2 * pair];
        store(to + pair * LANES, (model.activation ? gelu_tanh(gate) : silu(gate)) * y[2 * pair + 1]);
      }
    };
  }

  // Keeps the inner states of experts.
  auto activating(const Experts& experts) const {
    const size_t columns = experts.gate_up.n / experts.choice.count;
    return [this, &experts, columns](int expert, int row, int column, const Floats* y) {
      if (!experts.limit) return activating()(row, column, y);
      T* to = wide + row * size_t(wide_width) + column / 2;
      const float* bias = experts.gate_up_bias + expert * columns + column;
      for (int pair = 0; pair < UNIT / 2; ++pair, bias += 2 * LANES) {
        const Floats gate = y[2 * pair] + load(bias), up = y[2 * pair + 1] + load(bias + LANES);
        store(to + pair * LANES, clamped(gate, up, experts.limit, experts.slope));
      }
    };
  }

  // Chooses the experts of each token.
  void choose(Team::Member& member, int& phase, const Experts& experts, const Routing& routing) const {
    const int tokens = step.tokens, chosen = experts.choice.chosen;
    multiply(member, phase, narrow, narrow_width, tokens, experts.router, rounded,
             [&](int row, int column, const Floats* y) {
               put_sum(scores + row * size_t(scores_width) + column, y, experts.router_bias, column);
             });
    member.each(phase++, tokens, [&](int token) {
      const size_t first = token * size_t(chosen);
      const float* mine = scores + token * size_t(scores_width);
      float whole[MOST_EXPERTS];
      for (int expert = 0; expert < experts.choice.count; ++expert)
        whole[expert] = mine[expert] + (experts.rest ? mine[experts.rest + expert] : 0.0f);
      choose_experts(whole, experts.choice, routing.experts + first, routing.weights + first);
    });
    member.each(phase++, 1, [&](int) { routing.sort(tokens, chosen, experts.choice.count, rows_of_block(experts)); });
  }

  static int rows_of_block(const Experts& experts) {
    const int deepest = std::max(experts.gate_up.k, experts.down.k);
    return most_rows_of_block((experts.gate_up.bits ? 1 : sizeof(T)) * row_stride<T>(deepest));
  }

  // Adds to each token's state the results of its experts.
  void add_experts(Team::Member& member, int& phase, const Experts& experts, const Routing& routing) const {
    const int tokens = step.tokens, chosen = experts.choice.chosen, choices = tokens * chosen;
    const Matrix &gate_up = experts.gate_up, &down = experts.down;
    const auto rounded_for = [&](const Matrix& w) { return grouped::Activations::at(rounded, choices, w.k); };
    member.each(phase++, tokens, [&](int token) {
      const T* from = narrow + token * size_t(narrow_width);
      for (int choice = token * chosen; choice < (token + 1) * chosen; ++choice) {
        const int row = routing.rows[choice];
        if (gate_up.bits)
          grouped::round_row(from, round_up(gate_up.k, LANES), gate_up.factor, rounded_for(gate_up), row);
        else
          std::memcpy(picked + row * size_t(narrow_width), from, packed<T>(gate_up).depth() * sizeof(T));
      }
    });
    multiply_blocks(member, phase, picked, narrow_width, experts, gate_up, routing, activating(experts));
    if (down.bits)
      member.each(phase++, choices, [&](int row) {
        const T* from = wide + row * size_t(wide_width);
        grouped::round_row(from, round_up(down.k, LANES), down.factor, rounded_for(down), row);
      });
    const size_t columns = down.n / experts.choice.count;
    multiply_blocks(member, phase, wide, wide_width, experts, down, routing,
                    [&](int expert, int row, int column, const Floats* y) {
                      const size_t place = expert * columns + column;
                      put_sum(partial + row * size_t(state_width) + column, y, experts.down_bias, place);
                    });
    member.each(phase++, tokens, [&](int token) {
      float* mine = state + token * size_t(state_width);
      for (int at = 0; at < model.hidden; at += LANES) {
        Floats sum = Floats{};
        for (int choice = token * chosen; choice < (token + 1) * chosen; ++choice)
          sum += load(partial + routing.rows[choice] * size_t(state_width) + at) * routing.weights[choice];
        store(mine + at, load(mine + at) + sum);
      }
    });
  }

  // Multiplies each block of rows by the matrix of its expert, in one phase. Rows of groups are rounded already.
  // `put` is that of `share_units`, with the expert before the row.
  template <class Put>
  void multiply_blocks(Team::Member& member, int& phase, const T* x, size_t stride, const Experts& experts,
                       const Matrix& w, const Routing& routing, const Put& put) const {
    const auto block_of = [&](int number) { return routing.blocks[number]; };
    const int units = w.n / (UNIT * LANES) / experts.choice.count;
    if (w.bits) {
      const auto narrow = grouped::Activations::at(rounded, step.tokens * experts.choice.chosen, w.k);
      return share_units(
          member, phase++, *routing.count, block_of, units,
          [&](int first, int count, int unit, bool is_followed, Floats* y) {
            grouped::multiply(narrow.from(first), count, grouped_weights(w), unit, is_followed, y);
          },
          put);
    }
    share_units(
        member, phase++, *routing.count, block_of, units,
        [&](int first, int count, int unit, bool is_followed, Floats* y) {
          multiply_unit(x + first * stride, stride, count, packed<T>(w), unit, is_followed, y);
        },
        put);
  }

  // Rotates a token's queries and keys, and stores its keys and values in the pool.
  template <class Cell>
  void turn_and_keep(const Layer& layer, int token, Cell* keys, Cell* values) const {
    const int dim = model.dim, q = model.heads * dim, kv = model.kv_heads * dim;
    float* mine = qkv + token * size_t(qkv_width);
    if (layer.qkv_bias)
      for (int at = 0; at < q + 2 * kv; at += LANES) store(mine + at, load(mine + at) + load(layer.qkv_bias + at));
    if (layer.q_norm && model.norms_whole_heads) {
      norm(mine, layer.q_norm, q, model.eps, mine);
      norm(mine + q, layer.k_norm, kv, model.eps, mine + q);
    }
    const size_t angles = (std::max(layer.angles, 0) * size_t(step.tokens) + token) * step.turned;
    for (int head = 0; head < model.heads + model.kv_heads; ++head) {
      float* one = mine + head * dim;
      const float* weight = head < model.heads ? layer.q_norm : layer.k_norm;
      if (weight && !model.norms_whole_heads) norm(one, weight, dim, model.eps, one);
      if (layer.angles < 0) continue;
      const auto turn = model.turns_neighbours ? rotate_neighbours : rotate;
      turn(one, step.cos + angles, step.sin + angles, step.turned);
    }
    const int stride = cell_stride<Cell>(dim);
    const size_t slot = step.slots[token] * size_t(model.kv_heads);
    for (int head = 0; head < model.kv_heads; ++head) {
      keep_head(mine + q + head * dim, dim, keys + (slot + head) * stride);
      keep_head(mine + q + kv + head * dim, dim, values + (slot + head) * stride);
    }
  }

  template <class Cell>
  void attend(Team::Member& member, int& phase, const Layer& layer, int number) const {
    Cell *keys = static_cast<Cell*>(step.keys[number]), *values = static_cast<Cell*>(step.values[number]);
    const int attended = model.heads * model.dim, depth = round_up(attended, Format<T>::GRAIN);
    member.each(phase++, step.tokens, [&](int token) {
      turn_and_keep(layer, token, keys, values);
      std::memset(narrow + token * size_t(narrow_width) + attended, 0, (depth - attended) * sizeof(T));
    });
    const Shape shape{model.heads, model.kv_heads, model.dim, layer.window, model.scaling, model.softcap, layer.sinks};
    const Cells cells{step.block_table, step.table_stride, step.block_size};
    const Seen seen{step.key_ends, step.full_starts};
    Attending<Cell> attending(shape, cells, seen, keys, values);
    member.share(
        phase++, static_cast<int>(tiles.size()), 1,
        [&](int piece, bool) { attending.compute(tiles[piece], qkv, qkv_width); },
        [&](int) { attending.keep(narrow, narrow_width); });
  }
};

// The query tiles of a step, which members take one by one. A prompt is split into some tokens per key head. A
// decode has all heads, which are adjacent in memory, in one tile, or fewer heads if there are too few tiles.
const std::vector<QueryTile>& tiles_of(std::vector<QueryTile>& tiles, const Model& model, const Step& step, int members) {
  const int group = model.heads / model.kv_heads, most = std::max(1, MOST_ROWS / 2 / group);
  const int fair = std::max(1, model.kv_heads * step.spans / (2 * members));
  tiles.clear();
  for (int span = 0; span < step.spans; ++span) {
    const int begin = step.query_offsets[span], end = step.query_offsets[span + 1];
    for (int first = begin; first < end; first += most) {
      const int count = std::min(most, end - first);
      const int heads = count == 1 ? std::clamp(MOST_ROWS / group, 1, std::min(fair, model.kv_heads)) : 1;
      for (int head = 0; head < model.kv_heads; head += heads)
        tiles.push_back({first, count, step.kv_lengths[span] - (end - first), step.rows[span], head,
                         std::min(heads, model.kv_heads - head)});
    }
  }
  return tiles;
}

// Takes arrays from memory, one after the other, each from a new cache line on.
class Rooms {
 public:
  // Without memory, only their size is counted.
  explicit Rooms(char* memory) : memory_(memory) {}
  template <class T>
  T* take(size_t count) {
    const size_t at = (bytes_ + 63) / 64 * 64;
    bytes_ = at + count * sizeof(T);
    return memory_ ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// The largest experts of a model's layers.
struct Largest {
  int count = 0, chosen = 0, scores = 0, depth = 0, rows_of_block = MOST_ROWS_OF_BLOCK;
  bool picks = false;
};

template <class T>
Largest largest_experts(const Model& model) {
  Largest all;
  for (int number = 0; number < model.layers; ++number) {
    const Experts& experts = model.layer[number].experts;
    if (!experts.choice.count) continue;
    all.count = std::max(all.count, experts.choice.count);
    all.chosen = std::max(all.chosen, experts.choice.chosen);
    all.scores = std::max(all.scores, experts.router.n);
    all.depth = std::max({all.depth, experts.gate_up.k, experts.down.k});
    all.rows_of_block = std::min(all.rows_of_block, Body<T>::rows_of_block(experts));
    all.picks |= !experts.gate_up.bits;
  }
  return all;
}

inline bool has_result_norms(const Model& model) {
  return std::any_of(model.layer, model.layer + model.layers,
                     [](const Layer& layer) { return layer.norms.after_attention || layer.norms.after_mlp; });
}

// Sets the arrays of a body, in memory of which the rooms are taken.
template <class T>
void place(Body<T>& body, std::vector<Routing>& routings, const Largest& experts, Rooms& rooms) {
  const Model& model = body.model;
  const size_t tokens = body.step.tokens, choices = tokens * experts.chosen;
  const int deepest = std::max({model.hidden, model.heads * model.dim, model.intermediate});
  body.state = rooms.take<float>(tokens * body.state_width);
  body.branch = rooms.take<float>(has_result_norms(model) ? tokens * body.state_width : 0);
  body.qkv = rooms.take<float>(tokens * body.qkv_width);
  body.narrow = rooms.take<T>(tokens * body.narrow_width);
  body.wide = rooms.take<T>(std::max(tokens, choices) * body.wide_width);
  const auto rounded = [](size_t rows, int depth) { return grouped::Activations::bytes(static_cast<int>(rows), depth); };
  body.rounded = rooms.take<char>(std::max(rounded(tokens, deepest), choices ? rounded(choices, experts.depth) : 0));
  body.scores = rooms.take<float>(experts.count ? tokens * body.scores_width : 0);
  body.picked = rooms.take<T>(experts.picks ? choices * body.narrow_width : 0);
  body.partial = rooms.take<float>(choices * body.state_width);
  if (!experts.count) return;
  Routing shared{};
  shared.experts = rooms.take<int32_t>(choices);
  shared.weights = rooms.take<float>(choices);
  shared.rows = rooms.take<int32_t>(choices);
  routings.assign(model.layers, shared);
  const int blocks = Routing::most_blocks(experts.count, static_cast<int>(choices), experts.rows_of_block);
  for (Routing& routing : routings) {
    routing.blocks = rooms.take<Rows>(blocks);
    routing.count = rooms.take<int32_t>(1);
  }
  body.routings = routings.data();
}

template <class T>
void run_body(Context& context, const Model& model, const Step& step) {
  const Largest experts = largest_experts<T>(model);
  Body<T> body{model, step, tiles_of(context.tiles, model, step, context.team.size())};
  // Rows are padded to whole units, because products write whole units.
  const int heads = model.heads * model.dim, unit = UNIT * LANES;
  body.qkv_width = round_up(heads + 2 * model.kv_heads * model.dim, unit) + unit;  // values may have their own units
  body.narrow_width = row_stride<T>(round_up(std::max(model.hidden, heads), unit));
  body.wide_width = row_stride<T>(round_up(model.intermediate, unit));
  body.state_width = round_up(model.hidden, unit);
  body.scores_width = round_up(experts.scores, unit);
  Rooms counted(nullptr);
  place(body, context.routings, experts, counted);
  Rooms rooms(context.scratch.room(counted.bytes()));
  place(body, context.routings, experts, rooms);
  context.team.run(2 + model.layers * Body<T>::PHASES, body);
}

template <class T>
void run_linear(Context& context, const Matrix& w, const float* x, int rows, float* y, size_t stride) {
  const int depth = round_up(w.k, Format<T>::GRAIN), width = row_stride<T>(depth);
  const size_t bytes = rows * sizeof(T) * width;
  char* room = context.scratch.room(bytes + grouped::Activations::bytes(rows, w.k));
  T* narrow = reinterpret_cast<T*>(room);
  context.team.run(3, [&](Team::Member& member) {
    int phase = 0;
    member.each(phase++, rows, [&](int row) {
      T* to = narrow + row * size_t(width);
      const float* from = x + row * size_t(w.k);
      int at = 0;
      for (; at + LANES <= w.k; at += LANES) store(to + at, load(from + at));
      if (at < w.k) {
        float last[LANES] = {};
        std::memcpy(last, from + at, (w.k - at) * sizeof(float));
        T rounded[LANES];
        store(rounded, load(last));
        std::memcpy(to + at, rounded, (w.k - at) * sizeof(T));
      }
      std::memset(to + w.k, 0, (depth - w.k) * sizeof(T));
    });
    multiply(member, phase, narrow, width, rows, w, room + bytes, [&](int row, int column, const Floats* values) {
      float* to = y + row * stride + column;
      if (column + UNIT * LANES <= w.n) return put_floats(to, values);
      float all[UNIT * LANES];
      put_floats(all, values);
      if (column < w.n) std::memcpy(to, all, (w.n - column) * sizeof(float));
    });
  });
}

// Calls `work` once per unit of a packed matrix.
template <class Work>
void of_units(void* context, const Packed<bfloat16>& w, const Work& work) {
  static_cast<Context*>(context)->team.run(1, [&](Team::Member& member) {
    member.each(0, w.units(), [&](int unit) {
      work(unit, Squeezing(reinterpret_cast<const bfloat16*>(w.unit(unit)), w.depth()));
    });
  });
}

}  // namespace
}  // namespace dalsegno

using namespace dalsegno;

#pragma GCC visibility push(default)
extern "C" {

// The kind of processor it was compiled for, and whether this process may use its instructions.
const char* dalsegno_variant() {
#if defined(DALSEGNO_AMX)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512VNNI__)
  return "avx512_vnni";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avx_vnni";
#else
  return "plain";
#endif
}

int dalsegno_allowed() {
#if defined(DALSEGNO_AMX)
  return amx::allowed();
#else
  return 1;
#endif
}

// Returns null if there is not enough memory, or no thread can be created.
void* dalsegno_open(int threads) {
  try {
    return new Context(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}
void dalsegno_close(void* context) { delete static_cast<Context*>(context); }

// The number of pieces that were kept by another thread than the one that had taken them.
int64_t dalsegno_helped(void* context) { return static_cast<Context*>(context)->team.helped(); }

// Bytes of a packed matrix (n, k).
int64_t dalsegno_packed_bytes(int dtype, int32_t n, int32_t k) {
  const int64_t columns = round_up(n, UNIT * LANES);
  return dtype ? columns * round_up(k, Format<bfloat16>::GRAIN) * 2 : columns * round_up(k, Format<float>::GRAIN) * 4;
}

void dalsegno_pack(void* context, int dtype, void* into, const void* w, int32_t n, int32_t k, int64_t stride,
                   int columns, int32_t offset) {
  static_cast<Context*>(context)->team.run(1, [&](Team::Member& member) {
    if (dtype)
      pack(member, 0, static_cast<bfloat16*>(into), static_cast<const bfloat16*>(w), n, k, stride, Columns(columns), offset);
    else
      pack(member, 0, static_cast<float*>(into), static_cast<const float*>(w), n, k, stride, Columns(columns), offset);
  });
}

// Bytes of a squeezed bfloat16 matrix (n, k); 0 if this processor cannot read squeezed weights.
int64_t dalsegno_squeezed_bytes(int32_t n, int32_t k) {
  if (!DALSEGNO_SQUEEZES) return 0;
  const Packed<bfloat16> w{nullptr, n, k};
  return w.units() * squeezed_unit_bytes(w.depth());
}

// Returns the number of patches of a packed matrix, end markers included, and sets each unit's first in `lists`.
int64_t dalsegno_count_patches(void* context, const Matrix* plain, int32_t* lists) {
  const Packed<bfloat16> w = packed<bfloat16>(*plain);
  of_units(context, w, [&](int unit, const Squeezing& squeezing) { lists[unit] = squeezing.patches() + 1; });
  int64_t total = 0;
  for (int unit = 0; unit < w.units(); ++unit) total += std::exchange(lists[unit], static_cast<int32_t>(total));
  return total;
}

// Squeezes a packed matrix, and writes its patches at the places in `lists`.
void dalsegno_squeeze(void* context, const Matrix* plain, const int32_t* lists, void* into, Patch* patches) {
  const Packed<bfloat16> w = packed<bfloat16>(*plain);
  const size_t bytes = squeezed_unit_bytes(w.depth());
  of_units(context, w, [&](int unit, const Squeezing& squeezing) {
    squeezing.write(static_cast<char*>(into) + unit * bytes, patches + lists[unit]);
  });
}

// Bytes of a matrix whose weights are in groups.
int64_t dalsegno_grouped_bytes(const Matrix* w) {
  const grouped::Weights weights = grouped_weights(*w);
  return weights.units() * weights.unit_bytes();
}

// Packs n rows into a matrix whose weights are in groups; see `grouped::Source`.
void dalsegno_pack_groups(void* context, const Matrix* into, const uint8_t* numbers, const uint16_t* scales,
                          const uint16_t* minimums, int32_t n, int columns, int32_t offset) {
  static_cast<Context*>(context)->team.run(1, [&](Team::Member& member) {
    grouped::pack(member, 0, static_cast<char*>(const_cast<void*>(into->data)), grouped_weights(*into),
                  {numbers, scales, minimums}, n, Columns(columns), offset);
  });
}

// Quantises a matrix (n, k): numbers (n, k) of `bits` bits, and scales (n, groups). `importance` (k,) may be null.
void dalsegno_quantise(void* context, int dtype, const void* w, int32_t n, int32_t k, int32_t bits,
                       const float* importance, uint8_t* numbers, float* scales) {
  static_cast<Context*>(context)->team.run(1, [&](Team::Member& member) {
    if (dtype)
      grouped::quantise(member, 0, static_cast<const bfloat16*>(w), n, k, bits, importance, numbers, scales);
    else
      grouped::quantise(member, 0, static_cast<const float*>(w), n, k, bits, importance, numbers, scales);
  });
}

// Writes a matrix (n, k) of `dtype`; see `grouped::dequantise`.
void dalsegno_dequantise(void* context, int dtype, const uint8_t* numbers, const float* values, const float* scales,
                         const float* minimums, int32_t parts, int32_t n, int32_t k, void* to) {
  static_cast<Context*>(context)->team.run(1, [&](Team::Member& member) {
    if (dtype)
      grouped::dequantise(member, 0, numbers, values, scales, minimums, parts, n, k, static_cast<bfloat16*>(to));
    else
      grouped::dequantise(member, 0, numbers, values, scales, minimums, parts, n, k, static_cast<float*>(to));
  });
}

// y (rows, n) = x (rows, k) W^T, in float32; y's rows are `stride` apart. Returns 0, or 1 if out of memory.
int dalsegno_linear(void* context, int dtype, const Matrix* w, const float* x, int32_t rows, float* y, int64_t stride) {
  try {
    auto& to = *static_cast<Context*>(context);
    if (dtype)
      run_linear<bfloat16>(to, *w, x, rows, y, stride);
    else
      run_linear<float>(to, *w, x, rows, y, stride);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Chooses experts for rows of scores (rows, count), as layers do: experts and weights (rows, chosen).
void dalsegno_choose(const float* scores, int32_t rows, const Choice* choice, int32_t* experts, float* weights) {
  for (int row = 0; row < rows; ++row) {
    const size_t first = row * size_t(choice->chosen);
    choose_experts(scores + row * size_t(choice->count), *choice, experts + first, weights + first);
  }
}

int dalsegno_body(void* context, const Model* model, const Step* step) {
  try {
    if (model->dtype)
      run_body<bfloat16>(*static_cast<Context*>(context), *model, *step);
    else
      run_body<float>(*static_cast<Context*>(context), *model, *step);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
}
#pragma GCC visibility pop
