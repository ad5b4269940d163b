// Mixtures of experts: what a router chooses, products with one weight per expert, and weighted sums.
//
// A pair is a token with one of its experts. Rows are pairs grouped by expert; the weights of a stack lie one after the
// other, each in panels as csrc/cpu/linear and csrc/cpu/quantized have them, whose kernels multiply them.
#pragma once

#include "../types.h"

namespace octavo {

// out [tokens, width] of `type` = Σ weight · row over each token's pairs, in their order, plus `shared`.
struct ExpertSum {
  const float* rows;  // [pairs, width]
  const std::int32_t* places;  // [tokens, top_k]: the row of each pair
  const float* weights;        // [tokens, top_k]
  const void* shared;          // [tokens, width] of `type`, rows `shared_stride` apart, or null
  std::int64_t shared_stride;
  const float* gate;  // [tokens]: shared is multiplied with its sigmoid; or null
  void* out;
  int top_k;
  int width;
  Type type;
};

// out [tokens, width] of `type` = base + x · Σ weight over the pairs of a token whose experts return their inputs; or
// without base, x times the one weight of a token, rounded to `type`.
struct ExpertInputs {
  const void* base;  // [tokens, width] of `type`, rows `base_stride` apart, or null
  std::int64_t base_stride;
  const void* x;  // likewise
  std::int64_t x_stride;
  const std::int32_t* places;  // [tokens, top_k]; null without base
  const float* weights;        // [tokens, top_k]
  const std::int32_t* starts;  // likewise; rows from starts[experts] on are those of such experts
  int experts;
  void* out;
  float* ones;  // [tokens], becomes 1; null with base
  int top_k;
  int width;
  Type type;
};

struct ExpertKernels {
  // Tokens [begin, end).
  void (*sum)(const ExpertSum&, int begin, int end);
  void (*inputs)(const ExpertInputs&, int begin, int end);
};

}  // namespace octavo
