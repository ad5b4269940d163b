// What adapters add, compiled once per level. A sum has one order, however rows and ranks are grouped.
#include "lora.h"

#include "../vector.h"

namespace octavo {
namespace {

constexpr int kVectors = kLoraPanel / kLanes;

template <int Rows, int Ranks, class X, class W>
void shrink_tile(const Lora& a, const LoraSlot& slot, const std::int32_t* rows, int rank) {
  const X* x[Rows];
  const W* w[Ranks];
  Floats sums[Rows][Ranks];
  for (int i = 0; i < Rows; ++i) x[i] = static_cast<const X*>(a.x) + rows[i] * a.x_stride;
  for (int j = 0; j < Ranks; ++j) w[j] = static_cast<const W*>(slot.a) + static_cast<std::int64_t>(rank + j) * a.inputs;
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Ranks; ++j) sums[i][j] = zero();
  const auto step = [&](int k, int count) {
    Floats value[Rows];
    for (int i = 0; i < Rows; ++i) value[i] = load_some(x[i] + k, count);
    for (int j = 0; j < Ranks; ++j) {
      const Floats weight = load_some(w[j] + k, count);
      for (int i = 0; i < Rows; ++i) sums[i][j] = fma(value[i], weight, sums[i][j]);
    }
  };
  for_vectors(a.inputs, step);
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Ranks; ++j)
      a.hidden[rows[i] * a.hidden_stride + rank + j] = sum_of(sums[i][j]) * slot.scales[rank + j];
}

template <int Rows, class X, class W>
void shrink_rows(const Lora& a, const LoraSlot& slot, const std::int32_t* rows, int begin, int end) {
  int rank = begin;
  for (; rank + 4 <= end; rank += 4) shrink_tile<Rows, 4, X, W>(a, slot, rows, rank);
  for (; rank < end; ++rank) shrink_tile<Rows, 1, X, W>(a, slot, rows, rank);
}

template <class X, class W>
void shrink_typed(const Lora& a, const LoraSlot& slot, const std::int32_t* rows, int count, int begin, int end) {
  int i = 0;
  for (; i + 4 <= count; i += 4) shrink_rows<4, X, W>(a, slot, rows + i, begin, end);
  for (; i < count; ++i) shrink_rows<1, X, W>(a, slot, rows + i, begin, end);
}

void shrink(const Lora& a, const LoraSlot& slot, const std::int32_t* rows, int count, int begin, int end) {
  if (a.type == Type::float32)
    a.weight_type == Type::float32 ? shrink_typed<float, float>(a, slot, rows, count, begin, end)
                                   : shrink_typed<float, bf16>(a, slot, rows, count, begin, end);
  else
    a.weight_type == Type::float32 ? shrink_typed<bf16, float>(a, slot, rows, count, begin, end)
                                   : shrink_typed<bf16, bf16>(a, slot, rows, count, begin, end);
}

template <int Rows, class W>
void expand_panel(const Lora& a, const LoraRun& run, const W* b, const std::int32_t* rows, std::int64_t column, int count) {
  const float* hidden[Rows];
  Floats sums[Rows][kVectors];
  for (int i = 0; i < Rows; ++i) {
    hidden[i] = a.hidden + rows[i] * a.hidden_stride + run.first;
    for (int v = 0; v < kVectors; ++v) sums[i][v] = zero();
  }
  for (int rank = 0; rank < run.ranks; ++rank)
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = load(b + rank * kLoraPanel + v * kLanes);
      for (int i = 0; i < Rows; ++i) sums[i][v] = fma(weight, all(hidden[i][rank]), sums[i][v]);
    }
  for (int i = 0; i < Rows; ++i) {
    float* add = a.add + rows[i] * a.add_stride + column;
    for (int v = 0; v < kVectors && v * kLanes < count; ++v) {
      const int left = count - v * kLanes;
      store_some(add + v * kLanes, sums[i][v], left < kLanes ? left : kLanes);
    }
  }
}

template <class W>
void expand_typed(const Lora& a, const LoraRun& run, const LoraOutputs& outputs, const std::int32_t* rows, int count,
                  int begin, int end) {
  for (int panel = begin; panel < end; ++panel) {
    const W* b = static_cast<const W*>(run.b) + panel * run.ranks * kLoraPanel;
    const std::int64_t column = static_cast<std::int64_t>(panel) * kLoraPanel, left = outputs.length - column;
    const int columns = left < kLoraPanel ? static_cast<int>(left) : kLoraPanel;
    int i = 0;
    for (; i + 4 <= count; i += 4) expand_panel<4>(a, run, b, rows + i, outputs.start + column, columns);
    for (; i < count; ++i) expand_panel<1>(a, run, b, rows + i, outputs.start + column, columns);
  }
}

void expand(const Lora& a, const LoraRun& run, const LoraOutputs& outputs, const std::int32_t* rows, int count, int begin,
            int end) {
  if (run.b) {
    a.weight_type == Type::float32 ? expand_typed<float>(a, run, outputs, rows, count, begin, end)
                                   : expand_typed<bf16>(a, run, outputs, rows, count, begin, end);
    return;
  }
  const std::int64_t first = static_cast<std::int64_t>(begin) * kLoraPanel, past = static_cast<std::int64_t>(end) * kLoraPanel;
  const std::int64_t size = (past < outputs.length ? past : outputs.length) - first;
  for (int i = 0; i < count; ++i)
    std::memset(a.add + rows[i] * a.add_stride + outputs.start + first, 0, static_cast<std::size_t>(size) * sizeof(float));
}

}  // namespace

namespace OCTAVO_LEVEL {
extern const LoraKernels lora_table;
const LoraKernels lora_table = {shrink, expand};
}  // namespace OCTAVO_LEVEL
}  // namespace octavo
