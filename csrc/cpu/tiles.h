// Tiles: eight registers of up to 16 rows of 64 bytes, and the products between them.
//
// Level `amx` runs the instructions. With OCTAVO_EMULATE_TILES the same code runs a software model of them, written after
// the operation sections of Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TDPBF16PS, TDPBSSD, TDPBUSD, TDPBSUD), for machines that have no tiles.
//
// Included only by units of these two levels; everything lives in an unnamed namespace, as in vector.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace octavo {
namespace {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

constexpr int kStepBytes = 2 * kTileBytes;  // a step of a panel of weights: two tiles side by side

// How many rows each of the eight tiles has, and how many bytes a row has. Every tile must have at least one of each.
//
// In a product C[rows, columns] += A[rows, depth] · B[depth, columns], with `lanes` elements side by side in 32 bits (2
// of bfloat16, 4 of 8 bits): C has `rows` rows of 4·columns bytes, A `rows` of 4·(depth / lanes), and B, whose 32-bit
// lanes hold elements of one column, depth / lanes rows of 4·columns. The time of a product depends on the rows.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  constexpr void set(int tile, int tile_rows, int tile_row_bytes = kTileRowBytes) {
    rows[tile] = static_cast<std::uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(tile_row_bytes);
  }

  static constexpr TileShapes full() {
    TileShapes shapes;
    for (int tile = 0; tile < kTiles; ++tile) shapes.set(tile, kTileRows);
    return shapes;
  }

  // Tiles 0 to 3 are C (top left, top right, bottom left, bottom right), 4 and 5 are A (top, bottom), 6 and 7 are B
  // (left, right): two by two blocks, with fewer rows at the lower end of a matrix. No rows count as one. `depth_bytes` is
  // what a row of A has.
  static constexpr TileShapes two_by_two(int top_rows, int bottom_rows, int depth_bytes = kTileRowBytes) {
    TileShapes shapes = full();
    const int top = top_rows > 0 ? top_rows : 1, bottom = bottom_rows > 0 ? bottom_rows : 1;
    for (const int tile : {0, 1}) shapes.set(tile, top);
    for (const int tile : {2, 3}) shapes.set(tile, bottom);
    shapes.set(4, top, depth_bytes), shapes.set(5, bottom, depth_bytes);
    for (const int tile : {6, 7}) shapes.set(tile, depth_bytes / 4);
    return shapes;
  }
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(OCTAVO_EMULATE_TILES)

