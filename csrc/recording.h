// Records calls while they are made, so that they can be repeated without Python.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace octavo {

// The time that kernels ran while timing was on.
class KernelClock {
 public:
  bool is_on = false;
  std::int64_t nanoseconds = 0;

  template <class Work>
  void time(const Work& work) {
    if (!is_on) return work();
    const auto began = std::chrono::steady_clock::now();
    work();
    nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
  }
};

// Calls in the order in which they were made; running them again computes on the same addresses.
class Recording {
 public:
  explicit Recording(std::shared_ptr<KernelClock> clock) : clock_(std::move(clock)) {}
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  void run() const {
    clock_->time([this] {
      for (const auto& call : calls_) call();
    });
  }
  std::size_t size() const { return calls_.size(); }

  // The active recording of this thread, or null. Every compiled function that computes on addresses adds its calls.
  static inline thread_local Recording* under_way = nullptr;

 private:
  std::shared_ptr<KernelClock> clock_;
  std::vector<std::function<void()>> calls_;
};

// Makes a call, and adds it to the active recording if there is one.
template <class Work>
void make_recordable(const Work& work) {
  if (Recording::under_way) Recording::under_way->add(work);
  work();
}

}  // namespace octavo
