// Attention where each query sees vectors of its own: those that it chose, or all, and the last tokens.
#pragma once

#include "tasks.h"

namespace octavo {
namespace {

// A cache with a vector of every `rate` tokens of a block, its rows dense elements of `type`. 0 for no cache.
struct Vectors {
  const std::uint8_t* cache;
  const std::int32_t* tables;  // [rows, ...], `table_stride` apart
  std::int64_t table_stride, block_bytes, vector_bytes;
  int rate;
};

// What a query attends to: the numbers of `vectors` that it chose where more than `num_chosen` have ended, else all that
// have; behind them the last `window` tokens. In this order they are a sequence of their own, whose last token the query
// is, so its sums depend on its position alone.
struct Gathered {
  Attention a;  // queries and results, of latents or of keys and values; without places of keys
  Vectors vectors, recent;
  const std::int32_t* chosen;  // [tokens, num_chosen], dense; below 0 none. Null where all are seen
  int num_chosen, window, block_size;
  Type key_type;
  std::int64_t value_bytes;  // from a key to its value; heads of keys lie side by side. 0 for latents
};

constexpr int kSharingItems = 16;  // items of attention whose queries share copies

// Queries that share copied keys, or one query; and some of their heads, which share a head of keys.
struct GatheredTask {
  int row, token, position, queries, head, heads;
};

const void* place_of(const Gathered& g, const Vectors& v, int row, int number) {
  const int position = (number + 1) * v.rate - 1;
  const std::int64_t block = v.tables[row * v.table_stride + position / g.block_size];
  return v.cache + block * v.block_bytes + position % g.block_size / v.rate * v.vector_bytes;
}

int ended_at(const Gathered& g, int position) { return g.vectors.rate ? (position + 1) / g.vectors.rate : 0; }

bool chooses(const Gathered& g, int position) { return g.chosen && ended_at(g, position) > g.num_chosen; }

// Most keys that a query sees.
int most_keys(const Gathered& g, int position) {
  return (chooses(g, position) ? g.num_chosen : ended_at(g, position)) + std::min(position + 1, g.window);
}

// Fills in the places of the rows of the last query of a task; returns how many there are.
int find_rows(const Gathered& g, const GatheredTask& task, const void** rows) {
  const int position = task.position + task.queries - 1;
  int count = 0;
  if (chooses(g, position)) {
    const std::int32_t* chosen = g.chosen + static_cast<std::int64_t>(task.token) * g.num_chosen;
    for (int i = 0; i < g.num_chosen; ++i)
      if (chosen[i] >= 0) rows[count++] = place_of(g, g.vectors, task.row, chosen[i]);
  } else {
    for (const int ended = ended_at(g, position); count < ended; ++count) rows[count] = place_of(g, g.vectors, task.row, count);
  }
  for (int token = std::max(0, position - g.window + 1); g.window > 0 && token <= position; ++token)
    rows[count++] = place_of(g, g.recent, task.row, token);
  return count;
}

// Queries that see all tokens up to themselves share them. Of few queries, threads share the heads of a head of keys.
std::vector<GatheredTask> plan_gathered(const Gathered& g, const AttentionKernels& kernels, int threads) {
  std::vector<GatheredTask> tasks;
  const Attention& a = g.a;
  const int most = g.window == 0 && g.vectors.rate == 1 ? kSharingItems * most_queries_of(a, kernels) : 1;
  const int group = a.heads / a.kv_heads, few = std::min(threads, std::max(1, group / 8));
  const int parts_of_one = a.tokens * a.kv_heads < 2 * threads ? few : 1;
  for (int row = 0; row < a.rows; ++row) {
    const int first = a.query_starts[row], end = a.query_starts[row + 1], context = a.sequence_lengths[row] - (end - first);
    for (int token = first; token < end;) {
      const int position = context + token - first;
      int queries = 1;
      while (queries < most && token + queries < end && !chooses(g, position + queries)) ++queries;
      const int parts = queries == 1 ? parts_of_one : 1;
      for (int part = 0; part < a.kv_heads * parts; ++part) {
        const int first_head = part / parts * group, own = part % parts;
        const int head = first_head + group * own / parts, next = first_head + group * (own + 1) / parts;
        tasks.push_back({row, token, position, queries, head, next - head});
      }
      token += queries;
    }
  }
  return tasks;
}

// Bytes of a thread: of an item of attention, then the tiles and the places of up to `keys` keys.
std::int64_t gathered_bytes(const Attention& a, const AttentionKernels& kernels, int keys) {
  const std::int64_t tiles = (keys + kTileKeys - 1) / kTileKeys;
  return item_bytes(a, kernels, partial_rows(a, most_queries_of(a, kernels))) + tiles * (a.layout.tile_bytes + kTileKeys * 8);
}

void attend_gathered(const Gathered& g, const AttentionKernels& kernels, const GatheredTask& task, int keys,
                     const std::int32_t* table, std::uint8_t* memory) {
  const int item_rows = partial_rows(g.a, most_queries_of(g.a, kernels)), element = g.a.type == Type::float32 ? 4 : 2;
  std::uint8_t* tiles = memory + item_bytes(g.a, kernels, item_rows);
  auto** rows = reinterpret_cast<const void**>(tiles + (keys + kTileKeys - 1) / kTileKeys * static_cast<std::int64_t>(g.a.layout.tile_bytes));
  const int count = find_rows(g, task, rows), kv_head = task.head / (g.a.heads / g.a.kv_heads);
  const std::int64_t head_bytes = g.a.dim * (g.key_type == Type::float32 ? 4 : 2);
  kernels.gather(g.a, {rows, count, kv_head * head_bytes, g.value_bytes, g.key_type}, tiles);
  Attention own = g.a;
  const auto behind = [&](const void* x, std::int64_t elements) { return static_cast<const std::uint8_t*>(x) + elements * element; };
  own.rows = 1, own.cache = tiles, own.layout.head_bytes = 0, own.sequence_lengths = &count, own.block_tables = table;
  own.q = behind(own.q, task.token * own.q_stride);
  own.tails.q = behind(own.tails.q, task.token * own.tails.q_stride);
  std::int64_t out = static_cast<std::int64_t>(task.token) * own.heads * own.value_dim;
  if (task.queries == 1) {  // the task may have only some of the heads; for the kernel these are all
    own.q = behind(own.q, static_cast<std::int64_t>(task.head) * own.value_dim);
    own.tails.q = behind(own.tails.q, static_cast<std::int64_t>(task.head) * (own.dim - own.value_dim));
    out += static_cast<std::int64_t>(task.head) * own.value_dim;
    if (own.sinks) own.sinks += task.head;
    own.heads = task.heads, own.kv_heads = 1;
  }
  own.out = static_cast<std::uint8_t*>(own.out) + out * element;
  const int most = most_queries_of(g.a, kernels), first = count - task.queries;
  for (int done = 0; done < task.queries; done += most) {
    const int queries = std::min(most, task.queries - done);
    const AttentionItem item{0, task.queries == 1 ? 0 : kv_head, done, first + done, queries, first + done + queries};
    attend_item(own, kernels, item, item, memory, item_rows);
  }
}

void run_gathered(Cpu& cpu, const Gathered& g, const AttentionKernels& kernels) {
  const std::vector<GatheredTask> tasks = plan_gathered(g, kernels, cpu.pool.threads());
  int keys = 1;
  for (const GatheredTask& task : tasks) keys = std::max(keys, most_keys(g, task.position + task.queries - 1));
  std::vector<std::int32_t> table((keys + kTileKeys - 1) / kTileKeys);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
  const std::int64_t bytes = gathered_bytes(g.a, kernels, keys);
  auto* memory = static_cast<std::uint8_t*>(cpu.scratch(bytes * cpu.pool.threads()));
  cpu.pool.run(static_cast<int>(tasks.size()), [&](int task, int thread) {
    attend_gathered(g, kernels, tasks[task], keys, table.data(), memory + thread * bytes);
  });
}

// Attention in tiles of the type of the queries, divided by query, or by some queries, and by head of keys. value_dim: of
// latents; 0 for keys and values.
Attention gathered_attention(int heads, int kv_heads, int dim, int value_dim, Type type) {
  Attention a{};
  a.heads = heads, a.kv_heads = kv_heads, a.dim = dim, a.value_dim = value_dim ? value_dim : dim, a.block_size = kTileKeys;
  a.type = a.cache_type = type;
  a.window = INT32_MAX;
  a.layout = layout_of(1, dim, value_dim, kTileKeys, type);
  a.block_stride = a.layout.block_bytes;
  return a;
}

}  // namespace
}  // namespace octavo
