// Products with quantised weights, compiled once per level.
#include "quantized.h"

#include "epilogue.h"
#include "pack.h"
#include "sums.h"

namespace octavo {
namespace {

template <int kRows>
void multiply_block(const QuantizedLinear& a, int panel, int start) {
  const QuantizedWeight& weight = a.weight;
  const std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * weight.depth();
  const std::int32_t* offsets = a.row_sums + static_cast<std::int64_t>(start) * weight.num_groups();
  const std::uint8_t* from = weight.panels + panel * weight.panel_bytes();
  if (weight.group) {
    if constexpr (kRows <= kMostRowsInt4) {
      alignas(64) float sums[kRows * kPanelColumns];
      int4_sums<kRows>(codes, offsets, from, weight.num_groups(), weight.group, sums);
      write_rows(a, panel, start, kRows, sums);
    }
  } else {
    alignas(64) std::int32_t sums[kRows * kPanelColumns];
    int8_sums<kRows>(codes, offsets, from, weight.depth() / kStepDepth, sums);
    write_rows(a, panel, start, kRows, sums);
  }
}

using MultiplyBlock = void (*)(const QuantizedLinear&, int panel, int start);

// By the number of rows in a block.
#if defined(__AVX512F__)
constexpr MultiplyBlock kMultiplyBlock[kMostRowsInt8 + 1] = {
    nullptr,           multiply_block<1>, multiply_block<2>, multiply_block<3>,  multiply_block<4>,
    multiply_block<5>, multiply_block<6>, multiply_block<7>, multiply_block<8>,  multiply_block<9>,
    multiply_block<10>, multiply_block<11>, multiply_block<12>};
#else
constexpr MultiplyBlock kMultiplyBlock[kMostRowsInt8 + 1] = {nullptr, multiply_block<1>, multiply_block<2>};
#endif

void multiply_vectors(const QuantizedLinear& a, int first, int last, int begin, int end) {
  for (int panel = first; panel < last; ++panel)
    for (int block = begin; block < end; ++block) {
      const int start = vector_block_start(a, block);
      kMultiplyBlock[vector_block_start(a, block + 1) - start](a, panel, start);
    }
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const QuantizedKernels quantized_table;
const QuantizedKernels quantized_table = {vector_blocks,    vector_block_start, quantize_vector_block,
                                          multiply_vectors, pack_panels,        unpack_rows};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
