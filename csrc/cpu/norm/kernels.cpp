// Normalisation, compiled once per level.
#include "norm.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

template <class Element, class Norm>
const Element* row_of(const Norm& a, int row) {
  return static_cast<const Element*>(a.x) + row / a.heads * a.x_stride + row % a.heads * a.dim;
}

template <class Element>
void rms_norm_row(const Element* x, const Element* residual, const Element* weight, Element* sum, Element* out, int dim,
                  float eps, float offset) {
  const auto add_square = [&](Floats squares, int i, int count) {
    Floats value = load_some(x + i, count);
    if (residual) {
      value = add(value, load_some(residual + i, count));
      store_some(sum + i, value, count);
      value = load_some(sum + i, count);  // the norm sees what the stream keeps
    }
    return fma(value, value, squares);
  };
  const Floats scale = all(1.0f / std::sqrt(sum_over(dim, add_square) / static_cast<float>(dim) + eps));
  const Element* values = residual ? sum : x;
  for_vectors(dim, [&](int i, int count) {
    const Floats factor = add(load_some(weight + i, count), all(offset));
    store_some(out + i, mul(mul(load_some(values + i, count), scale), factor), count);
  });
}

template <class Element>
void rms_norm_rows(const RmsNorm& a, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const std::int64_t dense = static_cast<std::int64_t>(row) * a.dim;
    rms_norm_row(row_of<Element>(a, row),
                 a.residual ? static_cast<const Element*>(a.residual) + dense : nullptr,
                 static_cast<const Element*>(a.weight), a.sum ? static_cast<Element*>(a.sum) + dense : nullptr,
                 static_cast<Element*>(a.out) + dense, a.dim, a.eps, a.offset);
  }
}

void rms_norm(const RmsNorm& a, int begin, int end) {
  a.type == Type::float32 ? rms_norm_rows<float>(a, begin, end) : rms_norm_rows<bf16>(a, begin, end);
}

template <class Element>
void layer_norm_row(const Element* x, const Element* residual, const Element* weight, const Element* bias, Element* sum,
                    Element* out, int dim, float eps) {
  const auto add_value = [&](Floats total, int i, int count) {
    Floats value = load_some(x + i, count);
    if (residual) {
      value = add(value, load_some(residual + i, count));
      store_some(sum + i, value, count);
      value = load_some(sum + i, count);
    }
    return add(total, value);
  };
  const Floats mean = all(sum_over(dim, add_value) / static_cast<float>(dim));
  const Element* values = residual ? sum : x;
  const auto add_square = [&](Floats squares, int i, int count) {
    // lanes beyond the row are zero, not at the mean
    const Floats centred = first_lanes(sub(load_some(values + i, count), mean), count);
    return fma(centred, centred, squares);
  };
  const Floats scale = all(1.0f / std::sqrt(sum_over(dim, add_square) / static_cast<float>(dim) + eps));
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
    layer_norm_row(row_of<Element>(a, row),
                   a.residual ? static_cast<const Element*>(a.residual) + dense : nullptr,
                   static_cast<const Element*>(a.weight) + (a.has_weights_of_heads ? row % a.heads * a.dim : 0),
                   static_cast<const Element*>(a.bias),
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
