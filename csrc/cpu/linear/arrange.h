// Activations for products by vectors: the units of a block's rows side by side.
#pragma once

#include "vectors.h"

namespace octavo {
namespace {

// A vector for each unit out of a vector for each row.
#if defined(__AVX512F__)
inline void transpose(Floats (&x)[16]) {
  Floats y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  // x[4 g + j]: of the rows 4 g to 4 g + 3, the units j, j + 4, j + 8, j + 12
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm512_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const Floats low_even = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), low_odd = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
    const Floats high_even = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    const Floats high_odd = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
    y[8 + j] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
    y[4 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    y[12 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}
inline Floats units_of(const void* bits) { return _mm512_loadu_ps(bits); }
#else
inline void transpose(Floats (&x)[8]) {
  Floats y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  // x[4 g + j]: of the rows 4 g to 4 g + 3, the units j and j + 4
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}
inline Floats units_of(const void* bits) { return _mm256_loadu_ps(static_cast<const float*>(bits)); }
#endif

// kLanes units of a row from unit `first` on, zero beyond its last input.
template <class Arithmetic>
Floats take_units(const typename Arithmetic::Element* row, int inputs, std::int64_t first) {
  using Element = typename Arithmetic::Element;
  constexpr bool kAsTheyAre = sizeof(Element) * Arithmetic::kElements == sizeof(Unit);
  constexpr int kElements = kLanes * Arithmetic::kElements;
  const std::int64_t start = first * Arithmetic::kElements, left = inputs - start;
  alignas(64) Element some[kElements] = {};
  const Element* from = row + start;
  if (left < kElements) {
    if (left > 0) std::memcpy(some, from, left * sizeof(Element));
    from = some;
  }
  if constexpr (kAsTheyAre) {
    return units_of(from);
  } else {
    return load(from);
  }
}

// Units [first, last) of a block.
template <class Arithmetic>
void arrange_units(const LinearProduct& a, void* activations, int start, int rows, std::int64_t first, std::int64_t last) {
  using Element = typename Arithmetic::Element;
  float* to = static_cast<float*>(activations) + start * row_units<Arithmetic>(a);
  const Element* from = static_cast<const Element*>(a.x) + start * a.x_stride;
  for (std::int64_t unit = first; unit < last; unit += kLanes) {
    const auto count = static_cast<int>(last - unit < kLanes ? last - unit : kLanes);
    Floats x[kLanes];
    for (int row = 0; row < kLanes; ++row)
      x[row] = row < rows ? take_units<Arithmetic>(from + row * a.x_stride, a.weight.inputs, unit) : zero();
    if (rows == 1) {
      store_some(to + unit, x[0], count);
      continue;
    }
    transpose(x);
    for (int i = 0; i < count; ++i) {
      float* line = to + (unit + i) * rows;
      // what spills over is written again by the lines that follow
      if ((unit + i) * rows + kLanes <= last * rows) {
        store(line, x[i]);
      } else {
        store_some(line, x[i], rows);
      }
    }
  }
}

template <class Arithmetic>
void arrange_part(const LinearProduct& a, void* activations, int block, int part, int parts) {
  const RowBlocks blocks = vector_blocks(a);
  const std::int64_t units = row_units<Arithmetic>(a);
  arrange_units<Arithmetic>(a, activations, blocks.start(block), blocks.size(block), units * part / parts,
                            units * (part + 1) / parts);
}

inline void arrange_vectors(const LinearProduct& a, void* activations, int block, int part, int parts) {
  a.weight.type == Type::float32 ? arrange_part<SingleFloats>(a, activations, block, part, parts)
                                 : arrange_part<Bfloat16Arithmetic>(a, activations, block, part, parts);
}

}  // namespace
}  // namespace octavo
