// Attention as Python sees it: the cache's layout, the cut into tasks, and copies of blocks.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const AttentionKernels attention_table; }
namespace avx512 { extern const AttentionKernels attention_table; }
namespace avx512_bf16 { extern const AttentionKernels attention_table; }
namespace amx { extern const AttentionKernels attention_table; }
namespace amx_emulated { extern const AttentionKernels attention_table; }

const AttentionKernels& attention_kernels(Level level) {
  return choose_table(level, avx2::attention_table, avx512::attention_table, avx512_bf16::attention_table,
                      amx::attention_table, amx_emulated::attention_table);
}

namespace {

// value_dim: of latents, the first elements of a key that are its value; 0 for keys and values.
CacheLayout layout_of(int kv_heads, int dim, int value_dim, int block_size, Type cache_type) {
  CacheLayout layout;
  const bool has_scales = cache_type == Type::int8 || cache_type == Type::fp8_e4m3;
  const int value_bytes = cache_type == Type::float32 ? 4 : cache_type == Type::bfloat16 ? 2 : 1;
  layout.padded_dim = (dim + 15) / 16 * 16;
  layout.padded_value_dim = value_dim ? (value_dim + 15) / 16 * 16 : layout.padded_dim;
  layout.sides = value_dim ? 1 : 2;
  layout.side_bytes = kTileKeys * layout.padded_dim * value_bytes;
  layout.tile_bytes = layout.sides * (layout.side_bytes + (has_scales ? kTileKeys * static_cast<int>(sizeof(float)) : 0));
  layout.head_bytes = block_size / kTileKeys * layout.tile_bytes;
  layout.block_bytes = static_cast<std::int64_t>(kv_heads) * layout.head_bytes;
  return layout;
}

int first_split(const Attention& a, const AttentionItem& item) {
  return item.first_position < a.window ? 0 : (item.first_position - a.window + 1) / kSplitKeys;
}

int end_split(const AttentionItem& item) { return (item.key_end + kSplitKeys - 1) / kSplitKeys; }

int most_queries_of(const Attention& a, const AttentionKernels& kernels) {
  return std::max(1, kernels.item_rows / (a.heads / a.kv_heads));
}

// Head by head, for the keys of one are all that fits a cache; within a head those with the most keys first, so that the
// last tasks of a region are short.
std::vector<AttentionItem> plan_items(const Attention& a, const AttentionKernels& kernels) {
  const int most_queries = most_queries_of(a, kernels);
  std::vector<AttentionItem> items;
  for (int row = 0; row < a.rows; ++row) {
    const int first_token = a.query_starts[row], queries = a.query_starts[row + 1] - first_token;
    const int context = a.sequence_lengths[row] - queries;
    for (int done = 0; done < queries; done += most_queries) {
      const int count = std::min(most_queries, queries - done);
      items.push_back({row, 0, first_token + done, context + done, count, end_seen(a, row, context + done + count - 1)});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const AttentionItem& one, const AttentionItem& other) {
    return one.key_end > other.key_end;
  });
  const std::size_t count = items.size();
  items.reserve(count * a.kv_heads);
  for (int kv_head = 1; kv_head < a.kv_heads; ++kv_head)
    for (std::size_t i = 0; i < count; ++i) {
      items.push_back(items[i]);
      items.back().kv_head = kv_head;
    }
  return items;
}

int partial_rows(const Attention& a, int queries) { return (queries * (a.heads / a.kv_heads) + 15) / 16 * 16; }

std::int64_t partial_floats(const Attention& a, int rows) {
  return static_cast<std::int64_t>(rows) * (a.layout.padded_value_dim + 2);
}

AttentionPartial partial_at(const Attention& a, float* base, int rows) {
  float* maxima = base + static_cast<std::int64_t>(rows) * a.layout.padded_value_dim;
  return {base, maxima, maxima + rows};
}

// An item with all its splits, in the scratch of the kernel and, behind it, two sums of at most `rows` rows.
void attend_item(const Attention& a, const AttentionKernels& kernels, const AttentionItem& item, const AttentionItem& next,
                 std::uint8_t* own, int rows) {
  float* sums = reinterpret_cast<float*>(own + kernels.scratch_bytes(a));
  const AttentionPartial total = partial_at(a, sums, rows), part = partial_at(a, sums + partial_floats(a, rows), rows);
  const int first = first_split(a, item);
  kernels.attend(a, item, first, next, total, own);
  for (int split = first + 1; split < end_split(item); ++split) {
    kernels.attend(a, item, split, next, part, own);
    kernels.merge(a, item, total, part);
  }
  kernels.finish(a, item, total);
}

std::int64_t item_bytes(const Attention& a, const AttentionKernels& kernels, int rows) {
  return kernels.scratch_bytes(a) + 2 * partial_floats(a, rows) * static_cast<std::int64_t>(sizeof(float));
}

// A task is an item with all its splits.
void attend_items(Cpu& cpu, const Attention& a, const AttentionKernels& kernels, const std::vector<AttentionItem>& items) {
  const int rows = partial_rows(a, most_queries_of(a, kernels));
  const std::int64_t thread_bytes = item_bytes(a, kernels, rows);
  auto* memory = static_cast<std::uint8_t*>(cpu.scratch(thread_bytes * cpu.pool.threads()));
  const int count = static_cast<int>(items.size());
  cpu.pool.run(count, [&](int task, int thread) {
    const AttentionItem& next = items[std::min(task + cpu.pool.threads(), count - 1)];
    attend_item(a, kernels, items[task], next, memory + thread * thread_bytes, rows);
  });
}

// A task is one split of an item; a second region merges them. For few items with many keys.
void attend_splits(Cpu& cpu, const Attention& a, const AttentionKernels& kernels, const std::vector<AttentionItem>& items) {
  struct Task {
    int item, split;
    std::int64_t place;  // of its partial, in floats
  };
  std::vector<Task> tasks;
  std::vector<int> first_tasks;
  std::int64_t floats = 0;
  const int num_items = static_cast<int>(items.size());
  for (int i = 0; i < num_items; ++i) {
    first_tasks.push_back(static_cast<int>(tasks.size()));
    for (int split = first_split(a, items[i]); split < end_split(items[i]); ++split) {
      tasks.push_back({i, split, floats});
      floats += partial_floats(a, partial_rows(a, items[i].queries));
    }
  }
  first_tasks.push_back(static_cast<int>(tasks.size()));
  const std::int64_t own_bytes = kernels.scratch_bytes(a), own_total = own_bytes * cpu.pool.threads();
  auto* memory = static_cast<std::uint8_t*>(cpu.scratch(own_total + floats * static_cast<std::int64_t>(sizeof(float))));
  float* partials = reinterpret_cast<float*>(memory + own_total);
  const auto partial_of = [&](const Task& task) {
    return partial_at(a, partials + task.place, partial_rows(a, items[task.item].queries));
  };
  cpu.pool.run(static_cast<int>(tasks.size()), [&](int index, int thread) {
    const Task& task = tasks[index];
    const AttentionItem& item = items[task.item];
    kernels.attend(a, item, task.split, item, partial_of(task), memory + thread * own_bytes);
  });
  cpu.pool.run_pieces(num_items, 2, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const AttentionPartial total = partial_of(tasks[first_tasks[i]]);
      for (int task = first_tasks[i] + 1; task < first_tasks[i + 1]; ++task)
        kernels.merge(a, items[i], total, partial_of(tasks[task]));
      kernels.finish(a, items[i], total);
    }
  });
}

