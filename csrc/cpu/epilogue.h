// What becomes of a panel's sums, whatever was multiplied: a scale, bias, addend, SiLU of the gate times up, one rounding.
//
// Included only by units of one level. A product has `weight` (columns, bias, gated), `out`, `out_stride`, `out_type` and
// `addend`.
#pragma once

#include "panels.h"
#include "types.h"
#include "vector.h"

namespace octavo {
namespace {

template <class Out, bool kHasAddend, class Product, class Scale>
void finish_rows_as(const Product& a, int panel, int start, int rows, const float* sums, const Scale& scaled) {
  const PanelColumns columns = a.weight.columns();
  const int count = columns.results_per_panel(), first = panel * count, all_left = columns.results() - first;
  const float* bias = a.weight.bias ? a.weight.bias + panel * kPanelColumns : nullptr;
  Out* out = static_cast<Out*>(a.out) + start * a.out_stride + first;
  for (int row = start; row < start + rows; ++row, sums += kPanelColumns, out += a.out_stride)
    for (int i = 0; i < count && i < all_left; i += kLanes) {
      const int left = all_left - i;
      const auto value_at = [&](int column) {
        const Floats sum = scaled(row, load(sums + column)), value = bias ? add(sum, load(bias + column)) : sum;
        if constexpr (!kHasAddend) return value;
        const float* addend = a.addend.at(columns, row, panel, column);
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

// Rows [start, start + rows) of the result in one panel's columns. `sums` is [rows][32]; `scaled(row, sum)` is what is
// finished of them.
template <class Product, class Scale>
void finish_rows(const Product& a, int panel, int start, int rows, const float* sums, const Scale& scaled) {
  const bool is_single = a.out_type == Type::float32;
  const auto finish = a.addend.values ? is_single ? finish_rows_as<float, true, Product, Scale> : finish_rows_as<bf16, true, Product, Scale>
                                      : is_single ? finish_rows_as<float, false, Product, Scale> : finish_rows_as<bf16, false, Product, Scale>;
  finish(a, panel, start, rows, sums, scaled);
}

}  // namespace
}  // namespace octavo
