#include "shared_group.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <cstdio>
#include <ctime>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBuffer = 256 << 10;  // most that a rank writes in one round
constexpr std::size_t kRingSlot = 256 << 10;
constexpr std::uint32_t kRingSlots = 64;  // most messages that were sent and not received yet
constexpr long kNapNanoseconds = 50'000'000;  // how often a sleeping rank checks for poison

using Clock = std::chrono::steady_clock;

std::size_t in_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

float widen(float x) { return x; }
float widen(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
float widen(_Float16 x) { return static_cast<float>(x); }

void narrow(float x, float& out) { out = x; }
void narrow(float x, _Float16& out) { out = static_cast<_Float16>(x); }
// to the nearest bfloat16, ties to even
void narrow(float x, std::uint16_t& out) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto rounded = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  out = x != x ? 0x7fc0 : rounded;
}

// Elements that are summed at a time: few, so that their sums stay in the cache while the parts of all ranks are added.
template <class T>
void add_ranks(const char* const* sources, int size, char* out, std::size_t bytes) {
  constexpr std::size_t kBlock = 1024;
  float totals[kBlock];
  const std::size_t count = bytes / sizeof(T);
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t n = std::min(kBlock, count - start);
    for (int rank = 0; rank < size; ++rank) {
      const T* source = reinterpret_cast<const T*>(sources[rank]) + start;
      if (rank == 0)
        for (std::size_t i = 0; i < n; ++i) totals[i] = widen(source[i]);
      else
        for (std::size_t i = 0; i < n; ++i) totals[i] += widen(source[i]);
    }
    T* target = reinterpret_cast<T*>(out) + start;
    for (std::size_t i = 0; i < n; ++i) narrow(totals[i], target[i]);
  }
}

// Bytes [start, start + bytes) of the concatenation of rows of `width` bytes, which are `stride` bytes apart.
template <class Copy>
void for_pieces(std::size_t start, std::size_t bytes, std::size_t width, const Copy& copy) {
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t row = (start + done) / width, column = (start + done) % width;
    const std::size_t piece = std::min(width - column, bytes - done);
    copy(row, column, done, piece);
    done += piece;
  }
}

// What ranks compare in a round, because a rank that makes another call than the others would get wrong numbers.
std::uint64_t signature_of(std::uint64_t operation, std::uint64_t first, std::uint64_t second) {
  return (operation * 0x9e3779b97f4a7c15 ^ first) * 0xbf58476d1ce4e5b9 ^ second;
}

}  // namespace

struct SharedGroup::Head {
  std::atomic<std::uint32_t> state;  // 0 healthy, 1 a reason is being written, 2 poisoned
  char reason[1020];
};

// A counter that only one rank writes, and the number of ranks that wait for it.
struct alignas(64) SharedGroup::Counter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  void publish(std::uint32_t number) {
    value.store(number, std::memory_order_release);
    // a rank that goes to sleep increments `sleepers` and then reads `value` again
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed)) futex(&value, FUTEX_WAKE, 1 << 30, nullptr);
  }
};

// Rounds that a rank has written, and what the last two were.
struct alignas(64) SharedGroup::Arrival : Counter {
  std::uint64_t signatures[2];
};

struct SharedGroup::Ring {
  Counter written, read;
  char* slot(std::uint32_t number) { return reinterpret_cast<char*>(this) + kPage + number % kRingSlots * kRingSlot; }
};

std::size_t SharedGroup::head_bytes() { return in_pages(sizeof(Head)); }

std::size_t SharedGroup::group_bytes(int size) {
  const std::size_t ranks = size;
  return in_pages(ranks * sizeof(Arrival)) + 2 * ranks * kBuffer + ranks * ranks * (kPage + kRingSlots * kRingSlot);
}

SharedGroup::SharedGroup(int descriptor, std::size_t memory_bytes, const GroupPlace& place, double deadline_s,
                         double spin_s)
    : memory_bytes_(memory_bytes), place_(place), deadline_s_(deadline_s), spin_s_(spin_s) {
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size ||
      place.offset + group_bytes(place.size) > memory_bytes)
    throw std::invalid_argument("the group does not lie in the shared memory");
  void* memory = mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (memory == MAP_FAILED) throw GroupError(std::string("shared memory cannot be mapped: ") + std::strerror(errno));
  memory_ = static_cast<char*>(memory);
}

