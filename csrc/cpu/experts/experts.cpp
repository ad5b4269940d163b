// Mixtures of experts as Python sees them, and the division of their work into tasks.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "../bindings.h"
#include "../linear/linear.h"
#include "../quantized/quantized.h"
#include "../task_cuts.h"
#include "routing.h"

namespace octavo {

namespace avx2 { extern const ExpertKernels expert_table; }
namespace avx512 { extern const ExpertKernels expert_table; }
namespace avx512_bf16 { extern const ExpertKernels expert_table; }

namespace {

// The rows of a product with a stack, which has experts [first, first + count).
struct Rows {
  const char* x;
  std::int64_t x_stride_bytes;
  int inputs_bytes;  // of a row
  int per_token;     // pairs of a token, whose row of x they share; 0 where each has its own
  int pairs;
  const std::int32_t* order;
  const std::int32_t* starts;
  int first;
  int count;
  char* out;
  std::int64_t out_row_bytes;

  const char* source(int row) const { return x + (per_token ? order[row] / per_token : row) * x_stride_bytes; }
};

// Rough costs: of streaming a byte of weights, and of a multiply-add.
constexpr double kExpertByteNs = 0.03, kExpertMultiplyNs = 0.01, kExpertTaskNs = 8e3;
constexpr std::int64_t kGroupBytes = 512 << 10;

// One expert's product in bfloat16 or float32.
struct PlainJob {
  LinearProduct a;
  const LinearKernels* kernels;
  char* memory;
  std::int64_t row_bytes;

  PlainJob(const LinearProduct& whole, const LinearKernels& kernels) : a(whole), kernels(&kernels) {
    row_bytes = kernels.activation_row_bytes(a);
  }
  RowBlocks blocks() const { return kernels->blocks(a); }
  std::int64_t scratch_bytes() const { return line_up(a.rows * row_bytes); }
  bool needs_rearranging() const { return row_bytes > 0; }
  void place(char* at) { memory = at; }
  void prepare(int block) const { kernels->arrange(a, memory, block, 0, 1); }
  void multiply(float*, int first_block, int last_block, int first_panel, int last_panel) const {
    kernels->multiply(a, row_bytes ? memory : nullptr, first_block, last_block, first_panel, last_panel);
  }
  std::int64_t depth_bytes() const { return static_cast<std::int64_t>(a.weight.padded_inputs()) * a.weight.element_bytes(); }
  std::int64_t depth() const { return a.weight.padded_inputs(); }
  int sums_per_row() const { return 0; }
};

// One expert's product with quantised weights.
struct QuantizedJob {
  QuantizedLinear a;
  const QuantizedKernels* kernels;

