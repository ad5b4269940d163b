// Rotary position embedding, compiled once per level.
#include "rotary.h"

#include <cmath>

#include "../vector.h"

namespace octavo {
namespace {

// The factor of a head's norm, without its weight; 1 without a norm.
template <class Element>
float scale_of(const Element* x, const Element* weight, int dim, float eps) {
  if (!weight) return 1.0f;
  return 1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
}

template <class Element>
void rotate_halves(const Element* x, const Element* weight, Floats scale, Floats offset, const float* cosines,
                   const float* sines, Element* out, int half) {
  const auto value = [&](int i, int count) {
    const Floats plain = load_some(x + i, count);
    return weight ? mul(mul(plain, scale), add(load_some(weight + i, count), offset)) : plain;
  };
  for_vectors(half, [&](int i, int count) {
    const Floats one = value(i, count), other = value(half + i, count);
    const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
    store_some(out + i, sub(mul(one, c), mul(other, s)), count);
    store_some(out + half + i, add(mul(other, c), mul(one, s)), count);
  });
}

void put(float* out, float x) { *out = x; }
void put(bf16* out, float x) { *out = to_bf16(x); }

template <class Element>
float normed(const Element* x, const Element* weight, float scale, float offset, int i) {
  return weight ? to_float(x[i]) * scale * (to_float(weight[i]) + offset) : to_float(x[i]);
}

template <class Element>
void rotate_neighbours(const Element* x, const Element* weight, float scale, float offset, const float* cosines,
                       const float* sines, Element* out, int half) {
  for (int i = 0; i < half; ++i) {
    const float one = normed(x, weight, scale, offset, 2 * i), other = normed(x, weight, scale, offset, 2 * i + 1);
    put(out + 2 * i, one * cosines[i] - other * sines[i]);
    put(out + 2 * i + 1, other * cosines[i] + one * sines[i]);
  }
}

template <class Element>
void rotate_heads(const Rotary& a, const RotaryHeads& heads, int token, const float* row) {
  const Element* x = static_cast<const Element*>(heads.in) + token * heads.stride;
  const Element* weight = static_cast<const Element*>(heads.weight);
  Element* out = static_cast<Element*>(heads.out) + static_cast<std::int64_t>(token) * heads.count * a.dim;
  const int half = a.rotated / 2;
  // all norms before the first rotation, so that roots and quotients of many heads overlap
  float* scales = static_cast<float*>(__builtin_alloca(heads.count * sizeof(float)));
  for (int head = 0; head < heads.count; ++head) scales[head] = scale_of(x + head * a.dim, weight, a.dim, a.eps);
  for (int head = 0; head < heads.count; ++head, x += a.dim, out += a.dim) {
    const float scale = scales[head];
    if (a.interleaved) {
      rotate_neighbours(x, weight, scale, a.offset, row, row + half, out, half);
    } else if (weight) {
      rotate_halves(x, weight, all(scale), all(a.offset), row, row + half, out, half);
    } else {
      rotate_halves(x, static_cast<const Element*>(nullptr), all(1.0f), zero(), row, row + half, out, half);
    }
    for (int i = a.rotated; i < a.dim; ++i) put(out + i, normed(x, weight, scale, a.offset, i));
  }
}

template <class Element>
void rotate_tokens(const Rotary& a, int begin, int end) {
  for (int token = begin; token < end; ++token) {
    const float* row = a.table + a.positions[token] * a.rotated;
    rotate_heads<Element>(a, a.q, token, row);
    rotate_heads<Element>(a, a.k, token, row);
  }
}

void rotary(const Rotary& a, int begin, int end) {
  a.type == Type::float32 ? rotate_tokens<float>(a, begin, end) : rotate_tokens<bf16>(a, begin, end);
}

// Cosine and sine of an angle of any size below 2^30, to one unit in the last place: the nearest multiple of a quarter
// turn is subtracted in double precision, and the polynomials of the Cephes library (public domain) take the rest.
// The compiler vectorises it; there are no sums, so the width of vectors changes no bit.
inline void turn(float angle, float& cosine, float& sine) {
  constexpr double kQuartersPerRadian = 0.63661977236758134308, kQuarter = 1.57079632679489661923;
  const double quarters = __builtin_rint(static_cast<double>(angle) * kQuartersPerRadian);
  const float r = static_cast<float>(static_cast<double>(angle) - quarters * kQuarter), z = r * r;
  const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
  const float c = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const int quadrant = static_cast<int>(quarters);
  const bool is_odd = quadrant & 1;
  cosine = (is_odd ? s : c) * ((quadrant + 1) & 2 ? -1.0f : 1.0f);
  sine = (is_odd ? c : s) * (quadrant & 2 ? -1.0f : 1.0f);
}

void table(const RotaryTable& a, int begin, int end) {
  for (int position = begin; position < end; ++position) {
    float* __restrict__ cosines = a.out + static_cast<std::int64_t>(position) * 2 * a.pairs;
    float* __restrict__ sines = cosines + a.pairs;
    const float* __restrict__ frequencies = a.frequencies;
    for (int i = 0; i < a.pairs; ++i) {
      float cosine, sine;
      turn(static_cast<float>(position) * frequencies[i], cosine, sine);
      cosines[i] = cosine * a.factor;
      sines[i] = sine * a.factor;
    }
  }
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const RotaryKernels rotary_table;
const RotaryKernels rotary_table = {rotary, table};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
