// Rearranges activations for products by vectors: the units of a block's rows become adjacent.
#pragma once

#include "../transpose.h"
#include "vectors.h"

namespace octavo {
namespace {

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
    return load_bits(from);
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
      // the following lines overwrite what is written beyond the end
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
