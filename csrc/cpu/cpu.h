// The CPU of one worker: an instruction set, threads, and the active recording.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>

#include "../recording.h"
#include "level.h"
#include "thread_pool.h"

namespace octavo {

class Cpu {
 public:
  // Throws std::invalid_argument for a level this machine cannot run or a number of threads below one.
  Cpu(std::string_view level_name, int threads) : level(level_from_name(level_name)), pool(checked(threads)) {}

  const Level level;
  ThreadPool pool;
  const std::shared_ptr<KernelClock> clock = std::make_shared<KernelClock>();

  // Makes a kernel call, and adds it to the active recording if there is one. Every kernel call goes through here.
  template <class Work>
  void submit(const Work& work) {
    if (Recording::under_way) Recording::under_way->add(work);
    clock->time(work);
  }

  // Scratch memory, aligned to 64 bytes, between the regions of one call; the next call overwrites it.
  void* scratch(std::size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_bytes_ = bytes + bytes / 2;
      scratch_.reset(static_cast<char*>(::operator new(scratch_bytes_, kLine)));
    }
    return scratch_.get();
  }

  // From here to `end_recording` this thread's calls are made and recorded, those of other parts of the library too.
  // Throws std::logic_error when a recording is active.
  void begin_recording() {
    if (Recording::under_way) throw std::logic_error("a recording is under way already");
    recording_ = std::make_shared<Recording>(clock);
    Recording::under_way = recording_.get();
  }

  std::shared_ptr<Recording> end_recording() {
    if (!recording_) throw std::logic_error("no recording is under way");
    Recording::under_way = nullptr;
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
