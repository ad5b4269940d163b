#include "level.h"

#include <algorithm>
#include <stdexcept>

#include "features.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

const std::vector<std::string> kNeedsAvx2 = {"avx2", "fma", "f16c"};
const std::vector<std::string> kNeedsAvx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"};
const std::vector<std::string> kNeedsBf16 = {"avx512_bf16"};
const std::vector<std::string> kNeedsTiles = {"amx_tile", "amx_bf16", "amx_int8"};

bool has_all(const std::vector<std::string>& present, const std::vector<std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const std::string& name) {
    return std::find(present.begin(), present.end(), name) != present.end();
  });
}

// Linux grants tile registers on request, once per process; the state component's number is 18.
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

std::string_view name_of(Level level) {
  switch (level) {
    case Level::avx2: return "avx2";
    case Level::avx512: return "avx512";
    case Level::avx512_bf16: return "avx512_bf16";
    case Level::amx: return "amx";
    case Level::amx_emulated: return "amx_emulated";
  }
  return "";
}

std::vector<Level> usable_levels() {
  const std::vector<std::string> present = cpu_features();
  std::vector<Level> levels;
  if (!has_all(present, kNeedsAvx2)) return levels;
  levels.push_back(Level::avx2);
  if (has_all(present, kNeedsAvx512)) {
    levels.push_back(Level::avx512);
    if (has_all(present, kNeedsBf16)) {
      levels.push_back(Level::avx512_bf16);
      if (has_all(present, kNeedsTiles) && may_use_tiles()) levels.push_back(Level::amx);
    }
  }
  std::reverse(levels.begin(), levels.end());
  // last, for it is never the best
  if (has_all(present, kNeedsBf16)) levels.push_back(Level::amx_emulated);
  return levels;
}

Level level_from_name(std::string_view name) {
  const std::vector<Level> levels = usable_levels();
  if (levels.empty()) throw std::invalid_argument("this machine has no AVX2, which is the least the kernels need");
  if (name == "auto") return levels.front();
  std::string known;
  for (Level level : levels) {
    if (name_of(level) == name) return level;
    known += (known.empty() ? "" : ", ") + std::string(name_of(level));
  }
  throw std::invalid_argument("instruction set " + std::string(name) + " cannot run here; this machine has: " + known);
}

}  // namespace octavo
