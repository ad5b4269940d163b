// Hyper-connections, compiled once per level.
#include "hyper.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

constexpr int kMostEntries = kMostHyperStreams * kMostHyperStreams;

// sigmoid(x * scale + base) * factor + eps
void hyper_weights(const float* x, float scale, const float* base, int count, float factor, float eps, float* out) {
  for_vectors(count, [&](int i, int some) {
    const Floats value = add(mul(load_some(x + i, some), all(scale)), load_some(base + i, some));
    store_some(out + i, add(mul(times_sigmoid(all(1.0f), value), all(factor)), all(eps)), some);
  });
}

void unmixed(int count, float* mix) {
  for (int i = 0; i < count * count; ++i) mix[i] = i % (count + 1) == 0 ? 1.0f : 0.0f;
}

// Divides `entries` numbers by their sum, added in their order, plus eps.
inline void share_out(Floats* first, int step, int entries, float eps) {
  Floats total = first[0];
  for (int i = 1; i < entries; ++i) total = add(total, first[i * step]);
  total = add(total, all(eps));
  for (int i = 0; i < entries; ++i) first[i * step] = div(first[i * step], total);
}

// Matrices of up to kLanes rows at once: a lane is a row, so that a row has the same bits alone.
void mix_rows(const HyperMixing& a, int begin, int rows) {
  const int n = a.count, entries = n * n;
  alignas(64) float lanes[kMostEntries * kLanes] = {};
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < entries; ++i) lanes[i * kLanes + row] = a.products[(begin + row) * a.stride + 2 * n + i];
  Floats mix[kMostEntries];
  for (int i = 0; i < entries; ++i) mix[i] = add(mul(load(lanes + i * kLanes), all(a.scale[2])), all(a.base[2 * n + i]));
  for (int stream = 0; stream < n; ++stream) {
    Floats* own = mix + stream * n;
    Floats top = own[0];
    for (int i = 1; i < n; ++i) top = maximum(own[i], top);
    for (int i = 0; i < n; ++i) own[i] = exponential(sub(own[i], top));
    share_out(own, 1, n, 0.0f);
    for (int i = 0; i < n; ++i) own[i] = add(own[i], all(a.eps));
  }
  for (int round = 0; round < a.rounds; ++round) {
    for (int stream = 0; round > 0 && stream < n; ++stream) share_out(mix + stream * n, 1, n, a.eps);
    for (int stream = 0; stream < n; ++stream) share_out(mix + stream, n, n, a.eps);
  }
  for (int i = 0; i < entries; ++i) store(lanes + i * kLanes, mix[i]);
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < entries; ++i) a.mix[(begin + row) * static_cast<std::int64_t>(entries) + i] = lanes[i * kLanes + row];
}

void hyper_mixing(const HyperMixing& a, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const float* products = a.products + row * a.stride;
    const std::int64_t place = static_cast<std::int64_t>(row) * a.count;
    hyper_weights(products, a.scale[0], a.base, a.count, 1.0f, a.eps, a.read + place);
    if (!a.write) continue;
    hyper_weights(products + a.count, a.scale[1], a.base + a.count, a.count, a.most, 0.0f, a.write + place);
    if (a.rounds == 0) unmixed(a.count, a.mix + place * a.count);
  }
  for (int row = begin; a.write && a.rounds > 0 && row < end; row += kLanes)
    mix_rows(a, row, end - row < kLanes ? end - row : kLanes);
}

template <class Element>
void weigh_streams(const HyperStreams& a, const Element* x, const float* weights, Element* out) {
  for_vectors(a.dim, [&](int i, int some) {
    Floats total = mul(load_some(x + i, some), all(weights[0]));
    for (int k = 1; k < a.count; ++k) total = fma(load_some(x + k * a.dim + i, some), all(weights[k]), total);
    store_some(out + i, total, some);
  });
}

template <class Element>
void mix_streams(const HyperStreams& a, const Element* x, const Element* other, const float* write, const float* mix,
                 Element* out) {
  for_vectors(a.dim, [&](int i, int some) {
    const Floats given = load_some(other + i, some);
    Floats streams[kMostHyperStreams];
    for (int k = 0; k < a.count; ++k) streams[k] = load_some(x + k * a.dim + i, some);
    for (int j = 0; j < a.count; ++j) {
      Floats total = mul(given, all(write[j]));
      for (int k = 0; k < a.count; ++k) total = fma(streams[k], all(mix[k * a.count + j]), total);
      store_some(out + j * a.dim + i, total, some);
    }
  });
}

// The sums are those of rms_norm of a row in float32.
template <class Element>
void norm_streams(const HyperStreams& a, const Element* x, float* out) {
  const int width = a.count * a.dim;
  const Floats scale = all(1.0f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + a.eps));
  for_vectors(width, [&](int i, int some) {
    store_some(out + i, mul(mul(load_some(x + i, some), scale), load_some(a.weights + i, some)), some);
  });
}

template <class Element>
void hyper_streams_of(const HyperStreams& a, int begin, int end) {
  const std::int64_t width = static_cast<std::int64_t>(a.count) * a.dim;
  for (int row = begin; row < end; ++row) {
    const Element* x = static_cast<const Element*>(a.x) + row * a.stride;
    const Element* other = static_cast<const Element*>(a.other) + row * a.other_stride;
    const float* weights = a.weights + row * a.weight_stride;
    Element* out = static_cast<Element*>(a.out) + row * width;
    switch (a.function) {
      case HyperFunction::weighed:
        weigh_streams(a, x, weights, static_cast<Element*>(a.out) + static_cast<std::int64_t>(row) * a.dim);
        break;
      case HyperFunction::mixed: mix_streams(a, x, other, weights, a.mix + static_cast<std::int64_t>(row) * a.count * a.count, out); break;
      case HyperFunction::normed: norm_streams(a, x, static_cast<float*>(a.out) + row * width); break;
      case HyperFunction::repeated:
        for (int k = 0; k < a.count; ++k) std::memcpy(out + k * static_cast<std::int64_t>(a.dim), x, sizeof(Element) * a.dim);
        break;
    }
  }
}

void hyper_streams(const HyperStreams& a, int begin, int end) {
  a.type == Type::float32 ? hyper_streams_of<float>(a, begin, end) : hyper_streams_of<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const HyperKernels hyper_table;
const HyperKernels hyper_table = {hyper_mixing, hyper_streams};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
