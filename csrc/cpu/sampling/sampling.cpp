// Sampling as Python sees it.
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../bindings.h"
#include "row.h"

namespace octavo {

namespace avx2 { extern const SamplingKernels sampling_table; }
namespace avx512 { extern const SamplingKernels sampling_table; }

const SamplingKernels& sampling_kernels(Level level) {
  return choose_table(level, avx2::sampling_table, avx512::sampling_table);
}

namespace {

// Each takes its own scratch, for which memory is planned.
constexpr int kMostRowsAtOnce = 16;

int rows_at_once(const Cpu& cpu, int rows) { return std::min({rows, cpu.pool.threads(), kMostRowsAtOnce}); }

// Calls body(row, sampled_row) for each row of logits: a thread takes one row at a time, or all threads share each row
// where there are few.
template <class Body>
void for_rows(Cpu& cpu, float* logits, int rows, int vocab, void* scratch, const Body& body) {
  const SamplingKernels& kernels = sampling_kernels(cpu.level);
  const auto row_of = [&](int row) { return logits + static_cast<std::int64_t>(row) * vocab; };
  if ((rows == 1 || rows * 4 <= cpu.pool.threads()) && slices_of(vocab) > 2) {
    const SamplingScratch memory(scratch, vocab);
    const auto shared = [&](int slices, const auto& work) {
      cpu.pool.run(slices, [&](int slice, int) { work(slice); });
    };
    for (int row = 0; row < rows; ++row) body(row, SampledRow(kernels, memory, row_of(row), vocab, shared));
    return;
  }
  const auto alone = [](int slices, const auto& work) {
    for (int slice = 0; slice < slices; ++slice) work(slice);
  };
  std::atomic<int> next{0};
  cpu.pool.run(rows_at_once(cpu, rows), [&](int place, int) {
    const SamplingScratch memory(static_cast<char*>(scratch) + place * SamplingScratch::bytes(vocab), vocab);
    for (int row = next++; row < rows; row = next++)
      body(row, SampledRow(kernels, memory, row_of(row), vocab, alone));
  });
}

// Where the part of each row begins in an array that holds `count_of(row)` entries for each.
template <class Count>
std::vector<int> starts_of(int rows, const Count& count_of) {
  std::vector<int> starts(rows);
  for (int row = 0, next = 0; row < rows; next += count_of(row++)) starts[row] = next;
  return starts;
}

void sample(Cpu& cpu, float* logits, int rows, int vocab, const SamplingRequest* requests, const DrawKey* keys,
            SamplingStatus* statuses, Draw* draws, std::int32_t* top_tokens, float* top_logprobs, void* scratch) {
  const auto is_random = [&](int row) { return requests[row].temperature > 0; };
  const auto draw_starts = starts_of(rows, [&](int row) { return requests[row].num_draws; });
  const auto key_starts = starts_of(rows, [&](int row) { return is_random(row) ? requests[row].num_draws : 0; });
  const auto top_starts = starts_of(rows, [&](int row) { return std::clamp(requests[row].num_logprobs, 0, vocab); });
  for_rows(cpu, logits, rows, vocab, scratch, [&](int row, auto sampled) {
    statuses[row] = sampled.sample(requests[row], keys + key_starts[row], draws + draw_starts[row],
                                   top_tokens + top_starts[row], top_logprobs + top_starts[row]);
  });
}

void describe(Cpu& cpu, float* logits, int rows, int vocab, int num_logprobs, SamplingStatus* statuses, Draw* draws,
              std::int32_t* top_tokens, float* top_logprobs, void* scratch) {
  const std::int64_t listed = std::min(num_logprobs, vocab);
  for_rows(cpu, logits, rows, vocab, scratch, [&](int row, auto sampled) {
    statuses[row] = sampled.describe_token(num_logprobs, draws[row], top_tokens + row * listed,
                                           top_logprobs + row * listed);
  });
}

void rank(Cpu& cpu, float* logits, int rows, int vocab, const SamplingRequest* requests, int wanted,
          SamplingStatus* statuses, std::int32_t* top_tokens, float* top_values, void* scratch) {
  const std::int64_t listed = std::min(wanted, vocab);
  for_rows(cpu, logits, rows, vocab, scratch, [&](int row, auto sampled) {
    statuses[row] = sampled.rank(requests[row], wanted, top_tokens + row * listed, top_values + row * listed);
  });
}

}  // namespace

void bind_sampling(nb::class_<Cpu>& cpu) {
  cpu.def(
      "sampling_scratch_bytes",
      [](const Cpu& cpu, int rows, int vocab) { return rows_at_once(cpu, rows) * SamplingScratch::bytes(vocab); },
      "What `sample` and `describe` need as scratch for so many rows.");
  cpu.def(
      "sample",
      [](Cpu& cpu, Address logits, int rows, int vocab, Address requests, Address keys, Address statuses, Address draws,
         Address top_tokens, Address top_logprobs, Address scratch) {
        cpu.submit([=, &cpu] {
          sample(cpu, pointer<float>(logits), rows, vocab, pointer<const SamplingRequest>(requests),
                 pointer<const DrawKey>(keys), pointer<SamplingStatus>(statuses), pointer<Draw>(draws),
                 pointer<std::int32_t>(top_tokens), pointer<float>(top_logprobs), pointer(scratch));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Draw tokens for rows of float32 logits, which are changed. Of draws, keys of random rows, and listed tokens there "
      "are as many as the requests say, row after row.");
  cpu.def(
      "describe_tokens",
      [](Cpu& cpu, Address logits, int rows, int vocab, int num_logprobs, Address statuses, Address draws,
         Address top_tokens, Address top_logprobs, Address scratch) {
        cpu.submit([=, &cpu] {
          describe(cpu, pointer<float>(logits), rows, vocab, num_logprobs, pointer<SamplingStatus>(statuses),
                   pointer<Draw>(draws), pointer<std::int32_t>(top_tokens), pointer<float>(top_logprobs),
                   pointer(scratch));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Log-probability and rank of one given token in each row of float32 logits, and the likeliest tokens there.");
  cpu.def(
      "rank_tokens",
      [](Cpu& cpu, Address logits, int rows, int vocab, Address requests, int wanted, Address statuses,
         Address top_tokens, Address top_values, Address scratch) {
        cpu.submit([=, &cpu] {
          rank(cpu, pointer<float>(logits), rows, vocab, pointer<const SamplingRequest>(requests), wanted,
               pointer<SamplingStatus>(statuses), pointer<std::int32_t>(top_tokens), pointer<float>(top_values),
               pointer(scratch));
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "The tokens with the largest log-probabilities after what the requests change of them, in each row of float32 "
      "logits, which are changed.");
}

}  // namespace octavo
