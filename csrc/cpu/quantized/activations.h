// Activations as 8-bit codes: a scale per row, codes in the order in which the products read them.
//
// Included only by units of one level. A block is a few rows that are multiplied together; its codes are stored quad by
// quad of K, and inside a quad row by row, 4 bytes each, so that one pointer traverses them with a panel. A row's codes,
// scale and sums depend on that row alone.
#pragma once

#include "../vector.h"
#include "quantized.h"

namespace octavo {
namespace {

// Rows of codes whose sums fit the registers beside the weights: 32 columns of integers, and with groups of floats too.
#if defined(__AVX512F__)
constexpr int kMostChannelRows = 12;
constexpr int kMostGroupRows = 6;
#else
constexpr int kMostChannelRows = 4;
constexpr int kMostGroupRows = 4;
#endif

// One scale per column, of codes that are read as they are.
inline bool is_channel(const QuantizedWeight& weight) {
  return !weight.format.group() && weight.format.kind() == Kind::int8;
}

// Smaller magnitudes count as zero: 127 divided by one of them would leave the range of float32.
constexpr float kSmallest = 1e-30f;

inline RowBlocks vector_blocks(const QuantizedLinear& a) {
  return {a.rows, (is_channel(a.weight) ? kMostChannelRows : kMostGroupRows) / a.weight.format.codes_per_input(), true};
}

#if defined(__AVX512F__)

// The largest bits of |x|, in any order of comparison: infinities and NaN are above all numbers.
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

// The codes of a step in one store, because the next load reads all of them.
inline void store_step(std::int8_t* out, const Floats (&x)[4]) {
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
  // packing works in lanes of 128 bits, each of which now has four codes of every vector
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
}

// The sum of each quad of 64 codes.
inline void quad_sums(const std::int8_t* codes, std::int32_t* sums) {
  const __m512i ones = _mm512_set1_epi8(1);
  _mm512_storeu_si512(sums, _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, _mm512_loadu_si512(codes)));
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

inline void store_step(std::int8_t* out, const Floats (&x)[8]) {
  for (int i = 0; i < 8; i += 2) store_codes(out + i * kLanes, x[i], x[i + 1]);
}

inline void quad_sums(const std::int8_t* codes, std::int32_t* sums) {
  const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
  for (int i = 0; i < kStepDepth; i += 32) {
    const __m256i each = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i / 4),
                        _mm256_madd_epi16(_mm256_maddubs_epi16(ones, each), pairs));
  }
}

#endif

inline float from_bits(std::int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr std::int32_t kInfinityBits = 0x7f800000;

constexpr float kHalfBase = 254.0f;  // a code of 16 bits is this times one of 8 bits, plus another

// 64 codes of a row from `x` on, of which `count` exist: the nearest integers to x * factor, ties to even. With `low`
// they are split into two codes.
template <class Element>
void quantize_step(const Element* x, int count, float factor, std::int8_t* out, std::int8_t* low = nullptr) {
  constexpr int kVectors = kStepDepth / kLanes;
  Floats codes[kVectors], rest[kVectors];
  for (int part = 0; part < kVectors; ++part) {
    const int at = part * kLanes, left = count - at;
    codes[part] = left >= kLanes ? load(x + at) : left > 0 ? load_some(x + at, left) : zero();
    codes[part] = mul(codes[part], all(factor));
    if (!low) continue;
    rest[part] = round_even(codes[part]);
    codes[part] = round_even(mul(rest[part], all(1.0f / kHalfBase)));
    rest[part] = sub(rest[part], mul(codes[part], all(kHalfBase)));
  }
  store_step(out, codes);
  if (low) store_step(low, rest);
}

// Quantises one row into one or two rows of codes. `place(half, step, codes)` takes 64 codes, `sum(half, group, value)`
// the sum of the codes of a group.
template <class Element, class Place, class Sum>
float quantize_row(const Element* x, const QuantizedWeight& weight, const Place& place, const Sum& sum) {
  const std::int32_t bits = largest_bits(x, weight.inputs);
  const float largest = from_bits(bits);
  const bool is_finite = bits < kInfinityBits;
  const int halves = weight.format.codes_per_input(), group = weight.group_depth();
  const float most = halves == 1 ? 127.0f : 127.0f * kHalfBase + 126.0f;
  const float factor = is_finite && largest >= kSmallest ? most / largest : 0.0f;
  alignas(64) std::int8_t codes[2][kStepDepth] = {};
  alignas(64) std::int32_t totals[2][kStepDepth / 4] = {};  // of the quads of the steps of a group
  for (int start = 0; start < weight.depth(); start += kStepDepth) {
    const int count = weight.inputs - start;
    if (factor != 0.0f) {
      Element ordered[kStepDepth];
      if (weight.order)
        for (int i = 0; i < kStepDepth && i < count; ++i) ordered[i] = x[weight.order[start + i]];
      quantize_step(weight.order ? ordered : x + start, count, factor, codes[0], halves == 2 ? codes[1] : nullptr);
    }
    for (int half = 0; half < halves; ++half) {
      place(half, start / kStepDepth, codes[half]);
      alignas(64) std::int32_t quads[kStepDepth / 4];
      quad_sums(codes[half], quads);
      for (int quad = 0; quad < kStepDepth / 4; ++quad) totals[half][quad] += quads[quad];
      for (int unit = 0; unit < kStepDepth; unit += weight.unit_depth()) {
        const int end = start + unit + weight.unit_depth();
        if (end % group) continue;
        std::int32_t total = 0;
        for (int quad = unit / 4; quad < (unit + weight.unit_depth()) / 4; ++quad) {
          total += totals[half][quad];
          totals[half][quad] = 0;
        }
        sum(half, end / group - 1, total);
      }
    }
  }
  // NaN makes every column of the row NaN, and no other row
  return !is_finite ? from_bits(0x7fc00000) : factor == 0.0f ? 0.0f : largest / most;
}

// Quantises the rows of a block. 64 codes of code row `row` of the block go to `place(row, step, codes)`.
template <class Element, class Place>
void quantize_rows(const QuantizedLinear& a, int start, int rows, const Place& place) {
  const int halves = a.weight.format.codes_per_input();
  std::int32_t* sums = a.row_sums + static_cast<std::int64_t>(start) * halves * a.weight.num_groups();
  for (int row = 0; row < rows; ++row)
    a.row_scales[start + row] = quantize_row(
        static_cast<const Element*>(a.x) + (start + row) * a.x_stride, a.weight,
        [&](int half, int step, const std::int8_t* codes) { place(row * halves + half, step, codes); },
        [&](int half, int group, std::int32_t total) { sums[(group * rows + row) * halves + half] = total; });
}

template <class Place>
void quantize_block(const QuantizedLinear& a, int start, int rows, const Place& place) {
  a.type == Type::float32 ? quantize_rows<float>(a, start, rows, place) : quantize_rows<bf16>(a, start, rows, place);
}

inline void quantize_vectors(const QuantizedLinear& a, int block) {
  const RowBlocks blocks = vector_blocks(a);
  const int start = blocks.start(block), halves = a.weight.format.codes_per_input(), rows = blocks.size(block) * halves;
  std::int8_t* codes = a.codes + static_cast<std::int64_t>(start) * halves * a.weight.depth();
  quantize_block(a, start, blocks.size(block), [&](int row, int step, const std::int8_t* from) {
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
