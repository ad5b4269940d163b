// The choice of experts for a token, and its pairs with them grouped by expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace octavo {

// The numbers are part of the Python interface.
enum class Score : int { softmax = 0, sigmoid = 1, softmax_near = 2, softplus_root = 3 };

// What a router does with logits; see RouterRule in octavo/ops/experts.py.
struct Rule {
  int top_k;
  Score score;
  float threshold;
  bool is_normalized;
  float factor;
  int groups;
  int groups_kept;
  int group_best;
  bool corrects_logits;
};

// Indices of the `count` largest of `values`, in descending order, of equal ones the first.
inline void take_largest(const float* values, int size, int count, int* places) {
  for (int at = 0; at < size; ++at) {
    if (at >= count && !(values[at] > values[places[count - 1]])) continue;
    int i = std::min(at, count - 1);
    for (; i > 0 && values[at] > values[places[i - 1]]; --i) places[i] = places[i - 1];
    places[i] = at;
  }
}

// Keeps only experts of the best groups in `wanted`.
inline void keep_groups(const Rule& rule, float* wanted, int experts) {
  const int size = experts / rule.groups;
  std::vector<float> best(rule.groups);
  std::vector<int> places(std::max({size, rule.groups, rule.group_best}));
  for (int group = 0; group < rule.groups; ++group) {
    float* scores = wanted + group * size;
    const int count = std::min(rule.group_best, size);
    take_largest(scores, size, count, places.data());
    for (int i = 0; i < count; ++i) best[group] += scores[places[i]];
  }
  take_largest(best.data(), rule.groups, rule.groups_kept, places.data());
  for (int group = 0; group < rule.groups; ++group)
    if (std::find(places.begin(), places.begin() + rule.groups_kept, group) == places.begin() + rule.groups_kept)
      std::fill_n(wanted + group * size, size, -std::numeric_limits<float>::infinity());
}

inline std::vector<float> scores_of(const Rule& rule, const float* logits, int experts) {
  std::vector<float> scores(logits, logits + experts);
  if (rule.score == Score::sigmoid) {
    for (float& each : scores) each = 1.0f / (1.0f + std::exp(-each));
  } else if (rule.score == Score::softplus_root) {
    for (float& each : scores) each = std::sqrt(each > 20.0f ? each : std::log1p(std::exp(each)));
  } else {
    const float most = *std::max_element(scores.begin(), scores.end());
    float total = 0;
    for (float& each : scores) total += each = std::exp(each - most);
    for (float& each : scores) each /= total;
  }
  return scores;
}

// The best experts and their scores.
inline void take_best(const Rule& rule, const float* logits, const float* bias, int experts, float* weights, int* chosen) {
  const std::vector<float> scores = scores_of(rule, logits, experts);
  const bool takes_logits = rule.corrects_logits || (!bias && rule.groups == 1);
  std::vector<float> wanted = takes_logits ? std::vector<float>(logits, logits + experts) : scores;
  if (bias)
    for (int i = 0; i < experts; ++i) wanted[i] += bias[i];
  if (rule.groups > 1) keep_groups(rule, wanted.data(), experts);
  take_largest(wanted.data(), experts, rule.top_k, chosen);
  for (int i = 0; i < rule.top_k; ++i) weights[i] = scores[chosen[i]];
}

// Likewise by softmax_near: the share of each in a softmax over those near it which are left.
inline void take_near(const Rule& rule, const float* logits, int experts, float* weights, int* chosen) {
  std::vector<float> left(logits, logits + experts);
  for (int i = 0; i < rule.top_k; ++i) {
    take_largest(left.data(), experts, 1, chosen + i);
    const float most = left[chosen[i]];
    float total = 0;
    for (int at = 0; at < experts; ++at) {
      const bool is_far = (most - logits[at]) / std::max(std::abs(logits[at]), most) > rule.threshold;
      if (!is_far) total += std::exp(left[at] - most);
    }
    weights[i] = 1.0f / total;
    left[chosen[i]] = -std::numeric_limits<float>::infinity();
  }
}

inline void weigh_chosen(const Rule& rule, const float* factors, const int* chosen, float* weights) {
  float total = 0;
  for (int i = 0; i < rule.top_k; ++i) total += weights[i];
  for (int i = 0; i < rule.top_k; ++i) weights[i] = (rule.is_normalized ? weights[i] / (total + 1e-20f) : weights[i]) * rule.factor;
  if (factors)
    for (int i = 0; i < rule.top_k; ++i) weights[i] *= factors[chosen[i]];
}

inline void route_token(const Rule& rule, const float* logits, const float* bias, const float* factors, int experts,
                 float* weights, int* chosen) {
  if (rule.score == Score::softmax_near) take_near(rule, logits, experts, weights, chosen);
  else take_best(rule, logits, bias, experts, weights, chosen);
  weigh_chosen(rule, factors, chosen, weights);
}

// For experts that are chosen already.
inline void route_token_to(const Rule& rule, const float* logits, const std::int64_t* table, int experts, float* weights, int* chosen) {
  const std::vector<float> scores = scores_of(rule, logits, experts);
  for (int i = 0; i < rule.top_k; ++i) weights[i] = scores[chosen[i] = static_cast<int>(table[i])];
  weigh_chosen(rule, nullptr, chosen, weights);
}

// Groups pairs by expert; within one they stay in their order. Expert of a pair: places, which becomes its row.
inline void group_pairs(int pairs, int experts, std::int32_t* order, std::int32_t* places, std::int32_t* starts) {
  std::fill_n(starts, experts + 1, 0);
  for (int pair = 0; pair < pairs; ++pair) ++starts[places[pair] + 1];
  for (int expert = 0; expert < experts; ++expert) starts[expert + 1] += starts[expert];
  std::vector<std::int32_t> next(starts, starts + experts);
  for (int pair = 0; pair < pairs; ++pair) {
    const std::int32_t row = next[places[pair]]++;
    order[row] = pair;
    places[pair] = row;
  }
}

}  // namespace octavo
