// The probes as Python sees them.
#include "probe.h"

#include <vector>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const ProbeKernels probe_table; }
namespace avx512 { extern const ProbeKernels probe_table; }
namespace avx512_bf16 { extern const ProbeKernels probe_table; }
namespace amx { extern const ProbeKernels probe_table; }

const ProbeKernels& probe_kernels(Level level) {
  return choose_table(level, avx2::probe_table, avx512::probe_table, avx512_bf16::probe_table, amx::probe_table,
                      avx512_bf16::probe_table);
}

void bind_probe(nb::class_<Cpu>& cpu) {
  cpu.def(
      "probe_read",
      [](Cpu& cpu, Address from, std::int64_t bytes, int repeats, int parts) {
        // the result is stored, because the compiler would drop the loads otherwise
        std::vector<std::int64_t> found(parts);
        cpu.pool.run(parts, [&](int part, int) {
          const std::int64_t share = bytes / parts / 1024 * 1024;
          for (int i = 0; i < repeats; ++i)
            found[part] ^= probe_kernels(cpu.level).read(pointer<char>(from) + part * share, share);
        });
        return found.front();
      },
      nb::call_guard<nb::gil_scoped_release>(), "Read memory `repeats` times, cut into `parts` for as many threads.");
  cpu.def(
      "probe_compute",
      [](Cpu& cpu, int kind, std::int64_t count, int parts) {
        std::vector<std::int64_t> done(parts);
        cpu.pool.run(parts, [&](int part, int) {
          done[part] = probe_kernels(cpu.level).compute(static_cast<Arithmetic>(kind), count);
        });
        std::int64_t sum = 0;
        for (const std::int64_t each : done) sum += each;
        return sum;
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Do at least `count` operations between registers on each of `parts` threads; returns how many it were.");
}

}  // namespace octavo
