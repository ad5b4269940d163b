// Normalisation as Python sees it.
#include "norm.h"

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const NormKernels norm_table; }
namespace avx512 { extern const NormKernels norm_table; }
namespace avx512_bf16 { extern const NormKernels norm_table; }

const NormKernels& norm_kernels(Level level) {
  return choose_table(level, avx2::norm_table, avx512::norm_table, avx512_bf16::norm_table);
}

void bind_norm(nb::class_<Cpu>& cpu) {
  cpu.def(
      "rms_norm",
      [](Cpu& cpu, Address x, Address residual, Address weight, Address sum, Address out, int rows, std::int64_t x_stride,
         int heads, int dim, float eps, int type, float offset) {
        const RmsNorm norm{pointer(x), pointer(residual), pointer(weight), pointer(sum), pointer(out),           x_stride,
                           heads,      dim,               eps,             offset,       static_cast<Type>(type)};
        submit_rows(cpu, norm, rows, rows_grain(dim), norm_kernels(cpu.level).rms_norm);
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "RMS norm of rows, with the residual addition before it where `residual` and `sum` are not 0.");
  cpu.def(
      "layer_norm",
      [](Cpu& cpu, Address x, Address residual, Address weight, Address bias, Address sum, Address out, int rows,
         std::int64_t x_stride, int heads, int dim, float eps, int type, bool has_weights_of_heads) {
        const LayerNorm norm{pointer(x),   pointer(residual), pointer(weight), pointer(bias), pointer(sum),
                             pointer(out), x_stride,          heads,           dim,           has_weights_of_heads,
                             eps,          static_cast<Type>(type)};
        submit_rows(cpu, norm, rows, rows_grain(dim), norm_kernels(cpu.level).layer_norm);
      },
      nb::call_guard<nb::gil_scoped_release>(), "Layer norm of rows, likewise; weight and bias may be 0.");
}

}  // namespace octavo
