// The rows of an item: (query position) x (query head of one KV head).
#pragma once

#include "cache.h"

namespace octavo {
namespace {

inline int at_least_zero(int x) { return x > 0 ? x : 0; }
inline int at_most(int x, int limit) { return x < limit ? x : limit; }

// First position that the query at `position` sees.
inline int first_seen(const Attention& a, int position) { return position < a.window ? 0 : position - a.window + 1; }

struct Keys {
  int start, end;
};

// The keys of a split that an item has to read, from the start of a chunk on.
inline Keys keys_of(const Attention& a, const AttentionItem& item, int split) {
  const int first = first_seen(a, item.first_position), split_start = split * kSplitKeys;
  const int start = first > split_start ? first / kChunkKeys * kChunkKeys : split_start;
  return {start, at_most(item.key_end, split_start + kSplitKeys)};
}

// The keys that rows see, relative to `first_key`.
struct Seen {
  int begin, end;  // keys; both may lie outside of a chunk
};

struct ItemRows {
  const Attention& a;
  const AttentionItem& item;
  const int group = a.heads / a.kv_heads;

  int count() const { return item.queries * group; }
  int position(int row) const { return item.first_position + row / group; }
  int head(int row) const { return item.kv_head * group + row % group; }

  // What queries at the positions [first, last] see.
  Seen seen(int first, int last, int first_key) const {
    return {first_seen(a, first) - first_key, end_seen(a, item.row, last) - first_key};
  }

  // The index in q of a row's first element; with latents, of the part that matches the values.
  std::int64_t place(int row) const {
    return (item.first_token + row / group) * a.q_stride + static_cast<std::int64_t>(head(row)) * a.value_dim;
  }

  void load_query(int row, float* out) const {
    load_row(a.q, place(row), a.type, a.value_dim, out);
    if (a.v) return;
    const int rest = a.dim - a.value_dim;
    load_row(a.tails.q, (item.first_token + row / group) * a.tails.q_stride + row % group * rest, a.type, rest,
             out + a.value_dim);
  }
};

}  // namespace
}  // namespace octavo
