// The gated delta rule and Mamba2's recurrence: several tokens over columns of a head's matrix copied to the first-level
// cache, or one token over the matrix in place.
#pragma once

#include "../vector.h"
#include "state_row.h"

namespace octavo {
namespace {

constexpr int kColumnVectors = 2;
constexpr int kColumns = kColumnVectors * kLanes;
constexpr int kRunTokens = 8;  // whose keys, queries and gates are made at a time
constexpr int kMostHeadFloats = 65536;

// Keys, queries and gates of some tokens of one head.
struct HeadInputs {
  alignas(64) float keys[kRunTokens][kMostKeyDim];
  alignas(64) float queries[kRunTokens][kMostKeyDim];
  float decays[kRunTokens];
  float factors[kRunTokens];  // of u
  alignas(64) float key_decays[kRunTokens][kMostKeyDim];  // of each row of the matrix, where they have their own
  alignas(64) float faded_keys[kRunTokens][kMostKeyDim];  // keys times these
};

template <class Element>
void widen_row(const Element* x, int dim, float scale, float* out) {
  for_vectors(dim, [&](int i, int count) { store_some(out + i, mul(load_some(x + i, count), all(scale)), count); });
}

template <class Element>
float scale_to_one(const Element* x, int dim) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, dim) + 1e-6f);
}

template <class Element>
void read_key_decays(const Recurrence& a, const Element* steps, int head, const float* key, float* decays, float* faded) {
  const std::int64_t first = static_cast<std::int64_t>(head) * a.key_dim;
  const Floats rate = all(-__builtin_expf(a.decay_log[head])), bound = all(-a.most_step);
  const bool is_bounded = a.most_step < 1e30f;
  for_vectors(a.key_dim, [&](int i, int count) {
    const Floats raw = add(load_some(steps + first + i, count), load_some(a.step_bias + first + i, count));
    const Floats faded_by =
        is_bounded ? div(bound, add(all(1.0f), exponential(mul(rate, raw)))) : mul(rate, softplus(raw));
    const Floats decay = exponential(faded_by);
    store_some(decays + i, decay, count);
    store_some(faded + i, mul(decay, load_some(key + i, count)), count);
  });
}

template <class Element>
void read_head(const Recurrence& a, int head, std::int64_t first, int tokens, HeadInputs& in) {
  const std::int64_t key_first = static_cast<std::int64_t>(head / (a.heads / a.key_heads)) * a.key_dim;
  for (int t = 0; t < tokens; ++t) {
    const std::int64_t token = first + t;
    const Element* key = static_cast<const Element*>(a.key) + token * a.key_stride + key_first;
    const Element* query = static_cast<const Element*>(a.query) + token * a.query_stride + key_first;
    const Element* steps = static_cast<const Element*>(a.step) + token * a.step_stride;
    float step = 0.0f;
    if (!a.decays_by_key) {
      const float raw = to_float(steps[head]) + a.step_bias[head];
      step = raw > 20.0f ? raw : __builtin_log1pf(__builtin_expf(raw));
      step = step < a.least_step ? a.least_step : step > a.most_step ? a.most_step : step;
      in.decays[t] = __builtin_expf(-__builtin_expf(a.decay_log[head]) * step);
    }
    if (a.beta) {
      const float beta = to_float(static_cast<const Element*>(a.beta)[token * a.beta_stride + head]);
      in.factors[t] = (a.skip ? a.skip[head] : 1.0f) / (1.0f + __builtin_expf(-beta));
      widen_row(key, a.key_dim, scale_to_one(key, a.key_dim), in.keys[t]);
      widen_row(query, a.key_dim, scale_to_one(query, a.key_dim) / __builtin_sqrtf(static_cast<float>(a.key_dim)),
                in.queries[t]);
      if (a.decays_by_key) read_key_decays(a, steps, head, in.keys[t], in.key_decays[t], in.faded_keys[t]);
    } else {
      in.factors[t] = step;
      widen_row(key, a.key_dim, 1.0f, in.keys[t]);
      widen_row(query, a.key_dim, 1.0f, in.queries[t]);
    }
  }
}

