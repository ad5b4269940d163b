// A group of ranks on one machine that compute together through shared memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace octavo {

// A rank is missing, or the memory is poisoned: EngineDeadError in Python.
class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Element types of sums; the numbers are part of the Python interface.
enum class SumType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// The place of a group in the memory, and its ranks: first, first + stride, ….
struct GroupPlace {
  std::size_t offset;
  int rank, size;
  int first, stride;
};

// One rank's side of a group. Calls are made by one thread at a time, in the same order by all ranks, but for `poison`.
//
// A round: each rank writes its part into a buffer of its own, waits for the others (a barrier), then reads theirs. There
// are two buffers, used in turn: a rank in round n + 1 writes the other one, and a rank in round n + 2 knows that all have
// begun n + 1, so have read n. One barrier per round is enough. A rank that waits spins for a while and then sleeps.
class SharedGroup {
 public:
  // Maps the memory behind `descriptor`, which begins with zeros. Throws GroupError where that fails.
  SharedGroup(int descriptor, std::size_t memory_bytes, const GroupPlace& place, double deadline_s, double spin_s);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Bytes before the first group, and of a group; multiples of the page size. Pages are allocated when they are touched.
  static std::size_t head_bytes();
  static std::size_t group_bytes(int size);

  // Rows of `width` bytes, `stride` bytes apart, of each rank → dense rows of size x width bytes.
  void gather(const char* share, std::size_t stride, char* out, std::size_t rows, std::size_t width);
  // Elementwise in float32, ranks 0, 1, … in this order.
  void sum(char* partial, std::size_t count, SumType type);
  void broadcast(char* data, std::size_t bytes, int source);
  void send(const char* data, std::size_t bytes, int target);
  void receive(char* data, std::size_t bytes, int source);
  // Makes waiting and later calls of all groups in this memory throw; the first reason is kept.
  void poison(const std::string& reason);

 private:
  struct Head;
  struct Counter;
  struct Arrival;
  struct Ring;

  // A barrier: publishes that this rank has written its part of the next round, and waits for the other ranks.
  void meet(const char* what, std::uint64_t signature);
  void arrive(std::uint64_t signature);
  void await(const char* what, std::uint64_t signature);
  void wait(Counter& counter, std::uint32_t least, int rank, const char* what);
  [[noreturn]] void fail(int rank, const char* what);
  void check_poison() const;
  void check_rank(int rank) const;
  char* buffer(int rank, std::uint32_t round) const;
  Ring& ring(int from, int to) const;

  char* memory_ = nullptr;
  const std::size_t memory_bytes_;
  const GroupPlace place_;
  const double deadline_s_, spin_s_;
  std::uint32_t round_ = 0;
};

}  // namespace octavo
