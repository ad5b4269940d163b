// Linear layers whose weights are codes: integers or small floats with scales of groups, times activations of 8 or 16
// bits a row. The codes are quantised here, or stored ones that stay as they are.
//
// A weight is a sequence of panels of 32 output columns. A panel is a stream along K of blocks: a group of K, or 256
// inputs where scales have two levels. A block of a group is its codes, unit by unit of 64 inputs (or of a smaller group),
// then the scales and the zero points or minimums. A block of two levels has two groups at a time in this way, the scales
// and minimums of both behind the codes of both, and ends with the factors: a gap of a few lines among the codes, as long
// as the scales of 256 inputs, would halve the rate at which they come from memory. A unit is for every quad of K a line
// of 64 bytes, 16 columns by 4 inputs: 8-bit codes have lines of the first 16 columns, then those of the others (the
// tiles that the tile registers take); 4-bit codes have both in the nibbles of one line, the first in the low ones. Codes
// with zero points or minimums are unsigned; others have `kOffset` added. Sums of products are integers, exact in any
// order.
#pragma once

#include "../panels.h"
#include "../types.h"

namespace octavo {

constexpr int kStepDepth = 64;     // inputs that activations are quantised by
constexpr int kFactorDepth = 256;  // inputs that share factors

enum class Kind : int { int4 = 0, e2m1 = 1, int8 = 2 };
enum class Scales : int { float32 = 0, bfloat16 = 1, float16 = 2, factors = 3 };  // factors: float16 times int8
enum class Zero : int { none = 0, zeros = 1, minimums = 2 };                      // zeros are int16

// What is added to codes without zero points or minimums, of integers; halves of E2M1 are counted from -12.
[[gnu::always_inline]] constexpr int offset_of(Kind kind) { return kind == Kind::int8 ? 128 : kind == Kind::int4 ? 8 : 12; }

// A format as Python numbers it: `format_code` in octavo/devices/cpu/ops/quantized.py.
struct CodeFormat {
  int code;

  [[gnu::always_inline]] constexpr Kind kind() const { return static_cast<Kind>(code & 3); }
  [[gnu::always_inline]] constexpr Scales scales() const { return static_cast<Scales>(code >> 2 & 3); }
  [[gnu::always_inline]] constexpr Zero zero() const { return static_cast<Zero>(code >> 4 & 3); }
  // 8-bit codes that an activation becomes; two are multiplied as two rows.
  [[gnu::always_inline]] constexpr int codes_per_input() const { return 1 + (code >> 6 & 1); }
  // Inputs that share a scale; 0: all of them.
  [[gnu::always_inline]] constexpr int group() const { return code >> 8; }
  [[gnu::always_inline]] constexpr int offset() const { return zero() == Zero::none ? offset_of(kind()) : 0; }
  [[gnu::always_inline]] constexpr int scale_bytes() const {
    constexpr int bytes[] = {4, 2, 2, 1};
    return bytes[code >> 2 & 3] * kPanelColumns;
  }
  [[gnu::always_inline]] constexpr int zero_bytes() const {
    return zero() == Zero::none ? 0 : zero() == Zero::zeros ? 2 * kPanelColumns : scale_bytes();
  }
  [[gnu::always_inline]] constexpr int code_bytes(int depth) const {
    return depth * kPanelColumns / (kind() == Kind::int8 ? 1 : 2);
  }
};

// A group's scales, zero points or minimums, and factors, inside a block.
struct GroupTail {
  const std::uint8_t *scales, *zeros, *factors;
};

struct QuantizedWeight {
  std::uint8_t* panels;
  const std::int32_t* order;  // [inputs]: the input that a column of the codes is multiplied with; or null
  const float* bias;          // [panels * 32] in the panels' order, or null
  int outputs;                // of the plain weight
  int inputs;
  CodeFormat format;
  bool gated;

