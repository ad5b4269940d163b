// Products of blocks of rows by tiles: 32 rows by a panel at a time, in steps of 64 inputs.
//
// Included only by units of the two levels with tiles. Sums of codes are exact, and those of groups are added up
// as they are by vectors: the bits are those of the vectors, which take a few rows.
#pragma once

#include "../tiled_pairs.h"
#include "epilogue.h"
#include "sums.h"

namespace octavo {
namespace {

// Rows of codes from which on tiles are at least as fast as vectors, as measured. Vectors widen 4-bit codes again for every few
// rows; short groups fill a part of the tiles.
inline int fewest_tile_rows(const QuantizedWeight& weight) {
  if (weight.unit_depth() < kStepDepth) return 9;
  if (weight.format.kind() != Kind::int8) return 1;
  return weight.format.group() ? 4 : 2;
}

constexpr int kUnitsTogether = 8;  // that are widened into the first-level cache before they are multiplied

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

// Widened codes are signed, and are in the first-level cache.
template <bool kIsWidened>
struct CodesDot {
  template <int kC, int kA, int kB>
  static void add(Tiles& tiles) {
    kIsWidened ? tiles.dot_signed<kC, kA, kB>() : tiles.dot_signed_unsigned<kC, kA, kB>();
  }
};

template <bool kHasBottom, bool kIsWidened>
constexpr auto add_units = add_steps<CodesDot<kIsWidened>, kHasBottom, kIsWidened, std::int32_t, Ahead>;

// Units of nibbles into units of bytes, less `offset`.
template <Kind kKind>
void widen_units(const std::uint8_t* nibbles, int units, int depth, int offset, std::uint8_t* bytes) {
  const __m512i less = _mm512_set1_epi8(static_cast<char>(offset));
  for (int unit = 0; unit < units; ++unit, bytes += depth * kPanelColumns)
    for (int line = 0; line < depth * kTileColumns; line += 64, nibbles += 64) {
      __m512i low, high;
      widen<kKind>(line_at(nibbles), low, high);
      prefetch(nibbles + kStreamAhead);
      _mm512_store_si512(bytes + line, _mm512_sub_epi8(low, less));
      _mm512_store_si512(bytes + depth * kTileColumns + line, _mm512_sub_epi8(high, less));
    }
}

// One task: pairs of blocks by panels.
class TiledProduct {
 public:
  TiledProduct(const QuantizedLinear& a, float* sums, int first_block, int last_block)
      : a_(a), weight_(a.weight), blocks_(tile_blocks(a)), halves_(a.weight.format.codes_per_input()),
        depth_(a.weight.depth()), unit_depth_(a.weight.unit_depth()), units_(a.weight.group_depth() / unit_depth_),
        num_groups_(a.weight.num_groups()), groups_per_block_(a.weight.groups_per_block()), first_block_(first_block),
        last_block_(last_block), pairs_((last_block - first_block + 1) / 2), totals_(sums),
        sums_(reinterpret_cast<std::int32_t*>(sums + code_rows(first_block, last_block) * kPanelColumns)),
        scaled_(sums_ + code_rows(first_block, last_block) * kPanelColumns) {}

  // `next` is the distance in bytes to the next panel, 0 for none; the first panel is not prefetched.
  void multiply(int panel, std::int64_t next, bool is_first) {
    panel_ = panel, next_ = next, is_first_ = is_first;
    const int units = is_wide_ || units_ < kUnitsTogether ? units_ : kUnitsTogether;
    const int groups = units < kUnitsTogether && pairs_ > 1 ? kUnitsTogether / units : 1;
    for (int group = 0; group < num_groups_; group += groups)
      for (int unit = 0; unit < units_; unit += units)
        multiply_turn(group, num_groups_ - group < groups ? num_groups_ - group : groups, unit,
                      units_ - unit < units ? units_ - unit : units);
  }

  // Makes streaming stores visible to other threads.
  void end() const {
    if (streams_) _mm_sfence();
  }

 private:
  // A group of a panel, or a part of a long one.
  struct Group {
    int number;
    const std::uint8_t* block;
    const std::uint8_t* codes;  // of the units
    GroupTail tail;
    int unit, units;
    bool is_first, is_last;  // of its block
  };

  // Some short groups or a part of a long one, with all rows.
  void multiply_turn(int first, int count, int unit, int units) {
    alignas(64) std::uint8_t bytes[kUnitsTogether * kStepBytes];
    const CodeFormat format = weight_.format;
    const auto widen = format.kind() == Kind::e2m1 ? widen_units<Kind::e2m1> : widen_units<Kind::int4>;
    Group groups[kUnitsTogether];
    for (int i = 0; i < count; ++i) {
      const int number = first + i, in_block = number % groups_per_block_;
      const std::uint8_t* block = weight_.panels + panel_ * weight_.panel_bytes() + number / groups_per_block_ * weight_.block_bytes();
      const std::uint8_t* codes = weight_.codes(block, in_block) + format.code_bytes(unit * unit_depth_);
      std::uint8_t* const widened = bytes + i * units * unit_depth_ * kPanelColumns;
      if (!is_wide_) widen(codes, units, unit_depth_, format.offset(), widened);
      groups[i] = {number, block, is_wide_ ? codes : widened, weight_.tail(block, in_block), unit, units, in_block == 0,
                   in_block + 1 == groups_per_block_};
    }
    for (int pair = 0; pair < pairs_; ++pair)
      for (int i = 0; i < count; ++i) multiply_pair(pair, groups[i]);
  }

