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

// How far ahead of its use a line of weights is asked for. With few rows the processor, which sees one ascending stream,
// does better by itself: 33 of 34 GB/s measured on a Zen 4 core, against 23 with any prefetch.
constexpr int prefetch_bytes(int rows) { return rows >= 7 ? 16384 : 0; }

// Activations of bfloat16 as float32, for levels without dot products: of a pair of inputs, the even one comes first.
struct PairFloats {
  using Unit = float;
  static constexpr int kUnits = 2;  // per row and line
  static constexpr int kLines = 16, kLineBytes = 64, kStepBytes = 2048, kTileColumns = 16;
  static constexpr int offset(int column) { return column / 16 * 1024 + column % 16 * 4; }

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
  static constexpr int kStepBytes = PairFloats::kStepBytes, kTileColumns = PairFloats::kTileColumns;
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
  static constexpr int kLines = 1, kLineBytes = 128, kStepBytes = 128, kTileColumns = 32;
  static constexpr int offset(int column) { return column * 4; }

  using Weights = Floats;
  static Weights load(const char* line) { return octavo::load(reinterpret_cast<const float*>(line)); }
  static Floats add_product(Floats sum, const float* a, Weights b) { return fma(all(*a), b, sum); }
};

// sums [kRows][32] += activations [steps · lines][kRows][units] times kColumns columns of a panel; from zero at first.
// Weights are read in the order in which they lie, a tile after the other: a stream in any other order reaches a third
// of the memory's speed.
template <class Arithmetic, int kRows, int kColumns>
inline void accumulate(const typename Arithmetic::Unit* a, const char* weight, int steps, bool is_first, float* sums) {
  constexpr int kVectors = kColumns / kLanes, kAhead = prefetch_bytes(kRows);
  // vectors that share the lines of one stretch of the stream
  constexpr int kTogether = Arithmetic::kTileColumns < kColumns ? Arithmetic::kTileColumns / kLanes : kVectors;
  Floats sum[kVectors][kRows];
  for (int v = 0; v < kVectors; ++v)
    for (int row = 0; row < kRows; ++row)
      sum[v][row] = is_first ? zero() : load(sums + row * kPanelColumns + v * kLanes);
  for (int step = 0; step < steps; ++step, weight += Arithmetic::kStepBytes) {
#pragma GCC unroll 4
    for (int tile = 0; tile < kVectors; tile += kTogether) {
#pragma GCC unroll 1
      for (int line = 0; line < Arithmetic::kLines; ++line) {
        const typename Arithmetic::Unit* units = a + line * kRows * Arithmetic::kUnits;
        typename Arithmetic::Weights b[kTogether];
#pragma GCC unroll 4
        for (int v = 0; v < kTogether; ++v) {
          const char* from = weight + Arithmetic::offset((tile + v) * kLanes) + line * Arithmetic::kLineBytes;
          if (kAhead && v * kLanes % 16 == 0) _mm_prefetch(from + kAhead, _MM_HINT_T1);
          b[v] = Arithmetic::load(from);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
          for (int v = 0; v < kTogether; ++v)
            sum[tile + v][row] = Arithmetic::add_product(sum[tile + v][row], units + row * Arithmetic::kUnits, b[v]);
        }
      }
    }
    a += kRows * Arithmetic::kLines * Arithmetic::kUnits;
  }
  for (int v = 0; v < kVectors; ++v)
    for (int row = 0; row < kRows; ++row) store(sums + row * kPanelColumns + v * kLanes, sum[v][row]);
}

// How many rows the registers hold sums of, besides what these are made from; how many columns go through the registers
// at a time; and, where that is half a panel, after how many steps the other half has its turn on the same weights.
#if defined(__AVX512F__)
template <class Arithmetic>
constexpr int kMostRows = sizeof(typename Arithmetic::Weights) > sizeof(Floats) ? 12 : 14;
constexpr int columns_together(int) { return kPanelColumns; }
#else
template <class Arithmetic>
constexpr int kMostRows = sizeof(typename Arithmetic::Weights) > sizeof(Floats) ? 4 : 6;
constexpr int columns_together(int rows) { return rows <= 2 ? kPanelColumns : kTileColumns; }
#endif
constexpr int kTurnBytes = 2048;

// kRows rows, arranged in `activations`, times the panels.
template <class Arithmetic, int kRows>
void multiply_rows(const LinearProduct& a, const void* activations, int start, int first_panel, int last_panel) {
  if constexpr (kRows <= kMostRows<Arithmetic>) {
    constexpr int kColumns = columns_together(kRows);
    const int steps = a.weight.steps(), turn = kColumns == kPanelColumns ? steps : kTurnBytes / Arithmetic::kStepBytes;
    for (int panel = first_panel; panel < last_panel; ++panel) {
      alignas(64) float sums[kRows * kPanelColumns];
      const auto* units = static_cast<const typename Arithmetic::Unit*>(activations);
      const char* weight = static_cast<const char*>(a.weight.panels) + panel * a.weight.panel_bytes();
      for (int step = 0; step < steps; step += turn) {
        const int count = steps - step < turn ? steps - step : turn;
        for (int column = 0; column < kPanelColumns; column += kColumns)
          accumulate<Arithmetic, kRows, kColumns>(units, weight + Arithmetic::offset(column), count, step == 0,
                                                  sums + column);
        units += static_cast<std::int64_t>(count) * Arithmetic::kLines * kRows * Arithmetic::kUnits;
        weight += static_cast<std::int64_t>(count) * Arithmetic::kStepBytes;
      }
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
  const RowBlocks blocks{a.rows, kMostRows<Arithmetic>, true};
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
  return {a.rows, a.weight.type == Type::float32 ? kMostRows<SingleFloats> : kMostRows<Bfloat16Arithmetic>, true};
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
