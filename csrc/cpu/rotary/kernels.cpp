// Rotary position embedding, compiled once per level.
#include "rotary.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

// The head in float32, normed where there is a weight; `values` has room for `dim`.
template <class Element>
void read_head(const Element* x, const Element* weight, float* values, int dim, float eps) {
  Floats squares = zero();
  const auto take = [&](int i, int count) {
    const Floats value = load_some(x + i, count);
    store_some(values + i, value, count);
    squares = fma(value, value, squares);
  };
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) take(i, kLanes);
  if (i < dim) take(i, dim - i);
  if (!weight) return;
  const Floats scale = all(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps));
  for (i = 0; i + kLanes <= dim; i += kLanes) store(values + i, mul(mul(load(values + i), scale), load(weight + i)));
  if (const int rest = dim - i; rest > 0)
    store_some(values + i, mul(mul(load_some(values + i, rest), scale), load_some(weight + i, rest)), rest);
}

template <class Element>
void rotate_halves(const float* values, const float* cosines, const float* sines, Element* out, int half) {
  const auto turn = [&](int i, int count) {
    const Floats x = load_some(values + i, count), y = load_some(values + half + i, count);
    const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
    store_some(out + i, sub(mul(x, c), mul(y, s)), count);
    store_some(out + half + i, add(mul(y, c), mul(x, s)), count);
  };
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) turn(i, kLanes);
  if (i < half) turn(i, half - i);
}

void put(float* out, float x) { *out = x; }
void put(bf16* out, float x) { *out = to_bf16(x); }

template <class Element>
void rotate_neighbours(const float* values, const float* cosines, const float* sines, Element* out, int half) {
  for (int i = 0; i < half; ++i) {
    const float x = values[2 * i], y = values[2 * i + 1];
    put(out + 2 * i, x * cosines[i] - y * sines[i]);
    put(out + 2 * i + 1, y * cosines[i] + x * sines[i]);
  }
}

template <class Element>
void rotate_heads(const Rotary& a, const RotaryHeads& heads, int token, const float* row, float* values) {
  const Element* in = static_cast<const Element*>(heads.in) + token * heads.stride;
  Element* out = static_cast<Element*>(heads.out) + static_cast<std::int64_t>(token) * heads.count * a.dim;
  const int half = a.rotated / 2;
  for (int head = 0; head < heads.count; ++head, in += a.dim, out += a.dim) {
    read_head(in, static_cast<const Element*>(heads.weight), values, a.dim, a.eps);
    a.interleaved ? rotate_neighbours(values, row, row + half, out, half)
                  : rotate_halves(values, row, row + half, out, half);
    for (int i = a.rotated; i < a.dim; ++i) put(out + i, values[i]);
  }
}

template <class Element>
void rotate_tokens(const Rotary& a, int begin, int end) {
  float* values = static_cast<float*>(__builtin_alloca(a.dim * sizeof(float)));
  for (int token = begin; token < end; ++token) {
    const float* row = a.table + a.positions[token] * a.rotated;
    rotate_heads<Element>(a, a.q, token, row, values);
    rotate_heads<Element>(a, a.k, token, row, values);
  }
}

void rotary(const Rotary& a, int begin, int end) {
  a.type == Type::float32 ? rotate_tokens<float>(a, begin, end) : rotate_tokens<bf16>(a, begin, end);
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const RotaryKernels rotary_table;
const RotaryKernels rotary_table = {rotary};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
