// Sums of products of codes: a block of rows times a panel of 32 columns.
//
// Included only by units of one level. Integers are summed in any order, which is exact. A sum in float32 runs over the
// groups from first to last, each product rounded and then added, at every level and for every number of rows.
#pragma once

#include "dots.h"

namespace octavo {
namespace {

// Scales or minimums of one level of the columns of a vector.
inline Floats load_scales(Scales type, const std::uint8_t* from, int column) {
  switch (type) {
    case Scales::float32:
      return load(reinterpret_cast<const float*>(from) + column);
    case Scales::bfloat16:
      return load(reinterpret_cast<const bf16*>(from) + column);
    default:
      return load_halves(from + 2 * column);
  }
}

// totals += sums of a group's codes, with its zero points, scales and minimums. `sum` returns the sums of (row, part), and
// `change` updates a total.
template <class Sum, class Change>
[[gnu::always_inline]] inline void add_group(const CodeFormat& format, const GroupTail& tail, int rows,
                                             const std::int32_t* row_sums, const Sum& sum, const Change& change) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const Floats scale = load_scales(format.scales(), tail.scales, part * kLanes);
    if (format.zero() == Zero::none) {
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row)
        change(row, part, [&](Floats total) { return add(total, mul(to_floats(sum(row, part)), scale)); });
    } else if (format.zero() == Zero::zeros) {
      const Ints zero = load_shorts(tail.zeros + 2 * part * kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const Ints above = sub_ints(sum(row, part), mul_ints(zero, all_ints(row_sums[row])));
        change(row, part, [&](Floats total) { return add(total, mul(to_floats(above), scale)); });
      }
    } else {
      const Floats least = load_scales(format.scales(), tail.zeros, part * kLanes);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const Floats below = mul(all(static_cast<float>(row_sums[row])), least);
        change(row, part, [&](Floats total) { return sub(add(total, mul(to_floats(sum(row, part)), scale)), below); });
      }
    }
  }
}

// The integer sums of codes, and their start values.
template <int kRows, Kind kKind, bool kIsChannel, int kChains>
[[gnu::always_inline]] inline void sum_units(const std::int8_t*& codes, const std::uint8_t*& panel, int units, int depth,
                                             int offset, const std::int32_t* row_sums,
                                             Ints (&sum)[kChains][kRows][kParts]) {
#pragma GCC unroll 4
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        sum[chain][row][part] = all_ints(chain == 0 ? -offset * row_sums[row] : 0);
  do {
    add_unit<kRows, kKind, kIsChannel, kChains>(codes, panel, depth, sum);
  } while (--units);
#pragma GCC unroll 4
  for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) sum[0][row][part] = add_ints(sum[0][row][part], sum[chain][row][part]);
}

// sums [kRows][32] = codes of the block · 8-bit codes of the panel, all over the depth.
template <int kRows>
void channel_sums(const QuantizedWeight& weight, const std::int8_t* codes, const std::int32_t* row_sums,
                  const std::uint8_t* panel, std::int32_t* sums) {
  constexpr int kChains = chains_for(kRows);
  Ints sum[kChains][kRows][kParts];
  sum_units<kRows, Kind::int8, true, kChains>(codes, panel, weight.steps(), kStepDepth, weight.format.offset(), row_sums,
                                              sum);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) store_ints(sums + row * kPanelColumns + part * kLanes, sum[0][row][part]);
}

// sums [kRows][32] = Σ over groups of scale · (codes of the block · codes of the panel in the group). Every loop runs at
// least once, so that the compiler keeps sums in registers after it.
template <int kRows, Kind kKind>
void group_sums(const QuantizedWeight& weight, const std::int8_t* codes, const std::int32_t* row_sums,
                const std::uint8_t* panel, float* sums) {
  constexpr int kChains = kRows == 1 ? kMostGroupChains : 1;
  const CodeFormat format = weight.format;
  const int offset = format.offset(), unit = weight.unit_depth(), units = weight.group_depth() / unit;
  const std::int64_t block_bytes = weight.block_bytes();
  GroupTail tail = weight.tail(panel, 0);
  Floats totals[kRows][kParts];
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < kParts; ++part) totals[row][part] = zero();
  int groups = weight.num_groups();
  do {
    const std::uint8_t* from = panel;
    Ints sum[kChains][kRows][kParts];
    sum_units<kRows, kKind, false, kChains>(codes, from, units, unit, offset, row_sums, sum);
    add_group(
        format, tail, kRows, row_sums, [&](int row, int part) { return sum[0][row][part]; },
        [&](int row, int part, const auto& change) { totals[row][part] = change(totals[row][part]); });
    row_sums += kRows, panel += block_bytes, tail.scales += block_bytes, tail.zeros += block_bytes;
  } while (--groups);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) store(sums + row * kPanelColumns + part * kLanes, totals[row][part]);
}

