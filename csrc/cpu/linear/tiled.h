// Products by tiles: 32 rows by a panel at a time, in steps of 32 inputs, for any number of rows.
//
// A product of tiles takes 32 inputs into each of its sums; sums that are stored between blocks of inputs keep their
// bits. So a row's bits depend neither on its neighbours nor on how inputs are blocked.
#pragma once

#include <cstring>

#include "../tiles.h"
#include "epilogue.h"

namespace octavo {
namespace {

constexpr int kStepInputs = 32;
// How far ahead weights are prefetched: where they are read once, and where rows go by, for the next turn.
constexpr int kStreamAhead = 4096, kTurnAhead = kStepsTogether * kStepBytes;

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
    const int bytes = left < kStepInputs ? left * 2 : kTileRowBytes;
    for (int row = 0; row < rows; ++row) {
      char* line = to + (static_cast<std::int64_t>(step) * rows + row) * kTileRowBytes;
      std::memcpy(line, from + row * a.x_stride + step * kStepInputs, bytes);
      std::memset(line + bytes, 0, kTileRowBytes - bytes);
    }
  }
}

inline void prefetch_step(const char* weight) {
  for (int line = 0; line < kStepBytes; line += 64) _mm_prefetch(weight + line, _MM_HINT_T1);
}

// Sums [rows][32] of up to two blocks, of which the second may be empty. Tiles as in TileShapes::two_by_two.
template <bool kHasBottom>
void add_steps(Tiles& tiles, const char* top, int top_rows, const char* bottom, int bottom_rows, const char* weight,
               int steps, bool is_first, int ahead, float* sums) {
  constexpr int kSumsStride = kPanelColumns * 4;
  float* bottom_sums = sums + top_rows * kPanelColumns;
  if (is_first) {
    tiles.clear<0>(), tiles.clear<1>();
    if constexpr (kHasBottom) tiles.clear<2>(), tiles.clear<3>();
  } else {
    tiles.load<0>(sums, kSumsStride), tiles.load<1>(sums + kTileColumns, kSumsStride);
    if constexpr (kHasBottom)
      tiles.load<2>(bottom_sums, kSumsStride), tiles.load<3>(bottom_sums + kTileColumns, kSumsStride);
  }
  for (int step = 0; step < steps; ++step, weight += kStepBytes) {
    if (ahead) prefetch_step(weight + ahead);
    tiles.load<6>(weight);
    tiles.load<4>(top + static_cast<std::int64_t>(step) * top_rows * kTileRowBytes);
    tiles.dot_bf16<0, 4, 6>();
    tiles.load<7>(weight + kTileBytes);
    tiles.dot_bf16<1, 4, 7>();
    if constexpr (kHasBottom) {
      tiles.load<5>(bottom + static_cast<std::int64_t>(step) * bottom_rows * kTileRowBytes);
      tiles.dot_bf16<2, 5, 6>();
      tiles.dot_bf16<3, 5, 7>();
    }
  }
  tiles.store<0>(sums, kSumsStride), tiles.store<1>(sums + kTileColumns, kSumsStride);
  if constexpr (kHasBottom)
    tiles.store<2>(bottom_sums, kSumsStride), tiles.store<3>(bottom_sums + kTileColumns, kSumsStride);
}

inline void multiply_tiles(const LinearProduct& a, const void* activations, float* sums, int first_block, int last_block,
                           int first_panel, int last_panel) {
  const RowBlocks blocks = tile_blocks(a);
  const int steps = a.weight.steps(), first_row = blocks.start(first_block);
  const auto* rows = static_cast<const char*>(activations ? activations : a.x);
  const auto row_at = [&](int row, int step, int in_block) {
    return rows + (static_cast<std::int64_t>(row) * steps + static_cast<std::int64_t>(step) * in_block) * kTileRowBytes;
  };
  // one pair of blocks keeps its sums in the tiles all the way
  const int together = last_block - first_block <= 2 ? steps : kStepsTogether;
  int top_rows = 0, bottom_rows = -1;
  Tiles tiles(TileShapes::full());
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const char* weight = static_cast<const char*>(a.weight.panels) + panel * a.weight.panel_bytes();
    for (int step = 0; step < steps; step += together) {
      const int count = steps - step < together ? steps - step : together;
      for (int block = first_block; block < last_block; block += 2) {
        const bool has_bottom = block + 1 < last_block;
        const int start = blocks.start(block), top = blocks.size(block), bottom = has_bottom ? blocks.size(block + 1) : 0;
        if (top != top_rows || bottom != bottom_rows) tiles.configure(TileShapes::two_by_two(top, bottom));
        top_rows = top, bottom_rows = bottom;
        const int ahead = together == steps ? kStreamAhead : block == first_block ? kTurnAhead : 0;
        const auto add = has_bottom ? add_steps<true> : add_steps<false>;
        add(tiles, row_at(start, step, top), top, row_at(start + top, step, bottom), bottom,
            weight + static_cast<std::int64_t>(step) * kStepBytes, count, step == 0, ahead,
            sums + (start - first_row) * kPanelColumns);
      }
    }
    finish_rows(a, first_row, blocks.start(last_block) - first_row, panel, sums);
  }
}

}  // namespace
}  // namespace octavo
