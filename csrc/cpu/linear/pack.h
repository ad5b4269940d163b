// Weights into panels, and rows out of them.
#pragma once

#include <cstring>

#include "../vector.h"
#include "linear.h"

namespace octavo {
namespace {

constexpr int kTileBytes16 = 1024;
constexpr int kPairs = 16;  // of inputs in a step

// 16 columns by 32 inputs, as 16 lines of pairs; `from` has a row of the plain weight per column, or null.
inline void pack_tile(const bf16* const* from, int first_input, int count, char* tile) {
  for (int column = 0; column < kTileColumns; ++column) {
    alignas(64) bf16 values[2 * kPairs] = {};
    if (from[column]) std::memcpy(values, from[column] + first_input, count * sizeof(bf16));
    for (int pair = 0; pair < kPairs; ++pair) std::memcpy(tile + pair * 64 + column * 4, values + 2 * pair, 4);
  }
}

inline void pack_panel(const LinearWeight& weight, const bf16* const* from, char* panel) {
  for (int step = 0; step < weight.steps(); ++step) {
    const int input = step * 2 * kPairs, left = weight.inputs - input;
    for (int half = 0; half < 2; ++half, panel += kTileBytes16)
      pack_tile(from + half * kTileColumns, input, left < 2 * kPairs ? left : 2 * kPairs, panel);
  }
}

inline void pack_panel(const LinearWeight& weight, const float* const* from, char* panel) {
  constexpr int kTogether = 16;  // lines of the panel: one line of each row
  float* to = reinterpret_cast<float*>(panel);
  for (int first = 0; first < weight.inputs; first += kTogether) {
    const int last = first + kTogether < weight.inputs ? first + kTogether : weight.inputs;
    for (int column = 0; column < kPanelColumns; ++column)
      for (int input = first; input < last; ++input)
        to[input * kPanelColumns + column] = from[column] ? from[column][input] : 0.0f;
  }
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
