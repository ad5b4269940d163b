// What adapters add, as Python sees it.
#include "lora.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "../bindings.h"
#include "../task_cuts.h"

namespace octavo {

namespace avx2 { extern const LoraKernels lora_table; }
namespace avx512 { extern const LoraKernels lora_table; }

const LoraKernels& lora_kernels(Level level) { return choose_table(level, avx2::lora_table, avx512::lora_table); }

namespace {

constexpr int kTaskRows = 32, kTaskRanks = 8;
constexpr std::int64_t kTaskElements = 32 << 10;

// Rows of one slot: `order` from begin on.
struct Segment {
  int slot, begin, count;
};

// One task: rows of a segment, and a range of ranks or of a run's panels.
struct Piece {
  Segment rows;
  int run, begin, end;
};

// A table of slots has for each of them a LoraSlot, and a LoraRun for each run.
struct Table {
  const std::int64_t* words;
  int runs;

  const LoraSlot& slot(int number) const { return *reinterpret_cast<const LoraSlot*>(at(number)); }
  const LoraRun& run(int number, int index) const { return reinterpret_cast<const LoraRun*>(at(number) + 3)[index]; }
  const std::int64_t* at(int number) const { return words + static_cast<std::int64_t>(number) * 3 * (1 + runs); }
};

std::vector<Segment> segments_of(const std::int32_t* slots, const std::vector<std::int32_t>& order) {
  std::vector<Segment> segments;
  for (int i = 0; i < static_cast<int>(order.size()); ++i) {
    const int slot = slots[order[i]];
    if (segments.empty() || segments.back().slot != slot || segments.back().count == kTaskRows)
      segments.push_back({slot, i, 0});
    ++segments.back().count;
  }
  return segments;
}

template <class Body>
void run_all(Cpu& cpu, const std::vector<Piece>& pieces, std::int64_t elements, const Body& body) {
  const auto run = [&](int piece, int) { body(pieces[piece]); };
  if (elements < kTaskElements)
    for (int i = 0; i < static_cast<int>(pieces.size()); ++i) run(i, 0);
  else
    cpu.pool.run(static_cast<int>(pieces.size()), run);
}

void add_adapters(Cpu& cpu, Lora a, const std::int32_t* slots, int rows, const Table& table, const LoraKernels& kernels) {
  std::vector<std::int32_t> order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int left, int right) { return slots[left] < slots[right]; });
  const std::vector<Segment> segments = segments_of(slots, order);
  std::vector<Piece> shrinks, expands;
  std::int64_t work = 0;
  a.hidden_stride = 1;
  for (const Segment& segment : segments) {
    const LoraSlot& slot = table.slot(segment.slot);
    a.hidden_stride = std::max(a.hidden_stride, slot.ranks);
    work += slot.ranks * a.inputs * segment.count;
    for (int begin = 0; begin < slot.ranks; begin += kTaskRanks)
      shrinks.push_back({segment, 0, begin, std::min<int>(begin + kTaskRanks, static_cast<int>(slot.ranks))});
    for (int run = 0; run < table.runs; ++run) {
      const int panels = static_cast<int>(divided_up<std::int64_t>(a.outputs[run].length, kLoraPanel));
      const std::int64_t ranks = std::max<std::int64_t>(table.run(segment.slot, run).ranks, 1);
      const int most = static_cast<int>(std::max<std::int64_t>(1, kTaskElements / (ranks * kLoraPanel)));
      for (int begin = 0; begin < panels; begin += most)
        expands.push_back({segment, run, begin, std::min(begin + most, panels)});
    }
  }
  a.hidden = static_cast<float*>(cpu.scratch(static_cast<std::size_t>(rows * a.hidden_stride) * sizeof(float)));
  run_all(cpu, shrinks, work, [&](const Piece& each) {
    kernels.shrink(a, table.slot(each.rows.slot), order.data() + each.rows.begin, each.rows.count, each.begin, each.end);
  });
  run_all(cpu, expands, work, [&](const Piece& each) {
    kernels.expand(a, table.run(each.rows.slot, each.run), a.outputs[each.run], order.data() + each.rows.begin,
                   each.rows.count, each.begin, each.end);
  });
}

}  // namespace

void bind_lora(nb::class_<Cpu>& cpu) {
  cpu.def(
      "add_adapters",
      [](Cpu& cpu, Address x, std::int64_t x_stride, int rows, int type, Address slots, Address add,
         std::int64_t add_stride, int inputs, int weight_type, Address table, Address outputs, int runs) {
        const Lora a{pointer(x), x_stride, pointer<LoraOutputs>(outputs), nullptr, 0, pointer<float>(add), add_stride,
                     inputs, static_cast<Type>(type), static_cast<Type>(weight_type)};
        cpu.submit([&cpu, a, rows, slots = pointer<std::int32_t>(slots), table = Table{pointer<std::int64_t>(table), runs},
                    &kernels = lora_kernels(cpu.level)] { add_adapters(cpu, a, slots, rows, table, kernels); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "What the adapters in the slots of rows add to a product; zeros where they add nothing.");
}

}  // namespace octavo
