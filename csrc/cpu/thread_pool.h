// The one pool of threads that computes: the caller is its first thread, the others spin briefly and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// Rows of `width` elements that take about as long as handing them to another thread: the least that a piece should have.
inline int rows_grain(int width) { return width < 1 ? 8192 : width < 8192 ? 8192 / width : 1; }

// Runs regions of independent tasks. One caller at a time; regions do not nest.
//
// Tasks are claimed one by one, so that a thread which the operating system has taken off its core delays a region by
// no more than the task it holds: a region ends when its tasks are done, not when every thread has come.
class ThreadPool {
 public:
  // `threads` counts the caller. The others are bound to one processor each of those this process may use.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Threads that regions may have now.
  int threads() const { return is_alone ? 1 : size(); }

  // The caller computes alone, for work that is shorter than gathering the others. Changed between regions only.
  bool is_alone = false;

  // Calls `body(task, thread)` once for every task in [0, tasks); `thread` is in [0, threads()). Returns when all are
  // done. Which thread takes which task is not fixed: results must not depend on it.
  template <class Body>
  void run(int tasks, const Body& body) {
    if (tasks <= 0) return;
    if (tasks == 1 || threads() == 1) {
      for (int task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    run_shared(tasks, [](const void* erased, int task, int thread) { (*static_cast<const Body*>(erased))(task, thread); },
               &body);
  }

  // The same in contiguous pieces [begin, end) of at least `grain` items, a few per thread: for many small items.
  template <class Body>
  void run_pieces(int items, int grain, const Body& body) {
    const int most = threads() == 1 ? 1 : threads() * 4;
    const int wanted = items / (grain > 0 ? grain : 1);
    const int pieces = wanted < 1 ? 1 : wanted < most ? wanted : most;
    run(pieces, [&](int piece, int thread) {
      const auto start = static_cast<int>(static_cast<std::int64_t>(items) * piece / pieces);
      const auto stop = static_cast<int>(static_cast<std::int64_t>(items) * (piece + 1) / pieces);
      body(start, stop, thread);
    });
  }

 private:
  using Call = void (*)(const void* body, int task, int thread);

  void run_shared(int tasks, Call call, const void* body);
  void work(int thread, int processor);
  void take_tasks(int thread);

  // The region at hand. A task is claimed by compare-and-swap on region and unclaimed tasks together: success says that
  // the region is not over, and while it is not, its description stays as it is.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};  // region << 32 | unclaimed tasks
  int tasks_ = 0;
  Call call_ = nullptr;
  const void* body_ = nullptr;
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<std::uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace octavo
