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

// Chooses the `chosen` largest of `count` scores, and their weights: the probabilities of a softmax over all scores,
// which are divided by their sum if `normalises`. Of equal scores, the first counts as larger.
inline void choose_experts(const float* scores, int count, int chosen, bool normalises, int32_t* experts, float* weights) {
  bool is_taken[MOST_EXPERTS] = {};
  for (int choice = 0; choice < chosen; ++choice) {
    int best = -1;
    for (int expert = 0; expert < count; ++expert)
      if (!is_taken[expert] && (best < 0 || scores[expert] > scores[best])) best = expert;
    is_taken[best] = true;
    experts[choice] = best;
  }
  const float most = scores[experts[0]];
  float all = 0.0f, of_chosen = 0.0f;
  for (int expert = 0; expert < count; ++expert) all += std::exp(scores[expert] - most);
  for (int choice = 0; choice < chosen; ++choice) {
    weights[choice] = std::exp(scores[experts[choice]] - most);
    of_chosen += weights[choice];
  }
  for (int choice = 0; choice < chosen; ++choice) weights[choice] /= normalises ? of_chosen : all;
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
