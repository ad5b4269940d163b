// Normalisation, compiled once per level.
#include "norm.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

template <class Element>
void rms_norm_row(const Element* x, const Element* residual, const Element* weight, Element* sum, Element* out, int dim,
                  float eps) {
  Floats squares = zero();
  const auto add_up = [&](int i, int count) {
    Floats value = load_some(x + i, count);
    if (residual) {
      value = add(value, load_some(residual + i, count));
      store_some(sum + i, value, count);
      value = load_some(sum + i, count);  // the norm sees what the stream keeps
    }
    squares = fma(value, value, squares);
  };
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) add_up(i, kLanes);
  if (i < dim) add_up(i, dim - i);

  const Element* values = residual ? sum : x;
  const Floats scale = all(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps));
  for (i = 0; i + kLanes <= dim; i += kLanes) store(out + i, mul(mul(load(values + i), scale), load(weight + i)));
  if (const int rest = dim - i; rest > 0)
    store_some(out + i, mul(mul(load_some(values + i, rest), scale), load_some(weight + i, rest)), rest);
}

template <class Element>
void rms_norm_rows(const RmsNorm& a, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const std::int64_t dense = static_cast<std::int64_t>(row) * a.dim;
    rms_norm_row(static_cast<const Element*>(a.x) + row * a.x_stride,
                 a.residual ? static_cast<const Element*>(a.residual) + dense : nullptr,
                 static_cast<const Element*>(a.weight), a.sum ? static_cast<Element*>(a.sum) + dense : nullptr,
                 static_cast<Element*>(a.out) + dense, a.dim, a.eps);
  }
}

void rms_norm(const RmsNorm& a, int begin, int end) {
  a.type == Type::float32 ? rms_norm_rows<float>(a, begin, end) : rms_norm_rows<bf16>(a, begin, end);
}

// Calls `body(i, count)` for all elements of a row, a vector at a time.
template <class Body>
void for_vectors(int dim, const Body& body) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) body(i, kLanes);
  if (i < dim) body(i, dim - i);
}

template <class Element>
void layer_norm_row(const Element* x, const Element* residual, const Element* weight, const Element* bias, Element* sum,
                    Element* out, int dim, float eps) {
  Floats total = zero();
  for_vectors(dim, [&](int i, int count) {
    Floats value = load_some(x + i, count);
    if (residual) {
      value = add(value, load_some(residual + i, count));
      store_some(sum + i, value, count);
      value = load_some(sum + i, count);
    }
    total = add(total, value);
  });
  const Element* values = residual ? sum : x;
  const float mean_value = sum_of(total) / static_cast<float>(dim);
  const Floats mean = all(mean_value);

  Floats squares = zero();
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Floats centred = sub(load(values + i), mean);
    squares = fma(centred, centred, squares);
  }
  float rest = 0.0f;  // lanes beyond the row are not at the mean
  for (; i < dim; ++i) {
    const float centred = to_float(values[i]) - mean_value;
    rest += centred * centred;
  }
  const Floats scale = all(1.0f / std::sqrt((sum_of(squares) + rest) / static_cast<float>(dim) + eps));
  for_vectors(dim, [&](int i, int count) {
    Floats value = mul(sub(load_some(values + i, count), mean), scale);
    if (weight) value = mul(value, load_some(weight + i, count));
    if (bias) value = add(value, load_some(bias + i, count));
    store_some(out + i, value, count);
  });
}

template <class Element>
void layer_norm_rows(const LayerNorm& a, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const std::int64_t dense = static_cast<std::int64_t>(row) * a.dim;
    layer_norm_row(static_cast<const Element*>(a.x) + row * a.x_stride,
                   a.residual ? static_cast<const Element*>(a.residual) + dense : nullptr,
                   static_cast<const Element*>(a.weight), static_cast<const Element*>(a.bias),
                   a.sum ? static_cast<Element*>(a.sum) + dense : nullptr, static_cast<Element*>(a.out) + dense, a.dim,
                   a.eps);
  }
}

void layer_norm(const LayerNorm& a, int begin, int end) {
  a.type == Type::float32 ? layer_norm_rows<float>(a, begin, end) : layer_norm_rows<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const NormKernels norm_table;
const NormKernels norm_table = {rms_norm, layer_norm};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
