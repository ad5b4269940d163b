// From plain weights to panels, and from panels back to rows.
//
// Included only by units of one level. Every level makes the same bytes.
#pragma once

#include "sums.h"

namespace octavo {
namespace {

// A group's scale is its extreme value divided by minus one of these, rounded to bfloat16; the one with the least squared
// error is kept. 8 maps the extreme value to the lowest code, -8; larger ones clip it.
constexpr float kDivisors[] = {8.0f, 7.5f, 8.5f, 9.0f, 10.0f};
constexpr int kMostGroup = 128;

inline const float* row_at(const void* plain, std::int64_t stride, int row, float) {
  return static_cast<const float*>(plain) + row * stride;
}
inline const bf16* row_at(const void* plain, std::int64_t stride, int row, bf16) {
  return static_cast<const bf16*>(plain) + row * stride;
}

// Lanes in the order of 16, whatever the width of a vector.
constexpr int kParts16 = 16 / kLanes;

inline float sum_of_16(const Floats* parts) {
  return sum_of(kParts16 == 2 ? add(parts[0], parts[kParts16 - 1]) : parts[0]);
}

inline Floats code_of(Floats x, Floats inverse) {
  return maximum(all(-8.0f), minimum(all(7.0f), round_even(mul(x, inverse))));
}

// Σ (code · scale - x)² over `count` values, a multiple of 16.
inline float squared_error(const float* x, int count, float scale) {
  const Floats inverse = all(1.0f / scale);
  Floats errors[kParts16];
  for (Floats& each : errors) each = zero();
  for (int i = 0; i < count; i += 16)
    for (int part = 0; part < kParts16; ++part) {
      const Floats value = load(x + i + part * kLanes);
      const Floats error = sub(mul(code_of(value, inverse), all(scale)), value);
      errors[part] = add(errors[part], mul(error, error));
    }
  return sum_of_16(errors);
}

// The codes of a group in [0, 15], and their scale; `most` and `least` are the group's extremes.
inline bf16 quantize_group(const float* x, int count, float most, float least, std::uint8_t* codes) {
  const float extreme = most >= -least ? most : least;
  if ((extreme < 0 ? -extreme : extreme) < kSmallest) {
    std::memset(codes, 8, count);
    return 0;
  }
  bf16 best = 0;
  float least_error = 0;
  for (const float divisor : kDivisors) {
    const bf16 scale = to_bf16(extreme / -divisor);
    const float error = squared_error(x, count, to_float(scale));
    if (best == 0 || error < least_error) {
      best = scale;
      least_error = error;
    }
  }
  const Floats inverse = all(1.0f / to_float(best));
  alignas(64) float shifted[kLanes];
  for (int i = 0; i < count; i += kLanes) {
    store(shifted, add(code_of(load(x + i), inverse), all(8.0f)));
    for (int lane = 0; lane < kLanes; ++lane) codes[i + lane] = static_cast<std::uint8_t>(shifted[lane]);
  }
  return best;
}

// Writes 64 bytes along K of one column into a step's tile.
inline void place_column(std::uint8_t* tile, int lane, const std::uint8_t* bytes) {
  for (int quad = 0; quad < kStepDepth / 4; ++quad) std::memcpy(tile + quad * 64 + lane * 4, bytes + quad * 4, 4);
}

// Returns whether the row is finite.
template <class Element>
bool pack_column_int8(const QuantizedWeight& weight, const Element* x, std::uint8_t* panel, int column) {
  const std::int32_t bits = x ? largest_bits(x, weight.inputs) : 0;
  const float largest = from_bits(bits);
  const bool is_finite = bits < kInfinityBits, is_zero = !is_finite || largest < kSmallest;
  alignas(64) std::uint8_t bytes[kStepDepth];
  std::memset(bytes, 128, sizeof bytes);
  const float scale = is_zero ? 0.0f : largest / 127.0f;
  std::memcpy(panel + weight.format.code_bytes(weight.depth()) + column * 4, &scale, 4);
  for (int step = 0; step < weight.steps(); ++step, panel += kStepDepth * kPanelColumns) {
    if (!is_zero) {
      std::int8_t codes[kStepDepth];
      quantize_step(x + step * kStepDepth, weight.inputs - step * kStepDepth, 127.0f / largest, codes);
      for (int i = 0; i < kStepDepth; ++i) bytes[i] = static_cast<std::uint8_t>(codes[i] ^ 0x80);
    }
    place_column(panel + column / 16 * 1024, column % 16, bytes);
  }
  return is_finite;
}

// One group of a row as float32, zeros after its end; returns whether all is finite.
template <class Element>
bool load_group(const Element* x, int count, int group, float* values, float* most, float* least) {
  Floats highest = zero(), lowest = zero();
  for (int i = 0; i < group; i += kLanes) {
    const int left = count - i;
    const Floats value = left >= kLanes ? load(x + i) : left > 0 ? load_some(x + i, left) : zero();
    store(values + i, value);
    highest = maximum(highest, value);
    lowest = minimum(lowest, value);
  }
  *most = maximum_of(highest);
  *least = -maximum_of(sub(zero(), lowest));
  return count <= 0 || largest_bits(x, count < group ? count : group) < kInfinityBits;
}

// Two columns, which share bytes: `low` and `high` are rows of the plain weight or null.
template <class Element>
bool pack_columns_int4(const QuantizedWeight& weight, const Element* low, const Element* high, std::uint8_t* panel,
                       int lane) {
  alignas(64) float values[kMostGroup];
  alignas(64) std::uint8_t codes[2][kMostGroup];
  bool is_finite = true;
  const int group = weight.group_depth();
  for (int g = 0; g < weight.num_groups(); ++g, panel += weight.block_bytes()) {
    std::uint8_t* scales = panel + weight.format.code_bytes(group);
    for (int half = 0; half < 2; ++half) {
      const Element* x = half ? high : low;
      float most, least;
      const int done = g * group;
      const bool usable = x && load_group(x + done, weight.inputs - done, group, values, &most, &least);
      is_finite = is_finite && (usable || !x);
      bf16 scale = 0;
      if (usable) {
        scale = quantize_group(values, group, most, least, codes[half]);
      } else {
        std::memset(codes[half], 8, group);
      }
      std::memcpy(scales + (half * 16 + lane) * 2, &scale, 2);
    }
    for (int i = 0; i < group; ++i) codes[0][i] = static_cast<std::uint8_t>(codes[0][i] | codes[1][i] << 4);
    for (int step = 0; step < group / kStepDepth; ++step)
      place_column(panel + step * 1024, lane, codes[0] + step * kStepDepth);
  }
  return is_finite;
}

template <class Element>
int pack_panel(const QuantizedWeight& weight, const void* plain, std::int64_t stride, int panel) {
  std::uint8_t* to = weight.panels + panel * weight.panel_bytes();
  const auto row = [&](int column) -> const Element* {
    const int index = weight.columns().row_of(panel, column);
    return index < 0 ? nullptr : row_at(plain, stride, index, Element());
  };
  int spoilt = -1;
  if (weight.format.group()) {
    for (int lane = 0; lane < 16; ++lane)
      if (!pack_columns_int4(weight, row(lane), row(16 + lane), to, lane)) {
        // one of the two, whichever it is
        const Element* first = row(lane);
        const bool is_first = first && largest_bits(first, weight.inputs) >= kInfinityBits;
        spoilt = weight.columns().row_of(panel, is_first ? lane : kTileColumns + lane);
      }
  } else {
    for (int column = 0; column < kPanelColumns; ++column)
      if (!pack_column_int8(weight, row(column), to, column)) spoilt = weight.columns().row_of(panel, column);
  }
  return spoilt;
}

inline int pack(const QuantizedWeight& weight, const void* plain, std::int64_t stride, Type type, int panel) {
  return type == Type::float32 ? pack_panel<float>(weight, plain, stride, panel)
                               : pack_panel<bf16>(weight, plain, stride, panel);
}

inline float round_to(float x, float) { return x; }
inline bf16 round_to(float x, bf16) { return to_bf16(x); }

template <class Number>
Number read(const std::uint8_t* from, int index) {
  Number number;
  std::memcpy(&number, from + index * sizeof(Number), sizeof(Number));
  return number;
}

// As load_scales, of one column.
inline float scale_at(Scales type, const std::uint8_t* from, const std::uint8_t* factors, int column) {
  switch (type) {
    case Scales::float32:
      return read<float>(from, column);
    case Scales::bfloat16:
      return to_float(read<bf16>(from, column));
    case Scales::float16:
      return _cvtsh_ss(read<std::uint16_t>(from, column));
    default:
      return static_cast<float>(read<std::int8_t>(from, column)) * _cvtsh_ss(read<std::uint16_t>(factors, column));
  }
}

template <class Element>
void unpack_row(const QuantizedWeight& weight, int row, Element* out) {
  constexpr std::int8_t kE2M1[] = {OCTAVO_E2M1_BYTES};
  const CodeFormat format = weight.format;
  const int place = weight.columns().place_of(row);
  const int column = place % kPanelColumns, half = column / kTileColumns, unit = weight.unit_depth();
  const std::uint8_t* block = weight.panels + place / kPanelColumns * weight.panel_bytes();
  float zero = 0, scale = 0, least = 0;
  for (int i = 0; i < weight.inputs; ++i) {
    const int in_block = i % weight.block_depth(), in_unit = i % unit;
    if (i && !in_block) block += weight.block_bytes();
    if (i % weight.group_depth() == 0) {
      const GroupTail tail = weight.tail(block, in_block / weight.group_depth());
      scale = scale_at(format.scales(), tail.scales, tail.factors, column);
      zero = static_cast<float>(format.offset());
      if (format.zero() == Zero::zeros) zero = read<std::int16_t>(tail.zeros, column);
      if (format.zero() == Zero::minimums)
        least = scale_at(format.scales(), tail.zeros, tail.factors + 2 * kPanelColumns, column);
    }
    const std::uint8_t* codes = weight.codes(block, in_block / weight.group_depth()) +
                                format.code_bytes(in_block % weight.group_depth() - in_unit);
    const int in_line = in_unit / 4 * 64 + column % kTileColumns * 4 + in_unit % 4;
    int code = codes[in_line + (format.kind() == Kind::int8 ? half * unit * kTileColumns : 0)];
    if (format.kind() != Kind::int8) code = half ? code >> 4 : code & 15;
    if (format.kind() == Kind::e2m1) code = kE2M1[code];
    out[weight.order ? weight.order[i] : i] = round_to((static_cast<float>(code) - zero) * scale - least, Element());
  }
}

inline void rows(const QuantizedWeight& weight, const std::int64_t* ids, void* out, Type type, int first, int last) {
  for (int i = first; i < last; ++i) {
    const int row = static_cast<int>(ids[i]);
    const std::int64_t at = static_cast<std::int64_t>(i) * weight.inputs;
    type == Type::float32 ? unpack_row(weight, row, static_cast<float*>(out) + at)
                          : unpack_row(weight, row, static_cast<bf16*>(out) + at);
  }
}

}  // namespace
}  // namespace octavo
