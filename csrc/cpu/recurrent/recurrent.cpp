// Recurrent layers as Python sees them.
#include "recurrent.h"

#include "../bindings.h"
#include "../task_cuts.h"

namespace octavo {

namespace avx2 { extern const RecurrentKernels recurrent_table; }
namespace avx512 { extern const RecurrentKernels recurrent_table; }
namespace avx512_bf16 { extern const RecurrentKernels recurrent_table; }

const RecurrentKernels& recurrent_kernels(Level level) {
  return choose_table(level, avx2::recurrent_table, avx512::recurrent_table, avx512_bf16::recurrent_table);
}

namespace {

constexpr int kTaskChannels = 128;

void run_convolution(Cpu& cpu, const Convolution& a, const RecurrentKernels& kernels) {
  if (a.rows.rows == 0) return;
  const int parts = divided_up(a.channels, kTaskChannels), tokens = a.rows.query_starts[a.rows.rows];
  const int grain = rows_grain(kTaskChannels * 2 * std::max(1, tokens / a.rows.rows));
  cpu.pool.run_pieces(a.rows.rows * parts, grain, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int first = i % parts * kTaskChannels;
      kernels.convolve(a, i / parts, first, std::min(first + kTaskChannels, a.channels));
    }
  });
}

void run_recurrence(Cpu& cpu, const Recurrence& a, const RecurrentKernels& kernels) {
  const int chunks = divided_up(a.value_dim, kernels.columns), heads = a.rows.rows * a.heads;
  // keys and gates are computed once for all columns of a task, so heads are divided only if there are too few
  const int parts = heads < 2 * cpu.pool.threads() ? chunks : 1;
  cpu.pool.run_pieces(heads * parts, 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int part = i % parts, head = i / parts;
      kernels.recur(a, head / a.heads, head % a.heads, chunks * part / parts, chunks * (part + 1) / parts);
    }
  });
}

void run_scan(Cpu& cpu, const SelectiveScan& a, const RecurrentKernels& kernels) {
  const int parts = divided_up(a.channels, kTaskChannels);
  cpu.pool.run_pieces(a.rows.rows * parts, 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      const int first = i % parts * kTaskChannels;
      kernels.scan(a, i / parts, first, std::min(first + kTaskChannels, a.channels));
    }
  });
}

template <bool kDecaysByKey>
void bind_recurrence(nb::class_<Cpu>& cpu, const char* name, const char* text) {
  cpu.def(
      name,
      [](Cpu& cpu, Address query, Address key, Address value, Address step, Address beta, Address decay_log,
         Address step_bias, Address skip, Address out, std::int64_t query_stride, std::int64_t key_stride,
         std::int64_t value_stride, std::int64_t step_stride, std::int64_t beta_stride, int heads, int key_heads,
         int key_dim, int value_dim, float least_step, float most_step, int type, Address states,
         std::int64_t block_stride, Address query_starts, Address sequence_lengths, Address block_tables,
         std::int64_t table_stride, int rows, int block_size) {
        const Recurrence a{pointer(query), pointer(key), pointer(value), pointer(step), pointer(beta),
                           pointer<float>(decay_log), pointer<float>(step_bias), pointer<float>(skip), pointer(out),
                           query_stride, key_stride, value_stride, step_stride, beta_stride, heads, key_heads, key_dim,
                           value_dim, least_step, most_step, kDecaysByKey, static_cast<Type>(type),
                           {pointer<float>(states), block_stride, pointer<std::int32_t>(query_starts),
                            pointer<std::int32_t>(sequence_lengths), pointer<std::int32_t>(block_tables), table_stride,
                            rows, block_size}};
        cpu.submit([&cpu, a, &kernels = recurrent_kernels(cpu.level)] { run_recurrence(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(), text);
}

}  // namespace

void bind_recurrent(nb::class_<Cpu>& cpu) {
  cpu.def(
      "short_convolution",
      [](Cpu& cpu, Address x, Address before, Address after, Address weight, Address bias, Address out,
         std::int64_t x_stride, std::int64_t before_stride, std::int64_t after_stride, int channels, int taps,
         bool is_silu, int type, Address states, std::int64_t block_stride, Address query_starts,
         Address sequence_lengths, Address block_tables, std::int64_t table_stride, int rows, int block_size) {
        const Convolution a{pointer(x), pointer(before), pointer(after), pointer(weight), pointer(bias), pointer(out),
                            x_stride, before_stride, after_stride, channels, taps, is_silu, static_cast<Type>(type),
                            {pointer<float>(states), block_stride, pointer<std::int32_t>(query_starts),
                             pointer<std::int32_t>(sequence_lengths), pointer<std::int32_t>(block_tables), table_stride,
                             rows, block_size}};
        cpu.submit([&cpu, a, &kernels = recurrent_kernels(cpu.level)] { run_convolution(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Causal convolution of each channel, behind the inputs in the states.");
  bind_recurrence<false>(
      cpu, "recurrence",
      "A decaying sum of outer products, read by queries: the gated delta rule, or without `beta` Mamba2.");
  bind_recurrence<true>(cpu, "recurrence_by_key", "The gated delta rule with a decay for each element of keys.");
  cpu.def(
      "selective_scan",
      [](Cpu& cpu, Address query, Address key, Address value, Address step, Address rates, Address step_bias, Address skip,
         Address out, std::int64_t query_stride, std::int64_t key_stride, std::int64_t value_stride,
         std::int64_t step_stride, int channels, int state_size, int type, Address states, std::int64_t block_stride,
         Address query_starts, Address sequence_lengths, Address block_tables, std::int64_t table_stride, int rows,
         int block_size) {
        const SelectiveScan a{pointer(query), pointer(key), pointer(value), pointer(step), pointer<float>(rates),
                              pointer<float>(step_bias), pointer<float>(skip), pointer(out), query_stride, key_stride,
                              value_stride, step_stride, channels, state_size, static_cast<Type>(type),
                              {pointer<float>(states), block_stride, pointer<std::int32_t>(query_starts),
                               pointer<std::int32_t>(sequence_lengths), pointer<std::int32_t>(block_tables), table_stride,
                               rows, block_size}};
        cpu.submit([&cpu, a, &kernels = recurrent_kernels(cpu.level)] { run_scan(cpu, a, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Mamba's scan, with a decay for each channel and element of its state.");
  cpu.def(
      "gated_rms_norm",
      [](Cpu& cpu, Address x, Address gate, Address weight, Address out, std::int64_t x_stride, std::int64_t gate_stride,
         int rows, int dim, int group, int weight_size, bool is_gate_first, float eps, int type) {
        const GatedNorm a{pointer(x), pointer(gate), pointer(weight), pointer(out), x_stride, gate_stride, dim, group,
                          weight_size, is_gate_first, eps, static_cast<Type>(type)};
        submit_rows(cpu, a, rows, rows_grain(2 * dim), recurrent_kernels(cpu.level).gated_norm);
      },
      nb::call_guard<nb::gil_scoped_release>(), "RMS norm of groups of each row, beside a gate.");
}

}  // namespace octavo
