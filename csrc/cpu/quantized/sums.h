// Sums of products of codes: a block of rows times a panel of 32 columns.
//
// Included only by units of one level. Integers are summed in any order, for that is exact; an int4 sum in float32 runs
// over the groups from first to last, product rounded and then added, on every level and for every number of rows.
#pragma once

#include "activations.h"

namespace octavo {
namespace {

// How far ahead a block of so many rows prefetches the panel, which streams from memory when few rows use it. The best
// distance grows with the time that a line is worked on; found by measuring.
constexpr int ahead_int8(int rows) { return rows <= 3 ? 2048 : rows == 4 ? 4096 : rows <= 6 ? 6144 : 8192; }
constexpr int ahead_int4(int rows) { return rows <= 2 ? 2048 : 8192; }

inline void prefetch(const std::uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1); }
inline void prefetch_near(const std::uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0); }

inline std::int32_t quad_at(const std::int8_t* codes, int index) {
  std::int32_t quad;
  std::memcpy(&quad, codes + index * 4, 4);
  return quad;
}

#if defined(__AVX512F__)

inline __m512i line_at(const std::uint8_t* panel) { return _mm512_loadu_si512(panel); }

// Blocks of so many rows wait for memory more than for products.
constexpr int kStreamRows = 8;

// A product waits four cycles for the one before it in the same sum: few rows take several sums each.
constexpr int chains_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// sums [kRows][32] = codes of the block · codes of the panel, over the whole depth.
template <int kRows>
void int8_sums(const std::int8_t* codes, const std::int32_t* start, const std::uint8_t* panel, int steps,
               std::int32_t* sums) {
  constexpr int kChains = chains_for(kRows), kAhead = ahead_int8(kRows);
  __m512i sum[kChains][kRows][2];
  for (int chain = 0; chain < kChains; ++chain)
    for (int row = 0; row < kRows; ++row)
      for (int half = 0; half < 2; ++half)
        sum[chain][row][half] = chain == 0 ? _mm512_set1_epi32(start[row]) : _mm512_setzero_si512();
  for (int step = 0; step < steps; ++step) {
    if constexpr (kRows <= kStreamRows) {
      // one stream in the order of memory, which is what few rows wait for
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        asm volatile("" ::: "memory");  // the activations of a step are more than the registers that are left
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; ++quad) {
          const std::uint8_t* line = panel + half * 1024 + quad * 64;
          const __m512i weights = line_at(line);
          kRows == 4 ? prefetch_near(line + kAhead) : prefetch(line + kAhead);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            __m512i& to = sum[quad % kChains][row][half];
            to = _mm512_dpbusd_epi32(to, weights, _mm512_set1_epi32(quad_at(codes, quad * kRows + row)));
          }
        }
      }
    } else {
#pragma GCC unroll 4
      for (int quad = 0; quad < 16; ++quad) {
        const std::uint8_t* line = panel + quad * 64;
        const __m512i low = line_at(line), high = line_at(line + 1024);
        prefetch(panel + quad * 128 + kAhead);
        prefetch(panel + quad * 128 + kAhead + 64);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          const __m512i x = _mm512_set1_epi32(quad_at(codes, quad * kRows + row));
          __m512i* to = sum[quad % kChains][row];
          to[0] = _mm512_dpbusd_epi32(to[0], low, x);
          to[1] = _mm512_dpbusd_epi32(to[1], high, x);
        }
      }
    }
    codes += kStepDepth * kRows;
    panel += kStepDepth * kPanelColumns;
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < 2; ++half) {
      __m512i total = sum[0][row][half];
      for (int chain = 1; chain < kChains; ++chain) total = _mm512_add_epi32(total, sum[chain][row][half]);
      _mm512_storeu_si512(sums + row * kPanelColumns + half * 16, total);
    }
}

// sums [kRows][32] = Σ over groups of scale · (codes of the block · codes of the panel in the group).
template <int kRows>
void int4_sums(const std::int8_t* codes, const std::int32_t* start, const std::uint8_t* panel, int groups, int group,
               float* sums) {
  constexpr int kChains = chains_for(kRows), kAhead = ahead_int4(kRows);
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  Floats total[kRows][2];
  for (int row = 0; row < kRows; ++row) total[row][0] = total[row][1] = zero();
  for (int g = 0; g < groups; ++g) {
    __m512i sum[kChains][kRows][2];
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row)
        sum[chain][row][0] = sum[chain][row][1] =
            chain == 0 ? _mm512_set1_epi32(start[row]) : _mm512_setzero_si512();
    for (int quad = 0; quad < group / 4; quad += 4) {
#pragma GCC unroll 4
      for (int inner = 0; inner < 4; ++inner) {
        const __m512i line = line_at(panel);
        prefetch(panel + kAhead);
        panel += 64;
        const __m512i low = _mm512_and_si512(line, nibble);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          const __m512i x = _mm512_set1_epi32(quad_at(codes, inner * kRows + row));
          __m512i* to = sum[inner % kChains][row];
          to[0] = _mm512_dpbusd_epi32(to[0], low, x);
          to[1] = _mm512_dpbusd_epi32(to[1], high, x);
        }
      }
      codes += 16 * kRows;
    }
    const bf16* scales = reinterpret_cast<const bf16*>(panel);
    const Floats low_scale = load(scales), high_scale = load(scales + 16);
    prefetch(panel + kAhead);
    panel += kPanelColumns * 2;
    start += kRows;
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      __m512i low = sum[0][row][0], high = sum[0][row][1];
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) {
        low = _mm512_add_epi32(low, sum[chain][row][0]);
        high = _mm512_add_epi32(high, sum[chain][row][1]);
      }
      total[row][0] = add(total[row][0], mul(_mm512_cvtepi32_ps(low), low_scale));
      total[row][1] = add(total[row][1], mul(_mm512_cvtepi32_ps(high), high_scale));
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    store(sums + row * kPanelColumns, total[row][0]);
    store(sums + row * kPanelColumns + 16, total[row][1]);
  }
}

