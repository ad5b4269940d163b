// The few types that kernels and bindings share. No headers: units of one level include this.
#pragma once

#include <cstdint>

namespace octavo {

// The instruction-set levels that kernels are compiled for. Each includes the ones above it in this list, but for the
// model of the tiles, which stands beside `amx`.
enum class Level {
  avx2,          // with FMA and F16C: any x86-64 of the last ten years
  avx512,        // F, BW, DQ, VL and VNNI
  avx512_bf16,   // and dot products of bfloat16
  amx,           // and tiles for bfloat16 and int8
  amx_emulated,  // the code of `amx` over a software model of the tiles: slow, for checking it where there are none
};

// Element types of the tensors that Python passes as addresses; the numbers are part of the Python interface.
enum class Type : int { float32 = 0, bfloat16 = 1, int8 = 2, fp8_e4m3 = 3 };

}  // namespace octavo
