// Recurrent layers: a short causal convolution, a decaying sum of outer products (gated delta rule, Mamba2, Mamba), and the
// norm behind them. A sequence is computed token by token, so that its division into steps changes no bit. Threads share
// the work by channels, and by columns of a head's matrix, which are independent of each other.
#pragma once

#include "../types.h"

namespace octavo {

// The part of a layer's states that a kernel reads and writes, and the blocks of the rows of a step.
//
// Block `table[p / block_size]` holds the state after its last computed token p. A row whose first token has position c
// starts from block `table[(c - 1) / block_size]`, or from zeros where c is 0. It writes the state after the last token
// of each block and after its own last token, unless the entry of the table is 0.
struct StateRows {
  float* states;  // of block 0; blocks are `block_stride` floats apart
  std::int64_t block_stride;
  const std::int32_t* query_starts;      // [rows + 1]
  const std::int32_t* sequence_lengths;  // [rows], this step's tokens included
  const std::int32_t* block_tables;      // [rows, ...], `table_stride` apart
  std::int64_t table_stride;
  int rows, block_size;
};

// out = after * act(bias + sum over j of weight[j] * (before * x)[token - taps + 1 + j]), each [tokens, channels]. A state
// is the last taps - 1 inputs [taps - 1, channels], oldest first.
struct Convolution {
  const void* x;  // tokens `x_stride` elements apart, likewise those of the factors
  const void* before;  // or null
  const void* after;   // or null
  const void* weight;  // [taps, channels]
  const void* bias;    // [channels], or null
  void* out;           // dense
  std::int64_t x_stride, before_stride, after_stride;
  int channels, taps;
  bool is_silu;
  Type type;
  StateRows rows;
};

constexpr int kMostKeyDim = 256;

// For each head: S = decay * S + key (x) u, out = S^T query + skip * value. A state is S [heads, key_dim, value_dim].
//   step  = softplus(step + step_bias) within the limits, decay = e^(-e^decay_log * step)
//   delta rule: u = factor * sigmoid(beta) * (value - (decay * S)^T key), with key and query of length 1, the query
//               times 1 / sqrt(key_dim); rows of S may have decays of their own, then with step [tokens, heads, key_dim]
//               and step_bias [heads, key_dim]; these may be bounded: with a finite most_step b the decay of a row is
//               e^(-b * sigmoid(e^decay_log * (step + step_bias)))
//   Mamba2:     u = step * value
struct Recurrence {
  const void* query;  // [tokens, key_heads, key_dim]; tokens of all inputs lie their strides apart
  const void* key;
  const void* value;  // [tokens, heads, value_dim]
  const void* step;   // [tokens, heads]
  const void* beta;   // [tokens, heads] for the delta rule, else null
  const float* decay_log;  // [heads]
  const float* step_bias;  // [heads]
  const float* skip;       // [heads], or null; for the delta rule the factors, or null for 1
  void* out;               // [tokens, heads, value_dim], dense
  std::int64_t query_stride, key_stride, value_stride, step_stride, beta_stride;
  int heads, key_heads, key_dim, value_dim;
  float least_step, most_step;
  bool decays_by_key;  // for the delta rule alone
  Type type;
  StateRows rows;
};

// Mamba's scan: for each channel s = e^(-rate * step) * s + key * step * value, out = query . s + skip * value, with the
// step softplus(step + step_bias). A state is [state_size, channels].
struct SelectiveScan {
  const void* query;  // [tokens, state_size]; tokens of all inputs lie their strides apart
  const void* key;
  const void* value;  // [tokens, channels]
  const void* step;
  const float* rates;      // [state_size, channels]
  const float* step_bias;  // [channels]
  const float* skip;
  void* out;  // [tokens, channels], dense
  std::int64_t query_stride, key_stride, value_stride, step_stride;
  int channels, state_size;
  Type type;
  StateRows rows;
};

// Rows of `dim` elements, normalised in groups of `group` elements: norm(x) * silu(gate), or norm(x * silu(gate)) where
// the gate comes first. The weight has `weight_size` elements, and begins again where a row has more.
struct GatedNorm {
  const void* x;
  const void* gate;
  const void* weight;
  void* out;  // dense
  std::int64_t x_stride, gate_stride;
  int dim, group, weight_size;
  bool is_gate_first;
  float eps;
  Type type;
};

struct RecurrentKernels {
  int columns;  // of a chunk
  // Channels [begin, end) of one row.
  void (*convolve)(const Convolution&, int row, int begin, int end);
  // Chunks [begin, end) of the columns of one head in one row.
  void (*recur)(const Recurrence&, int row, int head, int begin, int end);
  // Channels [begin, end) of one row.
  void (*scan)(const SelectiveScan&, int row, int begin, int end);
  // Rows [begin, end).
  void (*gated_norm)(const GatedNorm&, int begin, int end);
};

const RecurrentKernels& recurrent_kernels(Level level);

}  // namespace octavo
