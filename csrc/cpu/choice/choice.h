// Scores by which queries choose the tokens that they attend to: octavo/ops/chosen_tokens.py.
#pragma once

#include "../types.h"

namespace octavo {

constexpr int kScoredKeys = 16;     // lanes of a tile of keys; a task has whole tiles
constexpr int kScoringTokens = 16;  // that a task has at most: they share the tiles

// Consecutive queries of one sequence, the first at `first_position`. Every `rate` tokens have a small key, which a query
// sees from the last of them on. It is in the block of that token, which `table` names, `block_stride` bytes from the one
// before; keys of a block lie `token_stride` bytes apart.
struct Choice {
  const void* queries;   // [tokens, heads, size] of `type`; tokens `query_stride` elements apart
  const float* weights;  // [tokens, heads], dense
  const std::uint8_t* keys;
  const std::int32_t* table;
  float* scores;  // [tokens, score_stride], of which a query has those of the keys up to itself
  std::int64_t query_stride, block_stride, token_stride, score_stride;
  int tokens, first_position, heads, size, block_size, rate;
  Type type, key_type;
};

// Keys that the query at a position sees.
inline int keys_seen(const Choice& a, int position) { return (position + 1) / a.rate; }

struct ChoiceKernels {
  std::int64_t (*scratch_bytes)(const Choice&);  // that `score` needs, a multiple of 64
  // Tokens [begin, end), at most kScoringTokens, with the keys at [first_key, end_key), first_key a multiple of kScoredKeys.
  void (*score)(const Choice&, int begin, int end, int first_key, int end_key, float* scratch);
};

const ChoiceKernels& choice_kernels(Level level);

}  // namespace octavo
