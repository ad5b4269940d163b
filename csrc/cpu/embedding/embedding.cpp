// Rows of a table as Python sees them. Copying bytes is the same at every level, and the C library knows how.
#include <cstring>

#include "../bindings.h"

namespace octavo {

void bind_embedding(nb::class_<Cpu>& cpu) {
  cpu.def(
      "embedding",
      [](Cpu& cpu, Address ids, std::int64_t offset, Address table, std::int64_t rows, std::int64_t row_bytes,
         Address out, int tokens) {
        cpu.submit([=, &cpu] {
          const auto* numbers = pointer<const std::int64_t>(ids);
          check_rows(numbers, tokens, offset, rows, "row");
          cpu.pool.run_pieces(tokens, rows_grain(static_cast<int>(row_bytes / 2)), [&](int begin, int end, int) {
            for (int i = begin; i < end; ++i)
              std::memcpy(pointer<char>(out) + i * row_bytes, pointer<char>(table) + (numbers[i] + offset) * row_bytes,
                          row_bytes);
          });
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Rows ids + offset of a table [rows, row_bytes], copied to out.");
}

}  // namespace octavo
