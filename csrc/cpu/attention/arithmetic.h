// The two products of attention for a few rows at once, in float32 or with dot products of bfloat16 pairs.
//
// Both operands come in units of 32 bits: one float32, or two bfloat16 that are multiplied and added in one go. A lane
// holds one (row, key) or one (row, element of the result) and adds its products in one order, whatever the blocking.
#pragma once

#include "../vector.h"
#include "attention.h"

namespace octavo {
namespace {

struct Float32Products {
  static constexpr bool kUsesTiles = false;
  static constexpr int kPerUnit = 1;
  static constexpr int kExponentialDegree = 5;
  static Floats multiply_add(Floats sum, Floats a, Floats b) { return fma(a, b, sum); }
  // A vector of weights, beginning with number `first`.
  static void store_weights(float* units, int first, Floats x) { store(units + first, x); }
  // `count` numbers, a multiple of 16, as operands.
  static void to_units(const float* x, int count, float* units) { std::memcpy(units, x, sizeof(float) * count); }
};

#if defined(__AVX512BF16__)
struct Bfloat16Products {
  static constexpr bool kUsesTiles = false;
  static constexpr int kPerUnit = 2;
  static constexpr int kExponentialDegree = 4;  // rounded to 8 bits afterwards
  static Floats multiply_add(Floats sum, Floats a, Floats b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static void store_weights(float* units, int first, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(units + first / 2), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  static void to_units(const float* x, int count, float* units) {
    for (int i = 0; i < count; i += kLanes) store(reinterpret_cast<bf16*>(units) + i, load(x + i));
  }
};
#endif

// Sixteen units that are stored as operands. A source reads a vector of pieces of `kBytes` for 16 lanes, each of `kUnits` units.
struct Plain {
  static constexpr int kBytes = 64, kUnits = 1;
  static void read(const std::uint8_t* p, Floats (&units)[1]) { units[0] = load(reinterpret_cast<const float*>(p)); }
};

// Prefetches the line at `p` into the second-level cache: blocks are not adjacent, and the hardware prefetches only adjacent lines.
[[gnu::always_inline]] inline void bring(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

template <int N>
struct Count {
  static constexpr int value = N;
};

// Rows whose sums fit the registers beside the operands. With sixteen registers there are half as many rows: two vectors
// for each of four rows give as many products as one for each of eight, with fewer loads.
constexpr int kScoreRows = kLanes == 16 ? 8 : 4;
constexpr int kValueRows = kScoreRows;

// Calls `f` with the number of rows, at most kScoreRows, as a constant.
template <int kRows = 1, class F>
inline void with_rows(int rows, const F& f) {
  if constexpr (kRows < kScoreRows) {
    if (rows > kRows) return with_rows<kRows + 1>(rows, f);
  }
  f(Count<kRows>());
}

// Bytes of a vector of what `Source` reads; a piece is one vector, or two narrow ones.
template <class Source>
constexpr int kVectorBytes = Source::kBytes * kLanes / 16;

constexpr int kVectorsPerTile = kTileKeys / kLanes;

// Vectors, a power of two and at most `most`, whose sums for so many rows fit the registers beside what they are made of.
template <class Source>
constexpr int vectors_at_once(int rows, int most) {
  constexpr int kRegisters = kLanes == 16 ? 32 : 16;
  while (most > 1 && most * (rows + Source::kUnits) > kRegisters - 2) most /= 2;
  return most;
}

// scores[r][key] = sum over units of q[unit][r] * keys, for `Vectors` vectors of keys, one piece apart from units to units;
// meanwhile prefetches the same places from `ahead` on.
template <class Products, class Source, int Rows, int Vectors>
[[gnu::always_inline]] inline void score_vectors(const float* q, const std::uint8_t* const* keys, const std::uint8_t* const* ahead,
                          int units, float* scores) {
  Floats sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) sums[r][j] = zero();
  constexpr int kUnits = Source::kUnits;
  for (int unit = 0; unit < units; unit += kUnits) {
    Floats key[Vectors][kUnits];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      Source::read(keys[j] + unit / kUnits * Source::kBytes, key[j]);
      bring(ahead[j] + unit / kUnits * Source::kBytes);
    }
#pragma GCC unroll 2
    for (int u = 0; u < kUnits; ++u)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Floats query = all(q[(unit + u) * kScoreRows + r]);
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; ++j) sums[r][j] = Products::multiply_add(sums[r][j], key[j][u], query);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(scores + r * kChunkKeys + j * kLanes, sums[r][j]);
}

// Scores of rows against the tiles [low, high) of a chunk; a tile is [units][16 keys].
template <class Products, class Source>
[[gnu::noinline]] void score_rows(int rows, const float* q, const std::uint8_t* const* tiles,
                       const std::uint8_t* const* next_tiles, int low, int high, int units, float* scores) {
  const std::uint8_t *keys[kChunkKeys / kLanes], *ahead[kChunkKeys / kLanes];
  for (int j = low * kVectorsPerTile; j < high * kVectorsPerTile; ++j) {
    const int offset = j % kVectorsPerTile * (Source::kBytes / kVectorsPerTile);
    keys[j] = tiles[j / kVectorsPerTile] + offset;
    ahead[j] = next_tiles[j / kVectorsPerTile] + offset;
  }
  with_rows(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    constexpr int kMost = vectors_at_once<Source>(kRows, 4);
    int j = low * kVectorsPerTile;
    const int end = high * kVectorsPerTile;
    for (; j + kMost <= end; j += kMost)
      score_vectors<Products, Source, kRows, kMost>(q, keys + j, ahead + j, units, scores + j * kLanes);
    for (; j < end; ++j)
      score_vectors<Products, Source, kRows, 1>(q, keys + j, ahead + j, units, scores + j * kLanes);
  });
}

// Adjacent values: [units][padded_dim] or pairs of units, multiplied with `units` weights from `first_unit` on.
struct Segment {
  const std::uint8_t* values;
  const std::uint8_t* ahead;  // the values that are read next, to be prefetched
  int first_unit;
  int units;
};

// sums[r] = sums[r] * factors[r] + sum over units of weights[r] * values, for `Vectors` vectors of the result.
template <class Products, class Source, int Rows, int Vectors>
[[gnu::always_inline]] inline void add_vectors(const Segment* segments, int count, const float* weights, const float* factors, float* sums,
                        int dim, int first) {
  constexpr int kStride = kChunkKeys / Products::kPerUnit, kUnits = Source::kUnits;
  Floats added[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j)
      added[r][j] = mul(load(sums + r * dim + first + j * kLanes), all(factors[r]));
  const int row_bytes = dim / 16 * Source::kBytes;
  for (int s = 0; s < count; ++s) {
    const std::uint8_t* values = segments[s].values + first * Source::kBytes / 16;
    const std::uint8_t* ahead = segments[s].ahead + first * Source::kBytes / 16;
    const float* weight = weights + segments[s].first_unit;
    for (int unit = 0; unit < segments[s].units; unit += kUnits, values += row_bytes, ahead += row_bytes) {
      Floats value[Vectors][kUnits];
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) {
        Source::read(values + j * kVectorBytes<Source>, value[j]);
        bring(ahead + j * kVectorBytes<Source>);
      }
#pragma GCC unroll 2
      for (int u = 0; u < kUnits; ++u) {
        if (u > 0 && unit + u == segments[s].units) break;  // data after the last value may be NaN
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const Floats shared = all(weight[r * kStride + unit + u]);
#pragma GCC unroll 8
          for (int j = 0; j < Vectors; ++j) added[r][j] = Products::multiply_add(added[r][j], value[j][u], shared);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) store(sums + r * dim + first + j * kLanes, added[r][j]);
}

template <class Products, class Source>
[[gnu::noinline]] void add_values(int rows, const Segment* segments, int count, const float* weights, const float* factors,
                                float* sums, int dim) {
  with_rows(rows, [&](auto number) {
    constexpr int kRows = decltype(number)::value;
    constexpr int kMost = vectors_at_once<Source>(kRows, 8);
    const auto add = [&](auto vectors, int first) {
      add_vectors<Products, Source, kRows, decltype(vectors)::value>(segments, count, weights, factors, sums, dim,
                                                                     first);
    };
    int first = 0;
    for (; first + kMost * kLanes <= dim; first += kMost * kLanes) add(Count<kMost>(), first);
    for (; first + 2 * kLanes <= dim; first += 2 * kLanes) add(Count<2>(), first);
    for (; first < dim; first += kLanes) add(Count<1>(), first);
  });
}

}  // namespace
}  // namespace octavo