  void multiply_pair(int pair, const Group& group) {
    const int block = first_block_ + 2 * pair;
    const BlockPair rows = pair_at(block, (group.number * units_ + group.unit) * unit_depth_);
    const Ahead ahead = is_wide_ ? Ahead::of(group.codes, group.units, unit_depth_ * kPanelColumns, next_, pair, pairs_, is_first_)
                                 : Ahead{nullptr, 0};
    const auto add = rows.bottom_rows ? is_wide_ ? add_units<true, false> : add_units<true, true>
                                      : is_wide_ ? add_units<false, false> : add_units<false, true>;
    // sums of whole groups are used at once, and stay in the first-level cache
    std::int32_t* const sums = group.units == units_ ? sums_ : row_of(sums_, block);
    add(tiles_, rows, group.codes, group.units, unit_depth_ * kTileColumns, group.unit == 0, ahead, sums);
    if (group.unit + group.units < units_) return;
    add_block(group, block, rows.top_rows, sums);
    if (rows.bottom_rows) add_block(group, block + 1, rows.bottom_rows, sums + rows.top_rows * kPanelColumns);
  }

  // totals += sums of a group of one block of so many rows of codes.
  void add_block(const Group& group, int block, int rows, const std::int32_t* sums) {
    const std::int32_t* const row_sums = a_.row_sums + code_rows(0, block) * num_groups_ + group.number * rows;
    float* const totals = row_of(totals_, block);
    if (group.number == 0) std::memset(totals, 0, rows * kPanelColumns * sizeof(float));
    if (weight_.format.scales() == Scales::factors) {
      scale_sums(group, rows, row_sums, sums, row_of(scaled_, block), totals);
    } else if (offset_) {
      add_sums<true>(weight_.format, group.tail, rows, row_sums, offset_, sums, totals);
    } else {
      add_sums<false>(weight_.format, group.tail, rows, row_sums, offset_, sums, totals);
    }
    if (group.number + 1 == num_groups_) write_rows(a_, panel_, blocks_.start(block), blocks_.size(block), totals, streams_);
  }

  // Sums of the groups of a block by their scales, and totals += these by the factors of the block.
  void scale_sums(const Group& group, int rows, const std::int32_t* row_sums, const std::int32_t* sums, std::int32_t* scaled,
                  float* totals) {
    for (int part = 0; part < kParts; ++part) {
      const Ints scale = load_bytes(group.tail.scales + part * kLanes);
      for (int row = 0; row < rows; ++row) {
        const int at = row * kPanelColumns + part * kLanes;
        const Ints sum = mul_ints(sub_ints(load_ints(sums + at), all_ints(offset_ * row_sums[row])), scale);
        store_ints(scaled + at, group.is_first ? sum : add_ints(load_ints(scaled + at), sum));
      }
    }
    if (!group.is_last) return;
    add_factors(weight_, group.block, rows, row_sums - (groups_per_block_ - 1) * rows, rows,
                [&](int row, int part) { return load_ints(scaled + row * kPanelColumns + part * kLanes); }, totals);
  }

  // The tiles take its shape. `k` is an input at which a unit begins.
  BlockPair pair_at(int block, int k) {
    const bool has_bottom = block + 1 < last_block_;
    const int top_rows = blocks_.size(block) * halves_, bottom_rows = has_bottom ? blocks_.size(block + 1) * halves_ : 0;
    if (top_rows != top_rows_ || bottom_rows != bottom_rows_)
      tiles_.configure(TileShapes::two_by_two(top_rows, bottom_rows, unit_depth_));
    top_rows_ = top_rows, bottom_rows_ = bottom_rows;
    const auto codes = [&](int each, int rows) {
      return reinterpret_cast<const char*>(a_.codes) + code_rows(0, each) * depth_ +
             static_cast<std::int64_t>(k / kStepDepth) * rows * kStepDepth + k % kStepDepth;
    };
    return {codes(block, top_rows), has_bottom ? codes(block + 1, bottom_rows) : nullptr, top_rows, bottom_rows};
  }

  std::int64_t code_rows(int first_block, int last_block) const {
    return static_cast<std::int64_t>(blocks_.start(last_block) - blocks_.start(first_block)) * halves_;
  }
  template <class Sum>
  Sum* row_of(Sum* sums, int block) const {
    return sums + code_rows(first_block_, block) * kPanelColumns;
  }

  const QuantizedLinear& a_;
  const QuantizedWeight& weight_;
  const RowBlocks blocks_;
  const int halves_, depth_, unit_depth_, units_, num_groups_, groups_per_block_, first_block_, last_block_, pairs_;
  const bool streams_ = !weight_.gated && can_stream(a_);
  const bool is_wide_ = weight_.format.kind() == Kind::int8;
  const int offset_ = is_wide_ ? weight_.format.offset() : 0;
  float* const totals_;         // [code rows][32]
  std::int32_t* const sums_;    // [code rows][32] of one group
  std::int32_t* const scaled_;  // [code rows][32] of the groups of a block
  int panel_ = 0;
  std::int64_t next_ = 0;
  bool is_first_ = true;
  Tiles tiles_{TileShapes::full()};
  int top_rows_ = 0, bottom_rows_ = -1;
};

inline void multiply_tiles(const QuantizedLinear& a, float* sums, int first_block, int last_block, int first_panel,
                           int last_panel) {
  TiledProduct product(a, sums, first_block, last_block);
  for (int panel = first_panel; panel < last_panel; ++panel)
    product.multiply(panel, panel + 1 < last_panel ? a.weight.panel_bytes() : 0, panel == first_panel);
  product.end();
}

}  // namespace
}  // namespace octavo
