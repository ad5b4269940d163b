// Linear layers with weights in bfloat16 or float32, kept in panels (see panels.h).
//
// A panel in bfloat16 is a sequence of steps of 32 inputs; a step is two tiles of 1 KB, one per 16 columns, each 16 pairs
// of inputs by 16 columns by 2: what tile registers take, and 64-byte lines of pairs for dot products. A panel in
// float32 is a line of 32 columns per input. Inputs and columns are filled up with zeros.
//
// Every output is one sum over the inputs in ascending order, in steps that depend on the level alone.
#pragma once

#include "../panels.h"
#include "../types.h"

namespace octavo {

struct LinearWeight {
  void* panels;
  const float* bias;  // in the order of the panels' columns, or null
  int outputs;        // of the plain weight
  int inputs;
  Type type;
  bool gated;

  [[gnu::always_inline]] constexpr PanelColumns columns() const { return {outputs, gated}; }
  [[gnu::always_inline]] constexpr int step_inputs() const { return type == Type::bfloat16 ? 32 : 1; }
  [[gnu::always_inline]] constexpr int steps() const { return (inputs + step_inputs() - 1) / step_inputs(); }
  [[gnu::always_inline]] constexpr int padded_inputs() const { return steps() * step_inputs(); }
  [[gnu::always_inline]] constexpr int element_bytes() const { return type == Type::bfloat16 ? 2 : 4; }
  [[gnu::always_inline]] constexpr std::int64_t panel_bytes() const {
    return static_cast<std::int64_t>(padded_inputs()) * kPanelColumns * element_bytes();
  }
};

// out [rows, results] = x [rows, inputs] times the weight; rows of both may lie apart. x has the weight's type.
struct LinearProduct {
  LinearWeight weight;
  const void* x;
  void* out;
  std::int64_t x_stride;
  std::int64_t out_stride;
  int rows;
  Type out_type;
  Addend addend;
};

// Kernels read activations in an order of their own: block of rows by block of rows, steps of inputs in each, and the
// block's rows in each step.
struct LinearKernels {
  RowBlocks (*blocks)(const LinearProduct&);
  // Bytes of rearranged activations for each row; 0 where x is used as it is.
  std::int64_t (*activation_row_bytes)(const LinearProduct&);
  // Bytes of a row that are read again for each panel.
  int (*inputs_at_once)(const LinearWeight&);
  // Rearranges part `part` of `parts` of one block.
  void (*arrange)(const LinearProduct&, void* activations, int block, int part, int parts);
  // Blocks [first_block, last_block) times panels [first_panel, last_panel).
  void (*multiply)(const LinearProduct&, const void* activations, int first_block, int last_block, int first_panel,
                   int last_panel);
  // From the plain weight, whose rows lie `stride` elements apart.
  void (*pack)(const LinearWeight&, const void* plain, std::int64_t stride, int first_panel, int last_panel);
  // Rows of the plain weight into [count, inputs], by numbers that are in range.
  void (*rows)(const LinearWeight&, const std::int64_t* ids, void* out, int first, int last);
};

const LinearKernels& linear_kernels(Level level);

}  // namespace octavo
