// Linear layers with quantised weights: 8 bits a channel or 4 bits a group, times activations of 8 bits a row.
//
// A weight is a sequence of panels of 32 output columns. A panel is a stream along K in steps of 64: two tiles of 1 KB,
// one per 16 columns, each 16 quads of K by 16 columns by 4 bytes: what the tile registers take, and 64-byte lines for
// vpdpbusd. int8 keeps code + 128 in each byte, and a float32 scale per column beside the panels. int4 keeps code + 8 of
// the first tile in the low and of the second in the high nibbles of 1 KB, and after each group of K the group's 32
// scales in bfloat16, so that one stream is read. Sums of products are integers, exact in any order.
#pragma once

#include "../types.h"

namespace octavo {

constexpr int kPanelColumns = 32;
constexpr int kStepDepth = 64;

struct QuantizedWeight {
  std::uint8_t* panels;
  float* scales;      // [panels * 32] for int8, null for int4
  const float* bias;  // [panels * 32] in the panels' order, or null
  int outputs;        // of the plain weight; a gated one has gate and up stacked
  int inputs;
  int group;   // weights along K that share a scale, a multiple of 64; 0: the format is int8
  bool gated;  // a panel is 16 columns of gate beside the same 16 of up

  int depth() const {
    const int step = group ? group : kStepDepth;
    return (inputs + step - 1) / step * step;
  }
  int columns_per_panel() const { return gated ? kPanelColumns / 2 : kPanelColumns; }
  int columns() const { return gated ? outputs / 2 : outputs; }  // of the answer
  int num_panels() const { return (columns() + columns_per_panel() - 1) / columns_per_panel(); }
  int num_groups() const { return group ? depth() / group : 1; }
  std::int64_t group_bytes() const { return group * (kPanelColumns / 2) + kPanelColumns * 2; }
  std::int64_t panel_bytes() const {
    return group ? num_groups() * group_bytes() : static_cast<std::int64_t>(depth()) * kPanelColumns;
  }
  // Row of the plain weight that is column `column` of panel `panel`, or -1 for padding.
  int row_of(int panel, int column) const {
    const int first = panel * columns_per_panel();
    const int inner = gated ? column % 16 : column;
    if (first + inner >= columns()) return -1;
    return gated && column >= 16 ? columns() + first + inner : first + inner;
  }
};

// One product. x is [rows, inputs] of `type`, out [rows, columns] of `out_type`; rows may lie apart.
struct QuantizedLinear {
  QuantizedWeight weight;
  const void* x;
  void* out;
  std::int64_t x_stride;
  std::int64_t out_stride;
  int rows;
  Type type;
  Type out_type;
  // Scratch for the activations. Rows are taken in blocks; inside a block the order is the level's own.
  std::int8_t* codes;       // [padded rows, depth]
  float* row_scales;        // [padded rows]; NaN for a row that is not finite
  std::int32_t* row_sums;   // [padded rows, groups]: what the offset of the weights' codes adds, negated
};

struct QuantizedKernels {
  // Blocks that `rows` activation rows are cut into, and rows before block `block`.
  int (*num_blocks)(const QuantizedLinear&);
  int (*block_start)(const QuantizedLinear&, int block);
  void (*quantize_block)(const QuantizedLinear&, int block);
  // Columns of panels [first, last) for the rows of blocks [begin, end).
  void (*multiply)(const QuantizedLinear&, int first, int last, int begin, int end);
  // Quantise a plain weight [outputs, inputs] of `type` into panels [first, last). Answers a row of it with a value that
  // is not finite, or -1.
  int (*pack)(const QuantizedWeight&, const void* plain, std::int64_t stride, Type type, int first, int last);
  // out [count, inputs] of `type`: rows `ids` of the plain weight.
  void (*rows)(const QuantizedWeight&, const std::int64_t* ids, void* out, Type type, int begin, int end);
};

const QuantizedKernels& quantized_kernels(Level level);

}  // namespace octavo