#else

inline __m256i line_at(const std::uint8_t* panel) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel));
}

// vpmaddubsw would saturate on bytes up to 255; on magnitudes up to 127, with the sign moved to the weight, two products
// are 32,258 at most.
template <int kRows>
void int8_sums(const std::int8_t* codes, const std::int32_t*, const std::uint8_t* panel, int steps, std::int32_t* sums) {
  constexpr int kAhead = ahead_int8(kRows);
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80)), pairs = _mm256_set1_epi16(1);
  __m256i sum[kRows][4];
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < 4; ++part) sum[row][part] = _mm256_setzero_si256();
  for (int step = 0; step < steps; ++step, codes += kStepDepth * kRows, panel += kStepDepth * kPanelColumns) {
    for (int quad = 0; quad < 16; ++quad) {
      prefetch(panel + quad * 64 + kAhead);
      prefetch(panel + quad * 64 + kAhead + 1024);
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const __m256i weights = _mm256_xor_si256(line_at(panel + part / 2 * 1024 + quad * 64 + part % 2 * 32), offset);
#pragma GCC unroll 2
        for (int row = 0; row < kRows; ++row) {
          const __m256i x = _mm256_set1_epi32(quad_at(codes, quad * kRows + row));
          const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
          sum[row][part] = _mm256_add_epi32(sum[row][part], _mm256_madd_epi16(products, pairs));
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < 4; ++part)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kPanelColumns + part * 8), sum[row][part]);
}

// Two products of a nibble are 3,810 at most: eight such sums stay inside 16 bits.
template <int kRows>
void int4_sums(const std::int8_t* codes, const std::int32_t* start, const std::uint8_t* panel, int groups, int group,
               float* sums) {
  constexpr int kAhead = ahead_int4(kRows);
  const __m256i nibble = _mm256_set1_epi8(0x0f), pairs = _mm256_set1_epi16(1);
  Floats total[kRows][4];
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < 4; ++part) total[row][part] = zero();
  for (int g = 0; g < groups; ++g) {
    __m256i sum[kRows][4];
    for (int row = 0; row < kRows; ++row)
      for (int part = 0; part < 4; ++part) sum[row][part] = _mm256_set1_epi32(start[row]);
    for (int quad = 0; quad < group / 4; quad += 8) {
      __m256i products[kRows][4];
      for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < 4; ++part) products[row][part] = _mm256_setzero_si256();
      for (int inner = 0; inner < 8; ++inner, panel += 64) {
        prefetch(panel + kAhead);
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side) {
          const __m256i line = line_at(panel + side * 32);
          const __m256i low = _mm256_and_si256(line, nibble);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
#pragma GCC unroll 2
          for (int row = 0; row < kRows; ++row) {
            const __m256i x = _mm256_set1_epi32(quad_at(codes, inner * kRows + row));
            products[row][side] = _mm256_add_epi16(products[row][side], _mm256_maddubs_epi16(low, x));
            products[row][2 + side] = _mm256_add_epi16(products[row][2 + side], _mm256_maddubs_epi16(high, x));
          }
        }
      }
      codes += 32 * kRows;
      for (int row = 0; row < kRows; ++row)
        for (int part = 0; part < 4; ++part)
          sum[row][part] = _mm256_add_epi32(sum[row][part], _mm256_madd_epi16(products[row][part], pairs));
    }
    const bf16* scales = reinterpret_cast<const bf16*>(panel);
    for (int part = 0; part < 4; ++part) {
      const Floats scale = load(scales + part * 8);
      for (int row = 0; row < kRows; ++row)
        total[row][part] = add(total[row][part], mul(_mm256_cvtepi32_ps(sum[row][part]), scale));
    }
    panel += kPanelColumns * 2;
    start += kRows;
  }
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < 4; ++part) store(sums + row * kPanelColumns + part * 8, total[row][part]);
}

#endif

}  // namespace
}  // namespace octavo
