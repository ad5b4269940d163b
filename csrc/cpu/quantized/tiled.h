// Products of blocks of rows by tiles: 32 rows by a panel at a time, in steps of 64 inputs.
//
// Included only by units of the two levels with tiles. Sums of codes are exact, and an int4 sum runs over the groups as
// it does by vectors: the bits are those of the vectors, which take what is only a few rows.
#pragma once

#include "../tiles.h"
#include "epilogue.h"
#include "sums.h"

namespace octavo {
namespace {

// Fewer rows wait for memory, however they are multiplied.
constexpr int kFewestTileRows = 5;
constexpr int kTilePrefetchBytes = 4096;

inline RowBlocks tile_blocks(const QuantizedLinear& a) { return {a.rows, kTileRows, false}; }

// A block is a tile of its rows per step, one after the other.
inline void quantize_tiles(const QuantizedLinear& a, int block) {
  const RowBlocks blocks = tile_blocks(a);
  const int start = blocks.start(block), rows = blocks.size(block);
  std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * a.weight.depth();
  quantize_block(a, start, rows, [&](int row, int step, const std::int8_t* from) {
    std::memcpy(codes + (static_cast<std::int64_t>(step) * rows + row) * kStepDepth, from, kStepDepth);
  });
}

// Two blocks of rows, of which the second may be empty.
struct BlockPair {
  const std::int8_t* top;  // at the first step
  const std::int8_t* bottom;
  int top_rows;
  int bottom_rows;
};

inline void prefetch_step(const std::uint8_t* weight) {
#if !defined(OCTAVO_EMULATE_TILES)
  for (int line = 0; line < kStepBytes; line += 64) prefetch(weight + kTilePrefetchBytes + line);
#else
  (void)weight;
#endif
}

// sums [rows][32] of integers = or += codes · codes over some steps. Weights are unsigned for int8, nibbles for int4.
template <bool kHasBottom, bool kUnsigned>
void add_steps(Tiles& tiles, const BlockPair& pair, const std::uint8_t* weight, int steps, bool is_first,
               std::int32_t* sums) {
  constexpr int kSumsStride = kPanelColumns * 4;
  std::int32_t* bottom_sums = sums + pair.top_rows * kPanelColumns;
  if (is_first) {
    tiles.clear<0>(), tiles.clear<1>();
    if constexpr (kHasBottom) tiles.clear<2>(), tiles.clear<3>();
  } else {
    tiles.load<0>(sums, kSumsStride), tiles.load<1>(sums + kTileColumns, kSumsStride);
    if constexpr (kHasBottom)
      tiles.load<2>(bottom_sums, kSumsStride), tiles.load<3>(bottom_sums + kTileColumns, kSumsStride);
  }
  for (int step = 0; step < steps; ++step, weight += kStepBytes) {
    if constexpr (kUnsigned) prefetch_step(weight);
    tiles.load<6>(weight);
    tiles.load<7>(weight + kTileBytes);
    tiles.load<4>(pair.top + static_cast<std::int64_t>(step) * pair.top_rows * kStepDepth);
    if constexpr (kUnsigned) {
      tiles.dot_signed_unsigned<0, 4, 6>(), tiles.dot_signed_unsigned<1, 4, 7>();
    } else {
      tiles.dot_signed<0, 4, 6>(), tiles.dot_signed<1, 4, 7>();
    }
    if constexpr (kHasBottom) {
      tiles.load<5>(pair.bottom + static_cast<std::int64_t>(step) * pair.bottom_rows * kStepDepth);
      if constexpr (kUnsigned) {
        tiles.dot_signed_unsigned<2, 5, 6>(), tiles.dot_signed_unsigned<3, 5, 7>();
      } else {
        tiles.dot_signed<2, 5, 6>(), tiles.dot_signed<3, 5, 7>();
      }
    }
  }
  tiles.store<0>(sums, kSumsStride), tiles.store<1>(sums + kTileColumns, kSumsStride);
  if constexpr (kHasBottom)
    tiles.store<2>(bottom_sums, kSumsStride), tiles.store<3>(bottom_sums + kTileColumns, kSumsStride);
}

// What the offset of the weights' codes has added is taken off again.
inline void take_offset(std::int32_t* sums, int rows, const std::int32_t* offsets) {
  for (int row = 0; row < rows; ++row, sums += kPanelColumns) {
    const __m512i offset = _mm512_set1_epi32(offsets[row]);
    _mm512_storeu_si512(sums, _mm512_add_epi32(_mm512_loadu_si512(sums), offset));
    _mm512_storeu_si512(sums + 16, _mm512_add_epi32(_mm512_loadu_si512(sums + 16), offset));
  }
}

// totals [rows][32] += sums of a group · its scales; the first group finds zeros.
inline void add_group(const std::int32_t* sums, int rows, const std::int32_t* offsets, const bf16* scales, bool is_first,
                      float* totals) {
  for (int half = 0; half < 2; ++half) {
    const Floats scale = load(scales + half * 16);
    for (int row = 0; row < rows; ++row) {
      const int at = row * kPanelColumns + half * 16;
      const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(sums + at), _mm512_set1_epi32(offsets[row]));
      const Floats before = is_first ? zero() : load(totals + at);
      store(totals + at, add(before, mul(_mm512_cvtepi32_ps(sum), scale)));
    }
  }
}

// Steps of nibbles into steps of bytes.
inline void widen_steps(const std::uint8_t* nibbles, int steps, std::uint8_t* bytes) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  for (int step = 0; step < steps; ++step, bytes += kStepBytes)
    for (int line = 0; line < kTileBytes; line += 64, nibbles += 64) {
      const __m512i both = _mm512_loadu_si512(nibbles);
      prefetch(nibbles + kTilePrefetchBytes);
      _mm512_store_si512(bytes + line, _mm512_and_si512(both, nibble));
      _mm512_store_si512(bytes + kTileBytes + line, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
    }
}

// One task: pairs of blocks by panels.
class TiledProduct {
 public:
  TiledProduct(const QuantizedLinear& a, float* sums, int first_block, int last_block)
      : a_(a), blocks_(tile_blocks(a)), sums_(sums), first_block_(first_block), last_block_(last_block),
        first_row_(blocks_.start(first_block)) {}

