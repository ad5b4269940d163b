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

}  // namespace

namespace OCTAVO_LEVEL {
extern const NormKernels norm_table;
const NormKernels norm_table = {rms_norm};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