SharedGroup::~SharedGroup() { munmap(memory_, memory_bytes_); }

void SharedGroup::gather(const char* share, std::size_t stride, char* out, std::size_t rows, std::size_t width) {
  const std::size_t total = rows * width, out_width = width * place_.size;
  for (std::size_t start = 0; start < total; start += kBuffer) {
    const std::size_t bytes = std::min(kBuffer, total - start);
    char* mine = buffer(place_.rank, round_ + 1);
    for_pieces(start, bytes, width, [&](std::size_t row, std::size_t column, std::size_t at, std::size_t piece) {
      std::memcpy(mine + at, share + row * stride + column, piece);
    });
    const std::uint64_t signature = signature_of(1, total, width);
    arrive(signature);
    // while the others come
    for_pieces(start, bytes, width, [&](std::size_t row, std::size_t column, std::size_t, std::size_t piece) {
      std::memcpy(out + row * out_width + place_.rank * width + column, share + row * stride + column, piece);
    });
    await("gather", signature);
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank == place_.rank) continue;
      const char* theirs = buffer(rank, round_);
      for_pieces(start, bytes, width, [&](std::size_t row, std::size_t column, std::size_t at, std::size_t piece) {
        std::memcpy(out + row * out_width + rank * width + column, theirs + at, piece);
      });
    }
  }
}

void SharedGroup::sum(char* partial, std::size_t count, SumType type) {
  const std::size_t total = count * (type == SumType::float32 ? 4 : 2);
  std::vector<const char*> sources(place_.size);
  for (std::size_t start = 0; start < total; start += kBuffer) {
    const std::size_t bytes = std::min(kBuffer, total - start);
    std::memcpy(buffer(place_.rank, round_ + 1), partial + start, bytes);
    meet("sum", signature_of(2, total, static_cast<std::uint64_t>(type)));
    for (int rank = 0; rank < place_.size; ++rank) sources[rank] = buffer(rank, round_);
    const auto add = type == SumType::float32    ? add_ranks<float>
                     : type == SumType::bfloat16 ? add_ranks<std::uint16_t>
                                                 : add_ranks<_Float16>;
    add(sources.data(), place_.size, partial + start, bytes);
  }
}

void SharedGroup::broadcast(char* data, std::size_t bytes, int source) {
  check_rank(source);
  for (std::size_t start = 0; start < bytes; start += kBuffer) {
    const std::size_t n = std::min(kBuffer, bytes - start);
    if (source == place_.rank) std::memcpy(buffer(source, round_ + 1), data + start, n);
    meet("broadcast", signature_of(3, bytes, source));
    if (source != place_.rank) std::memcpy(data + start, buffer(source, round_), n);
  }
}

void SharedGroup::send(const char* data, std::size_t bytes, int target) {
  check_rank(target);
  check_poison();
  Ring& to = ring(place_.rank, target);
  for (std::size_t start = 0; start < bytes; start += kRingSlot) {
    const std::uint32_t written = to.written.value.load(std::memory_order_relaxed);
    wait(to.read, written + 1 - kRingSlots, target, "receive");
    std::memcpy(to.slot(written), data + start, std::min(kRingSlot, bytes - start));
    to.written.publish(written + 1);
  }
}

void SharedGroup::receive(char* data, std::size_t bytes, int source) {
  check_rank(source);
  check_poison();
  Ring& from = ring(source, place_.rank);
  for (std::size_t start = 0; start < bytes; start += kRingSlot) {
    const std::uint32_t read = from.read.value.load(std::memory_order_relaxed);
    wait(from.written, read + 1, source, "send");
    std::memcpy(data + start, from.slot(read), std::min(kRingSlot, bytes - start));
    from.read.publish(read + 1);
  }
}

