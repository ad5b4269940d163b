// Hyper-connections, by which blocks read and write several residual streams: octavo/ops/hyper.py.
#pragma once

#include "../types.h"

namespace octavo {

constexpr int kMostHyperStreams = 8;

// Weights by which blocks read and write the streams, from products [rows, ...], rows `stride` elements apart: those for
// reading, then for writing, then for the matrix. Results are dense.
struct HyperMixing {
  const float* products;
  std::int64_t stride;
  const float* scale;  // [1 to 3]
  const float* base;   // as wide as the products
  float* read;         // [rows, count]
  float* write;        // [rows, count], or null
  float* mix;          // [rows, count, count]; with `write` alone
  int count;
  int rounds;  // of Sinkhorn and Knopp; 0 where streams are not mixed
  float eps;
  float most;  // that a stream gets of the output
};

// The numbers are part of the Python interface.
enum class HyperFunction : int { weighed = 0, mixed = 1, normed = 2, repeated = 3 };

// Rows of x lie `stride` elements apart, of `type`, as those of other; weights and matrices are float32.
struct HyperStreams {
  HyperFunction function;
  const void* x;      // [rows, count * dim]; repeated: [rows, dim]
  const void* other;  // [rows, dim], what a block returned; mixed
  std::int64_t stride, other_stride;
  const float* weights;  // [rows, count], rows `weight_stride` apart; weighed, mixed. normed: [count * dim]
  std::int64_t weight_stride;
  const float* mix;  // [rows, count, count], dense; mixed
  void* out;         // dense: [rows, dim] or [rows, count * dim]; normed: float32
  int count, dim;
  float eps;  // normed
  Type type;
};

struct HyperKernels {
  // Rows [begin, end).
  void (*mixing)(const HyperMixing&, int begin, int end);
  void (*streams)(const HyperStreams&, int begin, int end);
};

const HyperKernels& hyper_kernels(Level level);

}  // namespace octavo
