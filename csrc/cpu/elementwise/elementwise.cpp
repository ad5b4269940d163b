// Functions of single elements as Python sees them.
#include "elementwise.h"

#include "../bindings.h"

namespace octavo {

namespace avx2 { extern const ElementwiseKernels elementwise_table; }
namespace avx512 { extern const ElementwiseKernels elementwise_table; }
namespace avx512_bf16 { extern const ElementwiseKernels elementwise_table; }

const ElementwiseKernels& elementwise_kernels(Level level) {
  return choose_table(level, avx2::elementwise_table, avx512::elementwise_table, avx512_bf16::elementwise_table);
}

namespace {

void submit_elementwise(Cpu& cpu, int function, Address x, Address y, Address out, int rows, std::int64_t x_stride,
                        std::int64_t y_stride, int width, int type, float parameter, float limit) {
  const Elementwise a{static_cast<Function>(function), pointer(x), pointer(y), pointer(out), x_stride, y_stride,
                      width,                           static_cast<Type>(type), parameter, limit};
  cpu.submit([&cpu, a, rows, kernel = elementwise_kernels(cpu.level).elementwise] {
    cpu.pool.run_pieces(rows, rows_grain(a.width), [&](int begin, int end, int) { kernel(a, begin, end); });
  });
}

}  // namespace

void bind_elementwise(nb::class_<Cpu>& cpu) {
  cpu.def(
      "elementwise",
      [](Cpu& cpu, int function, Address x, Address y, Address out, int rows, std::int64_t x_stride,
         std::int64_t y_stride, int width, int type, float parameter) {
        submit_elementwise(cpu, function, x, y, out, rows, x_stride, y_stride, width, type, parameter, 0.0f);
      },
      nb::call_guard<nb::gil_scoped_release>(), "One function of every element of rows, and of another tensor's.");
  cpu.def("elementwise", submit_elementwise, nb::call_guard<nb::gil_scoped_release>(), "Likewise, with two parameters.");
}

}  // namespace octavo
