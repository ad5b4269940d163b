// What becomes of sums: scales, bias, addend, SiLU of the gate times up, one rounding.
#pragma once

#include "../vector.h"
#include "quantized.h"

namespace octavo {
namespace {

inline Floats load_as_floats(const float* p) { return load(p); }
inline Floats load_as_floats(const std::int32_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_loadu_si512(p));
#else
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#endif
}

// One vector of a row's values: sum · scale of the row · scale of the column + bias.
template <class Sum>
Floats value_at(const QuantizedWeight& weight, const Sum* sums, int column, int in_panel, Floats row_scale) {
  Floats value = mul(load_as_floats(sums + in_panel), row_scale);
  if (weight.scales) value = mul(value, load(weight.scales + column + in_panel));
  return weight.bias ? add(value, load(weight.bias + column + in_panel)) : value;
}

template <class Sum, class Out, bool kHasAddend>
void write_row(const QuantizedLinear& a, int panel, int row, const Sum* sums) {
  const QuantizedWeight& weight = a.weight;
  const PanelColumns columns = weight.columns();
  const int first_column = panel * columns.results_per_panel(), column = panel * kPanelColumns;
  const Floats row_scale = all(a.row_scales[row]);
  Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first_column;
  for (int i = 0; i < columns.results_per_panel(); i += kLanes) {
    const int left = columns.results() - first_column - i;
    if (left <= 0) break;
    const auto finished_at = [&](int in_panel) {
      const Floats value = value_at(weight, sums, column, in_panel, row_scale);
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

// Rows [start, start + rows) of the result in one panel's columns; sums is [rows][32].
template <class Sum>
void write_rows(const QuantizedLinear& a, int panel, int start, int rows, const Sum* sums) {
  const bool is_single = a.out_type == Type::float32;
  const auto write = a.addend.values ? is_single ? write_row<Sum, float, true> : write_row<Sum, bf16, true>
                                     : is_single ? write_row<Sum, float, false> : write_row<Sum, bf16, false>;
  for (int row = 0; row < rows; ++row) write(a, panel, start + row, sums + row * kPanelColumns);
}

}  // namespace
}  // namespace octavo
