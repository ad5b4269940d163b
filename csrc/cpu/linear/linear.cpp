// Linear layers in bfloat16 and float32 as Python sees them, and how their work is cut.
#include "linear.h"

#include <algorithm>
#include <stdexcept>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const LinearKernels linear_table; }
namespace avx512 { extern const LinearKernels linear_table; }
namespace avx512_bf16 { extern const LinearKernels linear_table; }
namespace amx { extern const LinearKernels linear_table; }
namespace amx_emulated { extern const LinearKernels linear_table; }

const LinearKernels& linear_kernels(Level level) {
  return choose_table(level, avx2::linear_table, avx512::linear_table, avx512_bf16::linear_table, amx::linear_table,
                      amx_emulated::linear_table);
}

namespace {

// Activations that stay in a second-level cache while panels go by.
constexpr std::int64_t kGroupBytes = 512 << 10;
// A task's share of one call: long enough that a stream from memory gets going, short enough that threads end together.
constexpr double kTaskNanoseconds = 12e3;
// Rough costs: of streaming a byte of weights, and of a multiply-add.
constexpr double kByteNanoseconds = 0.03, kMultiplyNanoseconds = 0.01;
constexpr std::int64_t kArrangedBytes = 16 << 10;

template <class Integer>
constexpr Integer divided_up(Integer x, Integer y) {
  return (x + y - 1) / y;
}

constexpr std::int64_t line_up(std::int64_t bytes) { return divided_up<std::int64_t>(bytes, 64) * 64; }

// Panels that one task takes for `rows` rows. Four suit one row best (see panels_together).
int panels_per_task(const LinearWeight& weight, int rows, int threads) {
  const int panels = weight.columns().panels();
  if (threads == 1) return panels;
  const double bytes = static_cast<double>(weight.panel_bytes());
  const double multiplies = static_cast<double>(rows) * kPanelColumns * weight.padded_inputs();
  const double cost = std::max(bytes * kByteNanoseconds, multiplies * kMultiplyNanoseconds);
  const int wanted = static_cast<int>(kTaskNanoseconds / cost);
  const int fair = std::max(1, panels / (4 * threads));
  const int taken = std::clamp(wanted, 1, std::max(1, divided_up(panels, threads)));
  const int most = std::min(taken, std::max(fair, std::min(taken, 4)));
  return most >= 4 ? most / 4 * 4 : most;
}

void multiply(Cpu& cpu, const LinearProduct& a, const LinearKernels& kernels) {
  const RowBlocks blocks = kernels.blocks(a);
  const int count = blocks.count(), panels = a.weight.columns().panels(), threads = cpu.pool.threads();

  // groups of whole blocks; tiles take blocks by two
  const std::int64_t bytes = static_cast<std::int64_t>(a.rows) * a.weight.padded_inputs() * a.weight.element_bytes();
  const int wanted_groups = static_cast<int>(divided_up(bytes, kGroupBytes));
  const int group = std::min(count, divided_up(divided_up(count, wanted_groups), 2) * 2), groups = divided_up(count, group);
  int group_rows = 0;
  for (int i = 0; i < groups; ++i)
    group_rows = std::max(group_rows, blocks.start(std::min(count, (i + 1) * group)) - blocks.start(i * group));

  const std::int64_t row_bytes = kernels.activation_row_bytes(a);
  const std::int64_t activation_bytes = line_up(a.rows * row_bytes);
  const std::int64_t sums_bytes = line_up(static_cast<std::int64_t>(group_rows) * kPanelColumns * 4);
  char* scratch = static_cast<char*>(cpu.scratch(activation_bytes + threads * sums_bytes));
  if (row_bytes) {
    const auto parts = static_cast<int>(1 + blocks.most * row_bytes / kArrangedBytes);
    const int tasks = count * parts;
    cpu.pool.run_pieces(tasks, 1, [&](int begin, int end, int) {
      for (int i = begin; i < end; ++i) kernels.arrange(a, scratch, i / parts, i % parts, parts);
    });
  }

  const int together = panels_per_task(a.weight, group_rows, threads), tasks = divided_up(panels, together);
  cpu.pool.run(groups * tasks, [&](int task, int thread) {
    const int first_block = task / tasks * group, first_panel = task % tasks * together;
    float* sums = reinterpret_cast<float*>(scratch + activation_bytes + thread * sums_bytes);
    kernels.multiply(a, row_bytes ? scratch : nullptr, sums, first_block, std::min(count, first_block + group),
                     first_panel, std::min(panels, first_panel + together));
  });
}

}  // namespace

void bind_linear(nb::class_<Cpu>& cpu) {
  cpu.def(
      "linear_pack",
      [](Cpu& cpu, Address plain, std::int64_t stride, Address panels, int outputs, int inputs, int type, bool gated) {
        const LinearWeight weight{pointer(panels), nullptr, outputs, inputs, static_cast<Type>(type), gated};
        cpu.pool.run_pieces(weight.columns().panels(), 4, [&](int begin, int end, int) {
          linear_kernels(cpu.level).pack(weight, pointer(plain), stride, begin, end);
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "A plain weight, whose rows lie `stride` elements apart, into panels; type is that of both.");
  cpu.def(
      "linear",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int rows, Address panels, Address bias, int outputs, int inputs,
         int type, bool gated, Address out, std::int64_t out_stride, int out_type) {
        if (rows == 0) return;
        const LinearProduct product{
            {pointer(panels), pointer<const float>(bias), outputs, inputs, static_cast<Type>(type), gated},
            pointer(x), pointer(out), x_stride, out_stride, rows, static_cast<Type>(out_type)};
        cpu.submit([&cpu, product, kernels = &linear_kernels(cpu.level)] { multiply(cpu, product, *kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Rows of x times a weight in panels, plus a bias in the panels' order where it is not 0.");
  cpu.def(
      "linear_rows",
      [](Cpu& cpu, Address ids, int count, Address out, Address panels, Address bias, int outputs, int inputs, int type,
         bool gated) {
        const LinearWeight weight{pointer(panels), pointer<const float>(bias), outputs, inputs, static_cast<Type>(type), gated};
        const auto* numbers = pointer<const std::int64_t>(ids);
        cpu.submit([&cpu, weight, numbers, count, out, kernel = linear_kernels(cpu.level).rows] {
          check_rows(numbers, count, 0, weight.outputs, "row");
          cpu.pool.run_pieces(count, 4, [&](int begin, int end, int) { kernel(weight, numbers, pointer(out), begin, end); });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of the plain weight, from its panels, into out [count, inputs].");
}

}  // namespace octavo
