// The highest rates of the machine, for plain reads and for arithmetic between registers; benchmarks compare kernels with them.
#pragma once

#include "../types.h"

namespace octavo {

// Arithmetic that can be measured; the numbers are part of the Python interface.
enum class Arithmetic : int { float32 = 0, bfloat16 = 1, int8 = 2, tiles_bfloat16 = 3, tiles_int8 = 4 };

struct ProbeKernels {
  // Reads `bytes`, a multiple of 1024, from a 64-byte boundary on; returns something that depends on all of them.
  std::int64_t (*read)(const void* from, std::int64_t bytes);
  // Does at least `count` multiplications and additions between registers and returns how many; 0 where the level has
  // no such instructions.
  std::int64_t (*compute)(Arithmetic kind, std::int64_t count);
};

const ProbeKernels& probe_kernels(Level level);

}  // namespace octavo
