#include "thread_pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace octavo {
namespace {

// As long as Python needs between two operators of a step, and then some; a thread that waits longer sleeps.
constexpr auto kSpin = std::chrono::microseconds(100);
// A region's last tasks are usually done by then; if not, their thread may be waiting for this processor.
constexpr int kPausesBeforeYield = 4000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Processors this process may run on, in order; empty where that is not known.
std::vector<int> allowed_processors() {
  std::vector<int> processors;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) processors.push_back(cpu);
#endif
  return processors;
}

// A thread that wakes on the processor of its spinning caller would wait for it: each worker has a place of its own.
void bind_to(int processor) {
#if defined(__linux__)
  if (processor < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  const std::vector<int> processors = allowed_processors();
  const bool has_places = threads > 1 && static_cast<std::size_t>(threads) <= processors.size();
  for (int thread = 1; thread < threads; ++thread)
    workers_.emplace_back([this, thread, processor = has_places ? processors[thread] : -1] { work(thread, processor); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_shared(int tasks, Call call, const void* body) {
  // every thread is done with the last region's description: it was read before the last task ended
  tasks_ = tasks;
  call_ = call;
  body_ = body;
  unfinished_.store(tasks, std::memory_order_relaxed);
  const std::uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(region << 32 | static_cast<std::uint32_t>(tasks), std::memory_order_release);
  wake_.fetch_add(1);
  if (sleepers_.load() > 0) wake_.notify_all();

  take_tasks(0);
  for (int waited = 0; unfinished_.load(std::memory_order_acquire) > 0; ++waited) {
    if (waited < kPausesBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::take_tasks(int thread) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (const auto unclaimed = static_cast<int>(ticket & 0xffffffffu)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire, std::memory_order_acquire)) continue;
    call_(body_, tasks_ - unclaimed, thread);
    unfinished_.fetch_sub(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work(int thread, int processor) {
  bind_to(processor);
  std::uint32_t seen = wake_.load();
  auto idle_since = std::chrono::steady_clock::now();
  for (int spins = 0; !stopping_.load(std::memory_order_relaxed); ++spins) {
    const std::uint32_t now = wake_.load(std::memory_order_acquire);
    if (now != seen) {
      seen = now;
      take_tasks(thread);
      idle_since = std::chrono::steady_clock::now();
      continue;
    }
    pause();
    // the clock costs as much as several looks at `wake_`
    if (spins % 64 != 0 || std::chrono::steady_clock::now() - idle_since < kSpin) continue;
    sleepers_.fetch_add(1);
    wake_.wait(seen);
    sleepers_.fetch_sub(1);
    idle_since = std::chrono::steady_clock::now();
  }
}

}  // namespace octavo
