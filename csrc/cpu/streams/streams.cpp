// Streams of a token as Python sees them.
#include "streams.h"

#include <algorithm>
#include <vector>

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const StreamKernels stream_table; }
namespace avx512 { extern const StreamKernels stream_table; }
namespace avx512_bf16 { extern const StreamKernels stream_table; }

const StreamKernels& stream_kernels(Level level) {
  return choose_table(level, avx2::stream_table, avx512::stream_table, avx512_bf16::stream_table);
}

void bind_streams(nb::class_<Cpu>& cpu) {
  cpu.def(
      "streams",
      [](Cpu& cpu, int function, const std::vector<Address>& parts, const std::vector<std::int64_t>& strides, Address states,
         Address weight, Address out, int rows, int count, int dim, int active, float deviations, int type) {
        Streams a{static_cast<StreamFunction>(function), {}, {}, pointer<float>(states), pointer(weight), pointer(out), count, dim,
                  active, deviations, static_cast<Type>(type)};
        std::transform(parts.begin(), parts.end(), a.parts, [](Address each) { return pointer(each); });
        std::copy(strides.begin(), strides.end(), a.strides);
        submit_rows(cpu, a, rows, rows_grain(count * dim), stream_kernels(cpu.level).streams);
      },
      nb::call_guard<nb::gil_scoped_release>(), "A function of the streams of tokens; see csrc/cpu/streams/streams.h.");
}

}  // namespace octavo