void SharedGroup::poison(const std::string& reason) {
  auto& head = *reinterpret_cast<Head*>(memory_);
  std::uint32_t healthy = 0;
  if (!head.state.compare_exchange_strong(healthy, 1)) return;
  std::strncpy(head.reason, reason.c_str(), sizeof head.reason - 1);
  head.state.store(2);
  // ranks that sleep in other groups of this memory check within kNapNanoseconds
  auto* arrivals = reinterpret_cast<Arrival*>(memory_ + place_.offset);
  for (int rank = 0; rank < place_.size; ++rank) futex(&arrivals[rank].value, FUTEX_WAKE, 1 << 30, nullptr);
}

void SharedGroup::meet(const char* what, std::uint64_t signature) {
  arrive(signature);
  await(what, signature);
}

void SharedGroup::arrive(std::uint64_t signature) {
  check_poison();
  auto* arrivals = reinterpret_cast<Arrival*>(memory_ + place_.offset);
  const std::uint32_t round = ++round_;
  arrivals[place_.rank].signatures[round & 1] = signature;
  arrivals[place_.rank].publish(round);
}

void SharedGroup::await(const char* what, std::uint64_t signature) {
  auto* arrivals = reinterpret_cast<Arrival*>(memory_ + place_.offset);
  for (int rank = 0; rank < place_.size; ++rank) {
    if (rank == place_.rank) continue;
    wait(arrivals[rank], round_, rank, what);
    if (arrivals[rank].signatures[round_ & 1] == signature) continue;
    const std::string reason = "ranks " + std::to_string(place_.first + place_.stride * place_.rank) + " and " +
                               std::to_string(place_.first + place_.stride * rank) +
                               " made different collective calls; the first made a " + what;
    poison(reason);
    throw GroupError(reason);
  }
}

// Returns when the counter has reached `least`, modulo 2^32.
void SharedGroup::wait(Counter& counter, std::uint32_t least, int rank, const char* what) {
  const auto is_there = [&] {
    return static_cast<std::int32_t>(counter.value.load(std::memory_order_acquire) - least) >= 0;
  };
  if (is_there()) return;
  const auto began = Clock::now();
  const auto waited = [&] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  // reading the clock costs as much as several reads of the counter
  do {
    for (int look = 0; look < 32; ++look) {
      if (is_there()) return;
      pause();
    }
  } while (waited() < spin_s_);
  const timespec nap{0, kNapNanoseconds};
  while (!is_there()) {
    check_poison();
    if (waited() > deadline_s_) fail(rank, what);
    counter.sleepers.fetch_add(1);
    const std::uint32_t seen = counter.value.load();
    if (static_cast<std::int32_t>(seen - least) < 0) futex(&counter.value, FUTEX_WAIT, seen, &nap);
    counter.sleepers.fetch_sub(1);
  }
}

void SharedGroup::fail(int rank, const char* what) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", deadline_s_);
  const std::string reason = "rank " + std::to_string(place_.first + place_.stride * rank) + " did not " + what +
                             " within " + seconds + " s";
  poison(reason);
  throw GroupError(reason);
}

void SharedGroup::check_poison() const {
  const auto& head = *reinterpret_cast<const Head*>(memory_);
  if (head.state.load(std::memory_order_acquire) == 0) return;
  // a rank that began to write a reason finishes at once, unless it is killed
  for (int look = 0; look < 1'000'000 && head.state.load(std::memory_order_acquire) == 1; ++look) pause();
  throw GroupError(head.state.load() == 2 ? head.reason : "a rank failed");
}

void SharedGroup::check_rank(int rank) const {
  if (rank < 0 || rank >= place_.size) throw std::invalid_argument("the group has no such rank");
}

char* SharedGroup::buffer(int rank, std::uint32_t round) const {
  char* buffers = memory_ + place_.offset + in_pages(place_.size * sizeof(Arrival));
  return buffers + ((round & 1) * place_.size + rank) * kBuffer;
}

SharedGroup::Ring& SharedGroup::ring(int from, int to) const {
  char* rings = buffer(0, 0) + 2 * place_.size * kBuffer;
  return *reinterpret_cast<Ring*>(rings + (from * place_.size + to) * (kPage + kRingSlots * kRingSlot));
}

}  // namespace octavo