  void multiply_int8(int panel) {
    const QuantizedWeight& weight = a_.weight;
    const std::uint8_t* from = weight.panels + panel * weight.panel_bytes();
    auto* sums = reinterpret_cast<std::int32_t*>(sums_);
    // one pair of blocks keeps its sums in the tiles all the way
    const int steps = weight.steps(), together = last_block_ - first_block_ <= 2 ? steps : kStepsTogether;
    for (int step = 0; step < steps; step += together) {
      const int count = steps - step < together ? steps - step : together;
      for (int block = first_block_; block < last_block_; block += 2) {
        const BlockPair pair = pair_at(block, step);
        const auto add = pair.bottom_rows ? add_steps<true, true> : add_steps<false, true>;
        add(tiles_, pair, from + static_cast<std::int64_t>(step) * kStepBytes, count, step == 0, row_of(sums, block));
      }
    }
    for (int block = first_block_; block < last_block_; ++block) {
      take_offset(row_of(sums, block), blocks_.size(block), offsets_of(block, 0));
      write_rows(a_, panel, blocks_.start(block), blocks_.size(block), row_of(sums, block));
    }
  }

  void multiply_int4(int panel) {
    const QuantizedWeight& weight = a_.weight;
    const std::uint8_t* from = weight.panels + panel * weight.panel_bytes();
    const int steps = weight.steps_per_group();
    alignas(64) std::uint8_t bytes[2 * kStepBytes];
    alignas(64) std::int32_t sums[2 * kTileRows * kPanelColumns];
    for (int group = 0; group < weight.num_groups(); ++group, from += weight.group_bytes()) {
      widen_steps(from, steps, bytes);
      const auto* scales = reinterpret_cast<const bf16*>(from + weight.group * (kPanelColumns / 2));
      for (int block = first_block_; block < last_block_; block += 2) {
        const BlockPair pair = pair_at(block, group * steps);
        const auto add = pair.bottom_rows ? add_steps<true, false> : add_steps<false, false>;
        add(tiles_, pair, bytes, steps, true, sums);
        add_group(sums, pair.top_rows, offsets_of(block, group), scales, group == 0, row_of(sums_, block));
        if (pair.bottom_rows)
          add_group(sums + pair.top_rows * kPanelColumns, pair.bottom_rows, offsets_of(block + 1, group), scales, group == 0,
                    row_of(sums_, block + 1));
      }
    }
    for (int block = first_block_; block < last_block_; ++block)
      write_rows(a_, panel, blocks_.start(block), blocks_.size(block), row_of(sums_, block));
  }

 private:
  // The tiles take its shape.
  BlockPair pair_at(int block, int step) {
    const bool has_bottom = block + 1 < last_block_;
    const int top_rows = blocks_.size(block), bottom_rows = has_bottom ? blocks_.size(block + 1) : 0;
    if (top_rows != top_rows_ || bottom_rows != bottom_rows_) tiles_.configure(TileShapes::two_by_two(top_rows, bottom_rows));
    top_rows_ = top_rows, bottom_rows_ = bottom_rows;
    const auto codes = [&](int start, int rows) {
      return a_.codes + static_cast<std::int64_t>(start) * a_.weight.depth() +
             static_cast<std::int64_t>(step) * rows * kStepDepth;
    };
    const int start = blocks_.start(block);
    return {codes(start, top_rows), has_bottom ? codes(start + top_rows, bottom_rows) : nullptr, top_rows, bottom_rows};
  }

  template <class Sum>
  Sum* row_of(Sum* sums, int block) const {
    return sums + (blocks_.start(block) - first_row_) * kPanelColumns;
  }

  const std::int32_t* offsets_of(int block, int group) const {
    return a_.row_sums + static_cast<std::int64_t>(blocks_.start(block)) * a_.weight.num_groups() +
           group * blocks_.size(block);
  }

  const QuantizedLinear& a_;
  const RowBlocks blocks_;
  float* const sums_;
  const int first_block_, last_block_, first_row_;
  Tiles tiles_{TileShapes::full()};
  int top_rows_ = 0, bottom_rows_ = -1;
};

inline void multiply_tiles(const QuantizedLinear& a, float* sums, int first_block, int last_block, int first_panel,
                           int last_panel) {
  TiledProduct product(a, sums, first_block, last_block);
  for (int panel = first_panel; panel < last_panel; ++panel)
    a.weight.group ? product.multiply_int4(panel) : product.multiply_int8(panel);
}

}  // namespace
}  // namespace octavo
