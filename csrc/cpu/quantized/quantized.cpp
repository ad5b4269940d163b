// Linear layers with quantised weights as Python sees them, and the division of their work into tasks.
#include "quantized.h"

#include <algorithm>
#include <vector>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const QuantizedKernels quantized_table; }
namespace avx512 { extern const QuantizedKernels quantized_table; }
namespace amx { extern const QuantizedKernels quantized_table; }
namespace amx_emulated { extern const QuantizedKernels quantized_table; }

const QuantizedKernels& quantized_kernels(Level level) {
  return choose_table(level, avx2::quantized_table, avx512::quantized_table, avx512::quantized_table,
                      amx::quantized_table, amx_emulated::quantized_table);
}

namespace {

// A task's share of one call: long enough for streaming from memory, short enough for threads to end together.
constexpr double kTaskNanoseconds = 12e3;
// Rough costs: of streaming a byte of weights, and of a multiply-add.
constexpr double kByteNanoseconds = 0.03, kMultiplyNanoseconds = 0.005;
// Elements of activations that are worth a thread.
constexpr int kQuantizedElements = 16 << 10;

// Panels that one task takes for `rows` rows.
int panels_per_task(const QuantizedWeight& weight, int rows, int threads) {
  const int panels = weight.columns().panels();
  if (threads == 1) return panels;
  const double multiplies = static_cast<double>(rows) * kPanelColumns * weight.depth() * weight.format.codes_per_input();
  const double cost = std::max(static_cast<double>(weight.panel_bytes()) * kByteNanoseconds, multiplies * kMultiplyNanoseconds);
  return std::clamp(static_cast<int>(kTaskNanoseconds / cost), 1, divided_up(panels, threads));
}

void multiply(Cpu& cpu, QuantizedLinear a, const QuantizedKernels& kernels) {
  const RowBlocks blocks = kernels.blocks(a);
  const int count = blocks.count(), panels = a.weight.columns().panels(), threads = cpu.pool.threads();

  // groups of whole blocks, whose activations stay in a second-level cache while panels are streamed; tiles take blocks in
  // pairs
  const std::int64_t group_bytes = resident_bytes(cpu.level) / 2;
  const std::int64_t codes_bytes = a.code_rows() * a.weight.depth();
  const int wanted_groups = static_cast<int>(divided_up(codes_bytes, group_bytes));
  const int group = std::min(count, divided_up(divided_up(count, wanted_groups), 2) * 2), groups = divided_up(count, group);
  int group_rows = 0;
  for (int i = 0; i < groups; ++i)
    group_rows = std::max(group_rows, blocks.start(std::min(count, (i + 1) * group)) - blocks.start(i * group));

  const std::int64_t scales_bytes = line_up(4 * static_cast<std::int64_t>(a.rows));
  const std::int64_t offsets_bytes = line_up(4 * a.code_rows() * a.weight.num_groups());
  const std::int64_t sums_bytes = line_up(4 * static_cast<std::int64_t>(group_rows) * a.sums_per_row());
  char* scratch = static_cast<char*>(cpu.scratch(codes_bytes + scales_bytes + offsets_bytes + threads * sums_bytes));
  a.codes = reinterpret_cast<std::int8_t*>(scratch);
  a.row_scales = reinterpret_cast<float*>(scratch + codes_bytes);
  a.row_sums = reinterpret_cast<std::int32_t*>(scratch + codes_bytes + scales_bytes);
  char* sums = scratch + codes_bytes + scales_bytes + offsets_bytes;

  cpu.pool.run_pieces(count, 1 + kQuantizedElements / (blocks.most * a.weight.depth()), [&](int begin, int end, int) {
    for (int block = begin; block < end; ++block) kernels.quantize(a, block);
  });
  const int together = panels_per_task(a.weight, group_rows, threads), tasks = divided_up(panels, together);
  cpu.pool.run(groups * tasks, [&](int task, int thread) {
    const int first_block = task / tasks * group, first_panel = task % tasks * together;
    kernels.multiply(a, reinterpret_cast<float*>(sums + thread * sums_bytes), first_block,
                     std::min(count, first_block + group), first_panel, std::min(panels, first_panel + together));
  });
}

QuantizedWeight weight_at(Address panels, Address order, Address bias, int outputs, int inputs, int format, bool gated) {
  return {pointer<std::uint8_t>(panels), pointer<const std::int32_t>(order), pointer<const float>(bias), outputs, inputs, {format}, gated};
}

void submit_quantized(Cpu& cpu, Address x, std::int64_t x_stride, int rows, int type, Address out, std::int64_t out_stride,
                      int out_type, Address panels, Address order, Address bias, int outputs, int inputs, int format,
                      bool gated, Address addend, std::int64_t addend_stride) {
  if (rows == 0) return;
  const QuantizedLinear product{weight_at(panels, order, bias, outputs, inputs, format, gated),
                                pointer(x),
                                pointer(out),
                                x_stride,
                                out_stride,
                                rows,
                                static_cast<Type>(type),
                                static_cast<Type>(out_type),
                                {pointer<const float>(addend), addend_stride},
                                nullptr,
                                nullptr,
                                nullptr};
  cpu.submit([&cpu, product, kernels = &quantized_kernels(cpu.level)] { multiply(cpu, product, *kernels); });
}

}  // namespace

