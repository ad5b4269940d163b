// One row of logits from its request to its draws; the order of the stages is that of docs/design/sampling.md.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling.h"
#include "scratch.h"

namespace octavo {

// `Run` calls a body once for each of a number of slices, on any threads.
template <class Run>
class SampledRow {
 public:
  SampledRow(const SamplingKernels& kernels, const SamplingScratch& scratch, float* logits, int vocab, const Run& run)
      : kernels_(kernels), s_(scratch), logits_(logits), vocab_(vocab), run_(run) {}

  // Draws request.num_draws tokens with one key each (greedy rows have none). Changes the logits.
  // `top_tokens` and `top_logprobs` have room for min(num_logprobs, vocab).
  SamplingStatus sample(const SamplingRequest& request, const DrawKey* keys, Draw* draws, std::int32_t* top_tokens,
                        float* top_logprobs) {
    if (!survey()) return SamplingStatus::not_finite;
    const bool is_described = request.num_logprobs >= 0;
    if (is_described) {
      normalise();
      list_likeliest(request.num_logprobs, top_tokens, top_logprobs);
    }
    if (!ids_are_known(request)) return SamplingStatus::outside_vocabulary;
    const std::vector<Change> changes = change_logits(request);
    std::vector<float> unmasked;
    if (request.mask) {
      if (is_described) unmasked.assign(logits_, logits_ + vocab_);
      apply_mask(request);
    }
    if (!changes.empty() || request.num_allowed || request.mask) {
      const bool is_number = request.num_allowed ? survey_allowed(request) : survey();
      if (largest_ == -INFINITY) return SamplingStatus::all_barred;
      if (!is_number) return SamplingStatus::overflow;
    }
    choose(request, keys, draws);
    if (is_described) {
      std::copy(unmasked.begin(), unmasked.end(), logits_);
      for (auto change = changes.rbegin(); change != changes.rend(); ++change) logits_[change->token] = change->before;
      for (int i = 0; i < request.num_draws; ++i) describe(draws[i]);
    }
    return SamplingStatus::drawn;
  }

  // The log-probability and rank of draw.token, and the likeliest tokens.
  SamplingStatus describe_token(int num_logprobs, Draw& draw, std::int32_t* top_tokens, float* top_logprobs) {
    if (draw.token < 0 || draw.token >= vocab_) return SamplingStatus::outside_vocabulary;
    if (!survey()) return SamplingStatus::not_finite;
    normalise();
    list_likeliest(num_logprobs, top_tokens, top_logprobs);
    describe(draw);
    return SamplingStatus::drawn;
  }

  // The `wanted` tokens with the largest log-probabilities after bias, bars and penalties, which act on these; the
  // result is not normalised again. Banned tokens have -inf, and arbitrary ids. Changes the logits.
  SamplingStatus rank(const SamplingRequest& request, int wanted, std::int32_t* tokens, float* values) {
    if (!survey()) return SamplingStatus::not_finite;
    if (!ids_are_known(request)) return SamplingStatus::outside_vocabulary;
    normalise();
    wanted = std::min(wanted, vocab_);
    std::vector<Ranked> ranked;
    if (!rank_changed(request, ranked)) return SamplingStatus::overflow;
    if (request.mask) {
      std::erase_if(ranked, [&](const Ranked& each) { return !is_in_mask(request, each.token); });
      apply_mask(request);
    }
    if (request.num_allowed) {
      if (!ranked.empty()) keep_allowed(request, ranked);
      for (int i = 0; i < request.num_allowed; ++i)
        ranked.push_back({logprob(logits_[request.allowed[i]]), static_cast<std::int32_t>(request.allowed[i])});
    } else {
      if (!ranked.empty() || request.mask) survey();
      list_likeliest(wanted, tokens, values);
      if (ranked.empty()) return SamplingStatus::drawn;
      for (int i = 0; i < wanted; ++i) ranked.push_back({values[i], tokens[i]});
    }
    const auto first = [](const Ranked& a, const Ranked& b) {
      return a.value != b.value ? a.value > b.value : a.token < b.token;
    };
    const int found = std::min(wanted, static_cast<int>(ranked.size()));
    std::partial_sort(ranked.begin(), ranked.begin() + found, ranked.end(), first);
    for (int i = 0; i < wanted; ++i) {
      tokens[i] = i < found ? ranked[i].token : 0;
      values[i] = i < found ? ranked[i].value : -INFINITY;
    }
    return SamplingStatus::drawn;
  }

 private:
  struct Ranked {
    float value;
    std::int32_t token;
  };

