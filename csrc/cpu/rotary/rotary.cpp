// Rotary position embedding as Python sees it.
#include "rotary.h"

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const RotaryKernels rotary_table; }
namespace avx512 { extern const RotaryKernels rotary_table; }
namespace avx512_bf16 { extern const RotaryKernels rotary_table; }

const RotaryKernels& rotary_kernels(Level level) {
  return choose_table(level, avx2::rotary_table, avx512::rotary_table, avx512_bf16::rotary_table);
}

void bind_rotary(nb::class_<Cpu>& cpu) {
  cpu.def(
      "rotary",
      [](Cpu& cpu, Address q, Address k, Address q_out, Address k_out, std::int64_t q_stride, std::int64_t k_stride,
         int heads, int kv_heads, int dim, int tokens, Address positions, Address table, std::int64_t table_rows,
         int rotated, bool interleaved, Address q_weight, Address k_weight, float eps, float offset, int type) {
        const Rotary rotary{{pointer(q), pointer(q_weight), pointer(q_out), q_stride, heads},
                            {pointer(k), pointer(k_weight), pointer(k_out), k_stride, kv_heads},
                            pointer<std::int64_t>(positions),
                            pointer<float>(table),
                            table_rows,
                            dim,
                            rotated,
                            interleaved,
                            eps,
                            offset,
                            static_cast<Type>(type)};
        cpu.submit([&cpu, rotary, tokens, kernel = rotary_kernels(cpu.level).rotary] {
          check_rows(rotary.positions, tokens, 0, rotary.table_rows, "position");
          const int grain = rows_grain((rotary.q.count + rotary.k.count) * rotary.dim);
          cpu.pool.run_pieces(tokens, grain, [&](int begin, int end, int) { kernel(rotary, begin, end); });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rotate queries and keys by their positions, into dense tensors.");
  cpu.def(
      "rotary_table",
      [](Cpu& cpu, Address frequencies, int pairs, int positions, float factor, Address out) {
        const RotaryTable table{pointer<float>(frequencies), pointer<float>(out), pairs, factor};
        submit_rows(cpu, table, positions, 256, rotary_kernels(cpu.level).table);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Cosines and sines of position * frequency.");
}

}  // namespace octavo
