// Products by tiles: up to 32 rows, in two blocks, by a panel of weights, whatever the elements are.
//
// Included only by units of the two levels with tiles.
#pragma once

#include <immintrin.h>

#include "panels.h"
#include "tiles.h"

namespace octavo {
namespace {

constexpr int kStreamAhead = 4096;  // bytes between a line of weights that is used and one that is prefetched

// Lines of weights that are prefetched in each step of a pair. Null for none.
struct Ahead {
  const char* from;
  int lines;

  void operator()(int step) const {
    if (!from) return;
    const char* line = from + static_cast<std::int64_t>(step) * lines * 64;
    for (int i = 0; i < lines; ++i) _mm_prefetch(line + i * 64, _MM_HINT_T1);
  }

  // Of pair `pair` of `pairs`, in `steps` steps of `step_bytes` from `weight` on. The pair that reads a panel from memory
  // prefetches a little ahead of itself; the others prefetch their shares of the next panel, `next` bytes away, so that
  // memory is read as long as something is multiplied. `next` is 0 for the last panel.
  static Ahead of(const void* weight, int steps, int step_bytes, std::int64_t next, int pair, int pairs, bool is_first) {
    const char* from = static_cast<const char*>(weight);
    if (pairs == 1 || (is_first && pair == 0)) return {from + kStreamAhead, step_bytes / 64};
    const int lines = (step_bytes / 64 + pairs - 1) / pairs;
    const std::int64_t done = static_cast<std::int64_t>(pair) * steps * lines * 64;
    return {next && done < static_cast<std::int64_t>(steps) * step_bytes ? from + next + done : nullptr, lines};
  }
};

// Two blocks of rows, of which the second may be empty; each lies step by step, the rows of a step side by side.
struct BlockPair {
  const char* top;  // at the first step
  const char* bottom;
  int top_rows;
  int bottom_rows;
};

// sums [rows][32] = or += rows · weights over some steps, each two tiles of `tile_bytes`. Tiles as in TileShapes::two_by_two.
// kIsNear: weights are in the first-level cache. `beside(step)` is called with each step.
template <class Dot, bool kHasBottom, bool kIsNear, class Sum, class Beside>
void add_steps(Tiles& tiles, const BlockPair& pair, const void* weights, int steps, int tile_bytes, bool is_first,
               const Beside& beside, Sum* sums) {
  constexpr int kSumsStride = kPanelColumns * sizeof(Sum);
  Sum* bottom_sums = sums + pair.top_rows * kPanelColumns;
  if (is_first) {
    tiles.clear<0>(), tiles.clear<1>();
    if constexpr (kHasBottom) tiles.clear<2>(), tiles.clear<3>();
  } else {
    tiles.load<0>(sums, kSumsStride), tiles.load<1>(sums + kTileColumns, kSumsStride);
    if constexpr (kHasBottom)
      tiles.load<2>(bottom_sums, kSumsStride), tiles.load<3>(bottom_sums + kTileColumns, kSumsStride);
  }
  const char* weight = static_cast<const char*>(weights);
  for (int step = 0; step < steps; ++step, weight += 2 * tile_bytes) {
    beside(step);
    kIsNear ? tiles.load<6>(weight) : tiles.load_past<6>(weight);
    tiles.load_past<4>(pair.top + static_cast<std::int64_t>(step) * pair.top_rows * kTileRowBytes);
    Dot::template add<0, 4, 6>(tiles);
    kIsNear ? tiles.load<7>(weight + tile_bytes) : tiles.load_past<7>(weight + tile_bytes);
    Dot::template add<1, 4, 7>(tiles);
    if constexpr (kHasBottom) {
      tiles.load_past<5>(pair.bottom + static_cast<std::int64_t>(step) * pair.bottom_rows * kTileRowBytes);
      Dot::template add<2, 5, 6>(tiles);
      Dot::template add<3, 5, 7>(tiles);
    }
  }
  tiles.store<0>(sums, kSumsStride), tiles.store<1>(sums + kTileColumns, kSumsStride);
  if constexpr (kHasBottom)
    tiles.store<2>(bottom_sums, kSumsStride), tiles.store<3>(bottom_sums + kTileColumns, kSumsStride);
}

}  // namespace
}  // namespace octavo