// The tiles of this thread, from construction to destruction. Shapes belong to a thread: a task makes its own.
//
// Assembly rather than intrinsics: those of gcc 12 take no template parameters, and the one that loads shapes names 8 of
// the 64 bytes that are read, so that stores to the others may be dropped.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { configure(shapes); }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Other shapes; all tiles become zero.
  void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

  template <int kTile>
  void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // Rows lie `stride` bytes apart.
  template <int kTile>
  void load(const void* from, std::ptrdiff_t stride = kTileRowBytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  // Likewise, past the first-level cache: for operands that come from the second level, whose lines would only evict each
  // other in the first (a quarter faster where both operands do).
  template <int kTile>
  void load_past(const void* from, std::ptrdiff_t stride = kTileRowBytes) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile>
  void store(void* to, std::ptrdiff_t stride = kTileRowBytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  // float32 C += bfloat16 A · bfloat16 B
  template <int kC, int kA, int kB>
  void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  // int32 C += int8 A · int8 B
  template <int kC, int kA, int kB>
  void dot_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  // int32 C += uint8 A · int8 B
  template <int kC, int kA, int kB>
  void dot_unsigned_signed() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  // int32 C += int8 A · uint8 B
  template <int kC, int kA, int kB>
  void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

#else

// The model. What the processor refuses with an exception (no rows, operands whose shapes do not fit) ends the process.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { configure(shapes); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void configure(const TileShapes& shapes) {
    expect(shapes.palette == 1 && shapes.start_row == 0);
    for (int tile = 0; tile < kTiles; ++tile)
      expect(shapes.rows[tile] <= kTileRows && shapes.row_bytes[tile] <= kTileRowBytes);
    shapes_ = shapes;
    std::memset(bytes_, 0, sizeof bytes_);
  }

  template <int kTile>
  void clear() {
    expect_used(kTile);
    std::memset(bytes_[kTile], 0, kTileBytes);
  }

  template <int kTile>
  void load(const void* from, std::ptrdiff_t stride = kTileRowBytes) {
    clear<kTile>();
    for (int row = 0; row < shapes_.rows[kTile]; ++row)
      std::memcpy(bytes_[kTile][row], static_cast<const char*>(from) + row * stride, shapes_.row_bytes[kTile]);
  }

  template <int kTile>
  void load_past(const void* from, std::ptrdiff_t stride = kTileRowBytes) {
    load<kTile>(from, stride);
  }

  template <int kTile>
  void store(void* to, std::ptrdiff_t stride = kTileRowBytes) {
    expect_used(kTile);
    for (int row = 0; row < shapes_.rows[kTile]; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, bytes_[kTile][row], shapes_.row_bytes[kTile]);
  }

  // Even and odd elements of the pairs are summed apart, from zero; their sum is added to C. Every operation rounds to
  // nearest even and treats denormal numbers, read or computed, as zero.
  template <int kC, int kA, int kB>
  void dot_bf16() {
    expect_fitting(kC, kA, kB);
    const unsigned int state = _mm_getcsr();
    constexpr unsigned int kMaskedNearestFlushing = 0x9fc0;
    _mm_setcsr(kMaskedNearestFlushing);
    asm volatile("" : : "r"(this) : "memory");  // what follows reads and writes through memory: it stays in between
    for (int row = 0; row < shapes_.rows[kC]; ++row) {
      __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      for (int k = 0; k < shapes_.row_bytes[kA] / 4; ++k) {
        const __m512i a = _mm512_set1_epi32(lane(kA, row, k));
        const __m512i b = _mm512_load_si512(bytes_[kB][k]);
        even = _mm512_fmadd_ps(low(a), low(b), even);
        odd = _mm512_fmadd_ps(high(a), high(b), odd);
      }
      float* const c = reinterpret_cast<float*>(bytes_[kC][row]);
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(c), _mm512_add_ps(even, odd));
      _mm512_mask_store_ps(c, columns(kC), sum);
    }
    asm volatile("" : : "r"(this) : "memory");
    _mm_setcsr(state);
  }

  template <int kC, int kA, int kB>
  void dot_signed() {
    dot_bytes<std::int8_t, std::int8_t>(kC, kA, kB);
  }

  template <int kC, int kA, int kB>
  void dot_unsigned_signed() {
    dot_bytes<std::uint8_t, std::int8_t>(kC, kA, kB);
  }

  template <int kC, int kA, int kB>
  void dot_signed_unsigned() {
    dot_bytes<std::int8_t, std::uint8_t>(kC, kA, kB);
  }

 private:
  static void expect(bool fulfilled) {
    if (!fulfilled) __builtin_trap();
  }
  void expect_used(int tile) const { expect(shapes_.rows[tile] > 0 && shapes_.row_bytes[tile] > 0); }
  void expect_fitting(int c, int a, int b) const {
    for (const int tile : {c, a, b}) expect_used(tile);
    expect(c != a && c != b && a != b);
    expect(shapes_.row_bytes[c] % 4 == 0 && shapes_.row_bytes[a] % 4 == 0);
    expect(shapes_.rows[c] == shapes_.rows[a] && shapes_.row_bytes[c] == shapes_.row_bytes[b]);
    expect(shapes_.row_bytes[a] / 4 == shapes_.rows[b]);
  }
  __mmask16 columns(int tile) const { return static_cast<__mmask16>((1u << (shapes_.row_bytes[tile] / 4)) - 1u); }
  int lane(int tile, int row, int k) const {
    int value;
    std::memcpy(&value, bytes_[tile][row] + 4 * k, sizeof value);
    return value;
  }
  static __m512 low(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static __m512 high(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // 32-bit sums that wrap.
  template <class Left, class Right>
  void dot_bytes(int c, int a, int b) {
    expect_fitting(c, a, b);
    for (int row = 0; row < shapes_.rows[c]; ++row)
      for (int k = 0; k < shapes_.row_bytes[a] / 4; ++k)
        for (int column = 0; column < shapes_.row_bytes[c] / 4; ++column) {
          std::uint32_t sum;
          std::memcpy(&sum, bytes_[c][row] + 4 * column, sizeof sum);
          for (int i = 0; i < 4; ++i)
            sum += static_cast<std::uint32_t>(static_cast<int>(static_cast<Left>(bytes_[a][row][4 * k + i])) *
                                              static_cast<Right>(bytes_[b][k][4 * column + i]));
          std::memcpy(bytes_[c][row] + 4 * column, &sum, sizeof sum);
        }
  }

  TileShapes shapes_;
  alignas(64) unsigned char bytes_[kTiles][kTileRows][kTileRowBytes];
};

#endif

}  // namespace
}  // namespace octavo
