// Attention within whole prompts, with biases of scores by the distance of query and key.
#pragma once

#include "tasks.h"

namespace octavo {
namespace {

// The layout of whole prompts in a temporary cache, whose blocks are tiles, one prompt after the other.
struct PromptPlaces {
  std::vector<std::int32_t> starts, tables;
  std::vector<std::int64_t> slots;
  int longest, tiles;  // of the longest prompt

  PromptPlaces(const std::int32_t* lengths, int prompts) : starts(1), longest(1) {
    for (int i = 0; i < prompts; ++i) longest = std::max(longest, lengths[i]);
    tiles = (longest + kTileKeys - 1) / kTileKeys;
    tables.resize(static_cast<std::size_t>(prompts) * tiles);
    int block = 0;
    for (int i = 0; i < prompts; ++i) {
      starts.push_back(starts.back() + lengths[i]);
      for (int token = 0; token < lengths[i]; ++token) slots.push_back(static_cast<std::int64_t>(block) * kTileKeys + token);
      for (int key = 0; key < lengths[i]; key += kTileKeys) tables[i * tiles + key / kTileKeys] = block++;
    }
  }
};

// `biases` [heads, 2 * reach + 1] for the distances -reach to reach, brought to those that prompts have. `table` has room
// for 2 * longest + kChunkKeys numbers of each head.
DistanceBiases spread(const float* biases, int reach, int longest, int heads, float* table) {
  const DistanceBiases spread{table, 2 * longest + kChunkKeys, longest, 0};
  for (int head = 0; head < heads; ++head)
    for (int place = 0; place < spread.stride; ++place)
      table[head * static_cast<std::int64_t>(spread.stride) + place] =
          kLog2E * biases[head * (2 * reach + 1LL) + reach + std::clamp(place - longest, -reach, reach)];
  return spread;
}

// Terms of scores by learned vectors of distances (DeBERTa): for a query -reach to reach tokens after the key, the number
// of its vector, one of `count`. Both sides are attentions whose keys are these vectors, in a cache of tiles.
struct Distances {
  Attention of_queries, of_keys;  // what queries are multiplied with, and what keys are
  const std::int64_t* places;     // [2 * reach + 1]
  int reach, count;
};

std::int64_t padded_chunk(std::int64_t count) { return (count + kChunkKeys - 1) / kChunkKeys * kChunkKeys; }

// Products of all keys of a head, and of an item's queries, with `places` vectors; and the terms of the item's scores.
std::int64_t disentangled_floats(int longest, int places) {
  return (padded_chunk(longest) + kItemRows) * padded_chunk(places) + kItemRows * padded_chunk(longest);
}

// One head of one prompt, whose keys and values are in the cache; `memory` has `disentangled_floats`.
void attend_disentangled(const Attention& a, const AttentionKernels& kernels, const Distances& d, int row, int head,
                         float* memory, std::uint8_t* own_scratch, int rows) {
  const int first = a.query_starts[row], length = a.sequence_lengths[row];
  const std::int64_t keys = padded_chunk(length), block = padded_chunk(d.count) * kItemRows;
  float *of_keys = memory, *of_queries = of_keys + keys / kItemRows * block, *biases = of_queries + block;
  std::vector<int> at(2 * length - 1);  // of the key that stands length - 1 - i tokens before the query, in a row's products
  for (int i = 0; i < 2 * length - 1; ++i) {
    const int place = static_cast<int>(d.places[d.reach + length - 1 - i]);
    at[i] = place / kChunkKeys * kItemRows * kChunkKeys + place % kChunkKeys;
  }
  for (int key = 0; key < length; key += kItemRows)
    kernels.relate(d.of_keys, {a.k, a.k_stride, head, first + key, std::min(kItemRows, length - key)}, d.count,
                   of_keys + key / kItemRows * block);
  for (int query = 0; query < length; query += kItemRows) {
    const int queries = std::min(kItemRows, length - query);
    kernels.relate(d.of_queries, {a.q, a.q_stride, head, first + query, queries}, d.count, of_queries);
    for (int start = 0; start < length; start += kItemRows)
      for (int i = 0; i < queries; ++i) {
        const int* place = at.data() + length - 1 - query - i + start;
        const float *own = of_queries + i * kChunkKeys, *other = of_keys + start / kItemRows * block;
        float* out = biases + i * keys + start;
        for (int j = 0; j < std::min(kItemRows, length - start); ++j)
          out[j] = a.scale * kLog2E * (own[place[j]] + other[j * kChunkKeys + place[j]]);
      }
    Attention own = a;
    own.biases = {biases, 0, -query * keys, static_cast<int>(keys) + 1};
    const AttentionItem item{row, head, first + query, query, queries, length};
    attend_item(own, kernels, item, item, own_scratch, rows);
  }
}

void run_disentangled(Cpu& cpu, const Attention& a, const AttentionKernels& kernels, const Distances& d, int longest,
                      float* memory) {
  cpu.pool.run(a.heads, [&](int head, int) {
    kernels.write(a, head, 0, a.tokens);
    kernels.write(d.of_queries, head, 0, d.count);
    kernels.write(d.of_keys, head, 0, d.count);
  });
  const int rows = partial_rows(a, kItemRows);
  const std::int64_t thread_bytes = item_bytes(a, kernels, rows), floats = disentangled_floats(longest, d.count);
  auto* scratch = static_cast<std::uint8_t*>(cpu.scratch(thread_bytes * cpu.pool.threads()));
  cpu.pool.run(a.rows * a.heads, [&](int task, int thread) {
    attend_disentangled(a, kernels, d, task / a.heads, task % a.heads, memory + thread * floats,
                        scratch + thread * thread_bytes, rows);
  });
}

// Whole prompts, as `distance_attention` has them.
Attention prompts_attention(Address q, Address k, Address v, Address out, Address cache, int dim, int heads, int kv_heads,
                            Type type, Type cache_type) {
  Attention a{};
  a.q = pointer(q), a.k = pointer(k), a.v = pointer(v), a.out = pointer(out), a.cache = pointer<std::uint8_t>(cache);
  a.heads = heads, a.kv_heads = kv_heads, a.dim = a.value_dim = dim, a.block_size = kTileKeys;
  a.type = type, a.cache_type = cache_type;
  a.window = a.ahead = INT32_MAX;
  a.layout = layout_of(kv_heads, dim, 0, kTileKeys, cache_type);
  a.block_stride = a.layout.block_bytes;
  return a;
}

}  // namespace
}  // namespace octavo