void bind_quantized(nb::class_<Cpu>& cpu) {
  cpu.def(
      "quantized_panel_bytes",
      [](Cpu&, int inputs, int format) {
        const QuantizedWeight weight = weight_at(0, 0, 0, 0, inputs, format, false);
        return weight.panel_bytes();
      },
      "Bytes of a panel of a format.");
  cpu.def(
      "quantized_pack",
      [](Cpu& cpu, Address plain, std::int64_t stride, int type, Address panels, int outputs, int inputs, int format,
         bool gated) {
        const QuantizedWeight weight = weight_at(panels, 0, 0, outputs, inputs, format, gated);
        std::vector<int> spoilt(weight.columns().panels());
        cpu.pool.run(weight.columns().panels(), [&](int panel, int) {
          spoilt[panel] =
              quantized_kernels(cpu.level).pack(weight, pointer(plain), stride, static_cast<Type>(type), panel);
        });
        for (const int row : spoilt)
          if (row >= 0) return row;
        return -1;
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Quantise a plain weight into panels; returns a row of it that is not finite, or -1.");
  cpu.def(
      "quantized_linear",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int rows, int type, Address out, std::int64_t out_stride, int out_type,
         Address panels, Address order, Address bias, int outputs, int inputs, int format, bool gated) {
        submit_quantized(cpu, x, x_stride, rows, type, out, out_stride, out_type, panels, order, bias, outputs, inputs,
                         format, gated, 0, 0);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of x times a quantised weight, plus a bias where it is not 0.");
  cpu.def("quantized_linear", submit_quantized, nb::call_guard<nb::gil_scoped_release>(),
          "Likewise, plus an addend, in float32 for each row and output, before the activation.");
  cpu.def(
      "quantized_rows",
      [](Cpu& cpu, Address ids, int count, Address out, int type, Address panels, Address order, int outputs, int inputs,
         int format, bool gated) {
        const QuantizedWeight weight = weight_at(panels, order, 0, outputs, inputs, format, gated);
        const auto* numbers = pointer<const std::int64_t>(ids);
        cpu.submit([&cpu, weight, numbers, count, out, type = static_cast<Type>(type),
                    kernel = quantized_kernels(cpu.level).rows] {
          check_rows(numbers, count, 0, weight.outputs, "row");
          cpu.pool.run_pieces(count, 4, [&](int begin, int end, int) {
            kernel(weight, numbers, pointer(out), type, begin, end);
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of the plain weight, from its panels, into out [count, inputs].");
}

}  // namespace octavo
