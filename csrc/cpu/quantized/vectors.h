// Products of blocks of rows by vectors: every sum stays in a register while the panel streams by.
//
// Included only by units of one level.
#pragma once

#include "epilogue.h"
#include "sums.h"

namespace octavo {
namespace {

template <int kRows>
void multiply_block(const QuantizedLinear& a, int panel, int start) {
  const QuantizedWeight& weight = a.weight;
  const std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * weight.depth();
  const std::int32_t* offsets = a.row_sums + static_cast<std::int64_t>(start) * weight.num_groups();
  const std::uint8_t* from = weight.panels + panel * weight.panel_bytes();
  if (!weight.group) {
    alignas(64) std::int32_t sums[kRows * kPanelColumns];
    int8_sums<kRows>(codes, offsets, from, weight.steps(), sums);
    write_rows(a, panel, start, kRows, sums);
  } else if constexpr (kRows <= kMostRowsInt4) {
    alignas(64) float sums[kRows * kPanelColumns];
    int4_sums<kRows>(codes, offsets, from, weight.num_groups(), weight.group, sums);
    write_rows(a, panel, start, kRows, sums);
  }
}

using MultiplyBlock = void (*)(const QuantizedLinear&, int panel, int start);

// By the number of rows in a block.
#if defined(__AVX512F__)
constexpr MultiplyBlock kMultiplyBlock[kMostRowsInt8 + 1] = {
    nullptr,            multiply_block<1>,  multiply_block<2>, multiply_block<3>, multiply_block<4>,
    multiply_block<5>,  multiply_block<6>,  multiply_block<7>, multiply_block<8>, multiply_block<9>,
    multiply_block<10>, multiply_block<11>, multiply_block<12>};
#else
constexpr MultiplyBlock kMultiplyBlock[kMostRowsInt8 + 1] = {nullptr, multiply_block<1>, multiply_block<2>};
#endif

inline void multiply_vectors(const QuantizedLinear& a, int first_block, int last_block, int first_panel, int last_panel) {
  const RowBlocks blocks = vector_blocks(a);
  for (int panel = first_panel; panel < last_panel; ++panel)
    for (int block = first_block; block < last_block; ++block)
      kMultiplyBlock[blocks.size(block)](a, panel, blocks.start(block));
}

}  // namespace
}  // namespace octavo
