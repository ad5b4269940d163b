// Several streams of a token beside each other, and gates that few pass: octavo/ops/streams.py.
#pragma once

#include "../types.h"

namespace octavo {

constexpr int kMostStreams = 8;

// The numbers are part of the Python interface.
enum class StreamFunction : int { predicted = 0, corrected = 1, added = 2, spread = 3, mean = 4, largest_gates = 5 };

// Tensors of `type`: rows of the parts lie `strides` elements apart, those of out, states and weight are dense.
struct Streams {
  StreamFunction function;
  const void* parts[kMostStreams];  // the streams [rows, count * dim] and another tensor [rows, dim]; spread, mean: each stream
  std::int64_t strides[kMostStreams];
  const float* states;              // [rows, count]; predicted, corrected
  const void* weight;               // [count * count, count] or [count, count]; likewise
  void* out;
  int count, dim;
  int active;        // the stream that a layer has computed; corrected
  float deviations;  // that a gate must exceed the mean by; largest_gates
  Type type;
};

struct StreamKernels {
  // Rows [begin, end).
  void (*streams)(const Streams&, int begin, int end);
};

const StreamKernels& stream_kernels(Level level);

}  // namespace octavo
