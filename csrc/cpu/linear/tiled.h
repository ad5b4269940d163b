// Products by tiles: 32 rows by a panel at a time, in steps of 32 inputs, for any number of rows.
//
// A product of tiles takes 32 inputs into each of its sums, which stay in the tiles from the first input to the last. So a
// row's bits do not depend on its neighbours.
#pragma once

#include "../tiled_pairs.h"
#include "epilogue.h"

namespace octavo {
namespace {

constexpr int kStepInputs = 32;

inline RowBlocks tile_blocks(const LinearProduct& a) { return {a.rows, kTileRows, false}; }

inline std::int64_t tile_row_bytes(const LinearProduct& a) {
  const bool serves = a.rows == 1 && a.weight.inputs == a.weight.padded_inputs();
  return serves ? 0 : static_cast<std::int64_t>(a.weight.steps()) * kTileRowBytes;
}

// A block is a tile of its rows per step, one after the other.
inline void arrange_tiles(const LinearProduct& a, void* activations, int block, int part, int parts) {
  const RowBlocks blocks = tile_blocks(a);
  const int steps = a.weight.steps(), start = blocks.start(block), rows = blocks.size(block);
  const auto first = static_cast<int>(static_cast<std::int64_t>(steps) * part / parts);
  const auto last = static_cast<int>(static_cast<std::int64_t>(steps) * (part + 1) / parts);
  const auto* from = static_cast<const std::uint16_t*>(a.x) + start * a.x_stride;
  char* to = static_cast<char*>(activations) + static_cast<std::int64_t>(start) * steps * kTileRowBytes;
  for (int step = first; step < last; ++step) {
    const int left = a.weight.inputs - step * kStepInputs;
    const __mmask32 inputs = left < kStepInputs ? (1u << left) - 1u : ~0u;
    char* line = to + static_cast<std::int64_t>(step) * rows * kTileRowBytes;
    for (int row = 0; row < rows; ++row, line += kTileRowBytes)
      _mm512_store_si512(line, _mm512_maskz_loadu_epi16(inputs, from + row * a.x_stride + step * kStepInputs));
  }
}

struct Bfloat16Dot {
  template <int kC, int kA, int kB>
  static void add(Tiles& tiles) {
    tiles.dot_bf16<kC, kA, kB>();
  }
};

inline void multiply_tiles(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
                           int last_panel) {
  const RowBlocks blocks = tile_blocks(a);
  const int steps = a.weight.steps(), pairs = (last_block - first_block + 1) / 2;
  const auto* rows = static_cast<const char*>(activations ? activations : a.x);
  alignas(64) float sums[2 * kTileRows * kPanelColumns];
  int top_rows = 0, bottom_rows = -1;
  Tiles tiles(TileShapes::full());
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const char* weight = static_cast<const char*>(a.weight.panels) + panel * a.weight.panel_bytes();
    for (int pair = 0; pair < pairs; ++pair) {
      const int block = first_block + 2 * pair;
      const bool has_bottom = block + 1 < last_block;
      const int start = blocks.start(block), top = blocks.size(block), bottom = has_bottom ? blocks.size(block + 1) : 0;
      if (top != top_rows || bottom != bottom_rows) tiles.configure(TileShapes::two_by_two(top, bottom));
      top_rows = top, bottom_rows = bottom;
      const char* from = rows + static_cast<std::int64_t>(start) * steps * kTileRowBytes;
      const BlockPair both{from, from + static_cast<std::int64_t>(top) * steps * kTileRowBytes, top, bottom};
      const std::int64_t next = panel + 1 < last_panel ? a.weight.panel_bytes() : 0;
      const Ahead ahead = Ahead::of(weight, steps, kStepBytes, next, pair, pairs, panel == first_panel);
      const auto add = has_bottom ? add_steps<Bfloat16Dot, true, false, float> : add_steps<Bfloat16Dot, false, false, float>;
      add(tiles, both, weight, steps, kTileBytes, true, ahead, sums);
      finish_rows(a, start, top + bottom, panel, sums);
    }
  }
}

}  // namespace
}  // namespace octavo
