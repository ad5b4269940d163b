// Products of blocks of rows by tiles: 32 rows by a panel at a time, in steps of 64 inputs.
//
// Included only by units of the two levels with tiles. Sums of codes are exact, and those of groups are added up
// as they are by vectors: the bits are those of the vectors, which take what is only a few rows.
#pragma once

#include "../tiles.h"
#include "epilogue.h"
#include "sums.h"

namespace octavo {
namespace {

// Fewer rows wait for memory, however they are multiplied.
constexpr int kFewestTileRows = 5;
constexpr int kTilePrefetchBytes = 4096;

inline RowBlocks tile_blocks(const QuantizedLinear& a) {
  return {a.rows, kTileRows / a.weight.format.codes_per_input(), false};
}

// A block is a tile of its rows per step, one after the other.
inline void quantize_tiles(const QuantizedLinear& a, int block) {
  const RowBlocks blocks = tile_blocks(a);
  const int start = blocks.start(block), halves = a.weight.format.codes_per_input(), rows = blocks.size(block) * halves;
  std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * halves * a.weight.depth();
  quantize_block(a, start, blocks.size(block), [&](int row, int step, const std::int8_t* from) {
    std::memcpy(codes + (static_cast<std::int64_t>(step) * rows + row) * kStepDepth, from, kStepDepth);
  });
}

// Two blocks of rows of codes, of which the second may be empty.
struct BlockPair {
  const std::int8_t* top;  // at the first unit
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

// sums [rows][32] of integers = or += codes · codes over some units, of bytes.
template <bool kHasBottom>
void add_units(Tiles& tiles, const BlockPair& pair, const std::uint8_t* weight, int units, int depth, bool is_first,
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
  for (int unit = 0; unit < units; ++unit, weight += depth * kPanelColumns) {
    prefetch_step(weight);
    tiles.load<6>(weight);
    tiles.load<7>(weight + depth * kTileColumns);
    tiles.load<4>(pair.top + static_cast<std::int64_t>(unit) * pair.top_rows * kStepDepth);
    tiles.dot_signed_unsigned<0, 4, 6>(), tiles.dot_signed_unsigned<1, 4, 7>();
    if constexpr (kHasBottom) {
      tiles.load<5>(pair.bottom + static_cast<std::int64_t>(unit) * pair.bottom_rows * kStepDepth);
      tiles.dot_signed_unsigned<2, 5, 6>(), tiles.dot_signed_unsigned<3, 5, 7>();
    }
  }
  tiles.store<0>(sums, kSumsStride), tiles.store<1>(sums + kTileColumns, kSumsStride);
  if constexpr (kHasBottom)
    tiles.store<2>(bottom_sums, kSumsStride), tiles.store<3>(bottom_sums + kTileColumns, kSumsStride);
}

// Units of nibbles into units of bytes.
template <Kind kKind>
void widen_units(const std::uint8_t* nibbles, int units, int depth, std::uint8_t* bytes) {
  for (int unit = 0; unit < units; ++unit, bytes += depth * kPanelColumns)
    for (int line = 0; line < depth * kTileColumns; line += 64, nibbles += 64) {
      __m512i low, high;
      widen<kKind>(line_at(nibbles), low, high);
      prefetch(nibbles + kTilePrefetchBytes);
      _mm512_store_si512(bytes + line, low);
      _mm512_store_si512(bytes + depth * kTileColumns + line, high);
    }
}

// One task: pairs of blocks by panels.
class TiledProduct {
 public:
  TiledProduct(const QuantizedLinear& a, float* sums, int first_block, int last_block)
      : a_(a), blocks_(tile_blocks(a)), halves_(a.weight.format.codes_per_input()), depth_(a.weight.unit_depth()),
        first_block_(first_block), last_block_(last_block), first_row_(blocks_.start(first_block)), totals_(sums),
        size_((blocks_.start(last_block) - first_row_) * halves_ * kPanelColumns),
        sums_(reinterpret_cast<std::int32_t*>(sums + size_)) {}

  void multiply(int panel) {
    const QuantizedWeight& weight = a_.weight;
    const std::uint8_t* block = weight.panels + panel * weight.panel_bytes();
    std::memset(totals_, 0, sizeof(float) * size_);
    for (int group = 0; group < weight.num_groups(); ++group) {
      const int in_block = group % weight.groups_per_block();
      if (group && !in_block) block += weight.block_bytes();
      if (!in_block) std::memset(sums_ + size_, 0, sizeof(float) * size_);
      add_codes(group, weight.codes(block, in_block));
      for (int each = first_block_; each < last_block_; ++each) add_block(group, block, each);
    }
    for (int each = first_block_; each < last_block_; ++each)
      write_rows(a_, panel, blocks_.start(each), blocks_.size(each), row_of(totals_, each));
  }

