// From a panel's sums to the result, for every format: scale, bias, addend, SiLU of the gate times up, one rounding.
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

// Rows [start, start + rows) of the result in one panel's columns. `sums` is [rows][32]; `scaled(row, sum)` scales
// a sum.
template <class Product, class Scale>
void finish_rows(const Product& a, int panel, int start, int rows, const float* sums, const Scale& scaled) {
  const bool is_single = a.out_type == Type::float32;
  const auto finish = a.addend.values ? is_single ? finish_rows_as<float, true, Product, Scale> : finish_rows_as<bf16, true, Product, Scale>
                                      : is_single ? finish_rows_as<float, false, Product, Scale> : finish_rows_as<bf16, false, Product, Scale>;
  finish(a, panel, start, rows, sums, scaled);
}

#if defined(__AVX512BF16__)
constexpr std::int64_t kStreamedElements = 512 << 10;  // of a result from which on streaming stores are faster, as measured

// Whether rows can be written as whole lines by streaming stores: an ordinary store reads a line before it writes it, and
// large results do not fit the caches.
template <class Product>
bool can_stream(const Product& a) {
  const int results = a.weight.columns().results();
  const bool is_plain = a.out_type == Type::bfloat16 && !a.weight.bias && !a.addend.values;
  const bool has_lines = results % kPanelColumns == 0 && a.out_stride % kPanelColumns == 0 &&
                         reinterpret_cast<std::uintptr_t>(a.out) % 64 == 0;
  return is_plain && has_lines && static_cast<std::int64_t>(a.rows) * results >= kStreamedElements;
}

// Rows [start, start + rows) of line `line` of the result. `low` and `high` are the sums, [rows][32], of the panels whose
// columns it has: of two of a gated weight, else of one, which is `low`. To be followed by a fence.
template <bool kIsGated, class Product, class Scale>
void stream_rows(const Product& a, int line, int start, int rows, const float* low, const float* high, const Scale& scaled) {
  auto* out = static_cast<bf16*>(a.out) + start * a.out_stride + line * kPanelColumns;
  for (int row = start; row < start + rows; ++row, low += kPanelColumns, high += kPanelColumns, out += a.out_stride) {
    Floats first = scaled(row, load(low)), second = scaled(row, load(kIsGated ? high : low + kTileColumns));
    if constexpr (kIsGated) {
      first = mul(silu(first), scaled(row, load(low + kTileColumns)));
      second = mul(silu(second), scaled(row, load(high + kTileColumns)));
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(both));
  }
}
#endif

}  // namespace
}  // namespace octavo
