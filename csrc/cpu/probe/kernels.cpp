// Reads and arithmetic at the speed of the hardware, compiled once per level.
#include "probe.h"

#include "../vector.h"

namespace octavo {
namespace {

// Enough independent sums to hide the latency of every instruction below, few enough for sixteen registers.
constexpr int kSums = 12;

// Makes the compiler assume that `x` is read, because it would drop the work otherwise.
#if defined(__AVX512F__)
#define OCTAVO_TOUCH(x) asm volatile("" : : "v"(x))
#else
#define OCTAVO_TOUCH(x) asm volatile("" : : "x"(x))
#endif

// Repeats `step(sum)` over all sums until `count` operations are done, `each` of them in one step.
template <class Sum, class Step>
std::int64_t repeat(Sum start, std::int64_t each, std::int64_t count, const Step& step) {
  Sum sums[kSums];
  for (Sum& sum : sums) sum = start;
  std::int64_t done = 0;
  for (; done < count; done += each * kSums) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      sums[i] = step(sums[i]);
      OCTAVO_TOUCH(sums[i]);
    }
  }
  return done;
}

std::int64_t compute_float32(std::int64_t count) {
  const Floats x = all(1.0f), y = all(1e-9f);
  return repeat(all(1e-8f), 2 * kLanes, count, [&](Floats sum) { return fma(x, y, sum); });
}

#if defined(__AVX512F__)
using Integers = __m512i;

Integers load_bits(const char* p) { return _mm512_load_si512(p); }
Integers either(Integers a, Integers b) { return _mm512_or_si512(a, b); }
std::int64_t number(Integers x) { return _mm512_reduce_or_epi64(x); }

std::int64_t compute_int8(std::int64_t count) {
  const __m512i ones = _mm512_set1_epi8(1);
  return repeat(ones, 128, count, [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, ones, ones); });
}
#else
using Integers = __m256i;

Integers load_bits(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
Integers either(Integers a, Integers b) { return _mm256_or_si256(a, b); }
std::int64_t number(Integers x) {
  const __m128i half = _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return _mm_extract_epi64(half, 0) | _mm_extract_epi64(half, 1);
}

// Without dot-product instructions for bytes: vpmaddubsw, vpmaddwd and an addition.
std::int64_t compute_int8(std::int64_t count) {
  const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
  return repeat(ones, 64, count, [&](__m256i sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, sum), pairs));
  });
}
#endif

#if defined(__AVX512BF16__)
std::int64_t compute_bfloat16(std::int64_t count) {
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  return repeat(_mm512_setzero_ps(), 64, count, [&](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
}
#else
std::int64_t compute_bfloat16(std::int64_t) { return 0; }
#endif

#if defined(__AMX_TILE__)
struct alignas(64) WholeTiles {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// static: the intrinsic names eight of the 64 bytes, and the compiler drops stores into the others
const WholeTiles kWholeTiles;

// Four sums from two tiles on either side, as in a matrix product.
template <class Step>
std::int64_t repeat_tiles(std::int64_t each, std::int64_t count, const Step& step) {
  _tile_loadconfig(&kWholeTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  std::int64_t done = 0;
  for (; done < count; done += 4 * each) step();
  _tile_release();
  return done;
}

std::int64_t compute_tiles_bfloat16(std::int64_t count) {
  return repeat_tiles(2 * 16 * 16 * 32, count, [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  });
}

std::int64_t compute_tiles_int8(std::int64_t count) {
  return repeat_tiles(2 * 16 * 16 * 64, count, [] {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  });
}
#else
std::int64_t compute_tiles_bfloat16(std::int64_t) { return 0; }
std::int64_t compute_tiles_int8(std::int64_t) { return 0; }
#endif

std::int64_t compute(Arithmetic kind, std::int64_t count) {
  switch (kind) {
    case Arithmetic::float32: return compute_float32(count);
    case Arithmetic::bfloat16: return compute_bfloat16(count);
    case Arithmetic::int8: return compute_int8(count);
    case Arithmetic::tiles_bfloat16: return compute_tiles_bfloat16(count);
    case Arithmetic::tiles_int8: return compute_tiles_int8(count);
  }
  return 0;
}

std::int64_t read(const void* from, std::int64_t bytes) {
  constexpr int kAtOnce = 8, kBytes = sizeof(Integers);
  const char* p = static_cast<const char*>(from);
  Integers found[kAtOnce];
  for (Integers& each : found) each = load_bits(p);
  for (std::int64_t i = 0; i < bytes; i += kAtOnce * kBytes) {
#pragma GCC unroll 8
    for (int k = 0; k < kAtOnce; ++k) found[k] = either(found[k], load_bits(p + i + k * kBytes));
  }
  for (int k = 1; k < kAtOnce; ++k) found[0] = either(found[0], found[k]);
  return number(found[0]);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const ProbeKernels probe_table;
const ProbeKernels probe_table = {read, compute};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
