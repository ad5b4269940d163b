// Rotary position embedding of queries and keys, after the norm of each head that some models have.
#pragma once

#include "../types.h"

namespace octavo {

// Heads of every token: in [tokens, count, dim] with rows `stride` elements apart, out dense.
struct RotaryHeads {
  const void* in;
  const void* weight;  // [dim], or null without a norm; `offset` is added to it
  void* out;
  std::int64_t stride;
  int count;
};

struct Rotary {
  RotaryHeads q, k;
  const std::int64_t* positions;  // [tokens], each a row of the table
  const float* table;             // [table_rows, rotated]: cosines, then sines
  std::int64_t table_rows;
  int dim;
  int rotated;       // the first elements of a head, an even number; the others stay
  bool interleaved;  // pairs are neighbours; else the halves of the rotated elements
  float eps, offset;
  Type type;
};

// out [positions, 2 * pairs]: cosines of position * frequency, then sines, all times `factor`.
struct RotaryTable {
  const float* frequencies;  // [pairs]
  float* out;
  int pairs;
  float factor;
};

struct RotaryKernels {
  // Tokens [begin, end).
  void (*rotary)(const Rotary&, int begin, int end);
  // Positions [begin, end).
  void (*table)(const RotaryTable&, int begin, int end);
};

const RotaryKernels& rotary_kernels(Level level);

}  // namespace octavo
