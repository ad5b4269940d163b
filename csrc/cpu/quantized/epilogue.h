// What becomes of the sums of rows in one panel: the halves of 16-bit codes meet, and each row has a scale.
#pragma once

#include "../epilogue.h"
#include "activations.h"

namespace octavo {
namespace {

// Rows [start, start + rows) of the result in one panel's columns; sums is [code rows][32], and is spoilt.
inline void write_rows(const QuantizedLinear& a, int panel, int start, int rows, float* sums) {
  if (a.weight.format.codes_per_input() == 2)
    for (int i = 0; i < rows * kPanelColumns; i += kLanes) {
      const float* high = sums + i / kPanelColumns * 2 * kPanelColumns + i % kPanelColumns;
      store(sums + i, add(mul(load(high), all(kHalfBase)), load(high + kPanelColumns)));
    }
  finish_rows(a, panel, start, rows, sums, [&a](int row, Floats sum) { return mul(sum, all(a.row_scales[row])); });
}

}  // namespace
}  // namespace octavo
