// The choice of tokens as Python sees it, and the best of the scores, which are the same at every level.
#include "choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const ChoiceKernels choice_table; }
namespace avx512 { extern const ChoiceKernels choice_table; }

const ChoiceKernels& choice_kernels(Level level) { return choose_table(level, avx2::choice_table, avx512::choice_table); }

namespace {

constexpr int kTaskKeys = 1024;

// An integer with the order of the scores; zeros are equal, NaN is above all.
std::uint32_t rank_of(float score) {
  if (std::isnan(score)) return UINT32_MAX;
  if (score == 0.0f) score = 0.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `count`-th largest of the ranks, and how many are larger: by counting one byte of the ranks after the other.
struct Least {
  std::uint32_t rank;
  int above;
};

Least least_chosen(const std::uint32_t* ranks, int seen, int count) {
  std::uint32_t prefix = 0, mask = 0;
  int above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int counts[256] = {};
    for (int i = 0; i < seen; ++i)
      if ((ranks[i] & mask) == prefix) ++counts[ranks[i] >> shift & 255];
    int byte = 255;
    while (above + counts[byte] < count) above += counts[byte--];
    prefix |= static_cast<std::uint32_t>(byte) << shift, mask |= 255u << shift;
  }
  return {prefix, above};
}

// Numbers of the `count` keys with the largest of `seen` scores, in ascending order; of equal scores the first. Overwrites
// the scores with their ranks.
void choose(float* scores, int seen, int count, std::int32_t* chosen) {
  if (seen <= count) {
    for (int i = 0; i < count; ++i) chosen[i] = std::min(i, seen - 1);
    return;
  }
  auto* ranks = reinterpret_cast<std::uint32_t*>(scores);
  for (int i = 0; i < seen; ++i) {
    const std::uint32_t rank = rank_of(scores[i]);
    std::memcpy(scores + i, &rank, sizeof rank);
  }
  const Least least = least_chosen(ranks, seen, count);
  int equal = count - least.above;
  for (int i = 0; i < seen; ++i)
    if (ranks[i] > least.rank || (ranks[i] == least.rank && equal-- > 0)) *chosen++ = i;
}

// Positions of the tokens of the `count` keys in `chosen`, then of the tokens after the last key that the query at
// `position` sees, then -1: `width` numbers, which overwrite the keys' numbers.
void name_tokens(const Choice& a, int position, int count, int width, std::int32_t* chosen) {
  const int seen = keys_seen(a, position);
  int end = position + 1;
  if (seen <= count) {
    for (int i = 0; i < end; ++i) chosen[i] = i;
  } else {
    for (int i = count - 1; i >= 0; --i)
      for (int token = a.rate - 1, key = chosen[i]; token >= 0; --token) chosen[i * a.rate + token] = key * a.rate + token;
    end = count * a.rate;
    for (int token = seen * a.rate; token <= position; ++token) chosen[end++] = token;
  }
  std::fill(chosen + end, chosen + width, -1);
}

// width: numbers of a query where tokens are named; 0 where its `count` keys are.
void run_choice(Cpu& cpu, const Choice& a, int count, int width, std::int32_t* chosen) {
  const ChoiceKernels& kernels = choice_kernels(cpu.level);
  // queries that see no more than they choose need no scores
  const std::int64_t sees_more = (count + 1LL) * a.rate - 1;  // the first position whose query does
  const int first = static_cast<int>(std::clamp<std::int64_t>(sees_more - a.first_position, 0, a.tokens));
  const int last = keys_seen(a, a.first_position + a.tokens - 1);
  const int groups = (a.tokens - first + kScoringTokens - 1) / kScoringTokens, parts = (last + kTaskKeys - 1) / kTaskKeys;
  const std::int64_t bytes = kernels.scratch_bytes(a);
  auto* memory = static_cast<std::uint8_t*>(cpu.scratch(bytes * cpu.pool.threads()));
  cpu.pool.run(groups * parts, [&](int task, int thread) {
    const int begin = first + task / parts * kScoringTokens, end = std::min(a.tokens, begin + kScoringTokens);
    const int key = task % parts * kTaskKeys, end_key = std::min(key + kTaskKeys, keys_seen(a, a.first_position + end - 1));
    if (key < end_key) kernels.score(a, begin, end, key, end_key, reinterpret_cast<float*>(memory + thread * bytes));
  });
  cpu.pool.run_pieces(a.tokens, 1, [&](int begin, int end, int) {
    for (int token = begin; token < end; ++token) {
      std::int32_t* own = chosen + static_cast<std::int64_t>(token) * (width ? width : count);
      choose(a.scores + token * a.score_stride, keys_seen(a, a.first_position + token), count, own);
      if (width) name_tokens(a, a.first_position + token, count, width, own);
    }
  });
}

}  // namespace

void bind_choice(nb::class_<Cpu>& cpu) {
  cpu.def(
      "choose_windows",
      [](Cpu& cpu, Address queries, Address weights, Address keys, Address table, Address scores, Address chosen,
         std::int64_t query_stride, std::int64_t block_stride, std::int64_t token_stride, std::int64_t score_stride, int tokens,
         int first_position, int heads, int size, int block_size, int rate, int count, int width, int type, int key_type) {
        const Choice a{pointer(queries), pointer<float>(weights), pointer<std::uint8_t>(keys), pointer<std::int32_t>(table),
                       pointer<float>(scores), query_stride, block_stride, token_stride, score_stride, tokens, first_position,
                       heads, size, block_size, rate, static_cast<Type>(type), static_cast<Type>(key_type)};
        cpu.submit([&cpu, a, count, width, chosen] { run_choice(cpu, a, count, width, pointer<std::int32_t>(chosen)); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Choose keys, of which every `rate` tokens have one, for consecutive queries of a sequence: `count` numbers of keys, or "
      "`width` of tokens where it is not 0; see csrc/cpu/choice/choice.h.");
}

}  // namespace octavo