  [[gnu::always_inline]] constexpr PanelColumns columns() const { return {outputs, gated}; }
  // Inputs with what fills the last step and the last block.
  [[gnu::always_inline]] constexpr int depth() const {
    const int block = format.scales() == Scales::factors ? kFactorDepth : format.group();
    const int step = block > kStepDepth ? block : kStepDepth;
    return (inputs + step - 1) / step * step;
  }
  [[gnu::always_inline]] constexpr int group_depth() const { return format.group() ? format.group() : depth(); }
  [[gnu::always_inline]] constexpr int unit_depth() const { return group_depth() < kStepDepth ? group_depth() : kStepDepth; }
  [[gnu::always_inline]] constexpr int block_depth() const {
    return format.scales() == Scales::factors ? kFactorDepth : group_depth();
  }
  [[gnu::always_inline]] constexpr int steps() const { return depth() / kStepDepth; }
  [[gnu::always_inline]] constexpr int num_groups() const { return depth() / group_depth(); }
  [[gnu::always_inline]] constexpr int groups_per_block() const { return block_depth() / group_depth(); }
  // Groups whose scales stand beside each other; with factors a block has an even number of them.
  [[gnu::always_inline]] constexpr int groups_together() const { return format.scales() == Scales::factors ? 2 : 1; }
  // Codes of these groups, and all that they have.
  [[gnu::always_inline]] constexpr int codes_together() const { return format.code_bytes(groups_together() * group_depth()); }
  [[gnu::always_inline]] constexpr int bytes_together() const {
    return codes_together() + groups_together() * (format.scale_bytes() + format.zero_bytes());
  }
  [[gnu::always_inline]] constexpr std::int64_t block_bytes() const {
    const int of_factors = 2 * kPanelColumns * (format.zero() == Zero::minimums ? 2 : 1);
    return groups_per_block() / groups_together() * static_cast<std::int64_t>(bytes_together()) +
           (format.scales() == Scales::factors ? of_factors : 0);
  }
  [[gnu::always_inline]] constexpr std::int64_t panel_bytes() const { return depth() / block_depth() * block_bytes(); }
  // The codes of a group of a block, and what stands behind them.
  [[gnu::always_inline]] constexpr const std::uint8_t* codes(const std::uint8_t* block, int group) const {
    return block + group / groups_together() * bytes_together() +
           format.code_bytes(group % groups_together() * group_depth());
  }
  [[gnu::always_inline]] constexpr GroupTail tail(const std::uint8_t* block, int group) const {
    const int place = group % groups_together();
    const std::uint8_t* scales = block + group / groups_together() * bytes_together() + codes_together();
    const std::uint8_t* zeros = scales + groups_together() * format.scale_bytes();
    return {scales + place * format.scale_bytes(), zeros + place * format.zero_bytes(),
            block + groups_per_block() / groups_together() * bytes_together()};
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
  std::int8_t* codes;      // [code rows, depth]
  float* row_scales;       // [rows]; NaN for a row that is not finite
  std::int32_t* row_sums;  // [code rows, groups]: what the codes of a group add up to

  // Rows of codes: of 16-bit activations two for each row, the higher parts first.
  [[gnu::always_inline]] constexpr std::int64_t code_rows() const {
    return static_cast<std::int64_t>(rows) * weight.format.codes_per_input();
  }
  // Sums that a row needs for a panel: floats, and integers of a group and of a block.
  [[gnu::always_inline]] constexpr int sums_per_row() const { return 3 * kPanelColumns * weight.format.codes_per_input(); }
};

struct QuantizedKernels {
  RowBlocks (*blocks)(const QuantizedLinear&);
  void (*quantize)(const QuantizedLinear&, int block);
  // Blocks [first_block, last_block) times panels [first_panel, last_panel). `sums` has room for `sums_per_row` floats
  // per row of these blocks.
  void (*multiply)(const QuantizedLinear&, float* sums, int first_block, int last_block, int first_panel, int last_panel);
  // Quantises a plain weight [outputs, inputs] of `type`, whose rows lie `stride` elements apart, into a panel: 8 bits
  // with one float32 scale, or 4 bits with bfloat16 scales of groups of 64 or 128. Returns a row of it with a value that
  // is not finite, or -1.
  int (*pack)(const QuantizedWeight&, const void* plain, std::int64_t stride, Type type, int panel);
  // Rows of the plain weight into out [count, inputs] of `type`, by numbers that are in range.
  void (*rows)(const QuantizedWeight&, const std::int64_t* ids, void* out, Type type, int first, int last);
};

const QuantizedKernels& quantized_kernels(Level level);

}  // namespace octavo
