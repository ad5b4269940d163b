// Paged attention, compiled once per level.
#include "attention.h"

#include "arithmetic.h"
#include "cache.h"
#include "softmax.h"

namespace octavo {
namespace {

// Memory of one task; everything lies at multiples of 64 bytes.
struct Scratch {
  float* queries;      // [rows][units]
  float* scores;       // [rows][chunk]
  float* weights;      // [rows][chunk / kPerUnit]
  float* key_units;    // [tiles][units][16], where the cache does not hold operands
  float* value_units;  // [tiles][units][dim]
  float* last_value;   // [dim]: the last key's values where it is the first of a pair
  float* key_factors;  // [chunk]: scale of each key
  float* value_scales;
  float* lane_sums;  // [rows][lanes]
  float* factors;    // [rows]
};

int padded_rows(const Attention& a) {
  const int group = a.heads / a.kv_heads;
  return ((group > kItemRows ? group : kItemRows) + 15) / 16 * 16;
}

// Answers the bytes; with a base also where everything lies.
std::int64_t lay_out(const Attention& a, std::uint8_t* base, Scratch* scratch) {
  const std::int64_t rows = padded_rows(a), dim = a.layout.padded_dim;
  std::int64_t bytes = 0;
  const auto take = [&](float*& place, std::int64_t count) {
    place = base ? reinterpret_cast<float*>(base + bytes) : nullptr;
    bytes += (count * static_cast<std::int64_t>(sizeof(float)) + 63) / 64 * 64;
  };
  take(scratch->queries, rows * dim);
  take(scratch->scores, rows * kChunkKeys);
  take(scratch->weights, rows * kChunkKeys);
  take(scratch->key_units, kChunkKeys * dim);
  take(scratch->value_units, kChunkKeys * dim);
  take(scratch->last_value, dim);
  take(scratch->key_factors, kChunkKeys);
  take(scratch->value_scales, kChunkKeys);
  take(scratch->lane_sums, rows * kLanes);
  take(scratch->factors, rows);
  return bytes;
}

std::int64_t scratch_bytes(const Attention& a) {
  Scratch scratch;
  return lay_out(a, nullptr, &scratch);
}

// The keys of a chunk that an item reads: tiles [low, high), the last of which may hold fewer than 16 keys.
struct Chunk {
  int first_key;
  int low, high;
  const float* keys[kChunkTiles];
  const float* next_keys[kChunkTiles];  // what to fetch from memory meanwhile
  Segment values[kChunkTiles + 1];
  bool has_last_value;  // values[high] is the first half of a pair
  bool has_scales;
};

int at_least_zero(int x) { return x > 0 ? x : 0; }
int at_most(int x, int limit) { return x < limit ? x : limit; }

// First position that the query at `position` sees.
int first_seen(const Attention& a, int position) { return position < a.window ? 0 : position - a.window + 1; }

template <class Products>
void fetch_tile(const Attention& a, const std::uint8_t* tile, const std::uint8_t* next, int valid, float factor, int t, Chunk& chunk, Scratch& scratch) {
  const int dim = a.layout.padded_dim;
  const std::uint8_t* values = tile + a.layout.side_bytes;
  float* key_units = scratch.key_units + t * kTileKeys * dim;
  float* value_units = scratch.value_units + t * kTileKeys * dim;
  const bool is_operand = a.cache_type == (Products::kPerUnit == 2 ? Type::bfloat16 : Type::float32);
  const float* next_values = value_units;
  if (is_operand) {
    chunk.keys[t] = reinterpret_cast<const float*>(tile);
    chunk.next_keys[t] = reinterpret_cast<const float*>(next);
    value_units = reinterpret_cast<float*>(const_cast<std::uint8_t*>(values));
    next_values = reinterpret_cast<const float*>(next + a.layout.side_bytes);
  } else {
    chunk.keys[t] = chunk.next_keys[t] = key_units;
    if (next != tile)
      for (int i = 0; i < a.layout.tile_bytes; i += 64) bring(reinterpret_cast<const float*>(next + i));
    if (a.cache_type == Type::int8) widen_tile<Type::int8>(tile, values, dim, valid, Products(), key_units, value_units);
    if (a.cache_type == Type::fp8_e4m3)
      widen_tile<Type::fp8_e4m3>(tile, values, dim, valid, Products(), key_units, value_units);
    if constexpr (Products::kPerUnit == 1)
      if (a.cache_type == Type::bfloat16)
        widen_tile<Type::bfloat16>(tile, values, dim, valid, Products(), key_units, value_units);
  }
  // keys behind the last one may be anything, NaN too: their units are not read, or cleared below
  chunk.values[t] = {value_units, next_values, t * kTileKeys / Products::kPerUnit, valid / Products::kPerUnit};
  chunk.has_last_value = valid % Products::kPerUnit != 0;
  if (chunk.has_last_value) {
    const float* pair = value_units + valid / 2 * dim;
    for (int i = 0; i < dim; i += kLanes) {
#if defined(__AVX512F__)
      const __m512i both = _mm512_castps_si512(load(pair + i));
      store(scratch.last_value + i, _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff))));
#else
      store(scratch.last_value + i, load(pair + i));
#endif
    }
    chunk.values[t + 1] = {scratch.last_value, scratch.last_value, (t * kTileKeys + valid) / 2, 1};
  }
  const float* scales = reinterpret_cast<const float*>(values + a.layout.side_bytes);
  for (int i = 0; i < kTileKeys; ++i) {
    const bool is_scaled = chunk.has_scales && i < valid;
    scratch.key_factors[t * kTileKeys + i] = is_scaled ? scales[i] * factor : factor;
    scratch.value_scales[t * kTileKeys + i] = is_scaled ? scales[kTileKeys + i] : 1.0f;
  }
}

