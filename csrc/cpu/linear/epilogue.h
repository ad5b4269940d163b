// From the sums of rows in one panel to the result.
#pragma once

#include "../epilogue.h"
#include "linear.h"

namespace octavo {
namespace {

constexpr auto kUnscaled = [](int, Floats sum) { return sum; };

// `sums` is [rows][32].
inline void finish_rows(const LinearProduct& a, int start, int rows, int panel, const float* sums) {
  finish_rows(a, panel, start, rows, sums, kUnscaled);
}

}  // namespace
}  // namespace octavo
