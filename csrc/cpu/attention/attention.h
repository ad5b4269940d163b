// Paged attention: writes a step's keys and values to their slots, then reads only the cache.
//
// The work is divided by absolute positions, so that a token's result never depends on what else is computed:
//   split  1,024 keys  summed from zero; splits are merged in the order of their positions
//   chunk     64 keys  between two updates of the running maximum inside a split
//   tile      16 keys  the unit of the cache's layout
// An item is up to 64 rows, or 128, of one sequence that share their keys: (query position) x (query head of one KV head).
#pragma once

#include "../types.h"

namespace octavo {

constexpr int kTileKeys = 16;
constexpr int kChunkKeys = 64;
constexpr int kChunkTiles = kChunkKeys / kTileKeys;
constexpr int kSplitKeys = 1024;
constexpr int kItemRows = 64;
constexpr int kTileItemRows = 128;  // with AMX: values are copied for each item
constexpr int kMostDim = 1024;
constexpr float kNothing = -3.0e38f;  // the maximum of no scores; finite, because differences from it are computed
constexpr float kLog2E = 1.44269504088896341f;

// One layer's cache: [blocks][KV heads][tiles of a block], blocks lying `block_stride` bytes apart, a tile being keys, values and, where they are stored in 8
// bits, float32 scales of 16 keys and of 16 values. Keys lie transposed, values in rows; formats of less than 32 bits
// interleave the two operands of a dot product: keys [dim / 2][16][2], values [8][dim][2]; float32 is [dim][16] and
// [16][dim]. `dim` is padded with zeros to a multiple of 16. Of latents a tile has the keys alone, whose first elements
// are the values.
struct CacheLayout {
  int padded_dim;
  int padded_value_dim;
  int sides;       // 2: keys and values; 1: latents
  int side_bytes;  // keys of a tile, or values of a tile
  int tile_bytes;
  int head_bytes;
  std::int64_t block_bytes;
};

// The elements of queries and keys behind the first `value_dim`, where a layer keeps latents: [tokens, heads, rest],
// tokens `q_stride` elements apart, and [tokens, rest].
struct LatentTails {
  const void* q;
  const void* k;
  std::int64_t q_stride, k_stride;
};

// Biases of scores by the distance from query to key, times log2 e: [heads], rows `stride` apart. A row has the bias of
// distance 0 at `origin`, and biases for all keys of the chunks that a query reads; those of the query at position p start
// `position_stride` * p further on. Null for none.
struct DistanceBiases {
  const float* table;
  int stride;
  std::int64_t origin;  // beyond 32 bits where there are biases of single queries
  int position_stride;
};

// Rows of one head, elements of [tokens, heads, dim], tokens `stride` apart, that are multiplied with keys.
struct HeadRows {
  const void* x;
  std::int64_t stride;
  int head, first, count;  // at most kItemRows tokens from `first` on
};

struct Attention {
  const void* q;  // [tokens, heads, value_dim] of `type`; tokens `q_stride` elements apart
  const void* k;  // [tokens, kv_heads, value_dim] likewise; null where another layer has written to the cache
  const void* v;  // likewise; null for latents
  void* out;                             // [tokens, heads, value_dim], dense
  std::uint8_t* cache;                   // see CacheLayout
  const std::int32_t* query_starts;      // [rows + 1]
  const std::int32_t* sequence_lengths;  // [rows], this step's tokens included
  const std::int32_t* block_tables;      // [rows, ...], `table_stride` apart
  const std::int64_t* slots;             // [tokens]
  const float* alibi;                    // [heads] slopes, or null
  const float* sinks;                    // [heads] scores that take part in the softmax without a value, or null
  std::int64_t q_stride, k_stride, v_stride, table_stride, block_stride;
  int tokens, rows, heads, kv_heads, dim, value_dim, block_size;  // dim is value_dim but for latents
  Type type, cache_type;
  float scale;     // positive
  int window;      // keys up to itself that a query sees, itself included; INT32_MAX for all
  int ahead;       // keys after itself that a query sees, of those in the cache after this step; 0 for causal attention
  float soft_cap;  // 0 for none
  CacheLayout layout;
  LatentTails tails;
  DistanceBiases biases;
};

struct AttentionItem {
  int row;  // sequence
  int kv_head;
  int first_token;  // flat index of the first query
  int first_position;
  int queries;
  int key_end;  // one past the last key that any of its queries sees
};

// One past the last key that the query at `position` sees.
inline int end_seen(const Attention& a, int row, int position) {
  const int length = a.sequence_lengths[row];
  return length - position - 1 < a.ahead ? length : position + 1 + a.ahead;
}

// The result of a split of an item: sums of values weighted by 2^(score - maximum), and the sums of the weights.
struct AttentionPartial {
  float* sums;      // [rows, padded_value_dim]
  float* maxima;    // [rows], rows rounded up to 16
  float* weights;   // [rows]
};

// Addresses of latents, or of keys and values of a head, that are not adjacent.
struct GatheredRows {
  const void* const* places;  // [count]
  int count;
  std::int64_t begin, value_bytes;  // bytes from a place to the key, and from there to the value
  Type type;
};

// What scores get beside products, by distance: factors of the query, elements of [tokens, heads, rank], times profiles.
// These are reversed, so that a row has the distance extent - 1 - i at kMargin + i, with zeros around: [rank, extent + 2 * kMargin].
struct Profiles {
  const void* factors;  // of the type of the queries
  const float* table;
  std::int64_t factor_stride;  // elements from token to token
  int rank, extent;            // at most kMostRank
  static constexpr int kMargin = 16, kMostRank = 256;
};

struct AttentionKernels {
  int item_rows;  // most rows of an item, but for a query with more heads to a KV head
  std::int64_t (*scratch_bytes)(const Attention&);  // that `attend` needs, a multiple of 64
  // Tokens [begin, end) of one KV head.
  void (*write)(const Attention&, int kv_head, int begin, int end);
  // Copies them into consecutive tiles of the cache.
  void (*gather)(const Attention&, const GatheredRows&, std::uint8_t* tiles);
  // One split of one item; `next` is the item that this thread probably computes next; its first keys are prefetched.
  void (*attend)(const Attention&, const AttentionItem&, int split, const AttentionItem& next, const AttentionPartial&,
                 std::uint8_t* scratch);
  // Adds a later split to the sum of earlier ones.
  void (*merge)(const Attention&, const AttentionItem&, const AttentionPartial& total, const AttentionPartial& part);
  // Products of rows with the first `keys` keys of the cache of block 0, whose blocks are tiles: [chunks][kItemRows][kChunkKeys].
  void (*relate)(const Attention&, const HeadRows&, int keys, float* products);
  // Biases of an item's rows for the keys of a split, in whole chunks: [rows, kSplitKeys], times log2 e.
  void (*profile)(const Attention&, const AttentionItem&, const Profiles&, int split, float* biases);
  // Divides by the weights, those of the sinks included, and stores the result.
  void (*finish)(const Attention&, const AttentionItem&, const AttentionPartial&);
};

const AttentionKernels& attention_kernels(Level level);

}  // namespace octavo
