// Scores of small keys, compiled once per level. A lane is a key, so the width of vectors changes no sum.
#include "choice.h"

#include "../vector.h"

namespace octavo {
namespace {

constexpr int kVectors = kScoredKeys / kLanes;
constexpr int kHeadsAtOnce = 8 / kVectors;

std::int64_t choice_scratch_bytes(const Choice& a) {
  const std::int64_t floats = static_cast<std::int64_t>(kScoringTokens) * a.heads * a.size + kScoredKeys * a.size;
  return (floats * static_cast<std::int64_t>(sizeof(float)) + 63) / 64 * 64;
}

// Keys of a tile in columns, [size][kScoredKeys]; after the last key, it is repeated.
template <class Element>
void arrange_keys(const Choice& a, int first_key, int last_key, float* tile) {
  for (int key = 0; key < kScoredKeys; ++key) {
    const int number = first_key + key < last_key ? first_key + key : last_key, position = (number + 1) * a.rate - 1;
    const std::uint8_t* place =
        a.keys + a.table[position / a.block_size] * a.block_stride + position % a.block_size / a.rate * a.token_stride;
    const auto* row = reinterpret_cast<const Element*>(place);
    for (int i = 0; i < a.size; ++i) tile[i * kScoredKeys + key] = to_float(row[i]);
  }
}

// Adds what `count` heads contribute to the scores of a tile, head by head.
template <int count>
void add_heads(const float* query, const float* weights, int size, const float* tile, Floats* total) {
  Floats sums[count][kVectors];
  for (auto& head : sums)
    for (Floats& sum : head) sum = zero();
  for (int i = 0; i < size; ++i) {
    Floats keys[kVectors];
    for (int v = 0; v < kVectors; ++v) keys[v] = load(tile + i * kScoredKeys + v * kLanes);
    for (int h = 0; h < count; ++h)
      for (int v = 0; v < kVectors; ++v) sums[h][v] = fma(all(query[h * size + i]), keys[v], sums[h][v]);
  }
  for (int h = 0; h < count; ++h)
    for (int v = 0; v < kVectors; ++v)
      total[v] = fma(all(weights[h]), where_less(sums[h][v], zero(), zero(), sums[h][v]), total[v]);  // NaN stays
}

void score_tile(const Choice& a, const float* query, const float* weights, const float* tile, float* out, int count) {
  Floats total[kVectors];
  for (Floats& each : total) each = zero();
  int head = 0;
  for (; head + kHeadsAtOnce <= a.heads; head += kHeadsAtOnce)
    add_heads<kHeadsAtOnce>(query + head * a.size, weights + head, a.size, tile, total);
  for (; head < a.heads; ++head) add_heads<1>(query + head * a.size, weights + head, a.size, tile, total);
  for (int v = 0; v < kVectors && v * kLanes < count; ++v)
    store_some(out + v * kLanes, total[v], count - v * kLanes < kLanes ? count - v * kLanes : kLanes);
}

template <class Element, class Key>
void score_of(const Choice& a, int begin, int end, int first_key, int end_key, float* scratch) {
  const int width = a.heads * a.size;
  float* tile = scratch + kScoringTokens * width;
  for (int token = begin; token < end; ++token) {
    const Element* row = static_cast<const Element*>(a.queries) + token * a.query_stride;
    for (int i = 0; i < width; ++i) scratch[(token - begin) * width + i] = to_float(row[i]);
  }
  for (int key = first_key; key < end_key; key += kScoredKeys) {
    arrange_keys<Key>(a, key, end_key - 1, tile);
    for (int token = begin; token < end; ++token) {
      const int seen = keys_seen(a, a.first_position + token), stop = seen < end_key ? seen : end_key;
      if (key >= stop) continue;
      score_tile(a, scratch + (token - begin) * width, a.weights + static_cast<std::int64_t>(token) * a.heads, tile,
                 a.scores + token * a.score_stride + key, stop - key < kScoredKeys ? stop - key : kScoredKeys);
    }
  }
}

void score_tokens(const Choice& a, int begin, int end, int first_key, int end_key, float* scratch) {
  const bool is_wide = a.type == Type::float32;
  if (a.key_type == Type::float32)
    is_wide ? score_of<float, float>(a, begin, end, first_key, end_key, scratch)
            : score_of<bf16, float>(a, begin, end, first_key, end_key, scratch);
  else
    is_wide ? score_of<float, bf16>(a, begin, end, first_key, end_key, scratch)
            : score_of<bf16, bf16>(a, begin, end, first_key, end_key, scratch);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const ChoiceKernels choice_table;
const ChoiceKernels choice_table = {choice_scratch_bytes, score_tokens};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
