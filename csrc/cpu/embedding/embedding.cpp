// Rows of a table as Python sees them. Copying bytes is the same at every level: memcpy.
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
  cpu.def(
      "share_ids",
      [](Cpu& cpu, Address ids, Address out, int tokens, std::int64_t start, std::int64_t rows, std::int64_t total) {
        cpu.submit([=] {
          const auto* numbers = pointer<const std::int64_t>(ids);
          for (int i = 0; i < tokens; ++i) {
            const std::int64_t place = numbers[i] - start;
            const bool is_known = numbers[i] >= 0 && numbers[i] < total;
            pointer<std::int64_t>(out)[i] = place >= 0 && place < rows ? place : is_known ? 0 : -1;
          }
        });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "Places of ids in the rows [start, start + rows) of a table; 0 for other ids in [0, total), -1 for all others.");
  cpu.def(
      "share_rows",
      [](Cpu& cpu, Address ids, Address found, int tokens, std::int64_t row_bytes, std::int64_t start, std::int64_t rows) {
        cpu.submit([=] {
          const auto* numbers = pointer<const std::int64_t>(ids);
          for (int i = 0; i < tokens; ++i)
            if (numbers[i] < start || numbers[i] >= start + rows)
              std::memset(pointer<char>(found) + i * row_bytes, 0, row_bytes);
        });
      },
      nb::call_guard<nb::gil_scoped_release>(), "Zeros over the rows of found whose ids are not in [start, start + rows).");
}

}  // namespace octavo
