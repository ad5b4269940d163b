// Sampling without sorting the vocabulary: operations on parts of a row, and the request of a row.
//
// A row of logits is worked on in blocks of kBlock tokens, whose maxima are kept to skip irrelevant ones, and in
// slices of kSlice tokens, which may run on different threads. Both are fixed: no result depends on the threads.
#pragma once

#include <cstdint>

#include "../types.h"

namespace octavo {

constexpr int kBlock = 64;
constexpr int kSlice = 256 * kBlock;

// Logits become (logit - largest) / temperature: at most 0.
struct Scaling {
  float largest;
  float temperature;
};

// Masses are integers, so that their sums are exact in any order: 2^20 tokens of mass 1 fit.
constexpr float kUnitsPerMass = 0x1p43f;

inline std::uint64_t units_of(float mass) {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(mass * kUnitsPerMass));
}

// Scaled logits are not positive: the bits of their magnitude rise as the likelihood falls.
inline std::uint32_t key_of(float scaled) { return __builtin_bit_cast(std::uint32_t, scaled) & 0x7fffffffu; }

// The two halves of a draw's key.
struct DrawKey {
  std::uint32_t first, second;
};

struct Winner {
  double score = 0;  // weight / exponential: the largest wins, of equals the lowest token
  int token = -1;
};

// All take `count` adjacent values; the last block may be shorter. Written arrays have room for one
// block more than `count`.
struct SamplingKernels {
  // Largest value of each block; true when one of them is NaN.
  bool (*survey)(const float* logits, int count, float* maxima);

  // Sum of e^scaled, always in the same order.
  double (*exponential_sum)(const float* logits, int count, Scaling scaling);

  // e^scaled of each value.
  void (*exponentials)(const float* scaled, int count, float* out);

  // Token ids (counted from `first`) and scaled logits of those not below `threshold`, in order; returns how many.
  // `maxima` are those of `survey`.
  int (*gather)(const float* logits, int first, int count, const float* maxima, Scaling scaling, float threshold,
                int* tokens, float* scaled);

  // Values in [low, high], with their tokens where those are given, in order; returns how many. Output may
  // be the input; up to a block after `count` is read, too.
  int (*narrow)(const float* values, const int* tokens, int count, float low, float high, float* out_values,
                int* out_tokens);

  // Adds to histogram[b] the weights of the values whose key, without its last `shift` bits, is `prefix` followed by b,
  // which has `bits` bits. Without `weights` each weighs 1, otherwise its units of mass.
  void (*tally)(const float* scaled, const float* weights, int count, std::uint32_t prefix, int shift, int bits,
                std::uint64_t* histogram);

  // The race of those whose scaled logit is not below `threshold`, against `best`. `tokens` are their ids; without it
  // they are first, first + 1, …
  Winner (*race)(const float* logits, const int* tokens, int first, int count, Scaling scaling, float threshold,
                 DrawKey key, Winner best);

  // How many values are larger.
  int (*count_above)(const float* logits, int count, float value);
};

const SamplingKernels& sampling_kernels(Level level);

// The request of one row of logits. Python packs its fields in this order.
struct SamplingRequest {
  float temperature;     // 0: the likeliest token, the first of equals
  float min_p_boundary;  // smallest scaled logit that min-p keeps, -FLT_MAX without
  double top_p;          // 1: without
  std::int32_t top_k;    // 0: without
  std::int32_t num_draws;
  std::int32_t num_logprobs;  // likeliest tokens to list; -1: no log-probabilities at all
  float repetition_penalty, frequency_penalty, presence_penalty;
  std::int32_t num_penalized, num_biased, num_barred, num_allowed;  // num_allowed 0: all are
  const std::int64_t* penalized;                                    // tokens of prompt and output
  const float* output_counts;                                       // of each of them
  const std::int64_t* biased;
  const float* biases;
  const std::int64_t* barred;
  const std::int64_t* allowed;  // ascending, each once
  const std::uint32_t* mask;    // bit i of word t: token 32 t + i may be drawn, and none behind them; null: all may be
  std::int64_t mask_words;
};
static_assert(sizeof(SamplingRequest) == 120);

enum class SamplingStatus : std::int32_t { drawn, not_finite, all_barred, overflow, outside_vocabulary };

struct Draw {
  std::int32_t token;
  std::int32_t rank;  // 1: no token is likelier
  float logprob;
};

}  // namespace octavo
