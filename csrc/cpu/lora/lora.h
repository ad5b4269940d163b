// The addend of adapters (LoRA) for a product: scale · B · A · x, for each row with the matrices of its own adapter.
#pragma once

#include "../types.h"

namespace octavo {

// A slot's matrices for one layer. A is [ranks, inputs], the rows of all sources below each other.
struct LoraSlot {
  const void* a;        // null: the slot leaves the layer as it is
  const float* scales;  // [ranks]
  std::int64_t ranks;
};

// A slot's matrix for one run of outputs: panels [32 columns] of [ranks, 32], the last one padded with zeros.
struct LoraRun {
  const void* b;       // null: nothing is added to this run
  std::int64_t first;  // of the slot's ranks
  std::int64_t ranks;
};

// A run's outputs, [start, start + length).
struct LoraOutputs {
  std::int64_t start, length;
};

struct Lora {
  const void* x;  // [rows, inputs] of `type`, rows `x_stride` elements apart
  std::int64_t x_stride;
  const LoraOutputs* outputs;  // [runs]
  float* hidden;               // [rows, hidden_stride]
  std::int64_t hidden_stride;
  float* add;  // [rows, add_stride]
  std::int64_t add_stride;
  int inputs;
  Type type, weight_type;
};

constexpr int kLoraPanel = 32;

struct LoraKernels {
  // hidden[row, rank] = scale · A[rank] · x[row] for the rows that are listed, ranks [begin, end).
  void (*shrink)(const Lora&, const LoraSlot&, const std::int32_t* rows, int count, int begin, int end);
  // add[row, …] = B · hidden[row] in panels [begin, end) of a run; zeros where the slot has nothing for it.
  void (*expand)(const Lora&, const LoraRun&, const LoraOutputs&, const std::int32_t* rows, int count, int begin, int end);
};

const LoraKernels& lora_kernels(Level level);

}  // namespace octavo
