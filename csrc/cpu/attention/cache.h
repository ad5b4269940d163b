// Tiles of the cache as operands, and the writing of keys and values into them.
#pragma once

#include <cstddef>

#include "../transpose.h"
#include "arithmetic.h"

namespace octavo {
namespace {

// The low and the high bfloat16 of each 32-bit lane, as float32.
#if defined(__AVX512F__)
inline Floats low_half(Floats x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
inline Floats high_half(Floats x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// Two bfloat16 in each lane, of float32 without lower halves.
inline Floats paired(Floats low, Floats high) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high)));
}
// The first of two bfloat16 in each lane, with zero for the second.
inline Floats first_of_pairs(Floats x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff)));
}
using Codes = __m512i;  // 32-bit lanes
inline Codes load_pairs(const std::uint8_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Codes low_byte(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xff)); }
inline Codes high_byte(Codes x) { return _mm512_srli_epi32(x, 8); }
inline Floats from_int8(Codes x) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24)); }
inline Floats from_e4m3(Codes x) {
  const Codes magnitude = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7f)), 20);
  const Codes sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
  // exponents move from a bias of 7 to one of 127; below 2^-6 there is no hidden bit
  const Floats normal = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(120 << 23)));
  const Floats small = sub(_mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(121 << 23))), all(0.015625f));
  return copy_sign(where_less(normal, all(0.015625f), small, normal), _mm512_castsi512_ps(sign));
}
#else
inline Floats low_half(Floats x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
inline Floats high_half(Floats x) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Floats paired(Floats low, Floats high) {
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low), 16), _mm256_castps_si256(high)));
}
inline Floats first_of_pairs(Floats x) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xffff)));
}
using Codes = __m256i;
inline Codes load_pairs(const std::uint8_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Codes low_byte(Codes x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xff)); }
inline Codes high_byte(Codes x) { return _mm256_srli_epi32(x, 8); }
inline Floats from_int8(Codes x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24), 24)); }
inline Floats from_e4m3(Codes x) {
  const Codes magnitude = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7f)), 20);
  const Codes sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
  const Floats normal = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(120 << 23)));
  const Floats small = sub(_mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(121 << 23))), all(0.015625f));
  return copy_sign(where_less(normal, all(0.015625f), small, normal), _mm256_castsi256_ps(sign));
}
#endif

// Pairs that are two units of float32, widened where they are used.
template <Type Stored>
struct Pairs {
  static constexpr int kBytes = Stored == Type::bfloat16 ? 64 : 32, kUnits = 2;
  static void read(const std::uint8_t* p, Floats (&units)[2]) {
    if constexpr (Stored == Type::bfloat16) {
      const Floats both = load(reinterpret_cast<const float*>(p));
      units[0] = low_half(both), units[1] = high_half(both);
    } else {
      const Codes both = load_pairs(p);
      constexpr bool kIsInteger = Stored == Type::int8;
      units[0] = kIsInteger ? from_int8(low_byte(both)) : from_e4m3(low_byte(both));
      units[1] = kIsInteger ? from_int8(high_byte(both)) : from_e4m3(high_byte(both));
    }
  }
};

// Sixteen pairs as float32, the first of each pair to `even`, the second to `odd`.
template <Type Stored>
inline void split_pairs(const std::uint8_t* pairs, float* even, float* odd) {
  for (int i = 0; i < 16; i += kLanes) {
    Floats both[2];
    Pairs<Stored>::read(pairs + i / kLanes * kVectorBytes<Pairs<Stored>>, both);
    store(even + i, both[0]);
    store(odd + i, both[1]);
  }
}

// A tile in pairs as operands of float32 products; the data that is read next is `ahead` bytes further. Latents have no
// `values`.
template <Type Stored>
inline void widen_tile(const std::uint8_t* keys, const std::uint8_t* values, std::ptrdiff_t ahead, int dim, int valid,
                       Float32Products, float* key_units, float* value_units) {
  constexpr int kStep = Pairs<Stored>::kBytes;
  for (int pair = 0; pair < dim / 2; ++pair) {
    bring(keys + pair * kStep + ahead);
    split_pairs<Stored>(keys + pair * kStep, key_units + 2 * pair * kTileKeys, key_units + (2 * pair + 1) * kTileKeys);
  }
  for (int pair = 0; values && 2 * pair < valid; ++pair)
    for (int i = 0; i < dim; i += 16) {
      const std::uint8_t* piece = values + (pair * dim + i) / 16 * kStep;
      bring(piece + ahead);
      split_pairs<Stored>(piece, value_units + 2 * pair * dim + i, value_units + (2 * pair + 1) * dim + i);
    }
}