  QuantizedJob(const QuantizedLinear& whole, const QuantizedKernels& kernels) : a(whole), kernels(&kernels) {}
  RowBlocks blocks() const { return kernels->blocks(a); }
  std::int64_t codes_bytes() const { return line_up(a.code_rows() * a.weight.depth()); }
  std::int64_t scales_bytes() const { return line_up(4 * static_cast<std::int64_t>(a.rows)); }
  std::int64_t scratch_bytes() const {
    return codes_bytes() + scales_bytes() + line_up(4 * a.code_rows() * a.weight.num_groups());
  }
  bool needs_rearranging() const { return true; }
  void place(char* at) {
    a.codes = reinterpret_cast<std::int8_t*>(at);
    a.row_scales = reinterpret_cast<float*>(at + codes_bytes());
    a.row_sums = reinterpret_cast<std::int32_t*>(at + codes_bytes() + scales_bytes());
  }
  void prepare(int block) const { kernels->quantize(a, block); }
  void multiply(float* sums, int first_block, int last_block, int first_panel, int last_panel) const {
    kernels->multiply(a, sums, first_block, last_block, first_panel, last_panel);
  }
  std::int64_t depth_bytes() const { return a.weight.depth() * a.weight.format.codes_per_input(); }
  std::int64_t depth() const { return depth_bytes(); }
  int sums_per_row() const { return a.sums_per_row(); }
};

struct Task {
  int job;
  int first_block, last_block;
  int first_panel, last_panel;
};

// Groups of blocks whose activations stay in a second-level cache; tiles take blocks in pairs.
template <class Job>
int blocks_per_group(const Job& job, int blocks) {
  const auto groups = static_cast<int>(divided_up<std::int64_t>(job.a.rows * job.depth_bytes(), kGroupBytes));
  return std::min(blocks, divided_up(divided_up(blocks, std::max(groups, 1)), 2) * 2);
}

template <class Job>
void cut_tasks(const std::vector<Job>& jobs, int threads, std::vector<Task>& tasks, int& group_rows) {
  for (int number = 0; number < static_cast<int>(jobs.size()); ++number) {
    const Job& job = jobs[number];
    const RowBlocks blocks = job.blocks();
    const int count = blocks.count(), panels = job.a.weight.columns().panels(), group = blocks_per_group(job, count);
    for (int block = 0; block < count; block += group) {
      const int last = std::min(count, block + group), rows = blocks.start(last) - blocks.start(block);
      group_rows = std::max(group_rows, rows);
      const double cost = std::max(static_cast<double>(job.a.weight.panel_bytes()) * kExpertByteNs,
                                   static_cast<double>(rows) * kPanelColumns * static_cast<double>(job.depth()) * kExpertMultiplyNs);
      const int together = threads == 1 ? panels : std::clamp(static_cast<int>(kExpertTaskNs / cost), 1, panels);
      for (int panel = 0; panel < panels; panel += together)
        tasks.push_back({number, block, last, panel, std::min(panels, panel + together)});
    }
  }
}

// Makes the rows of x adjacent, and sets the results of experts on other ranks to zero.
void place_rows(Cpu& cpu, const Rows& rows, char* gathered) {
  const int begin = rows.starts[rows.first], end = rows.starts[rows.first + rows.count];
  for (const auto& [from, to] : {std::pair(0, begin), std::pair(end, rows.pairs)})
    if (to > from) std::memset(rows.out + from * rows.out_row_bytes, 0, (to - from) * rows.out_row_bytes);
  if (!gathered) return;
  cpu.pool.run_pieces(end - begin, 8, [&](int first, int last, int) {
    for (int i = first; i < last; ++i) std::memcpy(gathered + static_cast<std::int64_t>(i) * rows.inputs_bytes, rows.source(begin + i), rows.inputs_bytes);
  });
}

// `make(expert, x, x_stride, out, rows)` makes the job of one expert of the stack; x_stride is that of gathered rows
// where `is_gathered`.
template <class Job, class Make>
void multiply_stack(Cpu& cpu, const Rows& rows, const Make& make) {
  const int begin = rows.starts[rows.first], end = rows.starts[rows.first + rows.count];
  // a single token has one row for all of its experts, each of which has at most one row unless a table names it twice
  bool is_gathered = rows.per_token && rows.pairs > rows.per_token;
  for (int expert = rows.first; rows.per_token && expert < rows.first + rows.count; ++expert)
    is_gathered = is_gathered || rows.starts[expert + 1] - rows.starts[expert] > 1;
  const std::int64_t gathered_bytes = is_gathered ? line_up(static_cast<std::int64_t>(end - begin) * rows.inputs_bytes) : 0;
  std::vector<Job> jobs;
  std::vector<int> first_rows;
  std::int64_t bytes = gathered_bytes;
  for (int expert = 0; expert < rows.count; ++expert) {
    const int row = rows.starts[rows.first + expert], count = rows.starts[rows.first + expert + 1] - row;
    if (!count) continue;
    jobs.push_back(make(expert, rows.source(row), is_gathered, rows.out + row * rows.out_row_bytes, count));
    first_rows.push_back(row);
    bytes += jobs.back().scratch_bytes();
  }
  std::vector<Task> tasks;
  int group_rows = 1;
  cut_tasks(jobs, cpu.pool.threads(), tasks, group_rows);
  const std::int64_t sums_bytes = jobs.empty() ? 0 : line_up(static_cast<std::int64_t>(group_rows) * jobs[0].sums_per_row() * 4);
  char* scratch = static_cast<char*>(cpu.scratch(bytes + cpu.pool.threads() * sums_bytes));
  char* at = scratch + gathered_bytes;
  std::vector<std::pair<int, int>> blocks;
  for (int number = 0; number < static_cast<int>(jobs.size()); ++number) {
    Job& job = jobs[number];
    if (is_gathered) job.a.x = scratch + static_cast<std::int64_t>(first_rows[number] - begin) * rows.inputs_bytes;
    job.place(at);
    at += job.scratch_bytes();
    if (job.needs_rearranging())
      for (int block = 0; block < job.blocks().count(); ++block) blocks.emplace_back(number, block);
  }
  place_rows(cpu, rows, is_gathered ? scratch : nullptr);
  cpu.pool.run_pieces(static_cast<int>(blocks.size()), 4, [&](int first, int last, int) {
    for (int i = first; i < last; ++i) jobs[blocks[i].first].prepare(blocks[i].second);
  });
  cpu.pool.run(static_cast<int>(tasks.size()), [&](int number, int thread) {
    const Task& task = tasks[number];
    float* sums = reinterpret_cast<float*>(scratch + bytes + thread * sums_bytes);
    jobs[task.job].multiply(sums, task.first_block, task.last_block, task.first_panel, task.last_panel);
  });
}

const ExpertKernels& expert_kernels(Level level) {
  return choose_table(level, avx2::expert_table, avx512::expert_table, avx512_bf16::expert_table);
}

void submit_inputs(Cpu& cpu, const ExpertInputs& a, int tokens) {
  submit_rows(cpu, a, tokens, rows_grain(a.width), expert_kernels(cpu.level).inputs);
}

int bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

Rows rows_of(Address x, std::int64_t x_stride, Type type, int inputs, int per_token, int pairs, Address order,
             Address starts, int first, int count, Address out, std::int64_t out_row_bytes) {
  return {pointer<const char>(x), x_stride * bytes_of(type), inputs * bytes_of(type), per_token, pairs,
          pointer<const std::int32_t>(order), pointer<const std::int32_t>(starts), first, count, pointer<char>(out),
          out_row_bytes};
}

}  // namespace

void bind_experts(nb::class_<Cpu>& cpu) {
  cpu.def(
      "route_experts",
      [](Cpu& cpu, Address logits, Address bias, Address factors, int tokens, int experts, int top_k, int score,
         float threshold, bool is_normalized, float factor, int groups, int groups_kept, int group_best,
         bool corrects_logits, Address weights, Address order, Address places, Address starts) {
        const Rule rule{top_k, static_cast<Score>(score), threshold, is_normalized, factor, groups, groups_kept,
                        group_best, corrects_logits};
        cpu.submit([=, &cpu] {
          cpu.pool.run_pieces(tokens, 4, [&](int begin, int end, int) {
            for (int token = begin; token < end; ++token)
              route_token(rule, pointer<const float>(logits) + static_cast<std::int64_t>(token) * experts,
                          pointer<const float>(bias), pointer<const float>(factors), experts,
                          pointer<float>(weights) + token * top_k,
                          pointer<std::int32_t>(places) + token * top_k);
          });
          group_pairs(tokens * top_k, experts, pointer<std::int32_t>(order), pointer<std::int32_t>(places),
                      pointer<std::int32_t>(starts));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Experts of tokens by their logits, and pairs grouped by expert.");
  cpu.def(
      "route_to_experts",
      [](Cpu& cpu, Address logits, Address chosen, int tokens, int experts, int top_k, int score, bool is_normalized,
         float factor, Address weights, Address order, Address places, Address starts) {
        const Rule rule{top_k, static_cast<Score>(score), 0.0f, is_normalized, factor, 1, 1, 1, false};
        cpu.submit([=] {
          for (std::int64_t token = 0; token < tokens; ++token)
            route_token_to(rule, pointer<const float>(logits) + token * experts, pointer<const std::int64_t>(chosen) + token * top_k,
                           experts, pointer<float>(weights) + token * top_k, pointer<std::int32_t>(places) + token * top_k);
          group_pairs(tokens * top_k, experts, pointer<std::int32_t>(order), pointer<std::int32_t>(places),
                      pointer<std::int32_t>(starts));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "The same for experts that are chosen already, int64 [tokens, top_k].");
  cpu.def(
      "expert_linear",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int per_token, int pairs, Address order, Address starts, int first,
         int count, Address panels, Address bias, int outputs, int inputs, int type, bool gated, Address out, int out_type) {
        const LinearWeight weight{pointer(panels), pointer<const float>(bias), outputs, inputs, static_cast<Type>(type), gated};
        const PanelColumns columns = weight.columns();
        const Type to = static_cast<Type>(out_type);
        const Rows rows = rows_of(x, x_stride, weight.type, inputs, per_token, pairs, order, starts, first, count, out,
                                  static_cast<std::int64_t>(columns.results()) * bytes_of(to));
        cpu.submit([=, &cpu, kernels = &linear_kernels(cpu.level)] {
          multiply_stack<PlainJob>(cpu, rows, [&](int expert, const void* from, bool is_gathered, char* into, int number) {
            LinearWeight own = weight;
            own.panels = static_cast<char*>(weight.panels) + expert * columns.panels() * weight.panel_bytes();
            if (weight.bias) own.bias = weight.bias + static_cast<std::int64_t>(expert) * columns.panels() * kPanelColumns;
            return PlainJob({own, from, into, is_gathered ? inputs : x_stride, columns.results(), number, to, {nullptr, 0}}, *kernels);
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of x times the weights of their experts, in panels.");
  cpu.def(
      "expert_quantized",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int per_token, int pairs, Address order, Address starts, int first,
         int count, Address panels, Address input_order, Address bias, int outputs, int inputs, int format, bool gated, int type,
         Address out, int out_type) {
        const QuantizedWeight weight{pointer<std::uint8_t>(panels), pointer<const std::int32_t>(input_order),
                                     pointer<const float>(bias), outputs, inputs, {format}, gated};
        const PanelColumns columns = weight.columns();
        const Type to = static_cast<Type>(out_type), of = static_cast<Type>(type);
        const Rows rows = rows_of(x, x_stride, of, inputs, per_token, pairs, order, starts, first, count, out,
                                  static_cast<std::int64_t>(columns.results()) * bytes_of(to));
        cpu.submit([=, &cpu, kernels = &quantized_kernels(cpu.level)] {
          multiply_stack<QuantizedJob>(cpu, rows, [&](int expert, const void* from, bool is_gathered, char* into, int number) {
            const std::int64_t columns_before = static_cast<std::int64_t>(expert) * columns.panels() * kPanelColumns;
            QuantizedWeight own = weight;
            own.panels += expert * columns.panels() * weight.panel_bytes();
            if (own.order) own.order += static_cast<std::int64_t>(expert) * inputs;
            if (own.bias) own.bias += columns_before;
            return QuantizedJob({own, from, into, is_gathered ? inputs : x_stride, columns.results(), number, of, to,
                                 {nullptr, 0}, nullptr, nullptr, nullptr}, *kernels);
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows of x times the quantised weights of their experts.");
  cpu.def(
      "expert_sum",
      [](Cpu& cpu, Address rows, Address places, Address weights, int tokens, int top_k, int width, Address shared,
         std::int64_t shared_stride, Address gate, Address out, int type) {
        const ExpertSum a{pointer<const float>(rows), pointer<const std::int32_t>(places), pointer<const float>(weights),
                          pointer<const void>(shared), shared_stride, pointer<const float>(gate), pointer(out), top_k,
                          width, static_cast<Type>(type)};
        submit_rows(cpu, a, tokens, rows_grain(width * top_k), expert_kernels(cpu.level).sum);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Weighted sums of the rows of tokens' experts.");
  cpu.def(
      "add_expert_inputs",
      [](Cpu& cpu, Address base, std::int64_t base_stride, Address x, std::int64_t x_stride, Address places,
         Address weights, Address starts, int experts, int tokens, int top_k, int width, Address out, int type) {
        submit_inputs(cpu, {pointer<const void>(base), base_stride, pointer<const void>(x), x_stride,
                            pointer<const std::int32_t>(places), pointer<float>(weights),
                            pointer<const std::int32_t>(starts), experts, pointer(out), nullptr, top_k, width,
                            static_cast<Type>(type)}, tokens);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Tokens times the weights of experts that return them, added to rows.");
  cpu.def(
      "weigh_expert_inputs",
      [](Cpu& cpu, Address x, std::int64_t x_stride, Address weights, int tokens, int width, Address out, Address ones,
         int type) {
        submit_inputs(cpu, {nullptr, 0, pointer<const void>(x), x_stride, nullptr, pointer<float>(weights), nullptr, 0,
                            pointer(out), pointer<float>(ones), 1, width, static_cast<Type>(type)}, tokens);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Tokens times their weights, which become 1.");
}

}  // namespace octavo
