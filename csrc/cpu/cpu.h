// What one worker computes with: an instruction set, its threads, and the list of calls it may be recording.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "level.h"
#include "thread_pool.h"

namespace octavo {

// How long kernels ran while it was on.
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

 private:
  std::shared_ptr<KernelClock> clock_;
  std::vector<std::function<void()>> calls_;
};

class Cpu {
 public:
  // Throws std::invalid_argument for a level this machine cannot run or a number of threads below one.
  Cpu(std::string_view level_name, int threads) : level(level_from_name(level_name)), pool(checked(threads)) {}

  const Level level;
  ThreadPool pool;
  const std::shared_ptr<KernelClock> clock = std::make_shared<KernelClock>();

  // Every kernel call goes through here: it is made now, and kept when a recording is under way.
  template <class Work>
  void submit(const Work& work) {
    if (recording_) recording_->add(work);
    clock->time(work);
  }

  // Memory at a multiple of 64 for what one region of a call computes for the next; the next call writes over it.
  void* scratch(std::size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_bytes_ = bytes + bytes / 2;
      scratch_.reset(static_cast<char*>(::operator new(scratch_bytes_, kLine)));
    }
    return scratch_.get();
  }

  // From here to `end_recording` calls are kept as well as made. Throws std::logic_error when one is under way.
  void begin_recording() {
    if (recording_) throw std::logic_error("a recording is under way already");
    recording_ = std::make_shared<Recording>(clock);
  }

  std::shared_ptr<Recording> end_recording() {
    if (!recording_) throw std::logic_error("no recording is under way");
    return std::move(recording_);
  }

 private:
  static int checked(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    return threads;
  }

  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, kLine); }
  };

  std::shared_ptr<Recording> recording_;
  std::unique_ptr<char, Free> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace octavo
