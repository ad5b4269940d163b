// Linear layers with quantised weights: 8 bits a channel or 4 bits a group, times activations of 8 bits a row.
//
// A weight is a sequence of panels of 32 output columns. A panel is a stream along K in steps of 64: two tiles of 1 KB,
// one per 16 columns, each 16 quads of K by 16 columns by 4 bytes: what the tile registers take, and 64-byte lines for
// vpdpbusd. int8 keeps code + 128 in each byte, and a float32 scale per column beside the panels. int4 keeps code + 8 of
// the first tile in the low and of the second in the high nibbles of 1 KB, and after each group of K the group's 32
// scales in bfloat16, so that one stream is read. Sums of products are integers, exact in any order.
#pragma once

#include "../panels.h"
#include "../types.h"

namespace octavo {

constexpr int kStepDepth = 64;

struct QuantizedWeight {
  std::uint8_t* panels;
  float* scales;      // [panels * 32] for int8, null for int4
  const float* bias;  // [panels * 32] in the panels' order, or null
  int outputs;        // of the plain weight
  int inputs;
  int group;  // weights along K that share a scale, a multiple of 64; 0: the format is int8
  bool gated;

  [[gnu::always_inline]] constexpr PanelColumns columns() const { return {outputs, gated}; }
  // Inputs with the zeros that fill the last step, or the last group.
  [[gnu::always_inline]] constexpr int depth() const {
    const int step = group ? group : kStepDepth;
    return (inputs + step - 1) / step * step;
  }
  [[gnu::always_inline]] constexpr int steps() const { return depth() / kStepDepth; }
  [[gnu::always_inline]] constexpr int num_groups() const { return group ? depth() / group : 1; }
  [[gnu::always_inline]] constexpr int steps_per_group() const { return group ? group / kStepDepth : steps(); }
  // Of int4: codes of a group, and its scales.
  [[gnu::always_inline]] constexpr int group_bytes() const { return group * (kPanelColumns / 2) + kPanelColumns * 2; }
  [[gnu::always_inline]] constexpr std::int64_t panel_bytes() const {
    return static_cast<std::int64_t>(group ? num_groups() * group_bytes() : depth() * kPanelColumns);
  }
};

// One product. x is [rows, inputs] of `type`, out [rows, results] of `out_type`; rows of both may lie apart.
struct QuantizedLinear {
  QuantizedWeight weight;
  const void* x;
  void* out;
  std::int64_t x_stride;
  std::int64_t out_stride;
  int rows;
  Type type;
  Type out_type;
  Addend addend;
  // Scratch for the activations, block of rows by block of rows; inside a block the order is the level's own.
  std::int8_t* codes;      // [rows, depth]
  float* row_scales;       // [rows]; NaN for a row that is not finite
  std::int32_t* row_sums;  // [rows, groups]: what the offset of the weights' codes adds, negated
};

struct QuantizedKernels {
  RowBlocks (*blocks)(const QuantizedLinear&);
  void (*quantize)(const QuantizedLinear&, int block);
  // Blocks [first_block, last_block) times panels [first_panel, last_panel). `sums` has room for 32 floats per row of
  // these blocks.
  void (*multiply)(const QuantizedLinear&, float* sums, int first_block, int last_block, int first_panel, int last_panel);
  // Quantises a plain weight [outputs, inputs] of `type`, whose rows lie `stride` elements apart, into a panel. Returns a
  // row of it with a value that is not finite, or -1.
  int (*pack)(const QuantizedWeight&, const void* plain, std::int64_t stride, Type type, int panel);
  // Rows of the plain weight into out [count, inputs] of `type`, by numbers that are in range.
  void (*rows)(const QuantizedWeight&, const std::int64_t* ids, void* out, Type type, int first, int last);
};

const QuantizedKernels& quantized_kernels(Level level);

}  // namespace octavo
