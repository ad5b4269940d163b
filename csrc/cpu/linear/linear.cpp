// Linear layers in bfloat16 and float32 as Python sees them, and the division of their work into tasks.
#include "linear.h"

#include <algorithm>
#include <stdexcept>

#include "../bindings.h"
#include "../task_cuts.h"

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

// Rough costs: of streaming a byte of weights, and of a multiply-add.
constexpr double kByteNs = 0.03, kMultiplyNs = 0.01;
// Activations that a task rearranges.
constexpr std::int64_t kArrangedBytes = 16 << 10;

// Groups of blocks of rows whose activations stay in a second-level cache while panels are streamed; tiles take blocks in
// pairs.
int blocks_per_group(const LinearWeight& weight, int inputs, int rows, int blocks, std::int64_t group_bytes) {
  const std::int64_t bytes = static_cast<std::int64_t>(rows) * inputs * weight.element_bytes();
  const int wanted_groups = static_cast<int>(divided_up(bytes, group_bytes));
  return std::min(blocks, divided_up(divided_up(blocks, wanted_groups), 2) * 2);
}

double panel_ns(const LinearWeight& weight, int rows) {
  const double multiplies = static_cast<double>(rows) * kPanelColumns * weight.padded_inputs();
  return std::max(static_cast<double>(weight.panel_bytes()) * kByteNs, multiplies * kMultiplyNs);
}

void multiply(Cpu& cpu, const LinearProduct& a, const LinearKernels& kernels) {
  const RowBlocks blocks = kernels.blocks(a);
  const int count = blocks.count(), panels = a.weight.columns().panels();
  const int inputs = kernels.inputs_at_once(a.weight);
  const int group = blocks_per_group(a.weight, inputs, a.rows, count, resident_bytes(cpu.level)), groups = divided_up(count, group);
  const int group_rows = std::min(a.rows, group * blocks.most);

  const std::int64_t row_bytes = kernels.activation_row_bytes(a), activation_bytes = line_up(a.rows * row_bytes);
  char* scratch = static_cast<char*>(cpu.scratch(activation_bytes));
  const void* activations = row_bytes ? scratch : nullptr;
  if (row_bytes) {
    const auto parts = static_cast<int>(divided_up(activation_bytes / count, kArrangedBytes));
    cpu.pool.run_pieces(count * parts, 1, [&](int begin, int end, int) {
      for (int i = begin; i < end; ++i) kernels.arrange(a, scratch, i / parts, i % parts, parts);
    });
  }

  // group after group, each with all panels
  const TaskCuts cuts(groups * panels, panel_ns(a.weight, group_rows), cpu.pool.threads());
  cpu.pool.run(cuts.count(), [&](int task, int) {
    const int end = cuts.start(task + 1);
    for (int at = cuts.start(task); at < end;) {
      const int first_block = at / panels * group, first_panel = at % panels;
      const int last_panel = std::min(panels, first_panel + end - at);
      kernels.multiply(a, activations, first_block, std::min(count, first_block + group), first_panel, last_panel);
      at += last_panel - first_panel;
    }
  });
}

// Rows that a task of `multiply_by_head` computes.
constexpr int kHeadRows = 128;

std::int64_t head_activation_bytes(const LinearProduct& a, const LinearKernels& kernels) {
  return line_up(std::min(a.rows, kHeadRows) * kernels.activation_row_bytes(a));
}

// Each head has panels of its own, reads its inputs of x and writes its outputs. A task is some rows of one head.
void multiply_by_head(Cpu& cpu, const LinearProduct& a, int heads, const LinearKernels& kernels) {
  const int groups = divided_up(a.rows, kHeadRows), panels = a.weight.columns().panels();
  const std::int64_t own_bytes = head_activation_bytes(a, kernels);
  char* scratch = static_cast<char*>(cpu.scratch(cpu.pool.threads() * own_bytes));
  cpu.pool.run(heads * groups, [&](int task, int thread) {
    const int head = task / groups, first = task % groups * kHeadRows;
    const std::int64_t out_bytes = a.out_type == Type::float32 ? 4 : 2;
    LinearProduct part = a;
    part.rows = std::min(kHeadRows, a.rows - first);
    part.x = static_cast<const char*>(a.x) + (first * a.x_stride + head * a.weight.inputs) * a.weight.element_bytes();
    part.out = static_cast<char*>(a.out) + (first * a.out_stride + head * a.weight.outputs) * out_bytes;
    part.weight.panels = static_cast<char*>(a.weight.panels) + head * panels * a.weight.panel_bytes();
    char* own = scratch + thread * own_bytes;
    const bool is_arranged = kernels.activation_row_bytes(part) != 0;
    const int blocks = kernels.blocks(part).count();
    for (int block = 0; is_arranged && block < blocks; ++block) kernels.arrange(part, own, block, 0, 1);
    kernels.multiply(part, is_arranged ? own : nullptr, 0, blocks, 0, panels);
  });
}

void submit_linear(Cpu& cpu, Address x, std::int64_t x_stride, int rows, Address panels, Address bias, int outputs,
                   int inputs, int type, bool gated, Address out, std::int64_t out_stride, int out_type, Address addend,
                   std::int64_t addend_stride) {
  if (rows == 0) return;
  const LinearProduct product{
      {pointer(panels), pointer<const float>(bias), outputs, inputs, static_cast<Type>(type), gated},
      pointer(x),
      pointer(out),
      x_stride,
      out_stride,
      rows,
      static_cast<Type>(out_type),
      {pointer<const float>(addend), addend_stride}};
  cpu.submit([&cpu, product, kernels = &linear_kernels(cpu.level)] { multiply(cpu, product, *kernels); });
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
        submit_linear(cpu, x, x_stride, rows, panels, bias, outputs, inputs, type, gated, out, out_stride, out_type, 0, 0);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of x times a weight in panels, plus a bias in the panels' order where it is not 0.");
  cpu.def("linear", submit_linear, nb::call_guard<nb::gil_scoped_release>(),
          "Likewise, plus an addend, in float32 for each row and output, before the activation.");
  cpu.def(
      "linear_by_head",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int rows, Address panels, int heads, int outputs, int inputs, int type,
         Address out) {
        const LinearProduct product{{pointer(panels), nullptr, outputs, inputs, static_cast<Type>(type), false},
                                    pointer(x), pointer(out), x_stride, static_cast<std::int64_t>(heads) * outputs, rows,
                                    static_cast<Type>(type), {nullptr, 0}};
        cpu.submit([&cpu, product, heads, kernels = &linear_kernels(cpu.level)] {
          multiply_by_head(cpu, product, heads, *kernels);
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Heads of x, rows `x_stride` apart, each times panels of its own that follow each other, into [rows, heads, outputs].");
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