  struct Change {
    std::int64_t token;
    float before;
  };

  template <class Body>
  void for_slices(const Body& body) {
    run_(slices_of(vocab_), [&](int slice) {
      const int first = slice * kSlice;
      body(slice, first, std::min(kSlice, vocab_ - first));
    });
  }

  // Finds the largest logit; false when the row is no row of numbers.
  bool survey() {
    for_slices([&](int slice, int first, int count) {
      s_.sums[slice] = kernels_.survey(logits_ + first, count, s_.maxima + first / kBlock);
    });
    largest_ = *std::max_element(s_.maxima, s_.maxima + blocks_of(vocab_));
    return std::count(s_.sums, s_.sums + slices_of(vocab_), 0.0) == slices_of(vocab_) && std::isfinite(largest_);
  }

  bool survey_allowed(const SamplingRequest& request) {
    bool is_number = true;
    largest_ = -INFINITY;
    for (int i = 0; i < request.num_allowed; ++i) {
      const float logit = logits_[request.allowed[i]];
      is_number &= !std::isnan(logit);
      largest_ = std::max(largest_, logit);
    }
    return is_number && std::isfinite(largest_);
  }

  double exponential_sum(Scaling scaling) {
    for_slices([&](int slice, int first, int count) {
      s_.sums[slice] = kernels_.exponential_sum(logits_ + first, count, scaling);
    });
    double total = 0;
    for (int slice = 0; slice < slices_of(vocab_); ++slice) total += s_.sums[slice];
    return total;
  }

  // A logit that at least `count` tokens reach; -FLT_MAX where the maxima of the blocks do not determine one.
  float reached_by(int count) {
    const int blocks = blocks_of(vocab_);
    if (count > blocks) return -FLT_MAX;
    std::memcpy(s_.narrowed, s_.maxima, blocks * sizeof(float));
    std::nth_element(s_.narrowed, s_.narrowed + count - 1, s_.narrowed + blocks, std::greater<>());
    return s_.narrowed[count - 1];
  }

  int gather(Scaling scaling, float threshold) {
    return kernels_.gather(logits_, 0, vocab_, s_.maxima, scaling, threshold, s_.tokens, s_.scaled);
  }

  float logprob(float logit) const { return static_cast<float>(static_cast<double>(logit) - log_total_); }

  // Finds what log-probabilities are counted from.
  void normalise() { log_total_ = largest_ + std::log(exponential_sum({largest_, 1.0f})); }

