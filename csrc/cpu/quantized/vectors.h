// Products of blocks of rows by vectors: every sum stays in a register while the panel is streamed.
//
// Included only by units of one level.
#pragma once

#include "epilogue.h"
#include "sums.h"

namespace octavo {
namespace {

template <class Sum>
using PanelSums = void (*)(const QuantizedWeight&, const std::int8_t* codes, const std::int32_t* row_sums,
                           const std::uint8_t* panel, Sum* sums);

// By the number of rows of codes in a block.
#if defined(__AVX512F__)
constexpr PanelSums<std::int32_t> kChannelSums[] = {
    channel_sums<1>, channel_sums<2>, channel_sums<3>, channel_sums<4>,  channel_sums<5>,  channel_sums<6>,
    channel_sums<7>, channel_sums<8>, channel_sums<9>, channel_sums<10>, channel_sums<11>, channel_sums<12>};
template <Kind kKind>
constexpr PanelSums<float> kGroupSums[] = {group_sums<1, kKind>, group_sums<2, kKind>, group_sums<3, kKind>,
                                           group_sums<4, kKind>, group_sums<5, kKind>, group_sums<6, kKind>};
template <Kind kKind>
constexpr PanelSums<float> kFactorSums[] = {factor_sums<1, kKind>, factor_sums<2, kKind>, factor_sums<3, kKind>,
                                            factor_sums<4, kKind>, factor_sums<5, kKind>, factor_sums<6, kKind>};
#else
constexpr PanelSums<std::int32_t> kChannelSums[] = {channel_sums<1>, channel_sums<2>, channel_sums<3>, channel_sums<4>};
template <Kind kKind>
constexpr PanelSums<float> kGroupSums[] = {group_sums<1, kKind>, group_sums<2, kKind>, group_sums<3, kKind>,
                                           group_sums<4, kKind>};
template <Kind kKind>
constexpr PanelSums<float> kFactorSums[] = {factor_sums<1, kKind>, factor_sums<2, kKind>, factor_sums<3, kKind>,
                                            factor_sums<4, kKind>};
#endif

inline void multiply_vectors(const QuantizedLinear& a, int first_block, int last_block, int first_panel, int last_panel) {
  const QuantizedWeight& weight = a.weight;
  const RowBlocks blocks = vector_blocks(a);
  const int halves = weight.format.codes_per_input();
  const Kind kind = weight.format.kind();
  const auto* const group_sums = weight.format.scales() == Scales::factors
                                     ? kind == Kind::int8 ? kFactorSums<Kind::int8> : kFactorSums<Kind::int4>
                                 : kind == Kind::int8 ? kGroupSums<Kind::int8>
                                 : kind == Kind::e2m1 ? kGroupSums<Kind::e2m1>
                                                      : kGroupSums<Kind::int4>;
  alignas(64) float sums[kMostChannelRows * kPanelColumns];
  alignas(64) std::int32_t integers[kMostChannelRows * kPanelColumns];
  for (int panel = first_panel; panel < last_panel; ++panel) {
    const std::uint8_t* const from = weight.panels + panel * weight.panel_bytes();
    for (int block = first_block; block < last_block; ++block) {
      const int start = blocks.start(block), rows = blocks.size(block) * halves;
      const std::int64_t first = static_cast<std::int64_t>(start) * halves;
      const std::int8_t* const codes = a.codes + first * weight.depth();
      const std::int32_t* const row_sums = a.row_sums + first * weight.num_groups();
      if (is_channel(weight)) {
        kChannelSums[rows - 1](weight, codes, row_sums, from, integers);
        std::memset(sums, 0, sizeof(float) * rows * kPanelColumns);
        add_sums<false>(weight.format, weight.tail(from, 0), rows, row_sums, 0, integers, sums);
      } else {
        group_sums[rows - 1](weight, codes, row_sums, from, sums);
      }
      write_rows(a, panel, start, blocks.size(block), sums);
    }
  }
}

}  // namespace
}  // namespace octavo
