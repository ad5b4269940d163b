// What becomes of the sums of rows in one panel.
#pragma once

#include "../epilogue.h"
#include "linear.h"

namespace octavo {
namespace {

// `sums` is [rows][32].
inline void finish_rows(const LinearProduct& a, int start, int rows, int panel, const float* sums) {
  finish_rows(a, panel, start, rows, sums, [](int, Floats sum) { return sum; });
}

}  // namespace
}  // namespace octavo