void run_attention(Cpu& cpu, const Attention& a, const AttentionKernels& kernels) {
  // by tokens, then by heads: where blocks are fresh each thread waits for pages of its own
  const int most = std::max(1, std::min(64, a.tokens)), parts = (a.tokens + most - 1) / most * a.kv_heads;
  if (a.k) cpu.pool.run_pieces(parts, std::max(1, 32 / most), [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int first_token = i / a.kv_heads * most;
      kernels.write(a, i % a.kv_heads, first_token, std::min(first_token + most, a.tokens));
    }
  });
  const std::vector<AttentionItem> items = plan_items(a, kernels);
  if (items.empty()) return;
  const bool is_few = static_cast<int>(items.size()) < 4 * cpu.pool.threads();
  const bool is_long = end_split(items.front()) - first_split(a, items.front()) > 1;
  if (cpu.pool.threads() > 1 && is_few && is_long) return attend_splits(cpu, a, kernels, items);
  attend_items(cpu, a, kernels, items);
}

// Where whole prompts lie in a cache of their own, whose blocks are tiles, one prompt behind the other.
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
          kLog2E * biases[head * (2 * reach + 1LL) + reach + std::clamp(place - spread.origin, -reach, reach)];
  return spread;
}

// What scores have of learned vectors of distances: the place of a query that stands -reach to reach tokens behind the
// key, one of `count`. Both sides are attentions whose keys are the vectors, in a cache of tiles.
struct Distances {
  Attention of_queries, of_keys;  // what queries are multiplied with, and what keys are
  const std::int64_t* places;     // [2 * reach + 1]
  int reach, count;
};

std::int64_t padded_chunk(std::int64_t count) { return (count + kChunkKeys - 1) / kChunkKeys * kChunkKeys; }

// Products of all keys of a head, and of the queries of an item, with `places` vectors; and what the item's scores have of them.
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
    own.biases = {biases, 0, static_cast<int>(-query * keys), static_cast<int>(keys) + 1};
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

