// From scores to weights: masks, caps and slopes, the running maximum, and powers of two.
#pragma once

#include "arithmetic.h"

namespace octavo {
namespace {

// 2^x for x <= 0, exactly 1 at 0 and 0 from -150 on; NaN stays NaN. Minimax polynomials of (2^f - 1) / f on [-1/2, 1/2]
// with relative errors of 2.8e-6 (degree 4) and 9.1e-8 (degree 5).
template <int Degree>
inline Floats power_of_two(Floats x) {
  x = maximum(all(-150.0f), x);
  const Floats n = round_even(x);
  const Floats f = sub(x, n);
  Floats p;
  if constexpr (Degree == 5) {
    p = all(0.001326472614891827f);
    p = fma(p, f, all(0.009671512991189957f));
    p = fma(p, f, all(0.05550733581185341f));
    p = fma(p, f, all(0.24022242426872253f));
    p = fma(p, f, all(0.6931470036506653f));
  } else {
    p = all(0.009582852013409138f);
    p = fma(p, f, all(0.055906426161527634f));
    p = fma(p, f, all(0.24024099111557007f));
    p = fma(p, f, all(0.6931241750717163f));
  }
  return scale_by_power(fma(p, f, all(1.0f)), n);
}

// `x` in the lanes [begin, end), -inf in the others; the bounds may lie outside the vector.
inline Floats keep_lanes(Floats x, int begin, int end) {
#if defined(__AVX512F__)
  const auto below = [](int count) { return count <= 0 ? 0u : count >= 16 ? 0xffffu : (1u << count) - 1u; };
  return _mm512_mask_blend_ps(static_cast<Mask>(below(end) & ~below(begin)), all(-__builtin_inff()), x);
#else
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
  const __m256i seen = _mm256_andnot_si256(early, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return _mm256_blendv_ps(all(-__builtin_inff()), x, _mm256_castsi256_ps(seen));
#endif
}

inline Floats lane_numbers() {
#if defined(__AVX512F__)
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
#endif
}

inline float first_lane(Floats x) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(x);
#else
  return _mm256_cvtss_f32(x);
#endif
}

// Changes to the scores of one row: cap, slope, biases.
struct Bend {
  float soft_cap;       // 0 for none
  float slope;          // of ALiBi, times log2 e
  float distance;       // of the chunk's first key from the query
  const float* biases;  // of the chunk's keys, or null
};

inline bool is_bent(const Attention& a) { return a.soft_cap != 0.0f || a.alibi || a.biases.table; }

inline Bend bend_of(const Attention& a, int head, int first_key, int position) {
  const DistanceBiases& own = a.biases;
  const int distance = first_key - position;
  const std::int64_t place = head * static_cast<std::int64_t>(own.stride) + own.origin + distance;
  return {a.soft_cap, a.alibi ? a.alibi[head] * kLog2E : 0.0f, static_cast<float>(distance),
          own.table ? own.table + place + static_cast<std::int64_t>(position) * own.position_stride : nullptr};
}

// Turns raw products of one row into base-2 exponents, -inf where a key is masked, and returns the largest. `factors`
// holds the scale of each key, times log2 e unless there is a cap.
template <bool IsBent>
inline float weigh(float* scores, const float* factors, int begin, int end, const Bend& bend) {
  const bool sees_all = begin <= 0 && end >= kChunkKeys;
  Floats largest = all(kNothing);
  for (int j = 0; j < kChunkKeys; j += kLanes) {
    Floats x = mul(load(scores + j), load(factors + j));
    if constexpr (IsBent) {
      if (bend.soft_cap != 0.0f)
        x = mul(far_tangent_hyperbolic(div(x, all(bend.soft_cap))), all(bend.soft_cap * kLog2E));
      x = fma(all(bend.slope), add(all(bend.distance + static_cast<float>(j)), lane_numbers()), x);
      if (bend.biases) x = add(x, load(bend.biases + j));
    }
    if (!sees_all) x = keep_lanes(x, begin - j, end - j);
    store(scores + j, x);
    largest = maximum(largest, x);
  }
  return maximum_of(largest);
}

// Weights 2^(exponent - maximum) of one row, times `value_scales` where they are given, as operands of the second
// product; adds the unscaled ones to `sums` lane by lane after multiplying those by `factor`.
template <class Products>
inline void store_row_weights(const float* exponents, float maximum, const float* value_scales, float factor, float* sums,
                              float* weights) {
  Floats sum = mul(load(sums), all(factor));
  for (int j = 0; j < kChunkKeys; j += kLanes) {
    const Floats p = power_of_two<Products::kExponentialDegree>(sub(load(exponents + j), all(maximum)));
    sum = add(sum, p);
    Products::store_weights(weights, j, value_scales ? mul(p, load(value_scales + j)) : p);
  }
  store(sums, sum);
}

#if defined(__AVX512BF16__)
// 2^x in fewer instructions, for x <= 0 or a little above: exactly 1 at 0, and 0 of -inf; NaN stays NaN. A minimax
// polynomial of (2^f - 1) / f on [0, 1] with a relative error of 2.9e-6, for weights that are rounded to 8 bits.
inline Floats weight_of(Floats x) {
  const Floats f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the integer below it
  Floats p = all(0.013425154424560829f);
  p = fma(p, f, all(0.05224537403796165f));
  p = fma(p, f, all(0.24127855610191123f));
  p = fma(p, f, all(0.6930451545323058f));
  return _mm512_scalef_ps(fma(p, f, all(1.0f)), x);
}

// Lane by lane the largest of a row's scores [first, last), of which those of keys outside of [begin, end) become -inf.
inline Floats largest_seen(float* scores, int first, int last, int begin, int end) {
  Floats largest = all(kNothing);
  for (int j = first; j < last; j += kLanes) {
    Floats x = load(scores + j);
    if (begin > j || end < j + kLanes) store(scores + j, x = keep_lanes(x, begin - j, end - j));
    largest = maximum(largest, x);
  }
  return largest;
}

// The largest lane of vector i in lane i.
inline Floats largest_of_each(const Floats (&x)[16]) {
  Floats halves[8], quarters[4], pairs[2];
  for (int i = 0; i < 8; ++i)
    halves[i] = maximum(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)
    quarters[i] = maximum(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88),
                          _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    pairs[i] = maximum(_mm512_unpacklo_ps(quarters[i], quarters[i + 2]), _mm512_unpackhi_ps(quarters[i], quarters[i + 2]));
  const Floats mixed = maximum(_mm512_shuffle_ps(pairs[0], pairs[1], 0x44), _mm512_shuffle_ps(pairs[0], pairs[1], 0xee));
  // lanes are of the vectors 0, 2, 1 and 3, then of those 8, 4 and 12 further on
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), mixed);
}

// Weights 2^(score * scale - maximum) of a row's keys [first, last), multiples of 32, times `value_scales` where they are
// given, as operands of the second product; adds the unscaled ones to `sums` lane by lane after multiplying those by `factor`.
inline void weigh_row(const float* scores, int first, int last, float scale, float maximum, const float* value_scales,
                      float factor, float* sums, bf16* weights) {
  Floats sum = mul(load(sums), all(factor));
  for (int j = first; j < last; j += 2 * kLanes) {
    Floats low = weight_of(fma(load(scores + j), all(scale), all(-maximum)));
    Floats high = weight_of(fma(load(scores + j + kLanes), all(scale), all(-maximum)));
    sum = add(add(sum, low), high);
    if (value_scales) low = mul(low, load(value_scales + j)), high = mul(high, load(value_scales + j + kLanes));
    _mm512_storeu_si512(weights + j, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
  store(sums, sum);
}
#endif

}  // namespace
}  // namespace octavo
