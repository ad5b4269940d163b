// Attention on tiles: while the scores of 32 rows become weights, in vectors, tiles compute the scores of the next rows and
// add the values of the last ones.
#pragma once

#include "reader.h"
#include "softmax.h"
#include "tile_products.h"

namespace octavo {
namespace {

struct TileProducts : Bfloat16Products {
  static constexpr bool kUsesTiles = true;
};

// Scratch of a task; all arrays are aligned to 64 bytes.
struct TileScratch {
  float* queries;            // [rows][units]
  float* scores[2];          // [32][chunk]; of a block of rows and of the next one
  float* weights[2];         // [32][chunk / 2]; of a block of rows and of the last one
  float* factors[2];         // [32]
  float* lane_sums;          // [rows][lanes]
  int* positions;            // [rows]
  ReaderScratch readers[2];  // of a chunk and of the last one
};

template <class R>
class TileAttention {
 public:
  TileAttention(const Attention& a, const AttentionItem& item, const AttentionPartial& partial, const TileScratch& scratch)
      : a_(a), rows_{a, item}, partial_(partial), scratch_(scratch) {
    const int rows = rows_.count(), dim = a.layout.padded_dim;
    alignas(64) float query[kMostDim + kLanes] = {};
    for (int r = 0; r < rows; ++r) {
      scratch.positions[r] = rows_.position(r);
      float* const units = scratch.queries + r * units_;
      if (dim % 32 != 0) std::memset(units + dim / 2, 0, 8 * sizeof(float));
      if (a.v && a.value_dim == dim) {  // they are stored as operands already
        std::memcpy(units, static_cast<const bf16*>(a.q) + rows_.place(r), dim * sizeof(bf16));
        continue;
      }
      rows_.load_query(r, query);
      R::Products::to_units(query, dim, units);
    }
    for (int r = 0; r < (rows + 15) / 16 * 16; ++r) partial.maxima[r] = kNothing;
    std::memset(partial.sums, 0, sizeof(float) * rows * dim_);
    std::memset(scratch.lane_sums, 0, sizeof(float) * rows * kLanes);
  }

  // Keys [start, end), start being the first of a chunk.
  void attend(int start, int end, const AttentionItem& next) {
    const int rows = rows_.count();
    for (int key = start; key < end; key += kChunkKeys) {
      // a single block has no work to overlap, and reads values from the first-level cache
      const int side = rows <= kBlockRows ? 0 : key / kChunkKeys % 2;
      const ReaderScratch& reader = scratch_.readers[side];
      if (last_.reader == &reader || values_.values == reader.value_units) finish();
      chunks_[side] = fetch_chunk<R>(a_, rows_.item, next, key, factor_, reader);
      for (int row = 0; row < rows; row += kBlockRows)
        attend_block({&reader, key, row, at_most(rows - row, kBlockRows)}, chunks_[side]);
    }
    finish();
    for (int r = 0; r < rows; ++r) partial_.weights[r] = sum_of(load(scratch_.lane_sums + r * kLanes));
  }

 private:
  // Some rows of the item, and the tiles that they see of a chunk.
  struct Block {
    const ReaderScratch* reader = nullptr;
    int key = 0;  // the first of the chunk
    int row = 0, rows = 0;
    int low = 0, high = 0;  // pairs of tiles
    float *scores = nullptr, *weights = nullptr, *factors = nullptr;
  };

  // Computes the scores of a block, beside the weights of the last one.
  void attend_block(Block block, const Chunk& chunk) {
    const Seen seen = rows_.seen(scratch_.positions[block.row], scratch_.positions[block.row + block.rows - 1], block.key);
    block.low = at_least_zero(seen.begin) / kTileKeys / 2;
    block.high = (at_most((at_least_zero(seen.end) + kTileKeys - 1) / kTileKeys, chunk.high) + 1) / 2;
    if (block.low >= block.high) return;
    side_ ^= 1;
    block.scores = scratch_.scores[side_], block.weights = scratch_.weights[side_], block.factors = scratch_.factors[side_];
    scores_ = {scratch_.queries + block.row * units_, block.rows, units_, chunk.keys,
               block.row == 0 ? chunk.next_keys : chunk.keys, 2 * block.low, 2 * block.high, block.scores};
    if (last_.rows) weigh_and_multiply(last_);
    while (scores_.steps()) scores_.step(tiles_);
    last_ = block;
  }