// Tiles [low, high) of the chunk hold every key that the item's queries see of it.
template <class Products>
Chunk fetch_chunk(const Attention& a, const AttentionItem& item, const AttentionItem& following, int first_key, float factor,
                  Scratch& scratch) {
  Chunk chunk;
  chunk.first_key = first_key;
  chunk.has_scales = a.cache_type == Type::int8 || a.cache_type == Type::fp8_e4m3;
  chunk.has_last_value = false;
  const int length = a.sequence_lengths[item.row];
  chunk.low = at_least_zero(first_seen(a, item.first_position) - first_key) / kTileKeys;
  chunk.high = (at_most(item.end_position() - first_key, kChunkKeys) + kTileKeys - 1) / kTileKeys;
  const auto tile_of = [&](const AttentionItem& whose, int key) {
    const std::int32_t* table = a.block_tables + whose.row * a.table_stride;
    return tile_at(a, table[key / a.block_size], whose.kv_head, key % a.block_size);
  };
  const int next_start = first_seen(a, following.first_position) / kChunkKeys * kChunkKeys;
  for (int t = chunk.low; t < chunk.high; ++t) {
    const int key = first_key + t * kTileKeys;
    const std::uint8_t* tile = tile_of(item, key);
    const std::uint8_t* next = tile;
    if (key + kChunkKeys < item.end_position()) {
      next = tile_of(item, key + kChunkKeys);
    } else if (next_start + t * kTileKeys < following.end_position()) {
      next = tile_of(following, next_start + t * kTileKeys);
    }
    fetch_tile<Products>(a, tile, next, at_most(length - key, kTileKeys), factor, t, chunk, scratch);
  }
  return chunk;
}

void load_queries_as_floats(const Attention& a, const AttentionItem& item, int row, float* out) {
  const int group = a.heads / a.kv_heads;
  const std::int64_t first = (item.first_token + row / group) * a.q_stride +
                             static_cast<std::int64_t>(item.kv_head * group + row % group) * a.dim;
  load_row(a.q, first, a.type, a.dim, out);
}