// Sums over even and over odd rows, so that no addition waits for the previous one.
template <class Element, bool kIsDelta, bool kByKey>
void advance_chunk(const Recurrence& a, const HeadInputs& in, int head, std::int64_t first, int tokens, int column,
                   float* state) {
  for (int t = 0; t < tokens; ++t) {
    const std::int64_t place = static_cast<std::int64_t>(head) * a.value_dim + column;
    const Element* value = static_cast<const Element*>(a.value) + (first + t) * a.value_stride + place;
    Element* out = static_cast<Element*>(a.out) + (first + t) * a.heads * a.value_dim + place;
    const Floats decay = all(in.decays[t]);
    const float *key = in.keys[t], *query = in.queries[t], *faded = kByKey ? in.faded_keys[t] : key;
    Floats values[kColumnVectors], updates[kColumnVectors], sums[2][kColumnVectors];
    int counts[kColumnVectors];
    for (int v = 0; v < kColumnVectors; ++v) {
      const int left = a.value_dim - column - v * kLanes;
      counts[v] = left < 0 ? 0 : left < kLanes ? left : kLanes;
      values[v] = counts[v] ? load_some(value + v * kLanes, counts[v]) : zero();
      sums[0][v] = sums[1][v] = zero();
    }
    if constexpr (kIsDelta) {
      for (int i = 0; i < a.key_dim; i += 2)
        for (int parity = 0; parity < 2; ++parity)
          for (int v = 0; v < kColumnVectors; ++v)
            sums[parity][v] =
                fma(load(state + (i + parity) * kColumns + v * kLanes), all(faded[i + parity]), sums[parity][v]);
      for (int v = 0; v < kColumnVectors; ++v) {
        const Floats sum = add(sums[0][v], sums[1][v]);
        updates[v] = mul(all(in.factors[t]), sub(values[v], kByKey ? sum : mul(decay, sum)));
        sums[0][v] = sums[1][v] = zero();
      }
    } else {
      for (int v = 0; v < kColumnVectors; ++v) updates[v] = mul(all(in.factors[t]), values[v]);
    }
    for (int i = 0; i < a.key_dim; i += 2)
      for (int parity = 0; parity < 2; ++parity)
        for (int v = 0; v < kColumnVectors; ++v) {
          float* at = state + (i + parity) * kColumns + v * kLanes;
          const Floats fade = kByKey ? all(in.key_decays[t][i + parity]) : decay;
          const Floats next = fma(all(key[i + parity]), updates[v], mul(fade, load(at)));
          store(at, next);
          sums[parity][v] = fma(next, all(query[i + parity]), sums[parity][v]);
        }
    for (int v = 0; v < kColumnVectors; ++v) {
      Floats sum = add(sums[0][v], sums[1][v]);
      if (!kIsDelta && a.skip) sum = fma(all(a.skip[head]), values[v], sum);
      if (counts[v]) store_some(out + v * kLanes, sum, counts[v]);
    }
  }
}

constexpr int kStripColumns = 128;

// One token of columns [begin, end), whose state is read and written in place, row by row: it is bound by
// memory. Products and sums are those of `advance_chunk`, in the same order.
template <class Element, bool kIsDelta, bool kByKey>
void advance_token(const Recurrence& a, const HeadInputs& in, int head, std::int64_t token, int begin, int end,
                   const float* from, float* to) {
  alignas(64) float updates[kStripColumns], sums[2][kStripColumns];
  const float *key = in.keys[0], *query = in.queries[0], *faded = kByKey ? in.faded_keys[0] : key;
  const Floats decay = all(in.decays[0]), factor = all(in.factors[0]);
  for (int column = begin; column < end; column += kStripColumns) {
    const int columns = end - column < kStripColumns ? end - column : kStripColumns;
    const std::int64_t place = static_cast<std::int64_t>(head) * a.value_dim + column;
    const Element* value = static_cast<const Element*>(a.value) + token * a.value_stride + place;
    Element* out = static_cast<Element*>(a.out) + token * a.heads * a.value_dim + place;
    const auto clear = [&](int i, int) { store(sums[0] + i, zero()), store(sums[1] + i, zero()); };
    for_vectors(columns, clear);
    if constexpr (kIsDelta) {
      for (int row = 0; row < a.key_dim; ++row)
        for_vectors(columns, [&](int i, int count) {
          const Floats old = load_some(from + static_cast<std::int64_t>(row) * a.value_dim + column + i, count);
          store(sums[row % 2] + i, fma(old, all(faded[row]), load(sums[row % 2] + i)));
        });
      for_vectors(columns, [&](int i, int count) {
        const Floats sum = add(load(sums[0] + i), load(sums[1] + i));
        store(updates + i, mul(factor, sub(load_some(value + i, count), kByKey ? sum : mul(decay, sum))));
      });
      for_vectors(columns, clear);
    } else {
      for_vectors(columns, [&](int i, int count) { store(updates + i, mul(factor, load_some(value + i, count))); });
    }
    for (int row = 0; row < a.key_dim; ++row)
      for_vectors(columns, [&](int i, int count) {
        const std::int64_t at = static_cast<std::int64_t>(row) * a.value_dim + column + i;
        const Floats fade = kByKey ? all(in.key_decays[0][row]) : decay;
        const Floats next = fma(all(key[row]), load(updates + i), mul(fade, load_some(from + at, count)));
        store_some(to + at, next, count);
        store(sums[row % 2] + i, fma(next, all(query[row]), load(sums[row % 2] + i)));
      });
    for_vectors(columns, [&](int i, int count) {
      Floats sum = add(load(sums[0] + i), load(sums[1] + i));
      if (!kIsDelta && a.skip) sum = fma(all(a.skip[head]), load_some(value + i, count), sum);
      store_some(out + i, sum, count);
    });
  }
}

