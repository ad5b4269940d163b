// Recurrent layers, compiled once per level.
#include "recurrent.h"

#include "../vector.h"

namespace octavo {
namespace {

// The tokens of one row of a step, and its states.
struct StateRow {
  const StateRows& all;
  const std::int32_t* table;
  int first_token, count, context;

  StateRow(const StateRows& rows, int row)
      : all(rows), table(rows.block_tables + row * rows.table_stride), first_token(rows.query_starts[row]),
        count(rows.query_starts[row + 1] - first_token), context(rows.sequence_lengths[row] - count) {}

  // What the row starts from, or null for zeros.
  const float* initial() const { return context == 0 ? nullptr : at(context - 1); }

  // How many of the tokens from `done` on, at most `most`, end before the next place where the state may be written.
  int run_length(int done, int most) const {
    const int left = all.block_size - (context + done) % all.block_size;
    const int length = left < count - done ? left : count - done;
    return length < most ? length : most;
  }

  // Where the state after `done` tokens is written, or null.
  float* target(int done) const {
    const int position = context + done - 1;
    if (done < count && (position + 1) % all.block_size != 0) return nullptr;
    return table[position / all.block_size] == 0 ? nullptr : at(position);
  }

  float* at(int position) const { return all.states + table[position / all.block_size] * all.block_stride; }
};

constexpr int kMostChannels = 128;  // of a task

template <class Element, int kTaps>
void convolve_of(const Convolution& a, int row_index, int begin, int end) {
  const StateRow row(a.rows, row_index);
  alignas(64) float ring[kTaps][kMostChannels];  // input of position p in place p % kTaps
  const float* initial = row.initial();
  for (int j = 0; j < kTaps - 1; ++j) {
    float* slot = ring[(row.context + kTaps * kTaps - (kTaps - 1) + j) % kTaps];
    for (int i = begin; i < end; ++i)
      slot[i - begin] = initial ? initial[static_cast<std::int64_t>(j) * a.channels + i] : 0.0f;
  }
  for (int done = 0; done < row.count; ++done) {
    const std::int64_t token = row.first_token + done;
    const Element* x = static_cast<const Element*>(a.x) + token * a.x_stride;
    const Element* before = a.before ? static_cast<const Element*>(a.before) + token * a.before_stride : nullptr;
    const Element* after = a.after ? static_cast<const Element*>(a.after) + token * a.after_stride : nullptr;
    const Element *weight = static_cast<const Element*>(a.weight), *bias = static_cast<const Element*>(a.bias);
    Element* out = static_cast<Element*>(a.out) + token * a.channels;
    float* inputs[kTaps];  // oldest first
    for (int j = 0; j < kTaps; ++j) inputs[j] = ring[(row.context + done + 1 + j) % kTaps];
    for (int i = begin; i < end; i += kLanes) {
      const int count = end - i < kLanes ? end - i : kLanes, place = i - begin;
      Floats input = load_some(x + i, count);
      if (before) input = mul(input, load_some(before + i, count));
      store(inputs[kTaps - 1] + place, input);
      Floats sum = bias ? load_some(bias + i, count) : zero();
      for (int j = 0; j < kTaps; ++j)
        sum = fma(load(inputs[j] + place), load_some(weight + static_cast<std::int64_t>(j) * a.channels + i, count), sum);
      if (a.is_silu) sum = silu(sum);
      if (after) sum = mul(sum, load_some(after + i, count));
      store_some(out + i, sum, count);
    }
    if (float* target = row.target(done + 1))
      for (int j = 1; j < kTaps; ++j)
        for (int i = begin; i < end; ++i) target[static_cast<std::int64_t>(j - 1) * a.channels + i] = inputs[j][i - begin];
  }
}

template <class Element>
void convolve_in(const Convolution& a, int row, int begin, int end) {
  switch (a.taps) {
    case 2: return convolve_of<Element, 2>(a, row, begin, end);
    case 3: return convolve_of<Element, 3>(a, row, begin, end);
    case 4: return convolve_of<Element, 4>(a, row, begin, end);
  }
}

void convolve(const Convolution& a, int row, int begin, int end) {
  for (int i = begin; i < end; i += kMostChannels) {
    const int stop = end - i < kMostChannels ? end : i + kMostChannels;
    a.type == Type::float32 ? convolve_in<float>(a, row, i, stop) : convolve_in<bf16>(a, row, i, stop);
  }
}

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
  const float squares = sum_over(dim, [&](Floats sum, int i, int count) {
    const Floats value = load_some(x + i, count);
    return fma(value, value, sum);
  });
  return 1.0f / __builtin_sqrtf(squares + 1e-6f);
}

// log(1 + e^x) = max(x, 0) + log(1 + e), with e = e^-|x|; of the latter the series of 2 artanh(e / (2 + e)).
inline Floats softplus(Floats x) {
  const Floats e = exponential(sub(zero(), absolute(x)));
  const Floats ratio = div(e, add(all(2.0f), e)), square = mul(ratio, ratio);
  Floats series = all(2.0f / 15.0f);
  for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, all(2.0f / static_cast<float>(odd)));
  return fma(series, ratio, maximum(zero(), x));  // NaN stays
}

