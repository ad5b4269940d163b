// How subjects bind their kernels for Python: methods of `Cpu` that take tensors as addresses.
//
// A subject X has a folder: X.h (argument structures, the table of kernels), kernels.cpp (compiled once per level) and
// X.cpp (the choice of the table, and `bind_X`). Addresses cost a tenth of a microsecond a call where a tensor caster
// costs nine, and keep torch's headers out; the Python side checks shapes and types.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "cpu.h"

namespace octavo {

namespace nb = nanobind;

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Submits what `kernel` does with the arguments for rows [begin, end), in pieces of at least `grain` rows.
template <class Arguments>
void submit_rows(Cpu& cpu, const Arguments& a, int rows, int grain, void (*kernel)(const Arguments&, int begin, int end)) {
  cpu.submit([=, &cpu] { cpu.pool.run_pieces(rows, grain, [&](int begin, int end, int) { kernel(a, begin, end); }); });
}

// Throws std::out_of_range, IndexError in Python, unless numbers[i] + offset are all in [0, rows).
void check_rows(const std::int64_t* numbers, int count, std::int64_t offset, std::int64_t rows, const char* name);

// The class `Cpu`, and what goes with it.
void bind_kernels(nb::module_& m);

// Groups of ranks: ../collectives.
void bind_collectives(nb::module_& m);

void bind_attention(nb::class_<Cpu>& cpu);
void bind_linear(nb::class_<Cpu>& cpu);
void bind_elementwise(nb::class_<Cpu>& cpu);
void bind_embedding(nb::class_<Cpu>& cpu);
void bind_experts(nb::class_<Cpu>& cpu);
void bind_lora(nb::class_<Cpu>& cpu);
void bind_norm(nb::class_<Cpu>& cpu);
void bind_probe(nb::class_<Cpu>& cpu);
void bind_recurrent(nb::class_<Cpu>& cpu);
void bind_rotary(nb::class_<Cpu>& cpu);
void bind_streams(nb::class_<Cpu>& cpu);
void bind_tile_dot(nb::class_<Cpu>& cpu);
void bind_sampling(nb::class_<Cpu>& cpu);
void bind_quantized(nb::class_<Cpu>& cpu);
void bind_choice(nb::class_<Cpu>& cpu);
void bind_hyper(nb::class_<Cpu>& cpu);

}  // namespace octavo