template <class Products, bool IsBent>
void attend_chunks(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
                   const AttentionPartial& partial, std::uint8_t* memory) {
  Scratch scratch;
  lay_out(a, memory, &scratch);
  const int group = a.heads / a.kv_heads, rows = item.queries * group, all_rows = (rows + 15) / 16 * 16;
  const int dim = a.layout.padded_dim, units = dim / Products::kPerUnit;
  constexpr int kWeightUnits = kChunkKeys / Products::kPerUnit;

  alignas(64) float row_values[kMostDim] = {};
  for (int r = 0; r < rows; ++r) {
    load_queries_as_floats(a, item, r, row_values);
    Products::store_queries(scratch.queries + r * units, row_values, dim);
  }
  for (int r = 0; r < all_rows; ++r) partial.maxima[r] = kNothing;
  std::memset(partial.sums, 0, sizeof(float) * rows * dim);
  std::memset(scratch.lane_sums, 0, sizeof(float) * rows * kLanes);

  const int first = first_seen(a, item.first_position);
  const int split_start = split * kSplitKeys;
  const int start = first > split_start ? first / kChunkKeys * kChunkKeys : split_start;
  const int end = at_most(item.end_position(), split_start + kSplitKeys);
  const float factor = IsBent && a.soft_cap != 0.0f ? a.scale : a.scale * kLog2E;
  for (int first_key = start; first_key < end; first_key += kChunkKeys) {
    Chunk chunk = fetch_chunk<Products>(a, item, next, first_key, factor, scratch);
    // what the rows of a block see of the chunk, in tiles
    const auto seen = [&](int r, int count, int& low, int& high) {
      const int earliest = item.first_position + r / group, latest = item.first_position + (r + count - 1) / group;
      low = at_least_zero(first_seen(a, earliest) - first_key) / kTileKeys;
      high = at_most(at_least_zero(latest + kTileKeys - first_key) / kTileKeys, chunk.high);
    };
    int low, high;
    for (int r = 0; r < rows; r += kScoreRows) {
      const int count = at_most(rows - r, kScoreRows);
      seen(r, count, low, high);
      if (low < high)
        score_rows<Products>(count, scratch.queries + r * units, units, chunk.keys, r == 0 ? chunk.next_keys : chunk.keys, low, high, units,
                             scratch.scores + r * kChunkKeys);
    }
    for (int r = 0; r < rows; ++r) {
      const int position = item.first_position + r / group;
      Bend bend{a.soft_cap, 0.0f, 0.0f};
      if (IsBent && a.alibi) {
        bend.slope = a.alibi[item.kv_head * group + r % group] * kLog2E;
        bend.distance = static_cast<float>(first_key - position);
      }
      const float largest = weigh<IsBent>(scratch.scores + r * kChunkKeys, scratch.key_factors,
                                          first_seen(a, position) - first_key, position + 1 - first_key, bend);
      // the old maximum, until the factors are made of both
      scratch.factors[r] = partial.maxima[r];
      if (!(largest <= partial.maxima[r])) partial.maxima[r] = largest;
    }
    for (int r = 0; r < rows; r += kLanes)
      store(scratch.factors + r, power_of_two<Products::kExponentialDegree>(sub(load(scratch.factors + r), load(partial.maxima + r))));
    for (int r = 0; r < rows; ++r)
      store_row_weights<Products>(scratch.scores + r * kChunkKeys, partial.maxima[r],
                                  chunk.has_scales ? scratch.value_scales : nullptr, scratch.factors[r],
                                  scratch.lane_sums + r * kLanes, scratch.weights + r * kWeightUnits);
    for (int r = 0; r < rows; r += kValueRows) {
      const int count = at_most(rows - r, kValueRows);
      seen(r, count, low, high);
      if (low >= high) continue;
      const int segments = high - low + (high == chunk.high && chunk.has_last_value);
      add_values<Products>(count, chunk.values + low, segments, scratch.weights + r * kWeightUnits, kWeightUnits,
                           scratch.factors + r, partial.sums + r * dim, dim);
      for (int s = chunk.low; r == 0 && s <= chunk.high; ++s) chunk.values[s].ahead = chunk.values[s].values;
    }
  }
  for (int r = 0; r < rows; ++r) partial.weights[r] = sum_of(load(scratch.lane_sums + r * kLanes));
}

template <class Products>
void attend_with(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
                 const AttentionPartial& partial, std::uint8_t* scratch) {
  a.soft_cap != 0.0f || a.alibi ? attend_chunks<Products, true>(a, item, split, next, partial, scratch)
                                : attend_chunks<Products, false>(a, item, split, next, partial, scratch);
}

void attend(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
            const AttentionPartial& partial, std::uint8_t* scratch) {
#if defined(__AVX512BF16__)
  if (a.type == Type::bfloat16 && a.cache_type != Type::float32)
    return attend_with<Bfloat16Products>(a, item, split, next, partial, scratch);
#endif
  attend_with<Float32Products>(a, item, split, next, partial, scratch);
}

void merge(const Attention& a, const AttentionItem& item, const AttentionPartial& total, const AttentionPartial& part) {
  const int rows = item.queries * (a.heads / a.kv_heads), dim = a.layout.padded_dim;
  for (int r = 0; r < rows; ++r) {
    const Floats before = all(total.maxima[r]), after = all(part.maxima[r]);
    const Floats top = maximum(before, after);
    const Floats old_factor = power_of_two<5>(sub(before, top)), new_factor = power_of_two<5>(sub(after, top));
    for (int i = 0; i < dim; i += kLanes) {
      const Floats old_sum = mul(load(total.sums + r * dim + i), old_factor);
      store(total.sums + r * dim + i, add(old_sum, mul(load(part.sums + r * dim + i), new_factor)));
    }
    const float kept = first_lane(old_factor) * total.weights[r], added = first_lane(new_factor) * part.weights[r];
    total.weights[r] = kept + added;
    total.maxima[r] = first_lane(top);
  }
}

void finish(const Attention& a, const AttentionItem& item, const AttentionPartial& total) {
  const int group = a.heads / a.kv_heads, rows = item.queries * group;
  for (int r = 0; r < rows; ++r) {
    const float* sums = total.sums + r * a.layout.padded_dim;
    const Floats share = all(1.0f / total.weights[r]);
    const std::int64_t first = (static_cast<std::int64_t>(item.first_token + r / group) * a.heads + item.kv_head * group + r % group) * a.dim;
    const auto write = [&](auto* out) {
      int i = 0;
      for (; i + kLanes <= a.dim; i += kLanes) store(out + i, mul(load(sums + i), share));
      if (i < a.dim) store_some(out + i, mul(load(sums + i), share), a.dim - i);
    };
    a.type == Type::float32 ? write(static_cast<float*>(a.out) + first) : write(static_cast<bf16*>(a.out) + first);
  }
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const AttentionKernels attention_table;
const AttentionKernels attention_table = {scratch_bytes, write_tokens, attend, merge, finish};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