template <class Element>
void read_key_decays(const Recurrence& a, const Element* steps, int head, const float* key, float* decays, float* faded) {
  const std::int64_t first = static_cast<std::int64_t>(head) * a.key_dim;
  const Floats rate = all(-__builtin_expf(a.decay_log[head]));
  for_vectors(a.key_dim, [&](int i, int count) {
    const Floats raw = add(load_some(steps + first + i, count), load_some(a.step_bias + first + i, count));
    const Floats decay = exponential(mul(rate, softplus(raw)));
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

// Sums over rows in two turns, even and odd ones, so that no addition waits for the one before.
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

// One token of columns [begin, end), whose state is read where it lies and written where it is kept, row by row: memory is
// the bound. Products and sums are those of `advance_chunk`, in the same order.
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
  // the matrix of a short row passes through the nearest cache chunk by chunk; that of a long one stays
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

// 2^x for x <= 0, with the polynomial of `exponential`, whose range needs no product here. Below -126 it is 0; NaN stays.
inline Floats power_of_two(Floats x) {
  const Floats n = round_even(x), r = sub(x, n);
  Floats p = fma(all(1.532107280e-4f), r, all(1.339021848e-3f));
  p = fma(p, r, all(9.618526681e-3f));
  p = fma(p, r, all(5.550362400e-2f));
  p = fma(p, r, all(2.402264783e-1f));
  p = fma(p, r, all(6.931471806e-1f));
  p = fma(p, r, all(1.0f));
  return scale_unless_less(p, n, x, all(-126.0f));
}

// Inputs of some tokens that all channels share.
struct ScanInputs {
  alignas(64) float keys[kRunTokens][kMostKeyDim];
  alignas(64) float queries[kRunTokens][kMostKeyDim];
};

// Advances the states of up to kLanes channels, rows of kLanes. Sums go in two turns, as in `advance_chunk`.
template <class Element>
void scan_channels(const SelectiveScan& a, const ScanInputs& in, std::int64_t first, int tokens, int channel, int count,
                   const float* rates, float* state) {
  const Floats bias = load_some(a.step_bias + channel, count), skip = load_some(a.skip + channel, count);
  for (int t = 0; t < tokens; ++t) {
    const std::int64_t token = first + t;
    const Floats value = load_some(static_cast<const Element*>(a.value) + token * a.value_stride + channel, count);
    const Floats raw = load_some(static_cast<const Element*>(a.step) + token * a.step_stride + channel, count);
    const Floats step = softplus(add(raw, bias)), input = mul(step, value);
    const Floats fade = mul(all(-1.44269504088896341f), step);
    Floats sums[2] = {zero(), zero()};
    for (int i = 0; i < a.state_size; i += 2)
      for (int parity = 0; parity < 2; ++parity) {
        float* at = state + (i + parity) * kLanes;
        const Floats decay = power_of_two(mul(fade, load(rates + (i + parity) * kLanes)));
        const Floats next = fma(all(in.keys[t][i + parity]), input, mul(decay, load(at)));
        store(at, next);
        sums[parity] = fma(next, all(in.queries[t][i + parity]), sums[parity]);
      }
    store_some(static_cast<Element*>(a.out) + token * a.channels + channel, fma(skip, value, add(sums[0], sums[1])), count);
  }
}

template <class Element>
void scan_of(const SelectiveScan& a, int row_index, int begin, int end) {
  const StateRow row(a.rows, row_index);
  if (row.count == 0) return;
  ScanInputs in;
  alignas(64) float rates[kMostKeyDim * kMostChannels], states[kMostKeyDim * kMostChannels];
  // rows of the state are copied one after the other, as memory is read ahead
  const auto for_rows = [&](const auto& copy) {
    for (int i = 0; i < a.state_size; ++i)
      for (int channel = begin; channel < end; channel += kLanes)
        copy(static_cast<std::int64_t>(i) * a.channels + channel, (channel - begin) * a.state_size + i * kLanes,
             end - channel < kLanes ? end - channel : kLanes);
  };
  const float* initial = row.initial();
  for_rows([&](std::int64_t far, int near, int count) {
    store(rates + near, load_some(a.rates + far, count));
    store(states + near, initial ? load_some(initial + far, count) : zero());
  });
  for (int done = 0; done < row.count;) {
    const int tokens = row.run_length(done, kRunTokens);
    const std::int64_t first = row.first_token + done;
    for (int t = 0; t < tokens; ++t) {
      widen_row(static_cast<const Element*>(a.key) + (first + t) * a.key_stride, a.state_size, 1.0f, in.keys[t]);
      widen_row(static_cast<const Element*>(a.query) + (first + t) * a.query_stride, a.state_size, 1.0f, in.queries[t]);
    }
    for (int channel = begin; channel < end; channel += kLanes) {
      const int place = (channel - begin) * a.state_size, count = end - channel < kLanes ? end - channel : kLanes;
      scan_channels<Element>(a, in, first, tokens, channel, count, rates + place, states + place);
    }
    if (float* target = row.target(done + tokens))
      for_rows([&](std::int64_t far, int near, int count) { store_some(target + far, load(states + near), count); });
    done += tokens;
  }
}

void scan(const SelectiveScan& a, int row, int begin, int end) {
  a.type == Type::float32 ? scan_of<float>(a, row, begin, end) : scan_of<bf16>(a, row, begin, end);
}

template <class Element>
void gated_norm_group(const GatedNorm& a, const Element* x, const Element* gate, const Element* weight, Element* out) {
  const auto value = [&](int i, int count) {
    const Floats plain = load_some(x + i, count);
    return a.is_gate_first ? mul(plain, silu(load_some(gate + i, count))) : plain;
  };
  const float squares = sum_over(a.group, [&](Floats sum, int i, int count) {
    const Floats each = first_lanes(value(i, count), count);
    return fma(each, each, sum);
  });
  const Floats scale = all(1.0f / __builtin_sqrtf(squares / static_cast<float>(a.group) + a.eps));
  for_vectors(a.group, [&](int i, int count) {
    Floats normed = mul(mul(value(i, count), scale), load_some(weight + i, count));
    if (!a.is_gate_first) normed = mul(normed, silu(load_some(gate + i, count)));
    store_some(out + i, normed, count);
  });
}

template <class Element>
void gated_norm_rows(const GatedNorm& a, int begin, int end) {
  for (std::int64_t row = begin; row < end; ++row)
    for (int first = 0; first < a.dim; first += a.group)
      gated_norm_group(a, static_cast<const Element*>(a.x) + row * a.x_stride + first,
                       static_cast<const Element*>(a.gate) + row * a.gate_stride + first,
                       static_cast<const Element*>(a.weight) + first % a.weight_size,
                       static_cast<Element*>(a.out) + row * a.dim + first);
}

void gated_norm(const GatedNorm& a, int begin, int end) {
  a.type == Type::float32 ? gated_norm_rows<float>(a, begin, end) : gated_norm_rows<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const RecurrentKernels recurrent_table;
const RecurrentKernels recurrent_table = {kColumns, convolve, recur, scan, gated_norm};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
