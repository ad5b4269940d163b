// What becomes of a row's sums in one panel: bias, SiLU of the gate times up, one rounding.
#pragma once

#include "../vector.h"
#include "linear.h"

namespace octavo {
namespace {


template <class Out>
void finish_row(const LinearProduct& a, int row, int panel, const float* sums) {
  const PanelColumns columns = a.weight.columns();
  const float* bias = a.weight.bias ? a.weight.bias + panel * kPanelColumns : nullptr;
  const int first = panel * columns.answers_per_panel();
  const auto biased = [&](int i) { return bias ? add(load(sums + i), load(bias + i)) : load(sums + i); };
  Out* out = static_cast<Out*>(a.out) + row * a.out_stride + first;
  for (int i = 0; i < columns.answers_per_panel(); i += kLanes) {
    const Floats value = a.weight.gated ? mul(silu(biased(i)), biased(kTileColumns + i)) : biased(i);
    const int left = columns.answers() - first - i;
    if (left >= kLanes) {
      store(out + i, value);
    } else if (left > 0) {
      store_some(out + i, value, left);
    }
  }
}

// `sums` is [rows][32].
inline void finish_rows(const LinearProduct& a, int start, int rows, int panel, const float* sums) {
  for (int row = 0; row < rows; ++row, sums += kPanelColumns) {
    a.out_type == Type::float32 ? finish_row<float>(a, start + row, panel, sums)
                                : finish_row<bf16>(a, start + row, panel, sums);
  }
}

}  // namespace
}  // namespace octavo
