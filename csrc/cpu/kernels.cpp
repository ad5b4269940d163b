// The class `Cpu` as Python sees it, with the methods of every subject.
#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

namespace octavo {

void check_rows(const std::int64_t* numbers, int count, std::int64_t offset, std::int64_t rows, const char* name) {
  for (int i = 0; i < count; ++i)
    if (const std::int64_t row = numbers[i] + offset; row < 0 || row >= rows)
      throw std::out_of_range(std::string(name) + " " + std::to_string(row) + " of a table with " +
                              std::to_string(rows) + " rows");
}

void bind_kernels(nb::module_& m) {
  m.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (const Level level : usable_levels()) names.emplace_back(name_of(level));
        return names;
      },
      "Levels of instruction sets that the kernels can run at here, best first; amx_emulated is for checking only.");

  nb::class_<Recording>(m, "Recording", "Kernel calls, kept with their addresses.")
      .def("run", &Recording::run, nb::call_guard<nb::gil_scoped_release>(), "Make the calls again, in order.")
      .def("__len__", &Recording::size);

  nb::class_<Cpu> cpu(m, "Cpu", "An instruction set, a pool of threads, and the kernels; tensors are passed as addresses.");
  cpu.def(nb::init<std::string_view, int>(), nb::arg("instruction_set"), nb::arg("threads"))
      .def_prop_ro("instruction_set", [](const Cpu& cpu) { return std::string(name_of(cpu.level)); })
      .def_prop_ro("threads", [](const Cpu& cpu) { return cpu.pool.size(); })
      .def_prop_rw(
          "is_alone", [](const Cpu& cpu) { return cpu.pool.is_alone; },
          [](Cpu& cpu, bool is_alone) { cpu.pool.is_alone = is_alone; }, "Whether the caller's thread computes alone.")
      .def_prop_rw(
          "is_clock_on", [](const Cpu& cpu) { return cpu.clock->is_on; },
          [](Cpu& cpu, bool is_on) { cpu.clock->is_on = is_on; }, "Whether `kernel_nanoseconds` counts.")
      .def_prop_ro(
          "kernel_nanoseconds", [](const Cpu& cpu) { return cpu.clock->nanoseconds; },
          "How long kernels have run while the clock was on.")
      .def("begin_recording", &Cpu::begin_recording, "Keep the calls that are made from here on.")
      .def("end_recording", &Cpu::end_recording, "Stop keeping calls; returns what was kept.");
  bind_attention(cpu);
  bind_linear(cpu);
  bind_elementwise(cpu);
  bind_embedding(cpu);
  bind_experts(cpu);
  bind_lora(cpu);
  bind_norm(cpu);
  bind_probe(cpu);
  bind_recurrent(cpu);
  bind_rotary(cpu);
  bind_streams(cpu);
  bind_tile_dot(cpu);
  bind_sampling(cpu);
  bind_quantized(cpu);
  bind_choice(cpu);
  bind_hyper(cpu);
}

}  // namespace octavo
