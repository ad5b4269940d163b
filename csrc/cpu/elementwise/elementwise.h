// Functions of single elements: activations, the addition of two tensors, and factors.
#pragma once

#include "../types.h"

namespace octavo {

// The numbers are part of the Python interface.
enum class Function : int {
  relu = 0,
  gelu = 1,
  gelu_tanh = 2,
  silu_and_mul = 3,
  add = 4,
  gelu_tanh_and_mul = 5,
  scaled = 6,
  soft_capped = 7,
  relu2 = 8,
  gated_by_sigmoid = 9,
  clamped_swiglu = 10,
  multiplied = 11,
  xielu = 12,
  clamped = 13,
  gated_by_softplus = 14,
};

// out [rows, width] of x and y, all of `type`; rows of x and y may lie apart, those of out are dense. A `y_stride` of 0
// gives all rows of x the same row of y.
struct Elementwise {
  Function function;
  const void* x;
  const void* y;  // the other operand of the products (up), the gate and add; the two factors of xielu; else null
  void* out;
  std::int64_t x_stride;
  std::int64_t y_stride;
  int width;
  Type type;
  float parameter;  // the factor, the cap, the largest magnitude, or the steepness of the sigmoid; else unused
  float limit;      // of gate and up; else unused
};

struct ElementwiseKernels {
  // Rows [begin, end).
  void (*elementwise)(const Elementwise&, int begin, int end);
};

const ElementwiseKernels& elementwise_kernels(Level level);

}  // namespace octavo
