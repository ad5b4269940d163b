// Products with quantised weights, compiled once per level.
#include "quantized.h"

#include "pack.h"
#include "vectors.h"

#if defined(__AMX_INT8__) || defined(OCTAVO_EMULATE_TILES)
#include "tiled.h"
#endif

namespace octavo {
namespace {

#if defined(__AMX_INT8__) || defined(OCTAVO_EMULATE_TILES)

bool by_tiles(const QuantizedLinear& a) { return a.code_rows() >= fewest_tile_rows(a.weight); }

RowBlocks blocks(const QuantizedLinear& a) { return by_tiles(a) ? tile_blocks(a) : vector_blocks(a); }

void quantize(const QuantizedLinear& a, int block) { by_tiles(a) ? quantize_tiles(a, block) : quantize_vectors(a, block); }

void multiply(const QuantizedLinear& a, float* sums, int first_block, int last_block, int first_panel, int last_panel) {
  by_tiles(a) ? multiply_tiles(a, sums, first_block, last_block, first_panel, last_panel)
              : multiply_vectors(a, first_block, last_block, first_panel, last_panel);
}

#else

RowBlocks blocks(const QuantizedLinear& a) { return vector_blocks(a); }

void quantize(const QuantizedLinear& a, int block) { quantize_vectors(a, block); }

void multiply(const QuantizedLinear& a, float*, int first_block, int last_block, int first_panel, int last_panel) {
  multiply_vectors(a, first_block, last_block, first_panel, last_panel);
}

#endif

}  // namespace

namespace OCTAVO_LEVEL {
extern const QuantizedKernels quantized_table;
const QuantizedKernels quantized_table = {blocks, quantize, multiply, pack, rows};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
