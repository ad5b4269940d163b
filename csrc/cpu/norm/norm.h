// Normalisation of rows, alone and fused with the residual addition before it.
#pragma once

#include "../types.h"

namespace octavo {

// x, residual, sum and out are [rows, dim] of `type`. In x, `heads` rows are adjacent, and such groups are `x_stride`
// elements apart; the others are dense.
struct RmsNorm {
  const void* x;
  const void* residual;  // null: nothing is added
  const void* weight;    // [dim]; `offset` is added to it
  void* sum;             // x + residual, rounded to `type`; null without a residual
  void* out;
  std::int64_t x_stride;
  int heads, dim;
  float eps, offset;
  Type type;
};

// Layer norm: the mean is subtracted first, and there is a bias.
struct LayerNorm {
  const void* x;
  const void* residual;  // null: nothing is added
  const void* weight;    // [dim], or [heads, dim] where `has_weights_of_heads`, or null for ones
  const void* bias;      // [dim], or null for zeros
  void* sum;
  void* out;
  std::int64_t x_stride;
  int heads, dim;
  bool has_weights_of_heads;
  float eps;
  Type type;
};

struct NormKernels {
  // Rows [begin, end).
  void (*rms_norm)(const RmsNorm&, int begin, int end);
  void (*layer_norm)(const LayerNorm&, int begin, int end);
};

const NormKernels& norm_kernels(Level level);

}  // namespace octavo
