// Products of the codes of one unit, added up, and what they need of each level: vectors, and codes out of nibbles.
//
// Included only by units of one level. Integers are summed in any order, which is exact.
#pragma once

#include <utility>

#include "activations.h"

namespace octavo {
namespace {

// How far ahead a block of so many rows prefetches the panel, which comes from memory when few rows use it. The best
// distance, found by measuring, grows with the time of computing on a line. With AVX2, which works longer on a line, 4 KiB
// and more take up to twice as long as 512 bytes.
constexpr int ahead_of([[maybe_unused]] Kind kind, [[maybe_unused]] int rows) {
#if !defined(__AVX512F__)
  return 512;
#endif
  if (kind != Kind::int8) return rows <= 2 ? 2048 : 8192;
  return rows <= 3 ? 2048 : rows == 4 ? 4096 : rows <= 6 ? 6144 : 8192;
}

// Always inlined, because the compiler drops a call as one without effects.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* line) {
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
}
[[gnu::always_inline]] inline void prefetch_near(const std::uint8_t* line) {
  _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
}

inline std::int32_t quad_at(const std::int8_t* codes, int index) {
  std::int32_t quad;
  std::memcpy(&quad, codes + index * 4, 4);
  return quad;
}

// Twice the value of an E2M1 code, plus 12.
#define OCTAVO_E2M1_BYTES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

// A panel's columns in vectors, of integers or floats.
constexpr int kParts = kPanelColumns / kLanes;

#if defined(__AVX512F__)

using Ints = __m512i;
inline Ints all_ints(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const std::int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_ints(std::int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints mul_ints(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints load_shorts(const std::uint8_t* p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints load_bytes(const std::uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_halves(const std::uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline __m512i line_at(const std::uint8_t* panel) { return _mm512_loadu_si512(panel); }

// The 8-bit codes of a line of nibbles: of the first 16 columns, and of the others.
template <Kind kKind>
inline void widen(__m512i line, __m512i& low, __m512i& high) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  low = _mm512_and_si512(line, nibble);
  high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
  if constexpr (kKind == Kind::e2m1) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(OCTAVO_E2M1_BYTES));
    low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
  }
}

// Whether blocks of so many rows are bound by memory rather than by products.
constexpr int kStreamRows = 8, kStreamGroupRows = 3;

// A product waits four cycles for the one before it in the same sum: few rows take several sums each.
constexpr int chains_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int kMostGroupChains = 2;  // groups are summed side by side

template <int kHalf>
struct Half {
  static constexpr int index = kHalf;
};

// sum += codes of the block · codes of a unit; both pointers go on behind it.
template <int kRows, Kind kKind, bool kIsChannel, int kChains>
[[gnu::always_inline]] inline void add_unit(const std::int8_t*& codes, const std::uint8_t*& panel, int depth,
                                            Ints (&sum)[kChains][kRows][2]) {
  constexpr int kAhead = ahead_of(kKind, kRows), kUnrolled = kIsChannel ? kStepDepth / 4 : 4;
  if constexpr (kKind != Kind::int8) {
    const std::int8_t* const end = codes + depth * kRows;
    do {
#pragma GCC unroll 4
      for (int inner = 0; inner < 4; ++inner, panel += 64) {
        __m512i low, high;
        widen<kKind>(line_at(panel), low, high);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          const __m512i x = _mm512_set1_epi32(quad_at(codes, inner * kRows + row));
          __m512i* to = sum[inner % kChains][row];
          to[0] = _mm512_dpbusd_epi32(to[0], low, x);
          to[1] = _mm512_dpbusd_epi32(to[1], high, x);
        }
      }
      codes += 16 * kRows;
    } while (codes != end);
  } else if constexpr (kRows <= (kIsChannel ? kStreamRows : kStreamGroupRows)) {
    // one stream in the order of memory, because few rows are bound by it
    const auto add_half = [&](auto half) {
      const std::int8_t* quads = codes;
      do {
#pragma GCC unroll 4
        for (int inner = 0; inner < 4; ++inner, panel += 64) {
          const __m512i weights = line_at(panel);
          kRows == 4 ? prefetch_near(panel + kAhead) : prefetch(panel + kAhead);
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            __m512i& to = sum[inner % kChains][row][half.index];
            to = _mm512_dpbusd_epi32(to, weights, _mm512_set1_epi32(quad_at(quads, inner * kRows + row)));
          }
        }
        quads += 16 * kRows;
      } while (quads != codes + depth * kRows);
    };
    add_half(Half<0>()), add_half(Half<1>());
    codes += depth * kRows;
  } else {
    const std::int8_t* const end = codes + depth * kRows;
    const int other = depth * kTileColumns;
    do {
#pragma GCC unroll 16
      for (int inner = 0; inner < kUnrolled; ++inner, panel += 64) {
        const __m512i low = line_at(panel), high = line_at(panel + other);
        if constexpr (kIsChannel) prefetch(panel + kAhead), prefetch(panel + kAhead + other);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          const __m512i x = _mm512_set1_epi32(quad_at(codes, inner * kRows + row));
          __m512i* to = sum[inner % kChains][row];
          to[0] = _mm512_dpbusd_epi32(to[0], low, x);
          to[1] = _mm512_dpbusd_epi32(to[1], high, x);
        }
      }
      codes += kUnrolled * 4 * kRows;
    } while (codes != end);
    panel += other;
  }
}

#else

using Ints = __m256i;
inline Ints all_ints(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_ints(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_ints(std::int32_t* p, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints mul_ints(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints load_shorts(const std::uint8_t* p) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_bytes(const std::uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_halves(const std::uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i line_at(const std::uint8_t* panel) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel));
}

template <Kind kKind>
inline void widen(__m256i line, __m256i& low, __m256i& high) {
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  low = _mm256_and_si256(line, nibble);
  high = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
  if constexpr (kKind == Kind::e2m1) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(OCTAVO_E2M1_BYTES));
    low = _mm256_shuffle_epi8(table, low), high = _mm256_shuffle_epi8(table, high);
  }
}

constexpr int chains_for(int) { return 1; }
constexpr int kMostGroupChains = 1;

#define OCTAVO_INLINED __attribute__((always_inline))

// change(0), change(1) and so on, with constants, so that the compiler keeps an array that they index in registers.
template <int kCount, class Change>
[[gnu::always_inline]] inline void for_each(const Change& change) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) OCTAVO_INLINED {
    (change(std::integral_constant<int, kIndex>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Vectors of sum [kRows][4], from kFirst on, += codes of the block · codes in kVectors vectors of each line of a panel.
// Codes of 8 bits are multiplied nibble by nibble, too: two products of whole bytes would not fit the 16 bits that
// vpmaddubsw has for them. Two products of a nibble are 3,810 at most and eight such sums stay inside 16 bits; of a byte
// of E2M1 they are 6,096, and four do.
template <int kRows, Kind kKind, int kVectors, int kFirst, int kAhead>
[[gnu::always_inline]] inline void add_lines(const std::int8_t* codes, const std::int8_t* end, int together,
                                             const std::uint8_t* line, Ints (&sum)[kRows][4]) {
  const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  do {
    __m256i low[kRows][kVectors], high[kRows][kVectors];
    for_each<kRows * kVectors>([&](auto i) OCTAVO_INLINED {
      low[i / kVectors][i % kVectors] = high[i / kVectors][i % kVectors] = _mm256_setzero_si256();
    });
    int inner = together;
    do {
      if constexpr (kAhead != 0) prefetch(line + kAhead);
      for_each<kVectors>([&](auto i) OCTAVO_INLINED {
        __m256i low_codes, high_codes;
        widen<kKind>(line_at(line + i * 32), low_codes, high_codes);
        for_each<kRows>([&](auto row) OCTAVO_INLINED {
          const __m256i x = _mm256_set1_epi32(quad_at(codes, row));
          low[row][i] = _mm256_add_epi16(low[row][i], _mm256_maddubs_epi16(low_codes, x));
          high[row][i] = _mm256_add_epi16(high[row][i], _mm256_maddubs_epi16(high_codes, x));
          // one row after the other: gcc would compute all products first, which needs more registers than there are
          asm volatile("" : "+x"(low[row][i]), "+x"(high[row][i]));
        });
      });
      line += 64, codes += 4 * kRows;
    } while (--inner);
    for_each<kRows>([&](auto row) OCTAVO_INLINED {
      for_each<kVectors>([&](auto i) OCTAVO_INLINED {
        constexpr bool kIsByte = kKind == Kind::int8;
        Ints& of_low = sum[row][kFirst + i];
        of_low = _mm256_add_epi32(of_low, _mm256_madd_epi16(low[row][i], ones));
        Ints& of_high = sum[row][kFirst + i + (kIsByte ? 0 : 2)];
        of_high = _mm256_add_epi32(of_high, _mm256_madd_epi16(high[row][i], kIsByte ? sixteens : ones));
      });
    });
  } while (codes != end);
}

// Sums of more rows than two leave registers for one vector of a line at a time.
template <int kRows, Kind kKind, bool kIsChannel, int kChains>
[[gnu::always_inline]] inline void add_unit(const std::int8_t*& codes, const std::uint8_t*& panel, int depth,
                                            Ints (&sum)[kChains][kRows][4]) {
  constexpr int kAhead = ahead_of(kKind, kRows), kVectors = kRows <= 2 ? 2 : 1;
  const std::int8_t* const end = codes + depth * kRows;
  const int together = kKind == Kind::e2m1 || depth < 32 ? 4 : 8;
  for_each<kKind == Kind::int8 ? 2 : 1>([&](auto half) OCTAVO_INLINED {
    for_each<2 / kVectors>([&](auto i) OCTAVO_INLINED {
      add_lines<kRows, kKind, kVectors, half * 2 + i, i == 0 ? kAhead : 0>(codes, end, together, panel + i * 32, sum[0]);
    });
    panel += depth * 16;
  });
  codes = end;
}

#endif

}  // namespace
}  // namespace octavo
