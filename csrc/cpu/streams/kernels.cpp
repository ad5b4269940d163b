// Streams of a token, compiled once per level.
#include "streams.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

constexpr float kLeastSquare = 1e-5f;  // what the mean square of a stream counts as at least

// Outputs of a small weight [outputs, count].
template <class Element>
void products(const float* states, const Element* weight, int count, int outputs, float* out) {
  for (int i = 0; i < outputs; ++i) {
    out[i] = states[0] * to_float(weight[i * count]);
    for (int k = 1; k < count; ++k) out[i] += states[k] * to_float(weight[i * count + k]);
  }
}

template <class Element>
void predict(const Streams& a, const Element* x, const float* states, Element* out) {
  float factors[kMostStreams * kMostStreams];
  products(states, static_cast<const Element*>(a.weight), a.count, a.count * a.count, factors);
  for_vectors(a.dim, [&](int i, int count) {
    Floats streams[kMostStreams];
    for (int j = 0; j < a.count; ++j) streams[j] = load_some(x + j * a.dim + i, count);
    for (int j = 0; j < a.count; ++j) {
      Floats total = streams[j];
      for (int k = 0; k < a.count; ++k) total = fma(all(factors[j * a.count + k]), streams[k], total);
      store_some(out + j * a.dim + i, total, count);
    }
  });
}

template <class Element>
void correct(const Streams& a, const Element* x, const Element* computed, const float* states, Element* out) {
  float shares[kMostStreams];
  products(states, static_cast<const Element*>(a.weight), a.count, a.count, shares);
  for_vectors(a.dim, [&](int i, int count) {
    const Floats change = sub(load_some(computed + i, count), load_some(x + a.active * a.dim + i, count));
    for (int j = 0; j < a.count; ++j)
      store_some(out + j * a.dim + i, fma(all(shares[j] + 1.0f), change, load_some(x + j * a.dim + i, count)), count);
  });
}

template <class Element>
void add_to_others(const Streams& a, const Element* x, const Element* y, Element* out) {
  for_vectors(a.dim, [&](int i, int count) {
    const Floats more = load_some(y + i, count);
    store_some(out + i, load_some(x + i, count), count);
    for (int j = 1; j < a.count; ++j)
      store_some(out + j * a.dim + i, add(load_some(x + j * a.dim + i, count), more), count);
  });
}

template <class Element>
float size_of(const Element* x, int dim, float least) {
  const float mean = sum_of_squares(x, dim) / static_cast<float>(dim);
  return std::sqrt(mean < least ? least : mean);
}

// The factors that bring each stream to the size of the first.
template <class Element>
void factors_of(const Streams& a, const Element* const* x, float* factors) {
  const float size = size_of(x[0], a.dim, 0.0f);
  factors[0] = 1.0f;
  for (int j = 1; j < a.count; ++j) factors[j] = size / size_of(x[j], a.dim, kLeastSquare);
}

template <class Element>
void spread(const Streams& a, const Element* const* x, Element* out) {
  float factors[kMostStreams];
  factors_of(a, x, factors);
  for (int j = 0; j < a.count; ++j)
    for_vectors(a.dim, [&](int i, int count) {
      store_some(out + j * a.dim + i, mul(load_some(x[j] + i, count), all(factors[j])), count);
    });
}

template <class Element>
void mean(const Streams& a, const Element* const* x, Element* out) {
  float factors[kMostStreams];
  factors_of(a, x, factors);
  const Floats number = all(static_cast<float>(a.count));
  for_vectors(a.dim, [&](int i, int count) {
    Floats total = load_some(x[0] + i, count);
    for (int j = 1; j < a.count; ++j) total = fma(load_some(x[j] + i, count), all(factors[j]), total);
    store_some(out + i, div(total, number), count);
  });
}

template <class Element>
void largest_gates(const Streams& a, const Element* x, Element* out) {
  const float width = static_cast<float>(a.dim);
  const float mean = sum_over(a.dim, [&](Floats total, int i, int count) { return add(total, load_some(x + i, count)); }) / width;
  const float squares = sum_over(a.dim, [&](Floats total, int i, int count) {
    // lanes beyond the row are zero, not at the mean
    const Floats centred = first_lanes(sub(load_some(x + i, count), all(mean)), count);
    return fma(centred, centred, total);
  });
  const Floats cut = all(mean + std::sqrt(squares / width) * a.deviations);
  for_vectors(a.dim, [&](int i, int count) {
    const Floats over = sub(load_some(x + i, count), cut);
    store_some(out + i, where_less(over, zero(), zero(), over), count);  // NaN stays
  });
}

template <class Element>
void streams_of(const Streams& a, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const Element* x[kMostStreams];
    for (int j = 0; j < kMostStreams; ++j) x[j] = static_cast<const Element*>(a.parts[j]) + row * a.strides[j];
    const float* states = a.states + static_cast<std::int64_t>(row) * a.count;
    const bool is_single = a.function == StreamFunction::mean || a.function == StreamFunction::largest_gates;
    Element* out = static_cast<Element*>(a.out) + static_cast<std::int64_t>(row) * a.dim * (is_single ? 1 : a.count);
    switch (a.function) {
      case StreamFunction::predicted: predict(a, x[0], states, out); break;
      case StreamFunction::corrected: correct(a, x[0], x[1], states, out); break;
      case StreamFunction::added: add_to_others(a, x[0], x[1], out); break;
      case StreamFunction::spread: spread(a, x, out); break;
      case StreamFunction::mean: mean(a, x, out); break;
      case StreamFunction::largest_gates: largest_gates(a, x[0], out); break;
    }
  }
}

void streams(const Streams& a, int begin, int end) {
  a.type == Type::float32 ? streams_of<float>(a, begin, end) : streams_of<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const StreamKernels stream_table;
const StreamKernels stream_table = {streams};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
