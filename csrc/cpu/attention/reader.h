// Keys of a chunk as operands: read in place, or widened into a scratch buffer that all rows of an item share.
#pragma once

#include "item_rows.h"

namespace octavo {
namespace {

// How tiles of `Stored` values are read by `Products`. Where many rows share them they are widened once (`Plain`), else
// at every use; both are exact.
template <class ProductsOf, class SourceOf, Type StoredAs>
struct Reader {
  using Products = ProductsOf;
  using Source = SourceOf;
  static constexpr Type kStored = StoredAs;
  static constexpr bool kHasScales = StoredAs == Type::int8 || StoredAs == Type::fp8_e4m3;
  static constexpr bool kIsWidened =
      Source::kBytes / Source::kUnits == Plain::kBytes && StoredAs != (Products::kPerUnit == 2 ? Type::bfloat16 : Type::float32);
};

struct ReaderScratch {
  float* key_units;    // [tiles][units][16], tiles `tile_units` apart
  float* value_units;  // [tiles][units][dim]
  float* last_value;   // [dim]: the last key's values where it is the first of a pair
  float* key_factors;  // [chunk]: factor of the scores of each key
  float* value_scales;
  int tile_units;
};

// Tiles [low, high) hold what the queries of an item see of a chunk; the last one may have fewer than 16 keys.
struct Chunk {
  int low, high;
  const std::uint8_t* keys[kChunkTiles];
  const std::uint8_t* next_keys[kChunkTiles];  // to be prefetched meanwhile
  Segment values[kChunkTiles];
  Segment last_value;  // no units unless the last key is the first of a pair
};

// Tile `t` of a chunk with `valid` keys. Data after these may be anything, also NaN: it is not read as a value, and its
// scores are masked.
template <class R>
inline void fetch_tile(const Attention& a, const std::uint8_t* tile, const std::uint8_t* next, int valid, float factor, int t,
                       const ReaderScratch& scratch, Chunk& chunk) {
  constexpr int kPerUnit = R::Products::kPerUnit;
  const int key_dim = a.layout.padded_dim, dim = a.layout.padded_value_dim, side_bytes = a.layout.side_bytes;
  const bool is_latent = a.layout.sides == 1;
  const std::uint8_t *values = tile + side_bytes, *next_values = next + side_bytes;
  chunk.keys[t] = tile;
  chunk.next_keys[t] = next;
  // values of a chunk are made adjacent, because a product of tiles takes two tiles of the cache
  float* value_units = scratch.value_units + t * kTileKeys / kPerUnit * dim;
  if constexpr (R::Products::kUsesTiles && !R::kIsWidened) {
    for (int i = 0; !is_latent && i < (valid + 1) / 2 * dim; i += kLanes) {
      store(value_units + i, load(reinterpret_cast<const float*>(values) + i));
      if (next != tile) bring(next_values + 4 * i);
    }
  }
  if constexpr (R::kIsWidened) {
    float* key_units = scratch.key_units + t * scratch.tile_units;
    widen_tile<R::kStored>(tile, is_latent ? nullptr : values, next - tile, key_dim, valid, typename R::Products(),
                           key_units, value_units);
    chunk.keys[t] = chunk.next_keys[t] = reinterpret_cast<const std::uint8_t*>(key_units);
    values = next_values = reinterpret_cast<const std::uint8_t*>(value_units);
  }
  if (R::Products::kUsesTiles && key_dim % 32 != 0) {  // the last step of a product is as deep as the others
    float* key_units = scratch.key_units + t * scratch.tile_units;
    const int count = kTileKeys / kPerUnit * key_dim;
    if (!R::kIsWidened) std::memcpy(key_units, tile, count * sizeof(float));
    std::memset(key_units + count, 0, kTileKeys * 8 * sizeof(float));
    chunk.keys[t] = chunk.next_keys[t] = reinterpret_cast<const std::uint8_t*>(key_units);
  }
  if (is_latent) {
    turn_tile(reinterpret_cast<const float*>(chunk.keys[t]), dim, typename R::Products(), value_units);
    values = next_values = reinterpret_cast<const std::uint8_t*>(value_units);
  }
  chunk.values[t] = {values, next_values, t * kTileKeys / kPerUnit, valid / kPerUnit};
  chunk.last_value.units = 0;
  if (kPerUnit == 2 && valid % 2 != 0) {
    const std::uint8_t* pair = values + valid / 2 * (dim / 16) * R::Source::kBytes;
    for (int i = 0; i < dim; i += kLanes) {
      Floats both[R::Source::kUnits];
      R::Source::read(pair + i / kLanes * kVectorBytes<typename R::Source>, both);
      store(scratch.last_value + i, first_of_pairs(both[0]));
    }
    const auto* last = reinterpret_cast<const std::uint8_t*>(scratch.last_value);
    chunk.last_value = {last, last, (t * kTileKeys + valid) / 2, 1};
  }
  if constexpr (R::Products::kUsesTiles) {
    float* end = value_units + valid / 2 * dim;
    if (valid % 2 != 0) {
      std::memcpy(end, scratch.last_value, dim * sizeof(float));
      end += dim;
    }
    std::memset(end, 0, (value_units + kTileKeys / 2 * dim - end) * sizeof(float));
  }
  const auto* scales = reinterpret_cast<const float*>(tile + a.layout.sides * side_bytes);
  for (int i = 0; i < kTileKeys; ++i) {
    const bool is_scaled = R::kHasScales && i < valid;
    scratch.key_factors[t * kTileKeys + i] = is_scaled ? scales[i] * factor : factor;
    scratch.value_scales[t * kTileKeys + i] = is_scaled ? scales[(a.layout.sides - 1) * kTileKeys + i] : 1.0f;
  }
}

// The chunk from `first_key` on; `following` is the item whose first keys are prefetched during the last chunk.
template <class R>
inline Chunk fetch_chunk(const Attention& a, const AttentionItem& item, const AttentionItem& following, int first_key,
                         float factor, const ReaderScratch& scratch) {
  Chunk chunk;
  chunk.low = at_least_zero(first_seen(a, item.first_position) - first_key) / kTileKeys;
  chunk.high = (at_most(item.key_end - first_key, kChunkKeys) + kTileKeys - 1) / kTileKeys;
  const int length = a.sequence_lengths[item.row];
  const int next_start = first_seen(a, following.first_position) / kChunkKeys * kChunkKeys;
  const auto tile_of = [&](const AttentionItem& whose, int key) {
    const std::int32_t* table = a.block_tables + whose.row * a.table_stride;
    return tile_at(a, table[key / a.block_size], whose.kv_head, key % a.block_size);
  };
  if constexpr (R::Products::kUsesTiles) {
    const int tile_units = kTileKeys / 2 * a.layout.padded_value_dim;
    for (int t = 0; t < kChunkTiles; ++t) {
      if (t >= chunk.low && t < chunk.high) continue;
      // read together with a tile that is there
      std::memset(scratch.value_units + t * tile_units, 0, tile_units * sizeof(float));
      std::memset(scratch.value_scales + t * kTileKeys, 0, kTileKeys * sizeof(float));
    }
  }
  // many queries share these, so all but the first read them from the second-level cache
  const bool brings = !R::Products::kUsesTiles || item.queries <= kScoreRows;
  for (int t = chunk.low; t < chunk.high; ++t) {
    const int key = first_key + t * kTileKeys;
    const std::uint8_t* tile = tile_of(item, key);
    const std::uint8_t* next = tile;
    if (brings && key + kChunkKeys < item.key_end) {
      next = tile_of(item, key + kChunkKeys);
    } else if (brings && next_start + t * kTileKeys < following.key_end) {
      next = tile_of(following, next_start + t * kTileKeys);
    }
    fetch_tile<R>(a, tile, next, at_most(length - key, kTileKeys), factor, t, scratch, chunk);
  }
  if constexpr (R::Products::kUsesTiles)
    for (int t = 0; t < kChunkTiles; ++t)  // likewise
      if (t < chunk.low || t >= chunk.high) chunk.keys[t] = chunk.next_keys[t] = chunk.keys[chunk.low];
  return chunk;
}

}  // namespace
}  // namespace octavo
