#include "features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

#if defined(__x86_64__)
namespace {

enum Register { EAX, EBX, ECX, EDX };

struct Feature {
  const char* name;
  std::uint32_t leaf, subleaf;
  Register where;
  int bit;
  std::uint64_t state;  // bits of XCR0 that the operating system must have set
};

constexpr std::uint64_t kAvx = 0x6;         // XMM and YMM
constexpr std::uint64_t kAvx512 = 0xe6;     // and opmask, ZMM halves, high ZMM
constexpr std::uint64_t kAmx = 0x60006;     // and tile configuration, tile data

constexpr Feature kFeatures[] = {
    {"avx", 1, 0, ECX, 28, kAvx},
    {"f16c", 1, 0, ECX, 29, kAvx},
    {"fma", 1, 0, ECX, 12, kAvx},
    {"avx2", 7, 0, EBX, 5, kAvx},
    {"avx_vnni", 7, 1, EAX, 4, kAvx},
    {"avx512f", 7, 0, EBX, 16, kAvx512},
    {"avx512dq", 7, 0, EBX, 17, kAvx512},
    {"avx512bw", 7, 0, EBX, 30, kAvx512},
    {"avx512vl", 7, 0, EBX, 31, kAvx512},
    {"avx512vbmi", 7, 0, ECX, 1, kAvx512},
    {"avx512_vnni", 7, 0, ECX, 11, kAvx512},
    {"avx512_bf16", 7, 1, EAX, 5, kAvx512},
    {"avx512_fp16", 7, 0, EDX, 23, kAvx512},
    {"amx_bf16", 7, 0, EDX, 22, kAmx},
    {"amx_tile", 7, 0, EDX, 24, kAmx},
    {"amx_int8", 7, 0, EDX, 25, kAmx},
};

std::uint64_t enabled_state() {
  std::uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;  // no OSXSAVE: xgetbv would fault
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

}  // namespace

std::vector<std::string> cpu_features() {
  const std::uint64_t state = enabled_state();
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    std::uint32_t registers[4] = {0, 0, 0, 0};
    if (!__get_cpuid_count(feature.leaf, feature.subleaf, &registers[EAX], &registers[EBX], &registers[ECX],
                           &registers[EDX]))
      continue;
    const bool in_hardware = (registers[feature.where] >> feature.bit) & 1u;
    if (in_hardware && (state & feature.state) == feature.state) names.emplace_back(feature.name);
  }
  return names;
}

#else

std::vector<std::string> cpu_features() { return {}; }

#endif

}  // namespace octavo
