// Vectors of float32 in the width of the unit that includes this, and the operations that most kernels are written in.
//
// Included only by units that are compiled for one level. Everything lives in an unnamed namespace, and such units use
// no templates of the standard library: the linker must never share their code with a unit of a lower level.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo {
namespace {

using bf16 = std::uint16_t;  // the upper half of a float32

inline float to_float(bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Floats = __m512;
using Mask = __mmask16;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
// The bfloat16 bits of each lane, in the low half of 32-bit lanes; rounds like to_bf16.
inline __m512i bf16_bits(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), 16);
}
inline __m256i to_bf16(Floats x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));  // numbers below 2^-126 become zero
#else
  return _mm512_cvtepi32_epi16(bf16_bits(x));
#endif
}
inline void store(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
// The first `count` lanes, at least one; the others are zero. A count that the compiler knows to be all costs nothing.
inline Mask first(int count) { return static_cast<Mask>((1u << count) - 1u); }
inline Floats load_some(const float* p, int count) {
  return count == kLanes ? load(p) : _mm512_maskz_loadu_ps(first(count), p);
}
inline Floats load_some(const bf16* p, int count) {
  if (count == kLanes) return load(p);
  const __m256i half = _mm256_maskz_loadu_epi16(first(count), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store_some(float* p, Floats x, int count) {
  count == kLanes ? store(p, x) : _mm512_mask_storeu_ps(p, first(count), x);
}
inline void store_some(bf16* p, Floats x, int count) {
  if (count == kLanes) return store(p, x);
  _mm256_mask_storeu_epi16(p, first(count), to_bf16(x));
}
// The first `count` lanes of x, zero in the others.
inline Floats first_lanes(Floats x, int count) {
  return count == kLanes ? x : _mm512_maskz_mov_ps(first(count), x);
}
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }            // b where either is NaN
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats round_even(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats copy_sign(Floats magnitude, Floats sign) {
  const __m512i bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_andnot_si512(bit, _mm512_castps_si512(magnitude)),
                                             _mm512_and_si512(bit, _mm512_castps_si512(sign))));
}
// x * 2^n for whole n in [-252, 254]; two steps, so that the factor itself never leaves the range of float32.
inline Floats scale_by_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
// p * 2^n where not x < y, for whole n in [-126, 128] there; else 0.
inline Floats scale_unless_less(Floats p, Floats n, Floats x, Floats y) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ), p, n);
}
// `a` where x < y, else `b`.
inline Floats where_less(Floats x, Floats y, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
// Always in the same order: halves are added to halves.
inline float sum_of(Floats x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float maximum_of(Floats x) { return _mm512_reduce_max_ps(x); }

#else

constexpr int kLanes = 8;
using Floats = __m256;

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline __m256i bf16_bits(Floats x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store(bf16* p, Floats x) {
  const __m256i bits = bf16_bits(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
inline __m256i first(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load_some(const float* p, int count) {
  return count == kLanes ? load(p) : _mm256_maskload_ps(p, first(count));
}
inline Floats load_some(const bf16* p, int count) {
  if (count == kLanes) return load(p);
  alignas(16) bf16 lanes[8] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_some(float* p, Floats x, int count) {
  count == kLanes ? store(p, x) : _mm256_maskstore_ps(p, first(count), x);
}
inline void store_some(bf16* p, Floats x, int count) {
  if (count == kLanes) return store(p, x);
  alignas(16) bf16 lanes[8];
  store(lanes, x);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}
inline Floats first_lanes(Floats x, int count) {
  return count == kLanes ? x : _mm256_and_ps(x, _mm256_castsi256_ps(first(count)));
}
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats round_even(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats copy_sign(Floats magnitude, Floats sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
inline Floats scale_by_power(Floats x, Floats n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline Floats scale_unless_less(Floats p, Floats n, Floats x, Floats y) {
  // the exponent of 2^128 is that of infinity
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), _mm256_cmp_ps(x, y, _CMP_NLT_UQ));
}
inline Floats where_less(Floats x, Floats y, Floats a, Floats b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
inline float sum_of(Floats x) {
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float maximum_of(Floats x) {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

#endif

// Calls `body(i, count)` for all elements of a row, a vector at a time.
template <class Body>
inline void for_vectors(int dim, const Body& body) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) body(i, kLanes);
  if (i < dim) body(i, dim - i);
}

// The sum over a row, from zero by `sum = step(sum, i, count)`; step does not change lanes from `count` on. The order
// depends on `dim` alone: four sums are added in turn, so that none waits for the previous addition.
template <class Step>
inline float sum_over(int dim, const Step& step) {
  Floats a = zero(), b = zero(), c = zero(), d = zero();
  int i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    a = step(a, i, kLanes);
    b = step(b, i + kLanes, kLanes);
    c = step(c, i + 2 * kLanes, kLanes);
    d = step(d, i + 3 * kLanes, kLanes);
  }
  for (; i + kLanes <= dim; i += kLanes) a = step(a, i, kLanes);
  if (i < dim) b = step(b, i, dim - i);
  return sum_of(add(add(a, b), add(c, d)));
}

template <class Element>
inline float sum_of_squares(const Element* x, int dim) {
  return sum_over(dim, [&](Floats sum, int i, int count) {
    const Floats value = load_some(x + i, count);
    return fma(value, value, sum);
  });
}

// e^x to about one unit in the last place: x = n ln 2 + r, a minimax polynomial in r with a relative error of 4e-9 and
// exactly 1 at 0, times 2^n. Below -87.3 the result is 0, -inf included; from 88.8 on, and for some levels from 88.4 on,
// it is inf; NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats clamped = minimum(all(88.8f), x);
  const Floats n = round_even(mul(clamped, all(1.44269504088896341f)));
  Floats r = fma(n, all(-0.693359375f), clamped);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(0.0013814539415761828f);
  p = fma(p, r, all(0.00836874544620514f));
  p = fma(p, r, all(0.04166838899254799f));
  p = fma(p, r, all(0.1666652113199234f));
  p = fma(p, r, all(0.4999999403953552f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  return scale_unless_less(p, n, x, all(-87.3f));
}

// tanh to about 1e-7: 1 - 2 / (e^2|x| + 1).
inline Floats far_tangent_hyperbolic(Floats x) {
  const Floats size = absolute(x);
  return copy_sign(sub(all(1.0f), div(all(2.0f), add(exponential(add(size, size)), all(1.0f)))), x);
}

// To about two units in the last place: near 0 a polynomial (Cephes again).
inline Floats tangent_hyperbolic(Floats x) {
  const Floats size = absolute(x), square = mul(x, x);
  Floats p = all(-5.70498872745e-3f);
  p = fma(p, square, all(2.06390887954e-2f));
  p = fma(p, square, all(-5.37397155531e-2f));
  p = fma(p, square, all(1.33314422036e-1f));
  p = fma(p, square, all(-3.33332819422e-1f));
  const Floats near = fma(mul(p, square), x, x);
  return where_less(size, all(0.625f), near, far_tangent_hyperbolic(x));
}

// The error function to 2e-7. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline Floats error_function(Floats x) {
  const Floats size = absolute(x);
  const Floats t = div(all(1.0f), fma(all(0.3275911f), size, all(1.0f)));
  Floats p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  return copy_sign(sub(all(1.0f), mul(mul(p, t), exponential(sub(zero(), mul(x, x))))), x);
}

// log(1 + e^x) = max(x, 0) + log(1 + e), with e = e^-|x|; of the latter the series of 2 artanh(e / (2 + e)).
inline Floats softplus(Floats x) {
  const Floats e = exponential(sub(zero(), absolute(x)));
  const Floats ratio = div(e, add(all(2.0f), e)), square = mul(ratio, ratio);
  Floats series = all(2.0f / 15.0f);
  for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, all(2.0f / static_cast<float>(odd)));
  return fma(series, ratio, maximum(zero(), x));  // NaN stays
}

// x / (1 + e^-gate)
inline Floats times_sigmoid(Floats x, Floats gate) { return div(x, add(all(1.0f), exponential(sub(zero(), gate)))); }

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

}  // namespace
}  // namespace octavo
