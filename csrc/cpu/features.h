// Which instruction sets this machine can run, as the hardware and the operating system report them.
#pragma once

#include <string>
#include <vector>

namespace octavo {

// Names in the spelling of /proc/cpuinfo ("avx2", "avx512f", "amx_bf16", ...), only those that octavo has or plans
// kernels for. A name is listed when the processor has it and the operating system saves its registers; using AMX still
// needs a permission, which the process requests once. Empty on machines that are not x86-64.
std::vector<std::string> cpu_features();

}  // namespace octavo
