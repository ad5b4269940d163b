// octavo._native: what Python sees of the compiled library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>

#include "bindings.h"
#include "features.h"

namespace nb = nanobind;

namespace {

std::map<std::string, std::string> build_info() {
  return {
#if defined(__clang__)
      {"compiler", "clang " __clang_version__},
#elif defined(__GNUC__)
      {"compiler", "gcc " __VERSION__},
#else
      {"compiler", "unknown"},
#endif
      {"cxx_standard", std::to_string(__cplusplus)},
      {"build_type", OCTAVO_BUILD_TYPE},
  };
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The compiled half of octavo.";
  // no warning about leaks: a script may end with its model in a global variable
  nb::set_leak_warnings(false);
  m.def("build_info", &build_info, "How this module was compiled: compiler, cxx_standard, build_type.");
  m.def("cpu_features", &octavo::cpu_features,
        "Instruction sets that this machine can run, spelt as in /proc/cpuinfo; empty where they are unknown.");
  octavo::bind_collectives(m);
#if defined(OCTAVO_HAS_KERNELS)
  octavo::bind_kernels(m);
#else
  m.def("instruction_sets", [] { return std::vector<std::string>(); }, "None: no kernels for this architecture yet.");
#endif
}
