// Activations as 8-bit codes: a scale per row, codes in the order in which the products read them.
//
// Included only by units of one level. A block is a few rows that are multiplied together; its codes lie quad by quad of
// K, and inside a quad row by row, 4 bytes each: one pointer walks them while a panel streams by. What a row's codes,
// scale and sums are depends on that row alone.
#pragma once

#include "../vector.h"
#include "quantized.h"

namespace octavo {
namespace {

// Rows whose sums fit the registers beside the weights: int8 keeps 32 columns of integers, int4 of floats as well.
#if defined(__AVX512F__)
constexpr int kMostRowsInt8 = 12;
constexpr int kMostRowsInt4 = 6;
#else
constexpr int kMostRowsInt8 = 2;
constexpr int kMostRowsInt4 = 2;
#endif

// Smaller magnitudes count as zero: 127 divided by one of them would leave the range of float32.
constexpr float kSmallest = 1e-30f;

inline RowBlocks vector_blocks(const QuantizedLinear& a) {
  return {a.rows, a.weight.group ? kMostRowsInt4 : kMostRowsInt8, true};
}

#if defined(__AVX512F__)

// The largest bits of |x|: infinities and NaN are above all numbers, and the order of comparing does not matter.
template <class Element>
std::int32_t largest_bits(const Element* x, int count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  int i = 0;
  for (; i + 16 <= count; i += 16)
    most = _mm512_max_epi32(most, _mm512_and_si512(magnitude, _mm512_castps_si512(load(x + i))));
  if (i < count)
    most = _mm512_max_epi32(most, _mm512_and_si512(magnitude, _mm512_castps_si512(load_some(x + i, count - i))));
  return _mm512_reduce_max_epi32(most);
}

inline void store_codes(std::int8_t* out, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

// x * factor, rounded to the nearest integers, ties to even; zeros after the first `count` of 16.
template <class Element>
void quantize_16(const Element* x, int count, float factor, std::int8_t* out) {
  store_codes(out, mul(count >= 16 ? load(x) : load_some(x, count), all(factor)));
}

inline std::int32_t sum_of_64(const std::int8_t* codes) {
  const __m512i ones = _mm512_set1_epi8(1);
  return _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, _mm512_loadu_si512(codes)));
}

#else

template <class Element>
std::int32_t largest_bits(const Element* x, int count) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  int i = 0;
  for (; i + 8 <= count; i += 8)
    most = _mm256_max_epi32(most, _mm256_and_si256(magnitude, _mm256_castps_si256(load(x + i))));
  if (i < count)
    most = _mm256_max_epi32(most, _mm256_and_si256(magnitude, _mm256_castps_si256(load_some(x + i, count - i))));
  alignas(32) std::int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
  std::int32_t largest = 0;
  for (const std::int32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

inline void store_codes(std::int8_t* out, Floats low, Floats high) {
  const __m256i a = _mm256_cvtps_epi32(low), b = _mm256_cvtps_epi32(high);
  const __m128i first_8 = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i last_8 = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(first_8, last_8));
}

template <class Element>
void quantize_16(const Element* x, int count, float factor, std::int8_t* out) {
  const Floats low = count >= 8 ? load(x) : load_some(x, count > 0 ? count : 0);
  const Floats high = count >= 16 ? load(x + 8) : count > 8 ? load_some(x + 8, count - 8) : zero();
  store_codes(out, mul(low, all(factor)), mul(high, all(factor)));
}

inline std::int32_t sum_of_64(const std::int8_t* codes) {
  const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
  const auto sums = [&](const std::int8_t* from) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), pairs);
  };
  const __m256i both = _mm256_add_epi32(sums(codes), sums(codes + 32));
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i d = _mm_add_epi32(q, _mm_unpackhi_epi64(q, q));
  return _mm_cvtsi128_si32(d) + _mm_extract_epi32(d, 1);
}

#endif

inline float from_bits(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr std::int32_t kInfinityBits = 0x7f800000;

// 64 codes of a row from `x` on, of which `count` are there.
template <class Element>
void quantize_step(const Element* x, int count, float factor, std::int8_t* out) {
  for (int i = 0; i < kStepDepth; i += 16) {
    if (i < count) {
      quantize_16(x + i, count - i, factor, out + i);
    } else {
      std::memset(out + i, 0, 16);
    }
  }
}

// Quantises one row. `place(step, codes)` takes 64 codes, `sum(group, value)` what the codes of a group add up to.
template <class Element, class Place, class Sum>
float quantize_row(const Element* x, const QuantizedWeight& weight, const Place& place, const Sum& sum) {
  const std::int32_t bits = largest_bits(x, weight.inputs);
  const float largest = from_bits(bits);
  const bool is_finite = bits < kInfinityBits;
  const float factor = is_finite && largest >= kSmallest ? 127.0f / largest : 0.0f;
  const int steps = weight.steps(), steps_per_group = weight.steps_per_group();
  alignas(64) std::int8_t codes[kStepDepth];
  std::int32_t total = 0;
  for (int step = 0; step < steps; ++step) {
    if (factor == 0.0f) {
      std::memset(codes, 0, sizeof codes);
    } else {
      quantize_step(x + step * kStepDepth, weight.inputs - step * kStepDepth, factor, codes);
    }
    place(step, codes);
    total += sum_of_64(codes);
    if ((step + 1) % steps_per_group == 0) {
      sum(step / steps_per_group, total);
      total = 0;
    }
  }
  // NaN makes every column of the row NaN, and no other row
  return !is_finite ? from_bits(0x7fc00000) : factor == 0.0f ? 0.0f : largest / 127.0f;
}

// Quantises the rows of a block; `offset` is what the codes of the weights are too large by. 64 codes of row `row` go to
// `place(row, step, codes)`.
template <class Element, class Place>
void quantize_rows(const QuantizedLinear& a, int start, int rows, int offset, const Place& place) {
  const int groups = a.weight.num_groups();
  std::int32_t* sums = a.row_sums + static_cast<std::int64_t>(start) * groups;
  for (int row = 0; row < rows; ++row)
    a.row_scales[start + row] = quantize_row(
        static_cast<const Element*>(a.x) + (start + row) * a.x_stride, a.weight,
        [&](int step, const std::int8_t* codes) { place(row, step, codes); },
        [&](int group, std::int32_t total) { sums[group * rows + row] = -offset * total; });
}

constexpr int kOffsetInt8 = 128;
constexpr int kOffsetInt4 = 8;

template <class Place>
void quantize_block(const QuantizedLinear& a, int start, int rows, const Place& place) {
  const int offset = a.weight.group ? kOffsetInt4 : kOffsetInt8;
  a.type == Type::float32 ? quantize_rows<float>(a, start, rows, offset, place)
                          : quantize_rows<bf16>(a, start, rows, offset, place);
}

inline void quantize_vectors(const QuantizedLinear& a, int block) {
  const RowBlocks blocks = vector_blocks(a);
  const int start = blocks.start(block), rows = blocks.size(block);
  std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * a.weight.depth();
  quantize_block(a, start, rows, [&](int row, int step, const std::int8_t* from) {
    std::int8_t* to = codes + (static_cast<std::int64_t>(step) * kStepDepth * rows + row * 4);
    if (rows == 1) {
      std::memcpy(to, from, kStepDepth);
    } else {
      for (int quad = 0; quad < kStepDepth / 4; ++quad) std::memcpy(to + quad * rows * 4, from + quad * 4, 4);
    }
  });
}

}  // namespace
}  // namespace octavo