#if defined(__AVX512BF16__)
// 32 codes as bfloat16, exactly.
template <Type Stored>
inline __m512i widen_codes(const std::uint8_t* p) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (Stored == Type::int8) {
    const Floats low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    const Floats high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  } else {
    // m * 2^-9 for the codes 0 to 7, which have no hidden bit
    const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i wide = _mm512_cvtepu8_epi16(codes);
    const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(value, sign);
  }
}

// Sixteen pairs of 8-bit codes, widened where they are used.
template <Type Stored>
struct Codes8 {
  static constexpr int kBytes = 32, kUnits = 1;
  static void read(const std::uint8_t* p, Floats (&units)[1]) { units[0] = _mm512_castsi512_ps(widen_codes<Stored>(p)); }
};

template <Type Stored>
inline void widen_tile(const std::uint8_t* keys, const std::uint8_t* values, std::ptrdiff_t ahead, int dim, int valid,
                       Bfloat16Products, float* key_units, float* value_units) {
  const auto widen = [&](const std::uint8_t* codes, float* units, int count) {
    for (int i = 0; i < count; i += 16) {
      bring(codes + 2 * i + ahead);
      _mm512_storeu_si512(units + i, widen_codes<Stored>(codes + 2 * i));
    }
  };
  widen(keys, key_units, dim / 2 * kTileKeys);
  if (values) widen(values, value_units, (valid + 1) / 2 * dim);
}
#endif

// Values of latents, [units][dim], from the first `dim` elements of the keys of a tile.
inline void turn_tile(const float* keys, int dim, Float32Products, float* values) {
  Floats square[kLanes];
  for (int first = 0; first < kTileKeys; first += kLanes)
    for (int i = 0; i < dim; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) square[j] = load(keys + (i + j) * kTileKeys + first);
      transpose(square);
      for (int j = 0; j < kLanes; ++j) store(values + (first + j) * dim + i, square[j]);
    }
}

#if defined(__AVX512BF16__)
inline void turn_tile(const float* keys, int dim, Bfloat16Products, float* values) {
  __m512i low, high;  // elements of one key and of the next by turns
  for (int i = 0; i < 32; ++i) {
    reinterpret_cast<std::uint16_t*>(&low)[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 32);
    reinterpret_cast<std::uint16_t*>(&high)[i] = static_cast<std::uint16_t>(16 + i / 2 + i % 2 * 32);
  }
  Floats square[16];
  for (int i = 0; i < dim; i += 32) {
    const int units = dim - i < 32 ? 8 : 16;
    for (int j = 0; j < 16; ++j) square[j] = j < units ? load(keys + (i / 2 + j) * kTileKeys) : zero();
    transpose(square);
    for (int key = 0; key < kTileKeys; key += 2) {
      const __m512i one = _mm512_castps_si512(square[key]), other = _mm512_castps_si512(square[key + 1]);
      float* row = values + key / 2 * dim + i;
      _mm512_storeu_si512(row, _mm512_permutex2var_epi16(one, low, other));
      if (units == 16) _mm512_storeu_si512(row + 16, _mm512_permutex2var_epi16(one, high, other));
    }
  }
}
#endif

// 8-bit codes of a row, and their scale: x is about code * scale. The scale of a row that is not finite
// is NaN, so that every product with it is NaN.
inline float quantize_row(const float* x, int dim, bool is_integer, std::uint8_t* codes) {
  Floats largest = zero(), nothing = zero();
  for (int i = 0; i < dim; i += kLanes) {
    largest = maximum(largest, absolute(load(x + i)));
    nothing = fma(load(x + i), zero(), nothing);
  }
  const float top = is_integer ? 127.0f : 448.0f;
  const float amplitude = maximum_of(largest);
  const float factor = amplitude > 0.0f ? top / amplitude : 0.0f;
  for (int i = 0; i < dim; ++i) {
    const float y = x[i] * factor;
    if (is_integer) {
      codes[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(__builtin_nearbyintf(y)));
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &y, sizeof bits);
      const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
      // to three bits of mantissa, ties to even; below 2^-6 a sum with 2^14 counts steps of 2^-9 the same way
      const std::uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
      const float shifted = __builtin_fabsf(y) + 16384.0f;
      std::uint32_t small;
      std::memcpy(&small, &shifted, sizeof small);
      codes[i] = static_cast<std::uint8_t>(sign | (magnitude < 0x3c800000u ? small & 0x7fu : normal & 0x7fu));
    }
  }
  return amplitude / top + sum_of(nothing);
}

