// One product of tiles as Python sees it.
#include "tile_dot.h"

#include "../bindings.h"

namespace octavo {

namespace amx { extern const TileDotKernels tile_dot_table; }
namespace amx_emulated { extern const TileDotKernels tile_dot_table; }

void bind_tile_dot(nb::class_<Cpu>& cpu) {
  cpu.def(
      "tile_dot",
      [](Cpu& cpu, Address c, Address a, Address b, int rows, int columns, int depth, int kind) {
        if (cpu.level != Level::amx && cpu.level != Level::amx_emulated)
          throw std::invalid_argument("level " + std::string(name_of(cpu.level)) + " has no tiles");
        const TileProduct product{pointer(c), pointer(a), pointer(b), rows, columns, depth, static_cast<TileDot>(kind)};
        const auto& table = cpu.level == Level::amx ? amx::tile_dot_table : amx_emulated::tile_dot_table;
        cpu.submit([product, kernel = table.multiply] { kernel(product); });
      },
      nb::call_guard<nb::gil_scoped_release>(),
      "c += a · b by one instruction on tiles, to check it: kind 0 bfloat16, 1 int8 · int8, 2 uint8 · int8.");
}

}  // namespace octavo
