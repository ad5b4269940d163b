// Paged attention, compiled once per level.
#include "attention.h"

#include "reader.h"
#include "softmax.h"
#if defined(__AMX_TILE__) || defined(OCTAVO_EMULATE_TILES)
#define OCTAVO_HAS_TILES
#include "tile_attention.h"
#endif

namespace octavo {

namespace avx512 { extern const AttentionKernels attention_table; }

namespace {

#if defined(OCTAVO_HAS_TILES)
constexpr int kRowsOfItem = kTileItemRows;
#else
constexpr int kRowsOfItem = kItemRows;
#endif

// Scratch of one task; all arrays are aligned to 64 bytes.
struct Scratch {
  float* queries;    // [rows / kScoreRows][units][kScoreRows]
  float* scores;     // [rows][chunk]
  float* weights;    // [rows][chunk / kPerUnit]
  float* lane_sums;  // [rows][lanes]
  float* factors;    // [rows]
  ReaderScratch reader;
};

// Rows of the largest item at any level, rounded up to 16.
int padded_rows(const Attention& a) {
  const int group = a.heads / a.kv_heads;
  return ((group > kTileItemRows ? group : kTileItemRows) + 15) / 16 * 16;
}

// Places the arrays in the memory from `base` on; with a null `base` only counts their bytes.
class Layout {
 public:
  explicit Layout(std::uint8_t* base) : base_(base) {}

