// Hyper-connections as Python sees them.
#include "hyper.h"

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const HyperKernels hyper_table; }
namespace avx512 { extern const HyperKernels hyper_table; }
namespace avx512_bf16 { extern const HyperKernels hyper_table; }

const HyperKernels& hyper_kernels(Level level) {
  return choose_table(level, avx2::hyper_table, avx512::hyper_table, avx512_bf16::hyper_table);
}

namespace {

constexpr int kMixingGrain = 16;  // a matrix takes about as long as sixteen

}  // namespace

void bind_hyper(nb::class_<Cpu>& cpu) {
  cpu.def(
      "hyper_mixing",
      [](Cpu& cpu, Address products, std::int64_t stride, Address scale, Address base, Address read, Address write, Address mix,
         int rows, int count, int rounds, float eps, float most) {
        const HyperMixing a{pointer<float>(products), stride, pointer<float>(scale), pointer<float>(base), pointer<float>(read),
                            pointer<float>(write), pointer<float>(mix), count, rounds, eps, most};
        submit_rows(cpu, a, rows, kMixingGrain, hyper_kernels(cpu.level).mixing);
      },
      nb::call_guard<nb::gil_scoped_release>(), "What blocks read and write of streams; see csrc/cpu/hyper/hyper.h.");
  cpu.def(
      "hyper_streams",
      [](Cpu& cpu, int function, Address x, std::int64_t stride, Address other, std::int64_t other_stride, Address weights,
         std::int64_t weight_stride, Address mix, Address out, int rows, int count, int dim, float eps, int type) {
        const HyperStreams a{static_cast<HyperFunction>(function), pointer(x), pointer(other), stride, other_stride,
                             pointer<float>(weights), weight_stride, pointer<float>(mix), pointer(out), count, dim, eps,
                             static_cast<Type>(type)};
        submit_rows(cpu, a, rows, rows_grain(count * dim), hyper_kernels(cpu.level).streams);
      },
      nb::call_guard<nb::gil_scoped_release>(), "A function of streams that hyper-connections join; see csrc/cpu/hyper/hyper.h.");
}

}  // namespace octavo