  // The `wanted` likeliest tokens, of equals those that come first.
  void list_likeliest(int wanted, std::int32_t* tokens, float* logprobs) {
    wanted = std::min(wanted, vocab_);
    if (wanted == 0) return;
    float threshold = reached_by(wanted);
    if (threshold == -FLT_MAX) threshold = -INFINITY;
    const int found = gather({0.0f, 1.0f}, threshold);
    std::vector<int> order(found);
    for (int i = 0; i < found; ++i) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int a, int b) {
      return s_.scaled[a] != s_.scaled[b] ? s_.scaled[a] > s_.scaled[b] : a < b;
    });
    for (int i = 0; i < wanted; ++i) {
      tokens[i] = s_.tokens[order[i]];
      logprobs[i] = logprob(s_.scaled[order[i]]);
    }
  }

  void describe(Draw& draw) {
    draw.logprob = logprob(logits_[draw.token]);
    for_slices([&](int slice, int first, int count) {
      s_.sums[slice] = kernels_.count_above(logits_ + first, count, logits_[draw.token]);
    });
    draw.rank = 1;
    for (int slice = 0; slice < slices_of(vocab_); ++slice) draw.rank += static_cast<int>(s_.sums[slice]);
  }

  bool ids_are_known(const SamplingRequest& request) const {
    const auto are_known = [&](const std::int64_t* ids, int count) {
      return std::all_of(ids, ids + count, [&](std::int64_t id) { return id >= 0 && id < vocab_; });
    };
    return are_known(request.biased, request.num_biased) && are_known(request.barred, request.num_barred) &&
           are_known(request.penalized, request.num_penalized) && are_known(request.allowed, request.num_allowed);
  }

  // Applies bias, banned tokens and penalties; returns the old logits, in the order of the changes.
  std::vector<Change> change_logits(const SamplingRequest& request) {
    std::vector<Change> changes;
    changes.reserve(request.num_biased + request.num_barred + request.num_penalized);
    const auto change = [&](std::int64_t token, float value) {
      changes.push_back({token, logits_[token]});
      logits_[token] = value;
    };
    for (int i = 0; i < request.num_biased; ++i)
      change(request.biased[i], logits_[request.biased[i]] + request.biases[i]);
    for (int i = 0; i < request.num_barred; ++i) change(request.barred[i], -INFINITY);
    for (int i = 0; i < request.num_penalized; ++i) {
      float value = logits_[request.penalized[i]];
      value = value > 0 ? value / request.repetition_penalty : value * request.repetition_penalty;
      value -= request.output_counts[i] * request.frequency_penalty;
      value -= request.output_counts[i] > 0 ? request.presence_penalty : 0.0f;
      change(request.penalized[i], value);
    }
    return changes;
  }

  // Applies the processors to the log-probabilities of the tokens that they change; the logits of these become -inf.
  // False when one is no number.
  bool rank_changed(const SamplingRequest& request, std::vector<Ranked>& ranked) {
    std::vector<std::int64_t> changed(request.biased, request.biased + request.num_biased);
    changed.insert(changed.end(), request.barred, request.barred + request.num_barred);
    changed.insert(changed.end(), request.penalized, request.penalized + request.num_penalized);
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (const std::int64_t token : changed) logits_[token] = logprob(logits_[token]);
    change_logits(request);
    bool are_numbers = true;
    for (const std::int64_t token : changed) {
      const float value = logits_[token];
      are_numbers &= value < INFINITY;  // nor NaN
      ranked.push_back({value, static_cast<std::int32_t>(token)});
      logits_[token] = -INFINITY;
    }
    return are_numbers;
  }

  static bool is_in_mask(const SamplingRequest& request, std::int64_t token) {
    return token / 32 < request.mask_words && (request.mask[token / 32] >> (token % 32) & 1);
  }

  // The logits of tokens that are not in the mask become -inf.
  void apply_mask(const SamplingRequest& request) {
    for (int first = 0; first < vocab_; first += 32) {
      const std::uint32_t word = first / 32 < request.mask_words ? request.mask[first / 32] : 0;
      if (word == ~0u) continue;
      for (int i = 0; i < std::min(32, vocab_ - first); ++i)
        if (!(word >> i & 1)) logits_[first + i] = -INFINITY;
    }
  }

  static void keep_allowed(const SamplingRequest& request, std::vector<Ranked>& ranked) {
    std::erase_if(ranked, [&](const Ranked& each) {
      return !std::binary_search(request.allowed, request.allowed + request.num_allowed, each.token);
    });
  }

  void choose(const SamplingRequest& request, const DrawKey* keys, Draw* draws) {
    if (request.temperature == 0) {
      const int token = request.num_allowed ? first_allowed(request) : first_largest();
      for (int i = 0; i < request.num_draws; ++i) draws[i].token = token;
      return;
    }
    const Scaling scaling{largest_, request.temperature};
    if (request.num_allowed) {
      candidates_ = request.num_allowed;
      for (int i = 0; i < candidates_; ++i) {
        s_.tokens[i] = static_cast<int>(request.allowed[i]);
        s_.scaled[i] = (logits_[request.allowed[i]] - largest_) / request.temperature;
      }
    } else if (!gather_candidates(request, scaling)) {
      for (int i = 0; i < request.num_draws; ++i) draws[i].token = race_of_all(scaling, keys[i]);
      return;
    }
    const float boundary = boundary_of(request);
    // rounding can leave the total short of a top_p next to 1: then nothing is cut
    const bool is_all = row_mass_ > 0 && boundary == -FLT_MAX;
    for (int i = 0; i < request.num_draws; ++i)
      draws[i].token = is_all ? race_of_all(scaling, keys[i]) : race_of_candidates(boundary, keys[i]);
  }

  int first_largest() const {
    const int block = static_cast<int>(std::find(s_.maxima, s_.maxima + blocks_of(vocab_), largest_) - s_.maxima);
    float* first = logits_ + block * kBlock;
    return static_cast<int>(std::find(first, logits_ + vocab_, largest_) - logits_);
  }

  int first_allowed(const SamplingRequest& request) const {
    return static_cast<int>(*std::find_if(request.allowed, request.allowed + request.num_allowed,
                                          [&](std::int64_t id) { return logits_[id] == largest_; }));
  }

  // Lists all tokens that the filters can keep, and maybe others; false when they keep everything.
  bool gather_candidates(const SamplingRequest& request, Scaling scaling) {
    const bool has_top_k = request.top_k > 0 && request.top_k < vocab_;
    float threshold = request.min_p_boundary;
    if (has_top_k) threshold = std::max(threshold, (reached_by(request.top_k) - largest_) / request.temperature);
    if (!has_top_k && threshold == -FLT_MAX) {
      if (request.top_p >= 1.0) return false;
      // all tokens below (1 - top_p) / vocab of the mass weigh less than 1 - top_p together: the boundary is not among
      // them (half of it, to be clear of rounding)
      row_mass_ = exponential_sum(scaling);
      threshold = static_cast<float>(std::log(row_mass_ * (1.0 - request.top_p) / (2.0 * vocab_)));
    }
    candidates_ = gather(scaling, std::max(threshold, -FLT_MAX));
    return true;
  }

  // The smallest scaled logit that min-p, top-k and top-p keep.
  float boundary_of(const SamplingRequest& request) {
    float boundary = request.min_p_boundary;
    if (request.top_k > 0)
      boundary = std::max(boundary, where_reached(request.top_k, nullptr));
    if (request.top_p >= 1.0) return boundary;
    if (candidates_ >= kFew && boundary > -FLT_MAX)
      candidates_ = kernels_.narrow(s_.scaled, s_.tokens, candidates_, boundary, 0.0f, s_.scaled, s_.tokens);
    kernels_.exponentials(s_.scaled, candidates_, s_.weights);
    double total = row_mass_ * kUnitsPerMass;
    if (total == 0) {
      std::uint64_t kept = 0;
      for (int i = 0; i < candidates_; ++i) kept += s_.scaled[i] >= boundary ? units_of(s_.weights[i]) : 0;
      total = static_cast<double>(kept);
    }
    return std::max(boundary, where_reached(static_cast<std::uint64_t>(std::ceil(request.top_p * total)), s_.weights));
  }

  // The scaled logit at which the weights of the candidates (without `weights` 1 each), summed from the likeliest on,
  // reach `wanted`; -FLT_MAX when it never does. Radix selection: each pass determines some bits of the logit.
  float where_reached(std::uint64_t wanted, const float* weights) {
    const float* values = s_.scaled;
    int count = candidates_;
    std::uint32_t prefix = 0;
    std::uint64_t before = 0;
    for (int shift = 31; shift > 0;) {
      const int bits = std::min(shift, SamplingScratch::kMostBits);
      shift -= bits;
      std::fill_n(s_.histogram, 1 << bits, 0);
      kernels_.tally(values, weights, count, prefix, shift, bits, s_.histogram);
      int bin = 0;
      while (before + s_.histogram[bin] < wanted) {
        before += s_.histogram[bin++];
        if (bin == 1 << bits) return -FLT_MAX;
      }
      prefix = prefix << bits | static_cast<std::uint32_t>(bin);
      if (prefix << shift >= key_of(-INFINITY)) return -FLT_MAX;
      if (count < kFew || values != s_.scaled) continue;
      count = kernels_.narrow(values, nullptr, count, -value_of((prefix + 1) << shift), -value_of(prefix << shift),
                              s_.narrowed, nullptr);
      values = s_.narrowed;
      if (!weights) continue;
      kernels_.exponentials(values, count, s_.narrowed_weights);
      weights = s_.narrowed_weights;
    }
    return -value_of(prefix);
  }

  // Fewer candidates than this are scanned again rather than copied.
  static constexpr int kFew = 4096;

  static float value_of(std::uint32_t key) { return __builtin_bit_cast(float, key); }

  int race_of_candidates(float boundary, DrawKey key) {
    return kernels_.race(s_.scaled, s_.tokens, 0, candidates_, {0.0f, 1.0f}, boundary, key, Winner{}).token;
  }

  int race_of_all(Scaling scaling, DrawKey key) {
    const float all = -FLT_MAX;
    const int likeliest = first_largest();
    // a start that excludes most others at once
    const Winner start = kernels_.race(logits_ + likeliest, nullptr, likeliest, 1, scaling, all, key, Winner{});
    for_slices([&](int slice, int first, int count) {
      s_.winners[slice] = kernels_.race(logits_ + first, nullptr, first, count, scaling, all, key, start);
    });
    Winner best = start;
    for (int slice = 0; slice < slices_of(vocab_); ++slice) {
      const Winner& other = s_.winners[slice];
      if (other.score > best.score || (other.score == best.score && other.token < best.token)) best = other;
    }
    return best.token;
  }

  const SamplingKernels& kernels_;
  const SamplingScratch& s_;
  float* logits_;
  const int vocab_;
  const Run& run_;
  float largest_ = 0;
  double log_total_ = 0;
  double row_mass_ = 0;  // of the whole row, where top-p counts that
  int candidates_ = 0;
};

}  // namespace octavo
