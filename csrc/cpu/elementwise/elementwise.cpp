// Functions of single elements as Python sees them.
#include "elementwise.h"

#include <cstring>

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
  submit_rows(cpu, a, rows, rows_grain(width), elementwise_kernels(cpu.level).elementwise);
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
  cpu.def(
      "widened",
      [](Cpu& cpu, Address x, std::int64_t x_stride, Address out, int tokens, int heads, std::int64_t bytes,
         std::int64_t wide_bytes) {
        cpu.submit([=, &cpu] {
          cpu.pool.run_pieces(tokens, rows_grain(static_cast<int>(heads * wide_bytes / 2)), [&](int begin, int end, int) {
            for (int token = begin; token < end; ++token)
              for (int head = 0; head < heads; ++head) {
                char* to = pointer<char>(out) + (static_cast<std::int64_t>(token) * heads + head) * wide_bytes;
                std::memcpy(to, pointer<char>(x) + token * x_stride + head * bytes, bytes);
                std::memset(to + bytes, 0, wide_bytes - bytes);
              }
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Heads [tokens, heads, bytes] with zeros behind each; strides in bytes.");
}

}  // namespace octavo
