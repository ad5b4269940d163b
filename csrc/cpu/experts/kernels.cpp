// Weighted sums of the rows of experts, compiled once per level.
#include "experts.h"

#include <math.h>

#include "../vector.h"

namespace octavo {
namespace {

template <class Element>
void sum_token(const ExpertSum& a, int token) {
  const std::int32_t* places = a.places + static_cast<std::int64_t>(token) * a.top_k;
  const float* weights = a.weights + static_cast<std::int64_t>(token) * a.top_k;
  const Element* shared = a.shared ? static_cast<const Element*>(a.shared) + token * a.shared_stride : nullptr;
  const Floats factor = all(a.gate ? 1.0f / (1.0f + expf(-a.gate[token])) : 1.0f);
  Element* out = static_cast<Element*>(a.out) + static_cast<std::int64_t>(token) * a.width;
  for (int i = 0; i < a.width; i += kLanes) {
    const int count = a.width - i < kLanes ? a.width - i : kLanes;
    Floats total = zero();
    for (int place = 0; place < a.top_k; ++place)
      total = add(total, mul(all(weights[place]),
                             load_some(a.rows + static_cast<std::int64_t>(places[place]) * a.width + i, count)));
    if (shared) total = add(total, mul(factor, load_some(shared + i, count)));
    store_some(out + i, total, count);
  }
}

void sum_experts(const ExpertSum& a, int begin, int end) {
  for (int token = begin; token < end; ++token)
    a.type == Type::float32 ? sum_token<float>(a, token) : sum_token<bf16>(a, token);
}

float weight_of_inputs(const ExpertInputs& a, int token) {
  float total = 0.0f;
  for (int i = token * a.top_k; i < (token + 1) * a.top_k; ++i)
    if (a.places[i] >= a.starts[a.experts]) total += a.weights[i];
  return total;
}

template <class Element>
void add_inputs(const ExpertInputs& a, int token) {
  const Element* base = static_cast<const Element*>(a.base) + token * a.base_stride;
  const Element* x = static_cast<const Element*>(a.x) + token * a.x_stride;
  Element* out = static_cast<Element*>(a.out) + static_cast<std::int64_t>(token) * a.width;
  const Floats weight = all(weight_of_inputs(a, token));
  for_vectors(a.width, [&](int i, int count) {
    store_some(out + i, add(load_some(base + i, count), mul(load_some(x + i, count), weight)), count);
  });
}

template <class Element>
void weigh_inputs(const ExpertInputs& a, int token) {
  const Element* x = static_cast<const Element*>(a.x) + token * a.x_stride;
  Element* out = static_cast<Element*>(a.out) + static_cast<std::int64_t>(token) * a.width;
  alignas(64) Element rounded[kLanes];
  store(rounded, all(a.weights[token]));
  const Floats weight = load(rounded);
  for_vectors(a.width, [&](int i, int count) { store_some(out + i, mul(load_some(x + i, count), weight), count); });
  a.ones[token] = 1.0f;
}

void expert_inputs(const ExpertInputs& a, int begin, int end) {
  for (int token = begin; token < end; ++token) {
    if (a.base) a.type == Type::float32 ? add_inputs<float>(a, token) : add_inputs<bf16>(a, token);
    else a.type == Type::float32 ? weigh_inputs<float>(a, token) : weigh_inputs<bf16>(a, token);
  }
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const ExpertKernels expert_table;
const ExpertKernels expert_table = {sum_experts, expert_inputs};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
