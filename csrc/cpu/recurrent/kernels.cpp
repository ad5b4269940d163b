// Recurrent layers, compiled once per level.
#include "recurrent.h"

#include "recurrence.h"

namespace octavo {
namespace {

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

// Advances the states of up to kLanes channels, rows of kLanes. Two sums are added in turn, as in `advance_chunk`.
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
  // rows of the state are copied in ascending order, which the hardware prefetches
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