// Copies the columns of a chunk between a head's matrix, whose rows are `value_dim` long, and rows of kColumns.
template <class Copy>
void for_chunk_rows(const Recurrence& a, int column, const Copy& copy) {
  for (int i = 0; i < a.key_dim; ++i)
    for (int v = 0; v < kColumnVectors; ++v) {
      const int left = a.value_dim - column - v * kLanes, count = left < 0 ? 0 : left < kLanes ? left : kLanes;
      copy(static_cast<std::int64_t>(i) * a.value_dim + column + v * kLanes, i * kColumns + v * kLanes, count);
    }
}

template <class Element, bool kIsDelta, bool kByKey = false>
void recur_of(const Recurrence& a, int row_index, int head, int begin, int end) {
  const StateRow row(a.rows, row_index);
  if (row.count == 0) return;
  HeadInputs in;
  alignas(64) float memory[kMostHeadFloats + kMostKeyDim * kColumns];
  const std::int64_t head_floats = static_cast<std::int64_t>(a.key_dim) * a.value_dim;
  // the matrix of a row of few tokens passes through the first-level cache chunk by chunk; that of a long one stays
  const bool is_short = row.run_length(0, kRunTokens) == row.count;
  const float* initial = row.initial();
  if (float* target = row.target(1); row.count == 1 && initial && target) {
    read_head<Element>(a, head, row.first_token, 1, in);
    const int last = end * kColumns < a.value_dim ? end * kColumns : a.value_dim;
    return advance_token<Element, kIsDelta, kByKey>(a, in, head, row.first_token, begin * kColumns, last,
                                                    initial + head * head_floats, target + head * head_floats);
  }
  for (int done = 0; done < row.count;) {
    const int tokens = row.run_length(done, kRunTokens);
    read_head<Element>(a, head, row.first_token + done, tokens, in);
    float* target = row.target(done + tokens);
    for (int chunk = begin; chunk < end; ++chunk) {
      float* state = memory + (is_short ? 0 : (chunk - begin) * a.key_dim * kColumns);
      const int column = chunk * kColumns;
      if (done == 0) {
        const float* from = initial ? initial + head * head_floats : nullptr;
        for_chunk_rows(a, column, [&](std::int64_t far, int near, int count) {
          store(state + near, from && count ? load_some(from + far, count) : zero());
        });
      }
      advance_chunk<Element, kIsDelta, kByKey>(a, in, head, row.first_token + done, tokens, column, state);
      if (target) {
        float* to = target + head * head_floats;
        for_chunk_rows(a, column, [&](std::int64_t far, int near, int count) {
          if (count) store_some(to + far, load(state + near), count);
        });
      }
    }
    done += tokens;
  }
}

template <class Element>
void recur_in(const Recurrence& a, int row, int head, int begin, int end) {
  if (!a.beta) return recur_of<Element, false>(a, row, head, begin, end);
  a.decays_by_key ? recur_of<Element, true, true>(a, row, head, begin, end)
                  : recur_of<Element, true>(a, row, head, begin, end);
}

void recur(const Recurrence& a, int row, int head, int begin, int end) {
  a.type == Type::float32 ? recur_in<float>(a, row, head, begin, end) : recur_in<bf16>(a, row, head, begin, end);
}

}  // namespace
}  // namespace octavo
