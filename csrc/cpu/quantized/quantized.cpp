// Linear layers with quantised weights as Python sees them.
#include "quantized.h"

#include <vector>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const QuantizedKernels quantized_table; }
namespace avx512 { extern const QuantizedKernels quantized_table; }

const QuantizedKernels& quantized_kernels(Level level) {
  return choose_table(level, avx2::quantized_table, avx512::quantized_table);
}

namespace {

// Activations of a task's rows stay in the second-level cache while its panels stream by.
constexpr std::int64_t kRowsBytes = 256 << 10;
// A piece that streams from memory should be long: each starts with a wait.
constexpr std::int64_t kPieceBytes = 64 << 10;

QuantizedWeight weight_of(Address panels, Address scales, Address bias, int outputs, int inputs, int group, bool gated) {
  return {pointer<std::uint8_t>(panels), pointer<float>(scales), pointer<const float>(bias), outputs, inputs, group, gated};
}

void multiply(ThreadPool& pool, const QuantizedLinear& a, const QuantizedKernels& kernels) {
  if (a.rows == 0) return;
  const int blocks = kernels.num_blocks(a);
  // a few rows are quantised before another thread would be awake
  pool.run_pieces(blocks, 1 + 64 / (a.rows / blocks), [&](int begin, int end, int) {
    for (int block = begin; block < end; ++block) kernels.quantize_block(a, block);
  });
  const int panels = a.weight.num_panels();
  const std::int64_t bytes = static_cast<std::int64_t>(a.rows) * a.weight.depth();
  const auto parts = static_cast<int>(bytes <= kRowsBytes ? 1 : (bytes + kRowsBytes - 1) / kRowsBytes);
  const auto grain = static_cast<int>(1 + kPieceBytes / (a.weight.panel_bytes() * (1 + a.rows / 8)));
  for (int part = 0; part < parts; ++part) {
    const auto begin = static_cast<int>(static_cast<std::int64_t>(blocks) * part / parts);
    const auto end = static_cast<int>(static_cast<std::int64_t>(blocks) * (part + 1) / parts);
    pool.run_pieces(panels, grain, [&](int first, int last, int) { kernels.multiply(a, first, last, begin, end); });
  }
}

}  // namespace

void bind_quantized(nb::class_<Cpu>& cpu) {
  cpu.def(
      "quantized_pack",
      [](Cpu& cpu, Address plain, std::int64_t stride, int type, Address panels, Address scales, int outputs, int inputs,
         int group, bool gated) {
        const QuantizedWeight weight = weight_of(panels, scales, 0, outputs, inputs, group, gated);
        std::vector<int> spoilt(weight.num_panels());
        cpu.pool.run(weight.num_panels(), [&](int panel, int) {
          spoilt[panel] = quantized_kernels(cpu.level)
                              .pack(weight, pointer(plain), stride, static_cast<Type>(type), panel, panel + 1);
        });
        for (const int row : spoilt)
          if (row >= 0) return row;
        return -1;
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Quantise a plain weight into panels; answers a row of it that is not finite, or -1.");
  cpu.def(
      "quantized_linear",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int rows, int type, Address out, std::int64_t out_stride, int out_type,
         Address codes, Address row_scales, Address row_sums, Address panels, Address scales, Address bias, int outputs,
         int inputs, int group, bool gated) {
        const QuantizedLinear linear{weight_of(panels, scales, bias, outputs, inputs, group, gated),
                                     pointer(x),
                                     pointer(out),
                                     x_stride,
                                     out_stride,
                                     rows,
                                     static_cast<Type>(type),
                                     static_cast<Type>(out_type),
                                     pointer<std::int8_t>(codes),
                                     pointer<float>(row_scales),
                                     pointer<std::int32_t>(row_sums)};
        cpu.submit([&cpu, linear] { multiply(cpu.pool, linear, quantized_kernels(cpu.level)); });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of x times a quantised weight.");
  cpu.def(
      "quantized_rows",
      [](Cpu& cpu, Address ids, int count, Address out, int type, Address panels, Address scales, int outputs, int inputs,
         int group, bool gated) {
        const QuantizedWeight weight = weight_of(panels, scales, 0, outputs, inputs, group, gated);
        cpu.submit([&cpu, weight, ids, count, out, type] {
          cpu.pool.run_pieces(count, 16, [&](int begin, int end, int) {
            quantized_kernels(cpu.level)
                .rows(weight, pointer<const std::int64_t>(ids), pointer(out), static_cast<Type>(type), begin, end);
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of the plain weight, as the panels have them.");
}

}  // namespace octavo
