// Products by vectors: columns lie in lanes, and each output is one chain of multiply-adds along the inputs.
//
// However many rows and panels are computed together, a chain is the same sequence of the same instructions: so a row's
// bits do not depend on other rows.
#pragma once

#include <cstring>

#include "../vector.h"
#include "epilogue.h"

namespace octavo {
namespace {

// How far ahead of its use a line of weights is prefetched. With few rows the processor, which sees one ascending stream,
// prefetches better by itself: 33 of 34 GB/s measured on a Zen 4 core, but 23 with any software prefetch.
constexpr int prefetch_bytes(int rows) { return rows >= 7 ? 16384 : 0; }

// A unit of activations: 32 bits, one float32 or a pair of bfloat16. A block of rows is kept as the units of all its
// rows side by side, for each of its units in a row in turn.
using Unit = std::uint32_t;
inline float as_float(Unit unit) {
  float value;
  std::memcpy(&value, &unit, sizeof value);
  return value;
}

// Pairs of bfloat16 for levels without dot products: activations are float32, the even input of a pair comes first.
struct PairFloats {
  using Element = bf16;
  static constexpr int kElements = 1;  // in a unit
  static constexpr int kUnits = 2;     // of a row, for a line of weights
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
  template <int kRows>
  static Floats add_product(Floats sum, const Unit* a, Weights b) {
    return fma(all(as_float(a[kRows])), b.odd, fma(all(as_float(a[0])), b.even, sum));
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 as they are.
struct PairDots {
  using Element = bf16;
  static constexpr int kElements = 2, kUnits = 1;
  static constexpr int kLines = PairFloats::kLines, kLineBytes = PairFloats::kLineBytes;
  static constexpr int kStepBytes = PairFloats::kStepBytes, kTileColumns = PairFloats::kTileColumns;
  static constexpr int offset(int column) { return PairFloats::offset(column); }

  using Weights = __m512bh;
  static Weights load(const char* line) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(line)); }
  template <int kRows>
  static Floats add_product(Floats sum, const Unit* a, Weights b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*a))), b);
  }
};
using Bfloat16Arithmetic = PairDots;
#else
using Bfloat16Arithmetic = PairFloats;
#endif

struct SingleFloats {
  using Element = float;
  static constexpr int kElements = 1, kUnits = 1;
  static constexpr int kLines = 1, kLineBytes = 128, kStepBytes = 128, kTileColumns = 32;
  static constexpr int offset(int column) { return column * 4; }

  using Weights = Floats;
  static Weights load(const char* line) { return octavo::load(reinterpret_cast<const float*>(line)); }
  template <int kRows>
  static Floats add_product(Floats sum, const Unit* a, Weights b) {
    return fma(all(as_float(*a)), b, sum);
  }
};

// sums [kRows][32] += activations [steps · lines · units][kRows] times kColumns columns of a panel; from zero at first.
// Weights are read in the order of memory, one tile after the other: any other order reaches a third of the memory
// bandwidth.
template <class Arithmetic, int kRows, int kColumns>
inline void accumulate(const Unit* a, const char* weight, int steps, bool is_first, float* sums) {
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
        const Unit* units = a + line * kRows * Arithmetic::kUnits;
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
            sum[tile + v][row] = Arithmetic::template add_product<kRows>(sum[tile + v][row], units + row, b[v]);
        }
      }
    }
    a += kRows * Arithmetic::kLines * Arithmetic::kUnits;
  }
  for (int v = 0; v < kVectors; ++v)
    for (int row = 0; row < kRows; ++row) store(sums + row * kPanelColumns + v * kLanes, sum[v][row]);
}

// The rows whose sums fit the registers beside the operands; the columns that are computed at a time; and, where that is
// half a panel, the steps after which the other half is computed with the same weights.
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

// sums [kRows][32] = activations of kRows rows times a panel.
template <class Arithmetic, int kRows>
void multiply_panel(const Unit* activations, const char* weight, int steps, float* sums) {
  if constexpr (kRows <= kMostRows<Arithmetic>) {
    constexpr int kColumns = columns_together(kRows);
    const int turn = kColumns == kPanelColumns ? steps : kTurnBytes / Arithmetic::kStepBytes;
    for (int step = 0; step < steps; step += turn) {
      const int count = steps - step < turn ? steps - step : turn;
      for (int column = 0; column < kPanelColumns; column += kColumns)
        accumulate<Arithmetic, kRows, kColumns>(activations, weight + Arithmetic::offset(column), count, step == 0,
                                                sums + column);
      activations += static_cast<std::int64_t>(count) * Arithmetic::kLines * kRows * Arithmetic::kUnits;
      weight += static_cast<std::int64_t>(count) * Arithmetic::kStepBytes;
    }
  }
}

using MultiplyPanel = void (*)(const Unit* activations, const char* weight, int steps, float* sums);

template <class Arithmetic>
constexpr MultiplyPanel kMultiplyPanel[15] = {
    nullptr,
    multiply_panel<Arithmetic, 1>,  multiply_panel<Arithmetic, 2>,  multiply_panel<Arithmetic, 3>,
    multiply_panel<Arithmetic, 4>,  multiply_panel<Arithmetic, 5>,  multiply_panel<Arithmetic, 6>,
    multiply_panel<Arithmetic, 7>,  multiply_panel<Arithmetic, 8>,  multiply_panel<Arithmetic, 9>,
    multiply_panel<Arithmetic, 10>, multiply_panel<Arithmetic, 11>, multiply_panel<Arithmetic, 12>,
    multiply_panel<Arithmetic, 13>, multiply_panel<Arithmetic, 14>,
};

template <class Arithmetic>
std::int64_t row_units(const LinearProduct& a) {
  return static_cast<std::int64_t>(a.weight.steps()) * Arithmetic::kLines * Arithmetic::kUnits;
}

template <class Arithmetic>
void multiply_blocks(const LinearProduct& a, const void* activations, int first_block, int last_block, int first_panel,
                     int last_panel) {
  const RowBlocks blocks{a.rows, kMostRows<Arithmetic>, true};
  alignas(64) float sums[kMostRows<Arithmetic> * kPanelColumns];
  // a panel that several blocks need comes from memory once
  for (int panel = first_panel; panel < last_panel; ++panel)
    for (int block = first_block; block < last_block; ++block) {
      const int start = blocks.start(block), rows = blocks.size(block);
      kMultiplyPanel<Arithmetic>[rows](static_cast<const Unit*>(activations) + start * row_units<Arithmetic>(a),
                                       static_cast<const char*>(a.weight.panels) + panel * a.weight.panel_bytes(),
                                       a.weight.steps(), sums);
      finish_rows(a, start, rows, panel, sums);
    }
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

template <class Arithmetic>
std::int64_t row_bytes_of(const LinearProduct& a) {
  const bool serves = sizeof(typename Arithmetic::Element) * Arithmetic::kElements == sizeof(Unit) && a.rows == 1 &&
                      a.weight.inputs == a.weight.padded_inputs();
  return serves ? 0 : row_units<Arithmetic>(a) * static_cast<std::int64_t>(sizeof(Unit));
}

inline std::int64_t vector_row_bytes(const LinearProduct& a) {
  return a.weight.type == Type::float32 ? row_bytes_of<SingleFloats>(a) : row_bytes_of<Bfloat16Arithmetic>(a);
}

}  // namespace
}  // namespace octavo
