// From the sums of rows in one panel to the result: adds the halves of 16-bit codes, and applies each row's scale.
#pragma once

#include "../epilogue.h"
#include "activations.h"

namespace octavo {
namespace {

// Rows [start, start + rows) of the result in one panel's columns; sums is [code rows][32], and is overwritten.
inline void write_rows(const QuantizedLinear& a, int panel, int start, int rows, float* sums,
                       [[maybe_unused]] bool streams = false) {
  if (a.weight.format.codes_per_input() == 2)
    for (int i = 0; i < rows * kPanelColumns; i += kLanes) {
      const float* high = sums + i / kPanelColumns * 2 * kPanelColumns + i % kPanelColumns;
      store(sums + i, add(mul(load(high), all(kHalfBase)), load(high + kPanelColumns)));
    }
  const auto scaled = [&a](int row, Floats sum) { return mul(sum, all(a.row_scales[row])); };
#if defined(__AVX512BF16__)
  if (streams) return stream_rows<false>(a, panel, start, rows, sums, sums, scaled);
#endif
  finish_rows(a, panel, start, rows, sums, scaled);
}

}  // namespace
}  // namespace octavo