  // Completes the pending work of earlier blocks.
  void finish() {
    if (last_.rows) weigh_and_multiply(last_);
    while (values_.steps()) values_.step(tiles_);
    last_.rows = 0;
  }

  // Turns scores into weights beside pending products, and leaves the products with the values pending.
  void weigh_and_multiply(const Block& block) {
    const int first = 2 * block.low * kTileKeys, last = 2 * block.high * kTileKeys;
    const float scale = find_maxima(block, first, last);
    const auto left = [&] { return scores_.steps() + values_.steps(); };
    const int steps = left();
    for (int r = 0; r < block.rows; ++r) {
      weigh_row(block.scores + r * kChunkKeys, first, last, scale, partial_.maxima[block.row + r],
                R::kHasScales ? block.reader->value_scales : nullptr, block.factors[r],
                scratch_.lane_sums + (block.row + r) * kLanes, reinterpret_cast<bf16*>(block.weights) + r * kChunkKeys);
      const int most = steps * (block.rows - r - 1) / block.rows;  // to be left
      while (left() > most) scores_.steps() ? scores_.step(tiles_) : values_.step(tiles_);
    }
    float* sums = partial_.sums + block.row * dim_;
    for (int r = 0; r < block.rows; ++r)
      if (block.factors[r] != 1.0f)
        for (int i = 0; i < dim_; i += kLanes)
          store(sums + r * dim_ + i, mul(load(sums + r * dim_ + i), all(block.factors[r])));
    values_ = {block.weights, block.reader->value_units, block.low, block.high, block.rows, dim_, sums};
  }

  // Updates the maxima of rows, and the factors for sums under the old maxima; returns the factor of scores.
  // Of the keys [first, last) of the chunk, scores of hidden ones become -inf.
  float find_maxima(const Block& block, int first, int last) {
    const bool bends = is_bent(a_), is_raw = !R::kHasScales && !bends;
    for (int start = 0; start < block.rows; start += kLanes) {
      Floats tops[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int row = block.row + start + i;
        tops[i] = all(kNothing);
        if (start + i >= block.rows) continue;
        const int position = scratch_.positions[row];
        const Seen seen = rows_.seen(position, position, block.key);
        float* scores = block.scores + (start + i) * kChunkKeys;
        if (is_raw) {
          tops[i] = largest_seen(scores, first, last, seen.begin, seen.end);
          continue;
        }
        const Bend bend = bend_of(a_, rows_.head(row), block.key, position);
        tops[i] = all(bends ? weigh<true>(scores, block.reader->key_factors, seen.begin, seen.end, bend)
                            : weigh<false>(scores, block.reader->key_factors, seen.begin, seen.end, bend));
      }
      float* maxima = partial_.maxima + block.row + start;
      const Floats before = load(maxima), largest = largest_of_each(tops);
      const Floats after = maximum(before, is_raw ? mul(largest, all(factor_)) : largest);
      store(maxima, after);
      store(block.factors + start, power_of_two<R::Products::kExponentialDegree>(sub(before, after)));
    }
    return is_raw ? factor_ : 1.0f;
  }

  const Attention& a_;
  const ItemRows rows_;
  const AttentionPartial& partial_;
  const TileScratch& scratch_;
  const int dim_ = a_.layout.padded_value_dim, units_ = (a_.layout.padded_dim + 31) / 32 * kTileDepth;
  const float factor_ = a_.soft_cap != 0.0f ? a_.scale : a_.scale * kLog2E;
  RowTiles tiles_;
  Chunk chunks_[2];
  Block last_;
  int side_ = 0;  // of the memory for scores and weights
  ScoreSteps scores_{};
  ValueSteps values_{};
};

}  // namespace
}  // namespace octavo
