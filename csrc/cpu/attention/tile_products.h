// The two products of attention on tiles of bfloat16, cut into steps that are done beside other work: 32 rows by two tiles
// of columns, or 16 rows and fewer by four.
#pragma once

#include "../tiles.h"
#include "item_rows.h"

namespace octavo {
namespace {

constexpr int kTileDepth = 16;  // units in a tile's rows: 32 dimensions, or the keys of two tiles of the cache
constexpr int kBlockRows = 2 * kTileRows;

// Tiles 0 to 3 are sums, 4 and 5 operands of the rows, 6 and 7 those of the columns. Those of the second 16 rows are 2, 3
// and 5; without such rows 2 and 3 are of other columns.
class RowTiles {
 public:
  RowTiles() : tiles_(TileShapes::full()) {}

  // For `rows` rows from here on.
  void set_rows(int rows) {
    if (rows == rows_) return;
    tiles_.configure(rows > kTileRows ? TileShapes::two_by_two(kTileRows, rows - kTileRows)
                                      : TileShapes::two_by_two(rows, rows));
    rows_ = rows;
  }

  bool has_bottom() const { return rows_ > kTileRows; }
  int columns() const { return has_bottom() ? 2 : 4; }

  void clear() { tiles_.clear<0>(), tiles_.clear<1>(), tiles_.clear<2>(), tiles_.clear<3>(); }

  // The sums of `count` columns; the second 16 rows lie `bottom` elements behind the first ones.
  void load(const float* sums, std::ptrdiff_t row_bytes, int bottom, int count) {
    tiles_.load<0>(sums, row_bytes);
    if (count > 1) tiles_.load<1>(sums + 16, row_bytes);
    if (has_bottom()) sums += bottom - 32, count += 2;
    if (count > 2) tiles_.load<2>(sums + 32, row_bytes);
    if (count > 3) tiles_.load<3>(sums + 48, row_bytes);
  }
  void store(float* sums, std::ptrdiff_t row_bytes, int bottom, int count) {
    tiles_.store<0>(sums, row_bytes);
    if (count > 1) tiles_.store<1>(sums + 16, row_bytes);
    if (has_bottom()) sums += bottom - 32, count += 2;
    if (count > 2) tiles_.store<2>(sums + 32, row_bytes);
    if (count > 3) tiles_.store<3>(sums + 48, row_bytes);
  }

  // Adds rows times `count` columns; column(0), column(1), ... are the addresses of their tiles.
  template <class Column>
  void multiply(const float* rows, std::ptrdiff_t row_bytes, int bottom, int count, std::ptrdiff_t column_bytes,
                const Column& column) {
    tiles_.load<4>(rows, row_bytes);
    tiles_.load<6>(column(0), column_bytes);
    tiles_.dot_bf16<0, 4, 6>();
    if (count > 1) tiles_.load<7>(column(1), column_bytes), tiles_.dot_bf16<1, 4, 7>();
    if (has_bottom()) {
      tiles_.load<5>(rows + bottom, row_bytes);
      tiles_.dot_bf16<2, 5, 6>();
      if (count > 1) tiles_.dot_bf16<3, 5, 7>();
      return;
    }
    if (count > 2) tiles_.load<6>(column(2), column_bytes), tiles_.dot_bf16<2, 4, 6>();
    if (count > 3) tiles_.load<7>(column(3), column_bytes), tiles_.dot_bf16<3, 4, 7>();
  }

 private:
  Tiles tiles_;
  int rows_ = kBlockRows;
};

// scores[r][key] = sum over units of queries[r] * keys, for the tiles [tile, end) of a chunk. Meanwhile prefetches the same
// places from `ahead` on, unless these are the keys themselves.
struct ScoreSteps {
  const float* queries;  // [rows][units], units a multiple of a tile's depth
  int rows, units;
  const std::uint8_t *const *keys, *const *ahead;
  int tile, end;
  float* scores;  // [rows][kChunkKeys]
  int unit = 0;

  // Steps left with 32 rows; with fewer rows a step takes more columns, so that fewer are needed.
  int steps() const { return (end - tile + 1) / 2 * (units / kTileDepth); }

  void step(RowTiles& tiles) {
    tiles.set_rows(rows);
    const int count = at_most(end - tile, tiles.columns());
    if (unit == 0) tiles.clear();
    const auto column = [&](int i) {
      const std::uint8_t *key = keys[tile + i] + unit * kTileRowBytes, *next = ahead[tile + i] + unit * kTileRowBytes;
      for (int line = 0; next != key && line < kTileBytes; line += 64) bring(next + line);
      return key;
    };
    tiles.multiply(queries + unit, units * static_cast<std::ptrdiff_t>(sizeof(float)), kTileRows * units, count, kTileRowBytes,
                   column);
    unit += kTileDepth;
    if (unit < units) return;
    tiles.store(scores + tile * kTileKeys, kChunkKeys * sizeof(float), kTileRows * kChunkKeys, count);
    unit = 0;
    tile += count;
  }
};

// sums[r] += sum over keys of weights[r] * values, for the groups [low, high) of 32 keys of a chunk.
struct ValueSteps {
  const float* weights;  // [rows][kChunkKeys / 2]
  const float* values;   // [kChunkKeys / 2][dim], zero for missing keys
  int low, high;
  int rows, dim;  // dim a multiple of 16
  float* sums;    // [rows][dim]
  int column = 0, group = low;

  int steps() const { return (dim - column + 31) / 32 * (high - low); }

  void step(RowTiles& tiles) {
    tiles.set_rows(rows);
    const int count = at_most((dim - column) / 16, tiles.columns());
    const std::ptrdiff_t dim_bytes = dim * static_cast<std::ptrdiff_t>(sizeof(float));
    if (group == low) tiles.load(sums + column, dim_bytes, kTileRows * dim, count);
    const float* value = values + group * kTileDepth * dim + column;
    tiles.multiply(weights + group * kTileDepth, kChunkKeys / 2 * sizeof(float), kTileRows * kChunkKeys / 2, count, dim_bytes,
                   [&](int i) { return value + 16 * i; });
    if (++group < high) return;
    tiles.store(sums + column, dim_bytes, kTileRows * dim, count);
    group = low;
    column += 16 * count;
  }
};

}  // namespace
}  // namespace octavo
