// What becomes of sums: scales, bias, SiLU of the gate times up, one rounding.
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

template <class Sum, class Out>
void write_row(const QuantizedLinear& a, int panel, int row, const Sum* sums) {
  const QuantizedWeight& weight = a.weight;
  const PanelColumns columns = weight.columns();
  const int first_column = panel * columns.answers_per_panel(), column = panel * kPanelColumns;
  const Floats row_scale = all(a.row_scales[row]);
  Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first_column;
  for (int i = 0; i < columns.answers_per_panel(); i += kLanes) {
    Floats value = value_at(weight, sums, column, i, row_scale);
    if (weight.gated) value = mul(silu(value), value_at(weight, sums, column, kTileColumns + i, row_scale));
    const int left = columns.answers() - first_column - i;
    if (left >= kLanes) {
      store(out + i, value);
    } else if (left > 0) {
      store_some(out + i, value, left);
    }
  }
}

// Rows [start, start + rows) of the answer in one panel's columns; sums is [rows][32].
template <class Sum>
void write_rows(const QuantizedLinear& a, int panel, int start, int rows, const Sum* sums) {
  for (int row = 0; row < rows; ++row) {
    if (a.out_type == Type::float32) {
      write_row<Sum, float>(a, panel, start + row, sums + row * kPanelColumns);
    } else {
      write_row<Sum, bf16>(a, panel, start + row, sums + row * kPanelColumns);
    }
  }
}

}  // namespace
}  // namespace octavo
