// Functions of single elements, compiled once per level.
#include "elementwise.h"

#include "../vector.h"

namespace octavo {
namespace {

Floats relu(Floats x) { return where_less(x, zero(), zero(), x); }  // NaN stays

Floats gelu(Floats x) {
  return mul(mul(all(0.5f), x), add(all(1.0f), error_function(mul(x, all(0.707106781186547524f)))));
}

// x / 2 (1 + tanh(inner)) is x / (1 + e^(-2 inner)), which loses no bits where the tanh is near -1.
Floats gelu_tanh(Floats x) {
  const Floats inner = mul(all(0.797884560802865356f), fma(mul(all(0.044715f), x), mul(x, x), x));
  return div(x, add(all(1.0f), exponential(mul(all(-2.0f), inner))));
}

// With t = tanh(x / 2), e^x - 1 is 2t / (1 - t), which is as good near 0.
Floats xielu(Floats x, Floats positive, Floats negative) {
  const Floats below = where_less(x, all(-1e-6f), x, all(-1e-6f)), t = tangent_hyperbolic(mul(below, all(0.5f)));
  const Floats grown = div(add(t, t), sub(all(1.0f), t));
  return fma(x, all(0.5f), where_less(zero(), x, mul(mul(x, x), positive), mul(sub(grown, x), negative)));
}

// `apply(x, y)` of every element; without y, it gets zeros that it does not look at.
template <class Element, class Apply>
void map_rows(const Elementwise& a, int begin, int end, const Apply& apply) {
  for (int row = begin; row < end; ++row) {
    const Element* x = static_cast<const Element*>(a.x) + row * a.x_stride;
    const Element* y = a.y ? static_cast<const Element*>(a.y) + row * a.y_stride : nullptr;
    Element* out = static_cast<Element*>(a.out) + static_cast<std::int64_t>(row) * a.width;
    for_vectors(a.width, [&](int i, int count) {
      store_some(out + i, apply(load_some(x + i, count), y ? load_some(y + i, count) : zero()), count);
    });
  }
}

template <class Element>
void elementwise_of(const Elementwise& a, int begin, int end) {
  switch (a.function) {
    case Function::relu: return map_rows<Element>(a, begin, end, [](Floats x, Floats) { return relu(x); });
    case Function::relu2:
      return map_rows<Element>(a, begin, end, [](Floats x, Floats) { return mul(relu(x), relu(x)); });
    case Function::gelu: return map_rows<Element>(a, begin, end, [](Floats x, Floats) { return gelu(x); });
    case Function::gelu_tanh: return map_rows<Element>(a, begin, end, [](Floats x, Floats) { return gelu_tanh(x); });
    case Function::silu_and_mul:
      return map_rows<Element>(a, begin, end, [](Floats gate, Floats up) { return mul(silu(gate), up); });
    case Function::add: return map_rows<Element>(a, begin, end, [](Floats x, Floats y) { return add(x, y); });
    case Function::multiplied: return map_rows<Element>(a, begin, end, [](Floats x, Floats y) { return mul(x, y); });
    case Function::gelu_tanh_and_mul:
      return map_rows<Element>(a, begin, end, [](Floats gate, Floats up) { return mul(gelu_tanh(gate), up); });
    case Function::gated_by_sigmoid:
      return map_rows<Element>(a, begin, end, [](Floats x, Floats gate) { return times_sigmoid(x, gate); });
    case Function::gated_by_softplus:
      return map_rows<Element>(a, begin, end, [](Floats x, Floats gate) { return mul(x, softplus(gate)); });
    case Function::scaled:
      return map_rows<Element>(a, begin, end, [p = all(a.parameter)](Floats x, Floats) { return mul(x, p); });
    case Function::soft_capped:
      return map_rows<Element>(a, begin, end, [p = all(a.parameter)](Floats x, Floats) {
        return mul(tangent_hyperbolic(div(x, p)), p);
      });
    case Function::clamped:
      return map_rows<Element>(a, begin, end, [most = all(a.parameter)](Floats x, Floats) {
        const Floats least = sub(zero(), most);  // NaN stays
        return where_less(most, x, most, where_less(x, least, least, x));
      });
    case Function::xielu: {
      Elementwise own = a;
      own.y = nullptr;
      const Element* factors = static_cast<const Element*>(a.y);
      return map_rows<Element>(own, begin, end, [p = all(to_float(factors[0])), n = all(to_float(factors[1]))](
                                                    Floats x, Floats) { return xielu(x, p, n); });
    }
    case Function::clamped_swiglu:
      return map_rows<Element>(a, begin, end, [p = all(a.parameter), most = all(a.limit)](Floats gate, Floats up) {
        gate = where_less(most, gate, most, gate);
        up = where_less(most, up, most, up);
        const Floats least = sub(zero(), most);
        up = where_less(up, least, least, up);
        return mul(add(up, all(1.0f)), times_sigmoid(gate, mul(gate, p)));
      });
  }
}

void elementwise(const Elementwise& a, int begin, int end) {
  a.type == Type::float32 ? elementwise_of<float>(a, begin, end) : elementwise_of<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const ElementwiseKernels elementwise_table;
const ElementwiseKernels elementwise_table = {elementwise};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
