// Products by vectors: columns lie in lanes, and each output is one chain of multiply-adds along the inputs.
//
// However many rows and panels are computed together, a chain is the same sequence of the same instructions: that is
// what makes a row's bits independent of its neighbours.
#pragma once

#include <cstring>

#include "../vector.h"
#include "epilogue.h"

namespace octavo {
namespace {

// How far ahead of its use a line of weights is asked for.
constexpr int kPrefetchBytes = 8192;

// Activations of bfloat16 as float32, for levels without dot products: of a pair of inputs, the even one comes first.
struct PairFloats {
  using Unit = float;
  static constexpr int kUnits = 2;  // per row and line
  static constexpr int kLines = 16, kLineBytes = 64, kStepBytes = 2048;
  static constexpr int offset(int column) { return column / kTileColumns * 1024 + column % kTileColumns * 4; }

  struct Weights {
    Floats even, odd;
  };
#if defined(__AVX512F__)
  static Weights load(const char* line) {
    const __m512i pairs = _mm512_loadu_si512(line);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
#else
  static Weights load(const char* line) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
#endif
  static Floats add_product(Floats sum, const float* a, Weights b) {
    return fma(all(a[1]), b.odd, fma(all(a[0]), b.even, sum));
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 as they are.
struct PairDots {
  using Unit = std::uint32_t;
  static constexpr int kUnits = 1;
  static constexpr int kLines = PairFloats::kLines, kLineBytes = PairFloats::kLineBytes;
  static constexpr int kStepBytes = PairFloats::kStepBytes;
  static constexpr int offset(int column) { return PairFloats::offset(column); }

  using Weights = __m512bh;
  static Weights load(const char* line) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(line)); }
  static Floats add_product(Floats sum, const std::uint32_t* a, Weights b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*a))), b);
  }
};
using Bfloat16Arithmetic = PairDots;
#else
using Bfloat16Arithmetic = PairFloats;
#endif

struct SingleFloats {
  using Unit = float;
  static constexpr int kUnits = 1;
  static constexpr int kLines = 1, kLineBytes = 128, kStepBytes = 128;
  static constexpr int offset(int column) { return column * 4; }

  using Weights = Floats;
  static Weights load(const char* line) { return octavo::load(reinterpret_cast<const float*>(line)); }
  static Floats add_product(Floats sum, const float* a, Weights b) { return fma(all(*a), b, sum); }
};

// sums [kPanels][kRows][32] = activations [steps · lines][kRows][units] times kColumns columns of kPanels panels.
template <class Arithmetic, int kRows, int kPanels, int kColumns>
inline void accumulate(const typename Arithmetic::Unit* a, const char* weight, std::int64_t panel_bytes, int steps,
                       float* sums) {
  constexpr int kVectors = kColumns / kLanes;
  Floats sum[kPanels * kVectors][kRows];
  for (auto& vector : sum)
    for (Floats& row : vector) row = zero();
  for (int step = 0; step < steps; ++step, weight += Arithmetic::kStepBytes) {
#pragma GCC unroll 4
    for (int line = 0; line < Arithmetic::kLines; ++line) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVectors; ++v) {
        const int column = v % kVectors * kLanes;
        const char* from =
            weight + v / kVectors * panel_bytes + Arithmetic::offset(column) + line * Arithmetic::kLineBytes;
        if (column % 16 == 0) _mm_prefetch(from + kPrefetchBytes, _MM_HINT_T0);
        const typename Arithmetic::Weights b = Arithmetic::load(from);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row)
          sum[v][row] = Arithmetic::add_product(sum[v][row], a + row * Arithmetic::kUnits, b);
      }
      a += kRows * Arithmetic::kUnits;
    }
  }
  for (int v = 0; v < kPanels * kVectors; ++v)
    for (int row = 0; row < kRows; ++row)
      store(sums + (v / kVectors * kRows + row) * kPanelColumns + v % kVectors * kLanes, sum[v][row]);
}