  template <class T>
  void take(T*& place, std::int64_t count) {
    place = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
  void take(ReaderScratch& reader, const CacheLayout& cache, int per_unit) {
    reader.tile_units = kTileKeys / per_unit * ((cache.padded_dim + 31) / 32 * 32);
    take(reader.key_units, kChunkTiles * reader.tile_units);
    take(reader.value_units, kChunkKeys / per_unit * static_cast<std::int64_t>(cache.padded_value_dim));
    take(reader.last_value, cache.padded_value_dim);
    take(reader.key_factors, kChunkKeys);
    take(reader.value_scales, kChunkKeys);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::uint8_t* base_;
  std::int64_t bytes_ = 0;
};

std::int64_t lay_out(const Attention& a, std::uint8_t* base, Scratch& scratch) {
  const std::int64_t rows = padded_rows(a);
  Layout layout(base);
  layout.take(scratch.queries, rows * a.layout.padded_dim);
  layout.take(scratch.scores, rows * kChunkKeys);
  layout.take(scratch.weights, rows * kChunkKeys);
  layout.take(scratch.reader, a.layout, 1);
  layout.take(scratch.lane_sums, rows * kLanes);
  layout.take(scratch.factors, rows);
  return layout.bytes();
}

#if defined(OCTAVO_HAS_TILES)
std::int64_t lay_out(const Attention& a, std::uint8_t* base, TileScratch& scratch) {
  const std::int64_t rows = padded_rows(a);
  Layout layout(base);
  layout.take(scratch.queries, rows * ((a.layout.padded_dim + 31) / 32 * kTileDepth));
  for (int i = 0; i < 2; ++i) {
    layout.take(scratch.scores[i], kBlockRows * kChunkKeys);
    layout.take(scratch.weights[i], kBlockRows * kChunkKeys / 2);
    layout.take(scratch.factors[i], kBlockRows);
  }
  layout.take(scratch.lane_sums, rows * kLanes);
  layout.take(scratch.positions, rows);
  for (ReaderScratch& reader : scratch.readers) layout.take(reader, a.layout, 2);
  return layout.bytes();
}

template <class R>
void attend_by_tiles(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
                     const AttentionPartial& partial, std::uint8_t* memory) {
  TileScratch scratch;
  lay_out(a, memory, scratch);
  const auto [start, end] = keys_of(a, item, split);
  TileAttention<R>(a, item, partial, scratch).attend(start, end, next);
}
#endif

std::int64_t scratch_bytes(const Attention& a) {
  Scratch scratch;
  const std::int64_t bytes = lay_out(a, nullptr, scratch);
#if defined(OCTAVO_HAS_TILES)
  TileScratch tile_scratch;
  const std::int64_t tile_bytes = lay_out(a, nullptr, tile_scratch);
  return bytes > tile_bytes ? bytes : tile_bytes;
#endif
  return bytes;
}

// Puts row `r` of an item where blocks of rows have their units.
template <class Products>
void arrange_query(const float* query, int r, int dim, float* queries) {
  const int units = dim / Products::kPerUnit;
  alignas(64) float query_units[kMostDim];
  Products::to_units(query, dim, query_units);
  float* block = queries + r / kScoreRows * kScoreRows * units + r % kScoreRows;
  for (int unit = 0; unit < units; ++unit) block[unit * kScoreRows] = query_units[unit];
}

template <class Products>
void relate_rows(const Attention& a, const HeadRows& rows, int keys, float* products) {
  const int dim = a.layout.padded_dim, units = dim / Products::kPerUnit;
  alignas(64) float query[kMostDim + kLanes] = {}, queries[kItemRows * kMostDim];
  for (int r = 0; r < rows.count; ++r) {
    const std::int64_t token = rows.first + r;
    load_row(rows.x, token * rows.stride + static_cast<std::int64_t>(rows.head) * a.dim, a.type, a.dim, query);
    arrange_query<Products>(query, r, dim, queries);
  }
  for (int first = 0; first < keys; first += kChunkKeys) {
    const std::uint8_t* tiles[kChunkTiles];
    const int count = (at_most(keys - first, kChunkKeys) + kTileKeys - 1) / kTileKeys;
    for (int t = 0; t < count; ++t) tiles[t] = tile_at(a, first / kTileKeys + t, rows.head, 0);
    for (int r = 0; r < rows.count; r += kScoreRows)
      score_rows<Products, Plain>(at_most(rows.count - r, kScoreRows), queries + r * units, tiles, tiles, 0, count, units,
                                  products + first * kItemRows + r * kChunkKeys);
  }
}

void relate(const Attention& a, const HeadRows& rows, int keys, float* products) {
#if defined(__AVX512BF16__)
  if (a.type == Type::bfloat16) return relate_rows<Bfloat16Products>(a, rows, keys, products);
  avx512::attention_table.relate(a, rows, keys, products);
#else
  relate_rows<Float32Products>(a, rows, keys, products);
#endif
}

// A lane adds its products in the order of ranks, wherever the vector begins.
void profile(const Attention& a, const AttentionItem& item, const Profiles& p, int split, float* biases) {
  const ItemRows rows{a, item};
  const auto [start, end] = keys_of(a, item, split);
  const int base = split * kSplitKeys, width = p.extent + 2 * Profiles::kMargin;
  float factors[Profiles::kMostRank + kLanes];
  for (int r = 0; r < rows.count(); ++r) {
    const std::int64_t token = item.first_token + r / rows.group;
    load_row(p.factors, token * p.factor_stride + static_cast<std::int64_t>(rows.head(r)) * p.rank, a.type, p.rank, factors);
    float* out = biases + r * kSplitKeys - base;
    for (int key = start; key < (end + kChunkKeys - 1) / kChunkKeys * kChunkKeys; key += kLanes) {
      const int place = p.extent - 1 - rows.position(r) + key;
      Floats sum = zero();
      if (place > -kLanes && place < p.extent) {
        const float* profiles = p.table + Profiles::kMargin + place;
        for (int i = 0; i < p.rank; ++i) sum = fma(all(factors[i]), load(profiles + static_cast<std::int64_t>(i) * width), sum);
      }
      store(out + key, mul(sum, all(kLog2E)));
    }
  }
}

constexpr float kOnes[] = {1, 1, 1, 1, 1, 1, 1, 1};
constexpr int kSharedRows = 8;  // with more rows, it is faster to widen shared keys once

template <class R>
void attend_chunks(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
                   const AttentionPartial& partial, std::uint8_t* memory) {
  using Products = typename R::Products;
  using Source = typename R::Source;
  Scratch scratch;
  lay_out(a, memory, scratch);
  const ItemRows item_rows{a, item};
  const int rows = item_rows.count(), all_rows = (rows + 15) / 16 * 16;
  const int dim = a.layout.padded_dim, value_dim = a.layout.padded_value_dim, units = dim / Products::kPerUnit;
  constexpr int kWeightUnits = kChunkKeys / Products::kPerUnit;
  const float* value_scales = R::kHasScales ? scratch.reader.value_scales : nullptr;
  const bool bends = is_bent(a);

  alignas(64) float query[kMostDim + kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    item_rows.load_query(r, query);
    arrange_query<Products>(query, r, dim, scratch.queries);
  }
  for (int r = 0; r < all_rows; ++r) partial.maxima[r] = kNothing;
  std::memset(partial.sums, 0, sizeof(float) * rows * value_dim);
  std::memset(scratch.lane_sums, 0, sizeof(float) * rows * kLanes);

  const auto [start, end] = keys_of(a, item, split);
  const float factor = a.soft_cap != 0.0f ? a.scale : a.scale * kLog2E;
  for (int first_key = start; first_key < end; first_key += kChunkKeys) {
    Chunk chunk = fetch_chunk<R>(a, item, next, first_key, factor, scratch.reader);
    // Calls f(first row, rows, low, high) for rows in blocks that see tiles [low, high) of the chunk, if any.
    const auto for_blocks = [&](int most, const auto& f) {
      for (int r = 0; r < rows; r += most) {
        const int count = at_most(rows - r, most);
        const Seen seen = item_rows.seen(item_rows.position(r), item_rows.position(r + count - 1), first_key);
        const int low = at_least_zero(seen.begin) / kTileKeys;
        const int high = at_most((at_least_zero(seen.end) + kTileKeys - 1) / kTileKeys, chunk.high);
        if (low < high) f(r, count, low, high);
      }
    };
    for_blocks(kScoreRows, [&](int r, int count, int low, int high) {
      score_rows<Products, Source>(count, scratch.queries + r * units, chunk.keys,
                                   r == 0 ? chunk.next_keys : chunk.keys, low, high, units,
                                   scratch.scores + r * kChunkKeys);
    });
    for (int r = 0; r < rows; ++r) {
      const int position = item_rows.position(r);
      const auto [low, high] = item_rows.seen(position, position, first_key);
      float* scores = scratch.scores + r * kChunkKeys;
      const Bend bend = bend_of(a, item_rows.head(r), first_key, position);
      const float largest = bends ? weigh<true>(scores, scratch.reader.key_factors, low, high, bend)
                                  : weigh<false>(scores, scratch.reader.key_factors, low, high, bend);
      // the old maximum, until the factors are made of both
      scratch.factors[r] = partial.maxima[r];
      if (!(largest <= partial.maxima[r])) partial.maxima[r] = largest;
    }
    for (int r = 0; r < rows; r += kLanes) {
      const Floats change = sub(load(scratch.factors + r), load(partial.maxima + r));
      store(scratch.factors + r, power_of_two<Products::kExponentialDegree>(change));
    }
    for (int r = 0; r < rows; ++r)
      store_row_weights<Products>(scratch.scores + r * kChunkKeys, partial.maxima[r], value_scales, scratch.factors[r],
                                  scratch.lane_sums + r * kLanes, scratch.weights + r * kWeightUnits);
    for_blocks(kValueRows, [&](int r, int count, int low, int high) {
      const float* weights = scratch.weights + r * kWeightUnits;
      float* sums = partial.sums + r * value_dim;
      add_values<Products, Source>(count, chunk.values + low, high - low, weights, scratch.factors + r,
                                   sums, value_dim);
      if (high == chunk.high && chunk.last_value.units > 0)
        add_values<Products, Plain>(count, &chunk.last_value, 1, weights, kOnes, sums, value_dim);
      for (int t = low; r == 0 && t < high; ++t) chunk.values[t].ahead = chunk.values[t].values;
    });
  }
  for (int r = 0; r < rows; ++r) partial.weights[r] = sum_of(load(scratch.lane_sums + r * kLanes));
}

template <Type Stored>
using FloatPairs = Reader<Float32Products, Pairs<Stored>, Stored>;
template <Type Stored>
using FloatsOf = Reader<Float32Products, Plain, Stored>;

void attend(const Attention& a, const AttentionItem& item, int split, const AttentionItem& next,
            const AttentionPartial& partial, std::uint8_t* scratch) {
#if defined(OCTAVO_HAS_TILES)
  const auto with = [&](auto reader) { attend_by_tiles<decltype(reader)>(a, item, split, next, partial, scratch); };
#else
  const auto with = [&](auto reader) { attend_chunks<decltype(reader)>(a, item, split, next, partial, scratch); };
#endif
  [[maybe_unused]] const bool is_shared = !a.v || item.queries * (a.heads / a.kv_heads) > kSharedRows;
#if defined(__AVX512BF16__)
  if (a.type == Type::bfloat16 && a.cache_type != Type::float32) {
#if defined(OCTAVO_HAS_TILES)
    if (a.cache_type == Type::bfloat16) return with(Reader<TileProducts, Plain, Type::bfloat16>());
    if (a.cache_type == Type::int8) return with(Reader<TileProducts, Plain, Type::int8>());
    return with(Reader<TileProducts, Plain, Type::fp8_e4m3>());
#else
    if (a.cache_type == Type::bfloat16) return with(Reader<Bfloat16Products, Plain, Type::bfloat16>());
    if (a.cache_type == Type::int8) {
      if (is_shared) return with(Reader<Bfloat16Products, Plain, Type::int8>());
      return with(Reader<Bfloat16Products, Codes8<Type::int8>, Type::int8>());
    }
    if (is_shared) return with(Reader<Bfloat16Products, Plain, Type::fp8_e4m3>());
    return with(Reader<Bfloat16Products, Codes8<Type::fp8_e4m3>, Type::fp8_e4m3>());
#endif
  }
  // products in float32 are those of avx512, bit for bit: they are compiled once
  avx512::attention_table.attend(a, item, split, next, partial, scratch);
#else
  if (a.cache_type == Type::float32) return with(Reader<Float32Products, Plain, Type::float32>());
  const auto with_pairs = [&](auto pairs, auto plain) { is_shared ? with(plain) : with(pairs); };
  if (a.cache_type == Type::bfloat16) return with_pairs(FloatPairs<Type::bfloat16>(), FloatsOf<Type::bfloat16>());
  if (a.cache_type == Type::int8) return with_pairs(FloatPairs<Type::int8>(), FloatsOf<Type::int8>());
  return with_pairs(FloatPairs<Type::fp8_e4m3>(), FloatsOf<Type::fp8_e4m3>());
#endif
}

void merge(const Attention& a, const AttentionItem& item, const AttentionPartial& total, const AttentionPartial& part) {
  const int rows = item.queries * (a.heads / a.kv_heads), dim = a.layout.padded_value_dim;
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
    const float* sums = total.sums + r * a.layout.padded_value_dim;
    float factor = 1.0f, weight = total.weights[r];
    if (a.sinks) {  // as a split after all others, with zero values
      const Floats before = all(total.maxima[r]), sink = all(a.sinks[item.kv_head * group + r % group] * kLog2E);
      const Floats top = maximum(before, sink);
      factor = first_lane(power_of_two<5>(sub(before, top)));
      weight = factor * weight + first_lane(power_of_two<5>(sub(sink, top)));
    }
    const Floats share = all(factor / weight);
    const std::int64_t first = (static_cast<std::int64_t>(item.first_token + r / group) * a.heads + item.kv_head * group + r % group) * a.value_dim;
    const auto write = [&](auto* out) {
      for_vectors(a.value_dim, [&](int i, int count) { store_some(out + i, mul(load(sums + i), share), count); });
    };
    a.type == Type::float32 ? write(static_cast<float*>(a.out) + first) : write(static_cast<bf16*>(a.out) + first);
  }
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const AttentionKernels attention_table;
const AttentionKernels attention_table = {kRowsOfItem, scratch_bytes, write_tokens, gather_tiles,
                                          attend,      merge,         relate,       profile,      finish};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
