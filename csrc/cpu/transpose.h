// Transposes squares of 32-bit lanes: vector j of the result has lane j of every vector. Bits do not change.
#pragma once

#include "vector.h"

namespace octavo {
namespace {

#if defined(__AVX512F__)
inline void transpose(Floats (&x)[16]) {
  Floats y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  // x[4 g + j]: of the rows 4 g to 4 g + 3, the lanes j, j + 4, j + 8, j + 12
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm512_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const Floats low_even = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), low_odd = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
    const Floats high_even = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    const Floats high_odd = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
    y[8 + j] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
    y[4 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    y[12 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}
inline Floats load_bits(const void* bits) { return _mm512_loadu_ps(bits); }
#else
inline void transpose(Floats (&x)[8]) {
  Floats y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  // x[4 g + j]: of the rows 4 g to 4 g + 3, the lanes j and j + 4
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}
inline Floats load_bits(const void* bits) { return _mm256_loadu_ps(static_cast<const float*>(bits)); }
#endif

}  // namespace
}  // namespace octavo
