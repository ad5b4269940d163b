// Weights into panels, and rows out of them.
#pragma once

#include <cstring>

#include "../transpose.h"
#include "linear.h"

namespace octavo {
namespace {

constexpr int kTileBytes16 = 1024;
constexpr int kPairs = 16;  // of inputs in a step

// kLanes lanes of 32 bits of a row, zero beyond its last input; `row` may be null for a row of zeros.
template <class Element>
Floats lanes_of(const Element* row, int first_input, int inputs) {
  constexpr int kElements = kLanes * 4 / sizeof(Element);
  const int left = inputs - first_input;
  if (!row || left <= 0) return zero();
  if (left >= kElements) return load_bits(row + first_input);
  alignas(64) Element some[kElements] = {};
  std::memcpy(some, row + first_input, left * sizeof(Element));
  return load_bits(some);
}

// kLanes columns from kLanes lanes of their rows on: `lines` lines, `line_bytes` apart.
template <class Element>
void pack_square(const Element* const* from, int first_input, int inputs, char* to, int lines, int line_bytes) {
  Floats x[kLanes];
  for (int column = 0; column < kLanes; ++column) x[column] = lanes_of(from[column], first_input, inputs);
  transpose(x);
  for (int line = 0; line < lines; ++line) store(reinterpret_cast<float*>(to + line * line_bytes), x[line]);
}

inline void pack_panel(const LinearWeight& weight, const bf16* const* from, char* panel) {
  for (int step = 0; step < weight.steps(); ++step)
    for (int column = 0; column < kPanelColumns; column += kLanes)
      for (int pair = 0; pair < kPairs; pair += kLanes)
        pack_square(from + column, step * 2 * kPairs + 2 * pair, weight.inputs,
                    panel + step * 2 * kTileBytes16 + column / kTileColumns * kTileBytes16 + pair * 64 +
                        column % kTileColumns * 4,
                    kLanes, 64);
}

inline void pack_panel(const LinearWeight& weight, const float* const* from, char* panel) {
  constexpr int kLineBytes = kPanelColumns * 4;
  for (int input = 0; input < weight.inputs; input += kLanes)
    for (int column = 0; column < kPanelColumns; column += kLanes)
      pack_square(from + column, input, weight.inputs, panel + input * kLineBytes + column * 4,
                  weight.inputs - input < kLanes ? weight.inputs - input : kLanes, kLineBytes);
}

template <class Element>
void pack_panels(const LinearWeight& weight, const void* plain, std::int64_t stride, int first, int last) {
  for (int panel = first; panel < last; ++panel) {
    const Element* from[kPanelColumns];
    for (int column = 0; column < kPanelColumns; ++column) {
      const int row = weight.columns().row_of(panel, column);
      from[column] = row < 0 ? nullptr : static_cast<const Element*>(plain) + row * stride;
    }
    pack_panel(weight, from, static_cast<char*>(weight.panels) + panel * weight.panel_bytes());
  }
}

inline void pack(const LinearWeight& weight, const void* plain, std::int64_t stride, int first, int last) {
  weight.type == Type::float32 ? pack_panels<float>(weight, plain, stride, first, last)
                               : pack_panels<bf16>(weight, plain, stride, first, last);
}

inline void unpack_row(const LinearWeight& weight, const char* panel, int column, bf16* out) {
  panel += column / kTileColumns * kTileBytes16 + column % kTileColumns * 4;
  for (int input = 0; input < weight.inputs; input += 2) {
    const int pair = input / 2;
    std::memcpy(out + input, panel + pair / kPairs * 2 * kTileBytes16 + pair % kPairs * 64,
                (input + 1 < weight.inputs ? 2 : 1) * sizeof(bf16));
  }
}

inline void unpack_row(const LinearWeight& weight, const char* panel, int column, float* out) {
  const float* from = reinterpret_cast<const float*>(panel) + column;
  for (int input = 0; input < weight.inputs; ++input) out[input] = from[input * kPanelColumns];
}

template <class Element>
void unpack_rows(const LinearWeight& weight, const std::int64_t* ids, void* out, int first, int last) {
  for (int i = first; i < last; ++i) {
    const int place = weight.columns().place_of(static_cast<int>(ids[i]));
    const char* panel = static_cast<const char*>(weight.panels) + place / kPanelColumns * weight.panel_bytes();
    unpack_row(weight, panel, place % kPanelColumns,
               static_cast<Element*>(out) + static_cast<std::int64_t>(i) * weight.inputs);
  }
}

inline void rows(const LinearWeight& weight, const std::int64_t* ids, void* out, int first, int last) {
  weight.type == Type::float32 ? unpack_rows<float>(weight, ids, out, first, last)
                               : unpack_rows<bf16>(weight, ids, out, first, last);
}

}  // namespace
}  // namespace octavo
