// What becomes of sums: scales, bias, addend, SiLU of the gate times up, one rounding.
#pragma once

#include "activations.h"

namespace octavo {
namespace {

// Values of rows in a panel's columns: sum · scale of the row + bias. `sums` is [rows][32].
template <class Out, bool kHasAddend>
void write_rows_as(const QuantizedLinear& a, int panel, int start, int rows, const float* sums) {
  const QuantizedWeight& weight = a.weight;
  const PanelColumns columns = weight.columns();
  const int count = columns.results_per_panel(), first = panel * count, all_left = columns.results() - first;
  const float* bias = weight.bias ? weight.bias + panel * kPanelColumns : nullptr;
  Out* out = static_cast<Out*>(a.out) + start * a.out_stride + first;
  for (int row = start; row < start + rows; ++row, sums += kPanelColumns, out += a.out_stride) {
    const Floats row_scale = all(a.row_scales[row]);
    for (int i = 0; i < count && i < all_left; i += kLanes) {
      const int left = all_left - i;
      const auto finished_at = [&](int column) {
        Floats value = mul(load(sums + column), row_scale);
        if (bias) value = add(value, load(bias + column));
        if constexpr (!kHasAddend) return value;
        const float* addend = a.addend.at(columns, row, panel, column);
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
}

// Rows [start, start + rows) of the result in one panel's columns; sums is [code rows][32], and is spoilt.
inline void write_rows(const QuantizedLinear& a, int panel, int start, int rows, float* sums) {
  if (a.weight.format.codes_per_input() == 2)
    for (int i = 0; i < rows * kPanelColumns; i += kLanes) {
      const float* high = sums + i / kPanelColumns * 2 * kPanelColumns + i % kPanelColumns;
      store(sums + i, add(mul(load(high), all(kHalfBase)), load(high + kPanelColumns)));
    }
  const bool is_single = a.out_type == Type::float32;
  const auto write = a.addend.values ? is_single ? write_rows_as<float, true> : write_rows_as<bf16, true>
                                     : is_single ? write_rows_as<float, false> : write_rows_as<bf16, false>;
  write(a, panel, start, rows, sums);
}

}  // namespace
}  // namespace octavo