 private:
  // The sums of a group's codes, of all blocks.
  void add_codes(int group, const std::uint8_t* from) {
    const QuantizedWeight& weight = a_.weight;
    const bool is_wide = weight.format.kind() == Kind::int8;
    // one pair of blocks keeps its sums in the tiles all the way
    const int units = weight.group_depth() / depth_, together = is_wide && last_block_ - first_block_ <= 2 ? units : kStepsTogether;
    alignas(64) std::uint8_t bytes[kStepsTogether * kStepBytes];
    for (int unit = 0; unit < units; unit += together) {
      const int count = units - unit < together ? units - unit : together;
      const std::uint8_t* codes = from + weight.format.code_bytes(unit * depth_);
      if (!is_wide) {
        weight.format.kind() == Kind::e2m1 ? widen_units<Kind::e2m1>(codes, count, depth_, bytes)
                                           : widen_units<Kind::int4>(codes, count, depth_, bytes);
        codes = bytes;
      }
      for (int block = first_block_; block < last_block_; block += 2) {
        const BlockPair pair = pair_at(block, group * weight.group_depth() + unit * depth_);
        const auto add = pair.bottom_rows ? add_units<true> : add_units<false>;
        add(tiles_, pair, codes, count, depth_, unit == 0, row_of(sums_, block));
      }
    }
  }

  // totals += sums of a group.
  void add_block(int group, const std::uint8_t* codes, int block) {
    const GroupTail tail = a_.weight.tail(codes, group % a_.weight.groups_per_block());
    const int rows = blocks_.size(block) * halves_;
    const std::int64_t first = static_cast<std::int64_t>(blocks_.start(block)) * halves_ * a_.weight.num_groups();
    const std::int32_t* const row_sums = a_.row_sums + first + group * rows;
    const std::int32_t* const sums = row_of(sums_, block);
    const int offset = a_.weight.format.offset(), last = a_.weight.groups_per_block() - 1;
    if (a_.weight.format.scales() != Scales::factors)
      return add_sums(a_.weight.format, tail, rows, row_sums, offset, sums, row_of(totals_, block));
    std::int32_t* const scaled = row_of(sums_ + size_, block);
    for (int part = 0; part < kParts; ++part) {
      const Ints scale = load_bytes(tail.scales + part * kLanes);
      for (int row = 0; row < rows; ++row) {
        const int at = row * kPanelColumns + part * kLanes;
        const Ints sum = sub_ints(load_ints(sums + at), all_ints(offset * row_sums[row]));
        store_ints(scaled + at, add_ints(load_ints(scaled + at), mul_ints(sum, scale)));
      }
    }
    if (group % (last + 1) != last) return;
    add_factors(a_.weight, codes, rows, row_sums - last * rows, rows,
                [&](int row, int part) { return load_ints(scaled + row * kPanelColumns + part * kLanes); },
                row_of(totals_, block));
  }

  // The tiles take its shape. `k` is an input at which a unit begins.
  BlockPair pair_at(int block, int k) {
    const bool has_bottom = block + 1 < last_block_;
    const int top_rows = blocks_.size(block) * halves_, bottom_rows = has_bottom ? blocks_.size(block + 1) * halves_ : 0;
    if (top_rows != top_rows_ || bottom_rows != bottom_rows_)
      tiles_.configure(TileShapes::two_by_two(top_rows, bottom_rows, depth_));
    top_rows_ = top_rows, bottom_rows_ = bottom_rows;
    const auto codes = [&](int start, int rows) {
      return a_.codes + static_cast<std::int64_t>(start) * halves_ * a_.weight.depth() +
             static_cast<std::int64_t>(k / kStepDepth) * rows * kStepDepth + k % kStepDepth;
    };
    return {codes(blocks_.start(block), top_rows), has_bottom ? codes(blocks_.start(block + 1), bottom_rows) : nullptr,
            top_rows, bottom_rows};
  }

  template <class Sum>
  Sum* row_of(Sum* sums, int block) const {
    return sums + static_cast<std::int64_t>(blocks_.start(block) - first_row_) * halves_ * kPanelColumns;
  }

  const QuantizedLinear& a_;
  const RowBlocks blocks_;
  const int halves_, depth_, first_block_, last_block_, first_row_;
  float* const totals_;  // [code rows][32]
  const std::int64_t size_;
  std::int32_t* const sums_;  // [code rows][32] of one group, then [code rows][32] of the groups of a block, scaled
  Tiles tiles_{TileShapes::full()};
  int top_rows_ = 0, bottom_rows_ = -1;
};

inline void multiply_tiles(const QuantizedLinear& a, float* sums, int first_block, int last_block, int first_panel,
                           int last_panel) {
  TiledProduct product(a, sums, first_block, last_block);
  for (int panel = first_panel; panel < last_panel; ++panel) product.multiply(panel);
}

}  // namespace
}  // namespace octavo
