// Linear layers in bfloat16 and float32, compiled once per level.
#include "linear.h"

#include "arrange.h"
#include "pack.h"
#include "vectors.h"

#if defined(__AMX_BF16__) || defined(OCTAVO_EMULATE_TILES)
#include "tiled.h"
#endif

namespace octavo {
namespace {

#if defined(__AMX_BF16__) || defined(OCTAVO_EMULATE_TILES)

bool by_tiles(const LinearProduct& a) { return a.weight.type == Type::bfloat16; }

RowBlocks blocks(const LinearProduct& a) { return by_tiles(a) ? tile_blocks(a) : vector_blocks(a); }

std::int64_t activation_row_bytes(const LinearProduct& a) { return by_tiles(a) ? tile_row_bytes(a) : vector_row_bytes(a); }

int inputs_at_once(const LinearWeight& weight) {
  return weight.type == Type::bfloat16 ? tile_depth(weight) * kStepInputs : weight.padded_inputs();
}

void arrange(const LinearProduct& a, void* activations, int block, int part, int parts) {
  by_tiles(a) ? arrange_tiles(a, activations, block, part, parts) : arrange_vectors(a, activations, block, part, parts);
}

void multiply(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
              int last_panel) {
  by_tiles(a) ? multiply_tiles(a, activations, first_block, last_block, first_panel, last_panel)
              : multiply_vectors(a, activations, first_block, last_block, first_panel, last_panel);
}

#else

RowBlocks blocks(const LinearProduct& a) { return vector_blocks(a); }

std::int64_t activation_row_bytes(const LinearProduct& a) { return vector_row_bytes(a); }

int inputs_at_once(const LinearWeight& weight) { return weight.padded_inputs(); }

void arrange(const LinearProduct& a, void* activations, int block, int part, int parts) {
  arrange_vectors(a, activations, block, part, parts);
}

void multiply(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
              int last_panel) {
  multiply_vectors(a, activations, first_block, last_block, first_panel, last_panel);
}

#endif

}  // namespace

namespace OCTAVO_LEVEL {
extern const LinearKernels linear_table;
const LinearKernels linear_table = {blocks, activation_row_bytes, inputs_at_once, arrange, multiply, pack, rows};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
