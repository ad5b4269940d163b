// What becomes of sums: scales, bias, addend, SiLU of the gate times up, one rounding.
#pragma once

#include "activations.h"

namespace octavo {
namespace {

// One row's values in a panel's columns: sum · scale of the row + bias.
template <class Out, bool kHasAddend>
void write_row(const QuantizedLinear& a, int panel, int row, const float* sums) {
  const QuantizedWeight& weight = a.weight;
  const PanelColumns columns = weight.columns();
  const int first_column = panel * columns.results_per_panel(), column = panel * kPanelColumns;
  const Floats row_scale = all(a.row_scales[row]);
  Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first_column;
  for (int i = 0; i < columns.results_per_panel(); i += kLanes) {
    const int left = columns.results() - first_column - i;
    if (left <= 0) break;
    const auto finished_at = [&](int in_panel) {
      Floats value = mul(load(sums + in_panel), row_scale);
      if (weight.bias) value = add(value, load(weight.bias + column + in_panel));
      if constexpr (!kHasAddend) return value;
      const float* addend = a.addend.at(columns, row, panel, in_panel);
      return add(value, left >= kLanes ? load(addend) : load_some(addend, left));
    };
    const Floats value = weight.gated ? mul(silu(finished_at(i)), finished_at(kTileColumns + i)) : finished_at(i);
    if (left >= kLanes) {
      store(out + i, value);
    } else {
      store_some(out + i, value, left);
    }
  }
}

// Rows [start, start + rows) of the result in one panel's columns; sums is [code rows][32], and is spoilt.
inline void write_rows(const QuantizedLinear& a, int panel, int start, int rows, float* sums) {
  if (a.weight.format.codes_per_input() == 2)
    for (int i = 0; i < rows * kPanelColumns; i += kLanes) {
      const float* high = sums + i / kPanelColumns * 2 * kPanelColumns + i % kPanelColumns;
      store(sums + i, add(mul(load(high), all(kHalfBase)), load(high + kPanelColumns)));
    }
  const bool is_single = a.out_type == Type::float32;
  const auto write = a.addend.values ? is_single ? write_row<float, true> : write_row<bf16, true>
                                     : is_single ? write_row<float, false> : write_row<bf16, false>;
  for (int row = 0; row < rows; ++row) write(a, panel, start + row, sums + row * kPanelColumns);
}

}  // namespace
}  // namespace octavo
