// One product of tiles, by which tests compare the software model of tiles, and the processor, with the manual.
#pragma once

#include "../types.h"

namespace octavo {

enum class TileDot : int { bf16 = 0, int8 = 1, uint8_int8 = 2, int8_uint8 = 3 };

// c [rows, columns] of 32 bits += a [rows, 4 · depth bytes] · b [depth, 4 · columns bytes], all dense; none over 16.
struct TileProduct {
  void* c;
  const void* a;
  const void* b;
  int rows;
  int columns;
  int depth;
  TileDot kind;
};

struct TileDotKernels {
  void (*multiply)(const TileProduct&);
};

}  // namespace octavo
