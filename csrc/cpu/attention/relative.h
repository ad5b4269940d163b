// Attention over stored keys and values whose scores have products of the query's factors with profiles of distances.
#pragma once

#include "gathered.h"

namespace octavo {
namespace {

// Memory of one thread: of the kernel, of the sums of the items that share keys, and of a split of those.
struct RelativeMemory {
  std::uint8_t* scratch;
  float* sums;  // of each item and, behind them, of one split
  float* biases;
  std::uint8_t* tiles;
  const void** places;
  std::int64_t bytes;

  RelativeMemory(const Attention& a, const AttentionKernels& kernels, int rows, std::uint8_t* base) : scratch(base) {
    const auto behind = [](auto* p, std::int64_t count) { return reinterpret_cast<std::uint8_t*>(p + (count + 15) / 16 * 16); };
    sums = reinterpret_cast<float*>(base + kernels.scratch_bytes(a));
    biases = reinterpret_cast<float*>(behind(sums, (kSharingItems + 1) * partial_floats(a, rows)));
    tiles = behind(biases, static_cast<std::int64_t>(rows) * kSplitKeys);
    places = reinterpret_cast<const void**>(tiles + kSplitKeys / kTileKeys * static_cast<std::int64_t>(a.layout.tile_bytes));
    bytes = behind(places, kSplitKeys) - base;
  }
};

// Copies the keys of a split that the queries of a task see into tiles, each at its place within the split.
void gather_split(const Gathered& g, const AttentionKernels& kernels, const GatheredTask& task, int split, const RelativeMemory& m) {
  const Attention& a = g.a;
  const int last = task.position + task.queries, seen = task.position < a.window ? 0 : task.position - a.window + 1;
  const int base = split * kSplitKeys, first = std::max(base, seen / kTileKeys * kTileKeys), end = std::min(last, base + kSplitKeys);
  // a key that no query sees is another one: its block may be gone
  for (int key = first; key < end; ++key) m.places[key - first] = place_of(g, g.vectors, task.row, std::max(key, seen));
  const std::int64_t head_bytes = a.dim * (g.key_type == Type::float32 ? 4 : 2), head = task.head / (a.heads / a.kv_heads);
  kernels.gather(a, {m.places, end - first, head * head_bytes, g.value_bytes, g.key_type},
                 m.tiles + (first - base) / kTileKeys * static_cast<std::int64_t>(a.layout.tile_bytes));
}

// The queries of a task, in items as those of paged attention. `table` has zeros: all splits lie in one block.
void attend_relative(const Gathered& g, const Profiles& profiles, const AttentionKernels& kernels, const GatheredTask& task,
                     const std::int32_t* table, const RelativeMemory& m) {
  Attention a = g.a;
  a.cache = m.tiles, a.block_size = kSplitKeys, a.layout.head_bytes = 0, a.block_tables = table, a.table_stride = 0;
  const int most = most_queries_of(a, kernels), rows = partial_rows(a, most), group = a.heads / a.kv_heads;
  std::vector<AttentionItem> items;
  for (int done = 0; done < task.queries; done += most) {
    const int queries = std::min(most, task.queries - done), first = task.position + done;
    items.push_back({task.row, task.head / group, task.token + done, first, queries, first + queries});
  }
  const auto sums_of = [&](std::size_t item) { return partial_at(a, m.sums + item * partial_floats(a, rows), rows); };
  const std::int64_t row = kSplitKeys;
  for (int split = first_split(a, items.front()); split < end_split(items.back()); ++split) {
    gather_split(g, kernels, task, split, m);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const AttentionItem& item = items[i];
      const int first = first_split(a, item);
      if (split < first || split >= end_split(item)) continue;
      // biases are [queries, heads of the item, keys of the split]
      const std::int64_t origin = -row * group * (item.kv_head + static_cast<std::int64_t>(item.first_position)) - split * row;
      a.biases = {m.biases, kSplitKeys, origin, static_cast<int>(row) * group + 1};
      kernels.profile(a, item, profiles, split, m.biases);
      const AttentionPartial own = sums_of(split == first ? i : kSharingItems);
      kernels.attend(a, item, split, item, own, m.scratch);
      if (split > first) kernels.merge(a, item, sums_of(i), own);
    }
  }
  for (std::size_t i = 0; i < items.size(); ++i) kernels.finish(a, items[i], sums_of(i));
}

void run_relative(Cpu& cpu, const Gathered& g, const Profiles& profiles, const AttentionKernels& kernels) {
  const std::vector<GatheredTask> tasks = plan_gathered(g, kernels, 1);
  int last = 0;
  for (const GatheredTask& task : tasks) last = std::max(last, task.position + task.queries);
  const std::vector<std::int32_t> table(last / kSplitKeys + 1);
  const int rows = partial_rows(g.a, most_queries_of(g.a, kernels));
  const std::int64_t bytes = RelativeMemory(g.a, kernels, rows, nullptr).bytes;
  auto* memory = static_cast<std::uint8_t*>(cpu.scratch(bytes * cpu.pool.threads()));
  cpu.pool.run(static_cast<int>(tasks.size()), [&](int task, int thread) {
    attend_relative(g, profiles, kernels, tasks[task], table.data(), RelativeMemory(g.a, kernels, rows, memory + thread * bytes));
  });
}

}  // namespace
}  // namespace octavo
