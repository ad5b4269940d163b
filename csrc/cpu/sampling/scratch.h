// Scratch memory for sampling a row of logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling.h"

namespace octavo {

inline int blocks_of(int count) { return (count + kBlock - 1) / kBlock; }
inline int slices_of(int count) { return (count + kSlice - 1) / kSlice; }

// Scratch for a row, reused for the next one.
class SamplingScratch {
 public:
  static constexpr int kMostBits = 11;  // of a key that one pass of a selection settles
  static constexpr int kBins = 1 << kMostBits;

  static std::size_t bytes(int vocab) {
    const std::size_t all = kBins * sizeof(std::uint64_t) + slices_of(vocab) * (sizeof(double) + sizeof(Winner)) +
                            sizeof(float) * (blocks_of(vocab) + 5 * room(vocab));
    return (all + 63) / 64 * 64;
  }

  SamplingScratch(void* memory, int vocab) {
    auto* next = static_cast<char*>(memory);
    const auto take = [&]<class T>(T*& array, std::size_t count) {
      array = reinterpret_cast<T*>(next);
      next += count * sizeof(T);
    };
    take(histogram, kBins);
    take(sums, slices_of(vocab));
    take(winners, slices_of(vocab));
    take(maxima, blocks_of(vocab));
    take(tokens, room(vocab));
    take(scaled, room(vocab));
    take(weights, room(vocab));
    take(narrowed, room(vocab));
    take(narrowed_weights, room(vocab));
  }

  std::uint64_t* histogram;
  double* sums;      // per slice
  Winner* winners;   // per slice
  float* maxima;     // per block
  int* tokens;       // candidates, and the next two with them
  float* scaled;
  float* weights;
  float* narrowed;   // some of the candidates
  float* narrowed_weights;

 private:
  static std::size_t room(int vocab) { return vocab + kBlock; }
};

}  // namespace octavo
