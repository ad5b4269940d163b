// Products by tiles: 32 rows by a panel at a time, in steps of 32 inputs, for any number of rows.
//
// A product of tiles adds 32 inputs to each of its sums, which stay in the tiles from the first input to the last, so a
// row's bits do not depend on other rows.
#pragma once

#include "../tiled_pairs.h"
#include "epilogue.h"

namespace octavo {
namespace {

constexpr int kStepInputs = 32;
constexpr int kDeepSteps = 32;  // of inputs that rows of a group have in the cache at once
constexpr int kKeptSums = 64;   // pairs of blocks by panels whose sums are kept

inline RowBlocks tile_blocks(const LinearProduct& a) { return {a.rows, kTileRows, false}; }

inline std::int64_t tile_row_bytes(const LinearProduct& a) {
  const bool serves = a.rows == 1 && a.weight.inputs == a.weight.padded_inputs();
  return serves ? 0 : static_cast<std::int64_t>(a.weight.steps()) * kTileRowBytes;
}

// Steps of inputs that are taken at once: where there are many, parts of one length.
inline int tile_depth(const LinearWeight& weight) {
  const int steps = weight.steps(), parts = (steps + kDeepSteps - 1) / kDeepSteps;
  return (steps + parts - 1) / parts;
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

// One task: pairs of blocks by panels.
class TiledLinear {
 public:
  TiledLinear(const LinearProduct& a, const void* activations, int first_block, int last_block)
      : a_(a), blocks_(tile_blocks(a)), rows_(static_cast<const char*>(activations ? activations : a.x)),
        steps_(a.weight.steps()), first_block_(first_block), last_block_(last_block),
        pairs_((last_block - first_block + 1) / 2), keeps_(2 * pairs_ <= kKeptSums),
        depth_(pairs_ > 1 && keeps_ ? tile_depth(a.weight) : steps_), streams_(keeps_ && can_stream(a)) {}

  // Many inputs are processed part by part, so that those of all rows stay in the cache; the sums of some panels are
  // kept meanwhile.
  void multiply(int first_panel, int last_panel) {
    const int width = depth_ == steps_ ? 2 : kKeptSums / pairs_ / 2 * 2;
    for (begin_ = first_panel; begin_ < last_panel; begin_ = end_) {
      end_ = begin_ + (begin_ % 2 ? 1 : width);
      if (end_ > last_panel) end_ = last_panel;
      const char* following = end_ < last_panel ? weights_at(end_, 0) : nullptr;
      for (int step = 0; step < steps_; step += depth_)
        multiply_part(step, depth_ < steps_ - step ? depth_ : steps_ - step, following);
      stream_some(0, 1);
      left_.rows = 0;
    }
    if (streams_) _mm_sfence();
  }

 private:
  // Inputs of some steps of the panels [begin_, end_). following: the weights that are read behind the last ones of these.
  void multiply_part(int step, int count, const char* following) {
    for (int panel = begin_; panel < end_; ++panel) {
      const char* weight = weights_at(panel, step);
      const char* next = panel + 1 < end_ ? weights_at(panel + 1, step)
                         : step + count < steps_ ? weights_at(begin_, step + count) : following ? following : weight;
      for (int pair = 0; pair < pairs_; ++pair)
        multiply_pair(pair, panel, step, count, Ahead::of(weight, count, kStepBytes, next - weight, pair, pairs_, is_first_));
      is_first_ = false;
    }
  }

  void multiply_pair(int pair, int panel, int step, int count, const Ahead& ahead) {
    const int block = first_block_ + 2 * pair, start = blocks_.start(block), top = blocks_.size(block);
    const int bottom = block + 1 < last_block_ ? blocks_.size(block + 1) : 0;
    if (top != top_rows_ || bottom != bottom_rows_) tiles_.configure(TileShapes::two_by_two(top, bottom));
    top_rows_ = top, bottom_rows_ = bottom;
    const char* from = rows_ + static_cast<std::int64_t>(start) * steps_ * kTileRowBytes;
    const char* below = from + static_cast<std::int64_t>(top) * steps_ * kTileRowBytes;
    const BlockPair both{from + step * top * kTileRowBytes, below + step * bottom * kTileRowBytes, top, bottom};
    const auto beside = [&](int done) {
      ahead(done);
      if (left_.rows) stream_some(done, count);
    };
    using Beside = decltype(beside);
    const auto add = bottom ? add_steps<Bfloat16Dot, true, false, float, Beside>
                            : add_steps<Bfloat16Dot, false, false, float, Beside>;
    float* const sums = sums_at(pair, panel);
    add(tiles_, both, weights_at(panel, step), count, kTileBytes, step == 0, beside, sums);
    left_.rows = 0;
    if (step + count < steps_) return;
    const int other = panel ^ (a_.weight.gated ? 1 : 0);
    if (!streams_ || other < begin_ || other >= end_) return finish_rows(a_, start, top + bottom, panel, sums);
    if (other <= panel) left_ = {sums_at(pair, other), sums, a_.weight.gated ? panel / 2 : panel, start, top + bottom};
  }

  // Part `part` of `parts` of the rows of the previous pair, so that vectors work while tiles multiply.
  void stream_some(int part, int parts) const {
    const int most = (left_.rows + parts - 1) / parts, first = part * most, rest = left_.rows - first;
    if (rest <= 0) return;
    const float *low = left_.low + first * kPanelColumns, *high = left_.high + first * kPanelColumns;
    using Scale = decltype(kUnscaled);
    const auto stream = a_.weight.gated ? stream_rows<true, LinearProduct, Scale> : stream_rows<false, LinearProduct, Scale>;
    stream(a_, left_.line, left_.start + first, rest < most ? rest : most, low, high, kUnscaled);
  }

  const char* weights_at(int panel, int step) const {
    return static_cast<const char*>(a_.weight.panels) + panel * a_.weight.panel_bytes() + step * kStepBytes;
  }

  float* sums_at(int pair, int panel) {
    return sums_[streams_ || depth_ < steps_ ? (panel - begin_) * pairs_ + pair : 0];
  }

  // A pair of blocks whose sums are not yet stored as lines of the result.
  struct Left {
    const float *low, *high;
    int line, start, rows;
  };

  const LinearProduct& a_;
  const RowBlocks blocks_;
  const char* const rows_;
  const int steps_, first_block_, last_block_, pairs_;
  const bool keeps_;  // whether there is room for the sums of two panels
  const int depth_;
  const bool streams_;
  Tiles tiles_ = Tiles(TileShapes::full());
  int top_rows_ = 0, bottom_rows_ = -1, begin_ = 0, end_ = 0;
  bool is_first_ = true;
  Left left_ = {nullptr, nullptr, 0, 0, 0};
  alignas(64) float sums_[kKeptSums][2 * kTileRows * kPanelColumns];
};

inline void multiply_tiles(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
                           int last_panel) {
  TiledLinear(a, activations, first_block, last_block).multiply(first_panel, last_panel);
}

}  // namespace
}  // namespace octavo
