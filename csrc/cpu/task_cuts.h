// Divides items of equal cost into tasks: long tasks first, so that streams from memory stay long, then shorter and
// shorter ones, so that threads end together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace octavo {

template <class Integer>
constexpr Integer divided_up(Integer x, Integer y) {
  return (x + y - 1) / y;
}

// The next multiple of a cache line's 64 bytes.
constexpr std::int64_t line_up(std::int64_t bytes) { return divided_up<std::int64_t>(bytes, 64) * 64; }

class TaskCuts {
 public:
  // item_ns: approximate cost of an item. Work of less than `kWorthSharingNs` in all is one task.
  TaskCuts(int items, double item_ns, int threads) {
    const double all_ns = items * item_ns;
    const int share = (items + threads - 1) / threads;
    int least = std::clamp(static_cast<int>(kShortestTaskNs / item_ns), 1, share);
    if (threads == 1 || all_ns < kWorthSharingNs) least = items;
    least = std::max(least, (items + kMostTasks / 2 - 1) / (kMostTasks / 2));
    for (int start = 0; start < items; start = starts_[count_]) {
      const int size = std::max(least, (items - start) / (2 * threads));
      starts_[++count_] = std::min(items, start + size);
    }
  }

  int count() const { return count_; }
  int start(int task) const { return starts_[task]; }

 private:
  static constexpr double kShortestTaskNs = 4e3, kWorthSharingNs = 2e3;
  static constexpr int kMostTasks = 512;

  int count_ = 0;
  int starts_[kMostTasks + 1] = {0};
};

}  // namespace octavo