struct BlockCopies {
  const std::int64_t* sources;  // [planes] addresses of what holds the blocks copied from
  const std::int64_t* targets;  // [planes]
  const std::int64_t* pairs;    // [count, 2] source and target block
  int planes, count;
  std::int64_t block_bytes, block_stride;
};

// Within a plane in the order of the list: a copy may read what an earlier one wrote.
void copy_blocks(Cpu& cpu, const BlockCopies& c) {
  cpu.pool.run(c.planes, [&](int plane, int) {
    const auto* source = pointer<std::uint8_t>(static_cast<Address>(c.sources[plane]));
    auto* target = pointer<std::uint8_t>(static_cast<Address>(c.targets[plane]));
    for (int i = 0; i < c.count; ++i)
      std::memmove(target + c.pairs[2 * i + 1] * c.block_stride, source + c.pairs[2 * i] * c.block_stride, c.block_bytes);
  });
}

}  // namespace

void bind_attention(nb::class_<Cpu>& cpu) {
  cpu.def_static(
      "attention_block_bytes",
      [](int kv_heads, int dim, int value_dim, int block_size, int cache_type) {
        return layout_of(kv_heads, dim, value_dim, block_size, static_cast<Type>(cache_type)).block_bytes;
      },
      "Bytes of one block of one layer's cache; block_size is a multiple of 16, value_dim 0 unless it keeps latents.");
  cpu.def(
      "attention_scratch_bytes",
      [](const Cpu& cpu, int heads, int kv_heads, int dim, int value_dim, int longest, int cache_type) {
        Attention a{};
        a.heads = heads, a.kv_heads = kv_heads, a.dim = dim;
        a.layout = layout_of(kv_heads, dim, value_dim, kTileKeys, static_cast<Type>(cache_type));
        const AttentionKernels& kernels = attention_kernels(cpu.level);
        const std::int64_t rows = partial_rows(a, most_queries_of(a, kernels));
        const std::int64_t partial = partial_floats(a, static_cast<int>(rows)) * static_cast<std::int64_t>(sizeof(float));
        // either two sums for each thread, or one for each split of the few items that are cut
        const std::int64_t splits = (longest + kSplitKeys - 1) / kSplitKeys, threads = cpu.pool.threads();
        return threads * kernels.scratch_bytes(a) + std::max(2 * threads, 4 * threads * splits) * partial;
      },
      "Most bytes that `attention` works in, for sequences of up to `longest` tokens.");
  cpu.def(
      "attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address query_starts,
         Address sequence_lengths, Address block_tables, Address slots, Address alibi, Address sinks,
         std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t table_stride, std::int64_t block_stride, int tokens,
         int rows, int heads, int kv_heads, int dim, int block_size, int type, int cache_type, float scale, int window,
         float soft_cap, int ahead) {
        Attention a{pointer(q), pointer(k), pointer(v), pointer(out), pointer<std::uint8_t>(cache),
                    pointer<std::int32_t>(query_starts), pointer<std::int32_t>(sequence_lengths),
                    pointer<std::int32_t>(block_tables), pointer<std::int64_t>(slots), pointer<float>(alibi), pointer<float>(sinks),
                    q_stride, k_stride, v_stride, table_stride, block_stride, tokens, rows, heads, kv_heads, dim, dim, block_size,
                    static_cast<Type>(type), static_cast<Type>(cache_type), scale, window, ahead, soft_cap,
                    layout_of(kv_heads, dim, 0, block_size, static_cast<Type>(cache_type)), {}, {}};
        cpu.submit([&cpu, a, &kernels = attention_kernels(cpu.level)] { run_attention(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Write keys and values to their slots, then attend over the paged cache; see csrc/cpu/attention/attention.h.");
  cpu.def(
      "distance_attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address table, Address biases, int reach,
         Address lengths, int prompts, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, int heads,
         int kv_heads, int dim, int type, float scale) {
        Attention a = prompts_attention(q, k, v, out, cache, dim, heads, kv_heads, static_cast<Type>(type), static_cast<Type>(type));
        a.sequence_lengths = pointer<std::int32_t>(lengths);
        a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride, a.rows = prompts, a.scale = scale;
        cpu.submit([=, &cpu, &kernels = attention_kernels(cpu.level)] {
          const PromptPlaces places(a.sequence_lengths, prompts);
          Attention own = a;
          own.query_starts = places.starts.data(), own.block_tables = places.tables.data();
          own.slots = places.slots.data(), own.tokens = places.starts.back(), own.table_stride = places.tiles;
          own.biases = spread(pointer<const float>(biases), reach, places.longest, heads, pointer<float>(table));
          run_attention(cpu, own, kernels);
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend within whole prompts, scores having a bias by distance; see PromptPlaces for the cache, spread for the table.");
  cpu.def(
      "disentangled_bytes",
      [](const Cpu& cpu, int longest, int places) {
        return cpu.pool.threads() * disentangled_floats(longest, places) * static_cast<std::int64_t>(sizeof(float));
      },
      "Bytes of products with vectors of distances that `disentangled_attention` keeps.");
  cpu.def(
      "disentangled_attention",
      [](Cpu& cpu, Address q, Address k, Address v, Address out, Address cache, Address place_q, Address place_k,
         Address place_q_cache, Address place_k_cache, Address memory, Address places, int reach, int count, Address lengths,
         int prompts, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t place_q_stride,
         std::int64_t place_k_stride, int heads, int dim, int type, float scale) {
        // products with tiles have no sums of their own for rows that are related
        const Level level = std::min(cpu.level, Level::avx512_bf16);
        const Type own = static_cast<Type>(type), related = level < Level::avx512_bf16 ? Type::float32 : own;
        Attention a = prompts_attention(q, k, v, out, cache, dim, heads, heads, own, own);
        a.sequence_lengths = pointer<std::int32_t>(lengths);
        a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride, a.rows = prompts, a.scale = scale;
        Distances d{prompts_attention(0, place_k, place_k, 0, place_k_cache, dim, heads, heads, own, related),
                    prompts_attention(0, place_q, place_q, 0, place_q_cache, dim, heads, heads, own, related),
                    pointer<std::int64_t>(places), reach, count};
        d.of_queries.k_stride = d.of_queries.v_stride = place_k_stride;
        d.of_keys.k_stride = d.of_keys.v_stride = place_q_stride;
        cpu.submit([=, &cpu, &kernels = attention_kernels(level)] {
          const PromptPlaces found(a.sequence_lengths, prompts);
          std::vector<std::int64_t> slots(count);
          for (int i = 0; i < count; ++i) slots[i] = i;
          Attention content = a;
          content.query_starts = found.starts.data(), content.block_tables = found.tables.data();
          content.slots = found.slots.data(), content.tokens = found.starts.back(), content.table_stride = found.tiles;
          Distances distances = d;
          distances.of_queries.slots = distances.of_keys.slots = slots.data();
          run_disentangled(cpu, content, kernels, distances, found.longest, pointer<float>(memory));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Attend within whole prompts, scores having products with vectors of distances; see Distances.");
  cpu.def(
      "latent_attention",
      [](Cpu& cpu, Address q, Address q_tail, Address k, Address k_tail, Address out, Address cache, Address query_starts,
         Address sequence_lengths, Address block_tables, Address slots, std::int64_t q_stride, std::int64_t q_tail_stride,
         std::int64_t k_stride, std::int64_t k_tail_stride, std::int64_t table_stride, std::int64_t block_stride,
         int tokens, int rows, int heads, int dim, int value_dim, int block_size, int type, int cache_type, float scale) {
        Attention a{};
        a.q = pointer(q), a.k = pointer(k), a.out = pointer(out), a.cache = pointer<std::uint8_t>(cache);
        a.query_starts = pointer<std::int32_t>(query_starts), a.block_tables = pointer<std::int32_t>(block_tables);
        a.sequence_lengths = pointer<std::int32_t>(sequence_lengths), a.slots = pointer<std::int64_t>(slots);
        a.q_stride = q_stride, a.k_stride = k_stride, a.table_stride = table_stride, a.block_stride = block_stride;
        a.tokens = tokens, a.rows = rows, a.heads = heads, a.kv_heads = 1, a.dim = dim, a.value_dim = value_dim;
        a.block_size = block_size, a.type = static_cast<Type>(type), a.cache_type = static_cast<Type>(cache_type);
        a.scale = scale, a.window = INT32_MAX;
        a.layout = layout_of(1, dim, value_dim, block_size, a.cache_type);
        a.tails = {pointer(q_tail), pointer(k_tail), q_tail_stride, k_tail_stride};
        cpu.submit([&cpu, a, &kernels = attention_kernels(cpu.level)] { run_attention(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "The same for latents, whose queries and keys come in two parts: the elements that are values too, and the rest.");
  cpu.def(
      "copy_blocks",
      [](Cpu& cpu, Address sources, Address targets, Address pairs, int planes, int count, std::int64_t block_bytes,
         std::int64_t block_stride) {
        copy_blocks(cpu, {pointer<std::int64_t>(sources), pointer<std::int64_t>(targets), pointer<std::int64_t>(pairs),
                          planes, count, block_bytes, block_stride});
      },
      nb::call_guard<nb::gil_scoped_release>(), "Copy whole blocks, in order, in every plane of every layer.");
}

}  // namespace octavo