// totals [rows][32] += factor · sums of a block, minus factor · (sums of the rows in its groups · minimums). The
// row sums of a group lie `stride` apart. `sum` gives the sums of (row, part).
template <class Sum>
[[gnu::always_inline]] inline void add_factors(const QuantizedWeight& weight, const std::uint8_t* block, int rows,
                                               const std::int32_t* row_sums, int stride, const Sum& sum, float* totals) {
  const GroupTail tail = weight.tail(block, 0);
  const int together = weight.bytes_together(), groups = weight.groups_per_block();
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const Floats factor = load_halves(tail.factors + 2 * part * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      float* const total = totals + row * kPanelColumns + part * kLanes;
      store(total, add(load(total), mul(to_floats(sum(row, part)), factor)));
    }
    if (weight.format.zero() != Zero::minimums) continue;
    const Floats least = load_halves(tail.factors + 2 * (kPanelColumns + part * kLanes));
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      Ints below = all_ints(0);
      const std::uint8_t* minimums = tail.zeros + part * kLanes;
      const std::int32_t* own = row_sums + row;
      for (int group = 0; group < groups; group += 2, minimums += together, own += 2 * stride) {
        below = add_ints(below, mul_ints(load_bytes(minimums), all_ints(own[0])));
        below = add_ints(below, mul_ints(load_bytes(minimums + kPanelColumns), all_ints(own[stride])));
      }
      float* const total = totals + row * kPanelColumns + part * kLanes;
      store(total, sub(load(total), mul(to_floats(below), least)));
    }
  }
}

// Likewise for scales of two levels: integers up to the factors of a block.
template <int kRows, Kind kKind>
void factor_sums(const QuantizedWeight& weight, const std::int8_t* codes, const std::int32_t* row_sums,
                 const std::uint8_t* panel, float* totals) {
  constexpr int kChains = 1;
  const int offset = weight.format.offset(), unit = weight.unit_depth(), units = weight.group_depth() / unit;
  const int groups = weight.groups_per_block(), codes_bytes = weight.codes_together();
  const int tail_bytes = weight.bytes_together() - codes_bytes;
  const std::int64_t block_bytes = weight.block_bytes();
  std::memset(totals, 0, sizeof(float) * kRows * kPanelColumns);
  int blocks = weight.depth() / kFactorDepth;
  do {
    const std::uint8_t* from = panel;
    Ints scaled[kRows][kParts];
    for (int row = 0; row < kRows; ++row)
      for (int part = 0; part < kParts; ++part) scaled[row][part] = all_ints(0);
    int group = 0;
    do {
      const std::uint8_t* scales = from + codes_bytes;
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side, scales += kPanelColumns) {
        Ints sum[kChains][kRows][kParts];
        sum_units<kRows, kKind, false, kChains>(codes, from, units, unit, offset, row_sums + (group + side) * kRows, sum);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          const Ints scale = load_bytes(scales + part * kLanes);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row)
            scaled[row][part] = add_ints(scaled[row][part], mul_ints(sum[0][row][part], scale));
        }
      }
      from += tail_bytes;
    } while ((group += 2) < groups);
    add_factors(weight, panel, kRows, row_sums, kRows, [&](int row, int part) { return scaled[row][part]; }, totals);
    row_sums += groups * kRows, panel += block_bytes;
  } while (--blocks);
}

// As add_group for sums [rows][32] in memory, from which `offset` times the row's sum is subtracted, if there is one.
template <bool kHasOffset>
void add_sums(const CodeFormat& format, const GroupTail& tail, int rows, const std::int32_t* row_sums, int offset,
                     const std::int32_t* sums, float* totals) {
  add_group(
      format, tail, rows, row_sums,
      [&](int row, int part) {
        const Ints sum = load_ints(sums + row * kPanelColumns + part * kLanes);
        return kHasOffset ? sub_ints(sum, all_ints(offset * row_sums[row])) : sum;
      },
      [&](int row, int part, const auto& change) {
        float* total = totals + row * kPanelColumns + part * kLanes;
        store(total, change(load(total)));
      });
}

}  // namespace
}  // namespace octavo