// How many rows the registers hold sums of, besides what they are made from; how many panels few rows take together, so
// that enough chains are under way; and how many columns go through the registers at a time.
#if defined(__AVX512F__)
constexpr int kMostRows = 14;
template <class Arithmetic>
constexpr int kMostRowsOf = sizeof(typename Arithmetic::Weights) > sizeof(Floats) ? 12 : kMostRows;
constexpr int panels_together(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int columns_together(int) { return kPanelColumns; }
#else
constexpr int kMostRows = 6;
template <class Arithmetic>
constexpr int kMostRowsOf = sizeof(typename Arithmetic::Weights) > sizeof(Floats) ? 4 : kMostRows;
constexpr int panels_together(int rows) { return rows == 1 ? 2 : 1; }
constexpr int columns_together(int rows) { return rows == 1 ? kPanelColumns : kTileColumns; }
#endif
constexpr int kMostPanels = 4;

// kRows rows, arranged in `activations`, times the panels.
template <class Arithmetic, int kRows>
void multiply_rows(const LinearProduct& a, const void* activations, int start, int first_panel, int last_panel) {
  if constexpr (kRows <= kMostRowsOf<Arithmetic>) {
    constexpr int kTogether = panels_together(kRows), kColumns = columns_together(kRows);
    const auto* units = static_cast<const typename Arithmetic::Unit*>(activations);
    const std::int64_t panel_bytes = a.weight.panel_bytes();
    alignas(64) float sums[kTogether * kRows * kPanelColumns];
    int panel = first_panel;
    const auto weight = [&] { return static_cast<const char*>(a.weight.panels) + panel * panel_bytes; };
    for (; panel + kTogether <= last_panel; panel += kTogether) {
      for (int column = 0; column < kPanelColumns; column += kColumns)
        accumulate<Arithmetic, kRows, kTogether, kColumns>(units, weight() + Arithmetic::offset(column), panel_bytes,
                                                           a.weight.steps(), sums + column);
      for (int i = 0; i < kTogether; ++i) finish_rows(a, start, kRows, panel + i, sums + i * kRows * kPanelColumns);
    }
    for (; panel < last_panel; ++panel) {
      for (int column = 0; column < kPanelColumns; column += kColumns)
        accumulate<Arithmetic, kRows, 1, kColumns>(units, weight() + Arithmetic::offset(column), panel_bytes,
                                                   a.weight.steps(), sums + column);
      finish_rows(a, start, kRows, panel, sums);
    }
  }
}

using MultiplyRows = void (*)(const LinearProduct&, const void*, int start, int first_panel, int last_panel);

template <class Arithmetic>
constexpr MultiplyRows kMultiplyRows[15] = {
    nullptr,
    multiply_rows<Arithmetic, 1>,  multiply_rows<Arithmetic, 2>,  multiply_rows<Arithmetic, 3>,
    multiply_rows<Arithmetic, 4>,  multiply_rows<Arithmetic, 5>,  multiply_rows<Arithmetic, 6>,
    multiply_rows<Arithmetic, 7>,  multiply_rows<Arithmetic, 8>,  multiply_rows<Arithmetic, 9>,
    multiply_rows<Arithmetic, 10>, multiply_rows<Arithmetic, 11>, multiply_rows<Arithmetic, 12>,
    multiply_rows<Arithmetic, 13>, multiply_rows<Arithmetic, 14>,
};

template <class Arithmetic>
std::int64_t row_units(const LinearProduct& a) {
  return static_cast<std::int64_t>(a.weight.steps()) * Arithmetic::kLines * Arithmetic::kUnits;
}

template <class Arithmetic>
void multiply_blocks(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
                     int last_panel) {
  const RowBlocks blocks{a.rows, kMostRowsOf<Arithmetic>, true};
  const auto multiply_block = [&](int block, int first, int last) {
    const auto* units = static_cast<const typename Arithmetic::Unit*>(activations);
    const int start = blocks.start(block);
    kMultiplyRows<Arithmetic>[blocks.size(block)](a, units + start * row_units<Arithmetic>(a), start, first, last);
  };
  if (last_block - first_block == 1) return multiply_block(first_block, first_panel, last_panel);
  // a panel that several blocks need comes from memory once
  for (int panel = first_panel; panel < last_panel; ++panel)
    for (int block = first_block; block < last_block; ++block) multiply_block(block, panel, panel + 1);
}

inline void multiply_vectors(const LinearProduct& a, const void* activations, int first_block, int last_block,
                             int first_panel, int last_panel) {
  const void* from = activations ? activations : a.x;
  a.weight.type == Type::float32
      ? multiply_blocks<SingleFloats>(a, from, first_block, last_block, first_panel, last_panel)
      : multiply_blocks<Bfloat16Arithmetic>(a, from, first_block, last_block, first_panel, last_panel);
}

inline RowBlocks vector_blocks(const LinearProduct& a) {
  return {a.rows, a.weight.type == Type::float32 ? kMostRowsOf<SingleFloats> : kMostRowsOf<Bfloat16Arithmetic>, true};
}

inline std::int64_t vector_row_bytes(const LinearProduct& a) {
  if (a.weight.type == Type::float32)
    return a.rows == 1 ? 0 : row_units<SingleFloats>(a) * static_cast<std::int64_t>(sizeof(float));
  const bool serves = a.rows == 1 && sizeof(Bfloat16Arithmetic::Unit) == 4 && Bfloat16Arithmetic::kUnits == 1 &&
                      a.weight.inputs == a.weight.padded_inputs();
  return serves ? 0 : row_units<Bfloat16Arithmetic>(a) * 4;
}

inline void set_unit(std::uint32_t* to, const bf16* from, int count) {
  *to = 0;
  std::memcpy(to, from, count * sizeof(bf16));
}
inline void set_unit(float* to, const bf16* from, int count) {
  to[0] = to_float(from[0]);
  to[1] = count > 1 ? to_float(from[1]) : 0.0f;
}
inline void set_unit(float* to, const float* from, int) { *to = *from; }

// Lines [first, last) of a block: the units of its rows side by side.
template <class Arithmetic, class Element>
void arrange_lines(const LinearProduct& a, void* activations, int start, int rows, std::int64_t first, std::int64_t last) {
  constexpr int kElements = sizeof(Element) == 2 ? 2 : 1;  // per line
  auto* to = static_cast<typename Arithmetic::Unit*>(activations) + start * row_units<Arithmetic>(a);
  const Element* from = static_cast<const Element*>(a.x) + start * a.x_stride;
  for (std::int64_t line = first; line < last; ++line) {
    const std::int64_t left = a.weight.inputs - line * kElements;
    for (int row = 0; row < rows; ++row) {
      auto* unit = to + (line * rows + row) * Arithmetic::kUnits;
      if (left > 0) {
        set_unit(unit, from + row * a.x_stride + line * kElements, left < kElements ? 1 : kElements);
      } else {
        for (int i = 0; i < Arithmetic::kUnits; ++i) unit[i] = 0;
      }
    }
  }
}

inline void arrange_vectors(const LinearProduct& a, void* activations, int block, int part, int parts) {
  const RowBlocks blocks = vector_blocks(a);
  const std::int64_t lines = a.weight.type == Type::float32 ? a.weight.steps() : a.weight.steps() * PairFloats::kLines;
  const std::int64_t first = lines * part / parts, last = lines * (part + 1) / parts;
  const int start = blocks.start(block), rows = blocks.size(block);
  a.weight.type == Type::float32 ? arrange_lines<SingleFloats, float>(a, activations, start, rows, first, last)
                                 : arrange_lines<Bfloat16Arithmetic, bf16>(a, activations, start, rows, first, last);
}

}  // namespace
}  // namespace octavo