// One key into column `key` of a tile's keys, one value into its row of the values; `v` is null for latents.
inline void write_row(const Attention& a, const float* k, const float* v, std::uint8_t* tile, int key) {
  const int dim = a.layout.padded_dim;
  std::uint8_t* values = tile + a.layout.side_bytes;
  if (a.cache_type == Type::float32) {
    for (int i = 0; i < dim; ++i) reinterpret_cast<float*>(tile)[i * kTileKeys + key] = k[i];
    if (v) std::memcpy(values + sizeof(float) * key * dim, v, sizeof(float) * dim);
    return;
  }
  const std::int64_t first_value = static_cast<std::int64_t>(key / 2) * dim * 2 + key % 2;
  if (a.cache_type == Type::bfloat16) {
    alignas(64) bf16 row[kMostDim];
    for (int i = 0; i < dim; i += kLanes) store(row + i, load(k + i));
    for (int i = 0; i < dim; i += 2) std::memcpy(tile + (i * kTileKeys + 2 * key) * sizeof(bf16), row + i, 2 * sizeof(bf16));
    if (!v) return;
    for (int i = 0; i < dim; i += kLanes) store(row + i, load(v + i));
    bf16* target = reinterpret_cast<bf16*>(values) + first_value;
    for (int i = 0; i < dim; ++i) target[2 * i] = row[i];
    return;
  }
  alignas(64) std::uint8_t codes[kMostDim];
  float* scales = reinterpret_cast<float*>(tile + a.layout.sides * a.layout.side_bytes);
  scales[key] = quantize_row(k, dim, a.cache_type == Type::int8, codes);
  for (int i = 0; i < dim; i += 2) std::memcpy(tile + i * kTileKeys + 2 * key, codes + i, 2);
  if (!v) return;
  scales[kTileKeys + key] = quantize_row(v, dim, a.cache_type == Type::int8, codes);
  for (int i = 0; i < dim; ++i) values[first_value + 2 * i] = codes[i];
}

inline void load_row(const void* base, std::int64_t first, Type type, int dim, float* row) {
  const auto copy = [&](const auto* x) {
    for_vectors(dim, [&](int i, int count) { store(row + i, load_some(x + i, count)); });
  };
  type == Type::float32 ? copy(static_cast<const float*>(base) + first) : copy(static_cast<const bf16*>(base) + first);
}

inline std::uint8_t* tile_at(const Attention& a, std::int64_t block, int kv_head, int offset) {
  return a.cache + block * a.block_stride + static_cast<std::int64_t>(kv_head) * a.layout.head_bytes +
         offset / kTileKeys * a.layout.tile_bytes;
}

// Keys of a tile, of which a row has pairs that are units: [kTileKeys] rows, `stride` elements apart.
void lay_keys(const bf16* keys, int stride, int dim, float* units) {
  for (int first = 0; first < kTileKeys; first += kLanes)
    for (int unit = 0; unit < dim / 2; unit += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load_bits(keys + (first + i) * stride + 2 * unit);
      transpose(square);
      for (int i = 0; i < kLanes && unit + i < dim / 2; ++i) store(units + (unit + i) * kTileKeys + first, square[i]);
    }
}

// The same of float32, where `dim` is a multiple of 16.
void lay_keys(const float* keys, int stride, int dim, float* units) {
  for (int first = 0; first < kTileKeys; first += kLanes)
    for (int i = 0; i < dim; i += kLanes) {
      Floats square[kLanes];
      for (int j = 0; j < kLanes; ++j) square[j] = load(keys + (first + j) * stride + i);
      transpose(square);
      for (int j = 0; j < kLanes; ++j) store(units + (i + j) * kTileKeys + first, square[j]);
    }
}

// Values of a tile, rows likewise.
void lay_values(const bf16* values, int stride, int dim, float* units) {
  for (int pair = 0; pair < kTileKeys / 2; ++pair)
    for (int i = 0; i < dim; i += kLanes) {
      const bf16* value = values + 2 * pair * stride + i;
      store(units + pair * dim + i, paired(load(value), load(value + stride)));
    }
}

void lay_values(const float* values, int stride, int dim, float* units) {
  for (int key = 0; key < kTileKeys; ++key) std::memcpy(units + key * dim, values + key * stride, sizeof(float) * dim);
}

