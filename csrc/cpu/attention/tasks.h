// The layout of the cache, and the division of attention into tasks for the threads of a pool.
#pragma once

#include <algorithm>
#include <vector>

#include "../bindings.h"
#include "attention.h"

namespace octavo {
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

// Head by head, because the cache holds the keys of only one; within a head, items with the most keys come first, so that
// the last tasks of a region are short.
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
  // by tokens, then by heads, so that each thread waits for page faults of its own in new blocks
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

}  // namespace
}  // namespace octavo
