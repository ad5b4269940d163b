// One product of tiles, compiled for the processor's tiles and for the model of them.
#include "tile_dot.h"

#include "../tiles.h"

namespace octavo {
namespace {

void multiply(const TileProduct& p) {
  TileShapes shapes;
  shapes.set(0, p.rows, 4 * p.columns);
  shapes.set(1, p.rows, 4 * p.depth);
  shapes.set(2, p.depth, 4 * p.columns);
  Tiles tiles(shapes);
  tiles.load<0>(p.c, 4 * p.columns);
  tiles.load<1>(p.a, 4 * p.depth);
  tiles.load<2>(p.b, 4 * p.columns);
  switch (p.kind) {
    case TileDot::bf16: tiles.dot_bf16<0, 1, 2>(); break;
    case TileDot::int8: tiles.dot_signed<0, 1, 2>(); break;
    case TileDot::uint8_int8: tiles.dot_unsigned_signed<0, 1, 2>(); break;
    case TileDot::int8_uint8: tiles.dot_signed_unsigned<0, 1, 2>(); break;
  }
  tiles.store<0>(p.c, 4 * p.columns);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const TileDotKernels tile_dot_table;
const TileDotKernels tile_dot_table = {multiply};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
