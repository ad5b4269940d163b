// What becomes of a row's sums in one panel: bias, addend, SiLU of the gate times up, one rounding.
#pragma once

#include "../vector.h"
#include "linear.h"

namespace octavo {
namespace {

// `sums` is [rows][32].
template <class Out, bool kHasAddend>
void finish_rows_as(const LinearProduct& a, int start, int rows, int panel, const float* sums) {
  const PanelColumns columns = a.weight.columns();
  const float* bias = a.weight.bias ? a.weight.bias + panel * kPanelColumns : nullptr;
  const int first = panel * columns.results_per_panel(), count = columns.results_per_panel(), all = columns.results() - first;
  Out* out = static_cast<Out*>(a.out) + start * a.out_stride + first;
  for (int row = 0; row < rows; ++row, sums += kPanelColumns, out += a.out_stride)
    for (int i = 0; i < count && i < all; i += kLanes) {
      const int left = all - i;
      const auto value_at = [&](int column) {
        const Floats value = bias ? add(load(sums + column), load(bias + column)) : load(sums + column);
        if constexpr (!kHasAddend) return value;
        const float* addend = a.addend.at(columns, start + row, panel, column);
        return add(value, left >= kLanes ? load(addend) : load_some(addend, left));
      };
      const Floats value = a.weight.gated ? mul(silu(value_at(i)), value_at(kTileColumns + i)) : value_at(i);
      if (left >= kLanes) {
        store(out + i, value);
      } else {
        store_some(out + i, value, left);
      }
    }
}

inline void finish_rows(const LinearProduct& a, int start, int rows, int panel, const float* sums) {
  const bool is_single = a.out_type == Type::float32;
  const auto finish = a.addend.values ? is_single ? finish_rows_as<float, true> : finish_rows_as<bf16, true>
                                      : is_single ? finish_rows_as<float, false> : finish_rows_as<bf16, false>;
  finish(a, start, rows, panel, sums);
}

}  // namespace
}  // namespace octavo