template <class Element>
void gather_tiles_of(const Attention& a, const GatheredRows& rows, std::uint8_t* tiles) {
  const int dim = a.layout.padded_dim, stride = (dim + 31) / 32 * 32;
  constexpr Type kType = sizeof(Element) == sizeof(float) ? Type::float32 : Type::bfloat16;
  alignas(64) Element sides[2][kTileKeys * kMostDim];
  alignas(64) float row[kMostDim + kLanes] = {};
  for (int side = 0; side < a.layout.sides; ++side) std::memset(sides[side], 0, sizeof(Element) * kTileKeys * stride);
  const auto take = [&](const std::uint8_t* from, Element* to) {
    if (rows.type == kType) {
      std::memcpy(to, from, sizeof(Element) * a.dim);
      return;
    }
    load_row(from, 0, rows.type, a.dim, row);
    for (int i = 0; i < dim; i += kLanes) store(to + i, load(row + i));
  };
  for (int first = 0; first < rows.count; first += kTileKeys) {
    const int own = rows.count - first < kTileKeys ? rows.count - first : kTileKeys;
    std::uint8_t* tile = tiles + first / kTileKeys * static_cast<std::int64_t>(a.layout.tile_bytes);
    for (int side = 0; side < a.layout.sides; ++side) {
      for (int key = 0; key < own; ++key)
        take(static_cast<const std::uint8_t*>(rows.places[first + key]) + rows.begin + side * rows.value_bytes, sides[side] + key * stride);
      std::memset(sides[side] + own * stride, 0, sizeof(Element) * (kTileKeys - own) * stride);
    }
    lay_keys(sides[0], stride, dim, reinterpret_cast<float*>(tile));
    if (a.layout.sides == 2) lay_values(sides[1], stride, dim, reinterpret_cast<float*>(tile + a.layout.side_bytes));
  }
}

// Of float32 and bfloat16.
void gather_tiles(const Attention& a, const GatheredRows& rows, std::uint8_t* tiles) {
  a.cache_type == Type::float32 ? gather_tiles_of<float>(a, rows, tiles) : gather_tiles_of<bf16>(a, rows, tiles);
}

// Keys and values in bfloat16 that fill a tile, from token `token` on, in vectors instead of element by element.
void write_tile(const Attention& a, int kv_head, int token, std::uint8_t* tile) {
  const int dim = a.layout.padded_dim, stride = (dim + 31) / 32 * 32;
  alignas(64) bf16 keys[kTileKeys * kMostDim], values[kTileKeys * kMostDim];
  alignas(64) float row[kMostDim] = {};
  const auto take = [&](const void* base, std::int64_t base_stride, bf16* rows) {
    for (int key = 0; key < kTileKeys; ++key) {
      load_row(base, (token + key) * base_stride + static_cast<std::int64_t>(kv_head) * a.dim, a.type, a.dim, row);
      for (int i = 0; i < dim; i += kLanes) store(rows + key * stride + i, load(row + i));
    }
  };
  take(a.k, a.k_stride, keys);
  take(a.v, a.v_stride, values);
  lay_keys(keys, stride, dim, reinterpret_cast<float*>(tile));
  lay_values(values, stride, dim, reinterpret_cast<float*>(tile + a.layout.side_bytes));
}

bool fills_tile(const Attention& a, int token, int end) {
  if (end - token < kTileKeys || a.slots[token] % kTileKeys != 0) return false;
  for (int i = 1; i < kTileKeys; ++i)
    if (a.slots[token + i] != a.slots[token] + i) return false;
  return true;
}

void write_tokens(const Attention& a, int kv_head, int begin, int end) {
  alignas(64) float k[kMostDim + kLanes] = {}, v[kMostDim] = {};
  for (int token = begin; token < end; ++token) {
    if (a.cache_type == Type::bfloat16 && a.v && fills_tile(a, token, end)) {
      const std::int64_t slot = a.slots[token];
      write_tile(a, kv_head, token, tile_at(a, slot / a.block_size, kv_head, static_cast<int>(slot % a.block_size)));
      token += kTileKeys - 1;
      continue;
    }
    const std::int64_t first = static_cast<std::int64_t>(kv_head) * a.value_dim;
    load_row(a.k, token * a.k_stride + first, a.type, a.value_dim, k);
    if (a.v) load_row(a.v, token * a.v_stride + first, a.type, a.dim, v);
    else load_row(a.tails.k, token * a.tails.k_stride, a.type, a.dim - a.value_dim, k + a.value_dim);
    const std::int64_t block = a.slots[token] / a.block_size;
    const int offset = static_cast<int>(a.slots[token] % a.block_size);
    write_row(a, k, a.v ? v : nullptr, tile_at(a, block, kv_head, offset), offset % kTileKeys);
  }
}

}  // namespace
}  // namespace octavo
