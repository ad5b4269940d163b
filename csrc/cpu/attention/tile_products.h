// The two products of attention on tiles of bfloat16: sixteen rows at a time, 32 dimensions or 32 keys deep.
#pragma once

#include "../tiles.h"
#include "arithmetic.h"

namespace octavo {
namespace {

constexpr int kTileDepth = 16;  // units in a tile's rows: 32 dimensions, or the keys of two tiles of the cache

// Tiles 0 to 3 are sums, 4 and 5 operands of the rows (whole, and half as deep), 6 and 7 those of the keys likewise.
class RowTiles {
 public:
  RowTiles() : tiles_(shapes(kTileRows)), rows_(kTileRows) {}

  // For up to 16 rows from here on.
  void set_rows(int rows) {
    if (rows == rows_) return;
    tiles_.configure(shapes(rows));
    rows_ = rows;
  }

  // scores[r][key] for `Count` tiles of keys; q is [rows][units]. Meanwhile fetches what lies in the same places from `ahead`
  // on, unless it is the keys themselves.
  template <int Count>
  void score(const float* q, const std::uint8_t* const* keys, const std::uint8_t* const* ahead, int units, float* scores) {
    const std::ptrdiff_t q_bytes = units * static_cast<std::ptrdiff_t>(sizeof(float));
    each<Count>([&](auto i) { tiles_.clear<i.value>(); });
    int unit = 0;
    for (; unit + kTileDepth <= units; unit += kTileDepth) {
      tiles_.load<4>(q + unit, q_bytes);
      each<Count>([&](auto i) {
        if (ahead[i.value] != keys[i.value])
          for (int line = 0; line < kTileBytes; line += 64) bring(ahead[i.value] + unit * kTileRowBytes + line);
        tiles_.load<6>(keys[i.value] + unit * kTileRowBytes);
        tiles_.dot_bf16<i.value, 4, 6>();
      });
    }
    if (unit < units) {
      tiles_.load<5>(q + unit, q_bytes);
      each<Count>([&](auto i) {
        tiles_.load<7>(keys[i.value] + unit * kTileRowBytes);
        tiles_.dot_bf16<i.value, 5, 7>();
      });
    }
    each<Count>([&](auto i) {
      tiles_.store<i.value>(scores + i.value * kTileKeys, kChunkKeys * static_cast<std::ptrdiff_t>(sizeof(float)));
    });
  }

  // Adds the values of key groups [low, high), 32 keys each, to `Count` times 16 elements of the sums.
  template <int Count>
  void add(const float* weights, const float* values, int low, int high, int dim, float* sums) {
    const std::ptrdiff_t dim_bytes = dim * static_cast<std::ptrdiff_t>(sizeof(float));
    constexpr std::ptrdiff_t kWeightBytes = kChunkKeys / 2 * sizeof(float);
    each<Count>([&](auto i) { tiles_.load<i.value>(sums + i.value * 16, dim_bytes); });
    for (int group = low; group < high; ++group) {
      tiles_.load<4>(weights + group * kTileDepth, kWeightBytes);
      each<Count>([&](auto i) {
        tiles_.load<6>(values + group * kTileDepth * dim + i.value * 16, dim_bytes);
        tiles_.dot_bf16<i.value, 4, 6>();
      });
    }
    each<Count>([&](auto i) { tiles_.store<i.value>(sums + i.value * 16, dim_bytes); });
  }

 private:
  static TileShapes shapes(int rows) {
    TileShapes shapes = TileShapes::full();
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows);
    shapes.set(5, rows, kTileRowBytes / 2);
    shapes.set(7, kTileDepth / 2);
    return shapes;
  }

  template <int Number, class F>
  static void each(const F& f) {
    f(Count<0>());
    if constexpr (Number > 1) f(Count<1>());
    if constexpr (Number > 2) f(Count<2>());
    if constexpr (Number > 3) f(Count<3>());
  }

  Tiles tiles_;
  int rows_;
};

struct TileProducts : Bfloat16Products {
  static constexpr bool kUsesTiles = true;
  using Tiles = RowTiles;
};

// Calls `f` with a number from 1 to 4 as a constant.
template <class F>
inline void with_tiles(int count, const F& f) {
  switch (count) {
    case 1: return f(Count<1>());
    case 2: return f(Count<2>());
    case 3: return f(Count<3>());
    default: return f(Count<4>());
  }
}

// Scores of up to 16 rows against `count` tiles of a chunk; see RowTiles::score.
inline void score_rows(RowTiles& tiles, int rows, const float* q, const std::uint8_t* const* keys,
                       const std::uint8_t* const* ahead, int count, int units, float* scores) {
  tiles.set_rows(rows);
  with_tiles(count, [&](auto number) { tiles.score<decltype(number)::value>(q, keys, ahead, units, scores); });
}

// sums = sums * factors + weights * values for up to 16 rows and the tiles [low, high) of a chunk, whose values lie
// side by side, with zeros for keys that are not there.
inline void add_values(RowTiles& tiles, int rows, const float* weights, const float* values, int low, int high,
                       const float* factors, float* sums, int dim) {
  for (int r = 0; r < rows; ++r)
    if (factors[r] != 1.0f)
      for (int i = 0; i < dim; i += kLanes) store(sums + r * dim + i, mul(load(sums + r * dim + i), all(factors[r])));
  tiles.set_rows(rows);
  for (int first = 0; first < dim; first += 64)
    with_tiles(dim - first >= 64 ? 4 : (dim - first) / 16, [&](auto count) {
      tiles.add<decltype(count)::value>(weights, values + first, low / 2, (high + 1) / 2, dim, sums + first);
    });
}

}  // namespace
}  // namespace octavo
