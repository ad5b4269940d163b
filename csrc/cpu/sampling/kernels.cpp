// Passes over logits, compiled once per level.
#include "sampling.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

// One bit per lane.
using Lanes = unsigned;
// Plain arithmetic on 32-bit lanes; the compiler knows the instructions.
using Words = std::uint32_t __attribute__((vector_size(4 * kLanes)));

static_assert(kBlock % kLanes == 0 && kSlice % kBlock == 0);

#if defined(__AVX512F__)
inline Lanes unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Lanes at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Lanes above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats floats_of(Words x) { return _mm512_cvtepu32_ps(reinterpret_cast<__m512i>(x)); }
inline Words load_words(const int* p) { return reinterpret_cast<Words>(_mm512_loadu_si512(p)); }
// Compresses the chosen lanes to the front; the lanes after them are undefined. (Compressing into memory is slow on some
// processors.)
inline void store_chosen(float* p, Floats x, Lanes chosen) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<Mask>(chosen), x));
}
inline void store_chosen(int* p, Words x, Lanes chosen) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<Mask>(chosen), reinterpret_cast<__m512i>(x)));
}
#else
inline Lanes lanes_of(Floats mask) { return static_cast<Lanes>(_mm256_movemask_ps(mask)); }
inline Lanes unordered(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
inline Lanes at_least(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline Lanes above(Floats a, Floats b) { return lanes_of(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
// Both halves are exact; their sum rounds once.
inline Floats floats_of(Words x) {
  const Floats high = _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x >> 16));
  const Floats low = _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x & 0xffffu));
  return add(mul(high, all(65536.0f)), low);
}
inline Words load_words(const int* p) {
  return reinterpret_cast<Words>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <class Element, class Vector>
inline void store_lanes(Element* p, Vector x, Lanes chosen) {
  alignas(32) Element lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (; chosen; chosen &= chosen - 1) *p++ = lanes[__builtin_ctz(chosen)];
}
inline void store_chosen(float* p, Floats x, Lanes chosen) { store_lanes(p, x, chosen); }
inline void store_chosen(int* p, Words x, Lanes chosen) { store_lanes(p, x, chosen); }
#endif

alignas(64) constexpr int kAscending[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Words ascending(int first) { return load_words(kAscending) + static_cast<std::uint32_t>(first); }

inline Floats scaled_of(Floats logits, Scaling scaling) {
  const Floats shifted = sub(logits, all(scaling.largest));
  return scaling.temperature == 1.0f ? shifted : div(shifted, all(scaling.temperature));
}

// Calls body(block, place) for whole blocks; the last one is filled with -inf.
template <class Body>
inline void for_blocks(const float* values, int count, const Body& body) {
  int i = 0;
  for (; i + kBlock <= count; i += kBlock) body(values + i, i);
  if (i == count) return;
  alignas(64) float tail[kBlock];
  for (int j = 0; j < kBlock; ++j) tail[j] = i + j < count ? values[i + j] : -INFINITY;
  body(tail, i);
}

bool survey(const float* logits, int count, float* maxima) {
  Lanes nan = 0;
  for_blocks(logits, count, [&](const float* block, int place) {
    Floats largest = all(-INFINITY);
    for (int j = 0; j < kBlock; j += 2 * kLanes) {
      const Floats a = load(block + j), b = load(block + j + kLanes);
      nan |= unordered(a, b);
      largest = maximum(largest, maximum(a, b));
    }
    maxima[place / kBlock] = maximum_of(largest);
  });
  return nan != 0;
}

double exponential_sum(const float* logits, int count, Scaling scaling) {
  constexpr int kSums = kBlock / kLanes;
  Floats sums[kSums];
  for (Floats& sum : sums) sum = zero();
  for_blocks(logits, count, [&](const float* block, int) {
    for (int j = 0; j < kSums; ++j)
      sums[j] = add(sums[j], exponential(scaled_of(load(block + j * kLanes), scaling)));
  });
  double total = 0;
  for (const Floats& sum : sums) total += sum_of(sum);
  return total;
}

void exponentials(const float* scaled, int count, float* out) {
  for (int i = 0; i < count; i += kLanes) {
    const int some = count - i < kLanes ? count - i : kLanes;
    store_some(out + i, exponential(load_some(scaled + i, some)), some);
  }
}

int gather(const float* logits, int first, int count, const float* maxima, Scaling scaling, float threshold,
           int* tokens, float* scaled) {
  int found = 0;
  for_blocks(logits, count, [&](const float* block, int place) {
    if ((maxima[place / kBlock] - scaling.largest) / scaling.temperature < threshold) return;
    for (int j = 0; j < kBlock; j += kLanes) {
      const Floats values = scaled_of(load(block + j), scaling);
      const Lanes chosen = at_least(values, all(threshold));
      if (!chosen) continue;
      store_chosen(scaled + found, values, chosen);
      store_chosen(tokens + found, ascending(first + place + j), chosen);
      found += __builtin_popcount(chosen);
    }
  });
  // the padding of the last block has no tokens
  while (found > 0 && tokens[found - 1] >= first + count) --found;
  return found;
}

int narrow(const float* values, const int* tokens, int count, float low, float high, float* out_values,
           int* out_tokens) {
  int found = 0;
  for (int i = 0; i < count; i += kLanes) {
    const Floats value = load(values + i);
    const Lanes inside = count - i < kLanes ? (1u << (count - i)) - 1u : ~0u;
    const Lanes chosen = at_least(value, all(low)) & at_least(all(high), value) & inside;
    store_chosen(out_values + found, value, chosen);
    if (tokens) store_chosen(out_tokens + found, load_words(tokens + i), chosen);
    found += __builtin_popcount(chosen);
  }
  return found;
}

template <class Weight>
inline void tally_as(const float* scaled, int count, std::uint32_t prefix, int shift, int bits,
                     std::uint64_t* histogram, const Weight& weight_of) {
  const std::uint32_t last_bin = (1u << bits) - 1;
  for (int i = 0; i < count; ++i) {
    const std::uint32_t key = key_of(scaled[i]) >> shift;
    if (key >> bits == prefix) histogram[key & last_bin] += weight_of(i);
  }
}

void tally(const float* scaled, const float* weights, int count, std::uint32_t prefix, int shift, int bits,
           std::uint64_t* histogram) {
  if (weights) {
    tally_as(scaled, count, prefix, shift, bits, histogram, [&](int i) { return units_of(weights[i]); });
  } else {
    tally_as(scaled, count, prefix, shift, bits, histogram, [](int) { return std::uint64_t{1}; });
  }
}

// One round of lowbias32 (Chris Wellons, "Prospecting for hash functions", 2018).
inline Words mix(Words x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// The stream of octavo/sampling/random.py: in (0, 1], finest near 0, where the numbers are that win races.
inline Floats uniforms(Words tokens, DrawKey key) {
  const Floats hashed = floats_of(mix(mix(tokens ^ key.first) + key.second));
  return mul(add(hashed, all(0.5f)), all(0x1p-32f));
}

constexpr float kLargestUniform = 1.0f - 0x1p-24f;

Winner race(const float* logits, const int* tokens, int first, int count, Scaling scaling, float threshold, DrawKey key,
            Winner best) {
  // -log1p(-v) >= v, so weight / v is an upper bound of a score: tokens with a bound below the best are skipped
  const auto bound_of = [](double score) { return static_cast<float>(score * (1.0 - 1e-6)); };
  float bound = bound_of(best.score);
  for_blocks(logits, count, [&](const float* block, int place) {
    for (int j = 0; j < kBlock && place + j < count; j += kLanes) {
      const Floats scaled = scaled_of(load(block + j), scaling);
      const Floats weights = where_less(scaled, all(threshold), zero(), exponential(scaled));
      const Words ids = tokens ? load_words(tokens + place + j) : ascending(first + place + j);
      const Floats uniform = uniforms(ids, key);
      Lanes able = at_least(weights, mul(uniform, all(bound)));
      if (!able) continue;
      alignas(64) float weight[kLanes], v[kLanes];
      store(weight, weights);
      store(v, uniform);
      for (; able; able &= able - 1) {
        const int lane = __builtin_ctz(able);
        const double arrival = -std::log1p(-static_cast<double>(v[lane] < kLargestUniform ? v[lane] : kLargestUniform));
        const double score = static_cast<double>(weight[lane]) / arrival;
        const int token = static_cast<int>(ids[lane]);
        if (score > best.score || (score == best.score && token < best.token)) best = {score, token};
      }
      bound = bound_of(best.score);
    }
  });
  return best;
}

int count_above(const float* logits, int count, float value) {
  int found = 0;
  for_blocks(logits, count, [&](const float* block, int) {
    for (int j = 0; j < kBlock; j += kLanes) found += __builtin_popcount(above(load(block + j), all(value)));
  });
  return found;
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const SamplingKernels sampling_table;
const SamplingKernels sampling_table = {survey, exponential_sum, exponentials, gather, narrow, tally, race, count_above};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
