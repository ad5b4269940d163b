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

}  // namespace

namespace OCTAVO_LEVEL {
extern const ExpertKernels expert_table;
const ExpertKernels expert_table = {sum_experts};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
