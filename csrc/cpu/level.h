// Which levels of instruction sets this machine can run, and the choice of a table of kernels by level.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace octavo {

std::string_view name_of(Level level);

// Levels that this process can run, best first; empty without AVX2. Requests the tile registers from the kernel.
std::vector<Level> usable_levels();

// The level of that name, "auto" for the best. Throws std::invalid_argument with what there is.
Level level_from_name(std::string_view name);

// Bytes of activations that stay in a second-level cache while weights are streamed: half of it. Processors with tiles have 2 MB.
constexpr std::int64_t resident_bytes(Level level) { return level == Level::amx ? 1 << 20 : 512 << 10; }

// The kernels of `level`, or of the next lower level that a subject is compiled for.
template <class Table>
const Table& choose_table(Level level, const Table& avx2, const Table& avx512) {
  return level == Level::avx2 ? avx2 : avx512;
}

template <class Table>
const Table& choose_table(Level level, const Table& avx2, const Table& avx512, const Table& avx512_bf16) {
  return level >= Level::avx512_bf16 ? avx512_bf16 : choose_table(level, avx2, avx512);
}

template <class Table>
const Table& choose_table(Level level, const Table& avx2, const Table& avx512, const Table& avx512_bf16,
                          const Table& amx, const Table& amx_emulated) {
  if (level == Level::amx) return amx;
  if (level == Level::amx_emulated) return amx_emulated;
  return choose_table(level, avx2, avx512, avx512_bf16);
}

}  // namespace octavo
