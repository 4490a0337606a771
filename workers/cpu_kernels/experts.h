// Mixtures of experts (Shazeer et al. 2017): each token's state goes through a few of a layer's MLPs.
//
// A layer's experts are one packed matrix, expert after expert, each from a whole unit on. The tokens' states are
// copied in the order of their experts, so that the rows of an expert are a block, and blocks are multiplied like a
// matrix. A token's results are added in the order of its choices: they do not depend on the other tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tiles.h"

namespace dalsegno {

constexpr int MOST_EXPERTS = 1024;

// The choice of a router. The probabilities of experts are a softmax over their scores, or the sigmoid of each.
struct Choice {
  int32_t count, chosen;         // 0 without experts; how many of them see a token
  int32_t groups, open_groups;   // experts are chosen from the groups with the largest sums of two; 1: from all
  int32_t is_sigmoid, normalises;
  float least, factor;  // weights are divided by their sum, if it is not less than `least`, and multiplied
  const float* bias;    // (count,) added to probabilities for the choice, not for the weights; or null
};

// Leaves in `ranks` only the experts of the groups that are open: the others are behind all of these.
inline void close_groups(const Choice& choice, float* ranks) {
  const int size = choice.count / choice.groups;
  bool is_open[MOST_EXPERTS] = {};
  float sums[MOST_EXPERTS];
  for (int group = 0; group < choice.groups; ++group) {
    float first = -INFINITY, second = -INFINITY;
    for (int at = group * size; at < (group + 1) * size; ++at) {
      second = std::max(second, std::min(first, ranks[at]));
      first = std::max(first, ranks[at]);
    }
    sums[group] = first + second;
  }
  for (int turn = 0; turn < choice.open_groups; ++turn) {
    int best = -1;
    for (int group = 0; group < choice.groups; ++group)
      if (!is_open[group] && (best < 0 || sums[group] > sums[best])) best = group;
    is_open[best] = true;
  }
  for (int expert = 0; expert < choice.count; ++expert)
    if (!is_open[expert / size]) ranks[expert] = -INFINITY;
}

// Chooses the experts of a token by their scores, (count,), and their weights. Of equal ones, the first counts as
// larger.
inline void choose_experts(const float* scores, const Choice& choice, int32_t* experts, float* weights) {
  const int count = choice.count, chosen = choice.chosen;
  float odds[MOST_EXPERTS], ranks[MOST_EXPERTS], all = 1.0f;
  if (choice.is_sigmoid) {
    for (int expert = 0; expert < count; ++expert) odds[expert] = 1.0f / (1.0f + std::exp(-scores[expert]));
  } else {
    const float most = *std::max_element(scores, scores + count);
    all = 0.0f;
    for (int expert = 0; expert < count; ++expert) all += odds[expert] = std::exp(scores[expert] - most);
  }
  // Without a bias the order of probabilities is that of scores, which differ where tiny probabilities do not.
  for (int expert = 0; expert < count; ++expert)
    ranks[expert] = choice.bias ? odds[expert] / all + choice.bias[expert] : scores[expert];
  if (choice.groups > 1) close_groups(choice, ranks);
  bool is_taken[MOST_EXPERTS] = {};
  float of_chosen = 0.0f;
  for (int turn = 0; turn < chosen; ++turn) {
    int best = -1;
    for (int expert = 0; expert < count; ++expert)
      if (!is_taken[expert] && (best < 0 || ranks[expert] > ranks[best])) best = expert;
    is_taken[best] = true;
    experts[turn] = best;
    weights[turn] = odds[best];
    of_chosen += odds[best];
  }
  const float by = choice.normalises ? std::max(of_chosen, choice.least * all) : all;
  for (int turn = 0; turn < chosen; ++turn) weights[turn] = weights[turn] / by * choice.factor;
}

// The tokens of a step by their experts, for one layer.
struct Routing {
  int32_t* experts;  // (tokens, chosen)
  float* weights;    // (tokens, chosen)
  int32_t* rows;     // (tokens, chosen): the row of each choice, of rows in the order of experts
  Rows* blocks;      // the rows of each expert, in blocks
  int32_t* count;    // of blocks

  static int most_blocks(int experts, int rows, int rows_of_block) {
    return std::min(experts, rows) + rows / rows_of_block;
  }

  // Sorts the choices of `tokens` tokens by expert, in the order of tokens.
  // The blocks of a layer are not written again in a step: members of the team that are late still read them.
  void sort(int tokens, int chosen, int number_of_experts, int rows_of_block) const {
    int32_t first[MOST_EXPERTS + 1] = {};
    const int choices = tokens * chosen;
    for (int choice = 0; choice < choices; ++choice) ++first[experts[choice] + 1];
    *count = 0;
    for (int expert = 0; expert < number_of_experts; ++expert) {
      const int rows_here = first[expert + 1], pieces = (rows_here + rows_of_block - 1) / rows_of_block;
      for (int piece = 0; piece < pieces; ++piece) {
        const int begin = rows_here * piece / pieces, end = rows_here * (piece + 1) / pieces;
        blocks[(*count)++] = {first[expert] + begin, end - begin, expert};
      }
      first[expert + 1] += first[expert];
    }
    for (int choice = 0; choice < choices; ++choice) rows[choice] = first[experts[choice]]++;
  }
};

}  // namespace dalsegno
