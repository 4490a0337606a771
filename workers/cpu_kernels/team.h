// A team of threads that compute a step together.
//
// A step is a sequence of phases, and a phase is a number of pieces. Members take pieces when they are free. The
// next phase begins when all pieces are done, no matter by whom. In short phases (`each`) members wait for that.
// In long phases (`share`) they do not wait for a member whose core the operating system has given to another
// process: a member that has waited longer than pieces take computes the piece a second time, in private memory.
// The first to finish keeps its result; the other discards its own and continues, through the phases that were
// finished without it. Only the end of a call waits for all members in it.
//
// Such a straggler may read data that others already write for later phases. This is intended: its results are
// never kept, and it takes no index from that data.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dalsegno {

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// A monotonic clock, in its own units.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

constexpr uint64_t LEAST_PATIENCE = 50'000;  // ticks, some tens of microseconds; also for a member that took no piece

// Spins, and yields the core if the wait is long.
class Waiting {
 public:
  void operator()() {
    if (++turns_ < 4000)
      rest();
    else
      std::this_thread::yield();  // a member has lost its core, and may get this one
  }

 private:
  int turns_ = 0;
};

// Pieces of a phase that a member has taken and that are not kept yet: `left` pieces from `next` on.
struct Range {
  uint64_t bits;  // phase + 1 (16 bits), next (32), left (16)
  static Range of(int phase, int next, int end) {
    return {uint64_t(phase + 1) << 48 | uint64_t(next) << 16 | uint64_t(end - next)};
  }
  int next() const { return static_cast<int>(bits >> 16 & 0xFFFFFFFF); }
  int left() const { return static_cast<int>(bits & 0xFFFF); }
  bool has_any_of(int phase) const { return bits >> 48 == uint64_t(phase + 1) && left(); }
  Range behind_next() const { return {bits + (uint64_t(1) << 16) - 1}; }
};

// The state of a member that others read, in a separate cache line.
struct alignas(64) Seat {
  std::atomic<uint64_t> range{0};   // `Range`
  std::atomic<uint64_t> done{0};    // phase + 1, and the number of its pieces that this member has kept
};

class Team {
 public:
  class Member;

  // Throws std::system_error if the operating system cannot create a thread.
  explicit Team(int size) : seats_(size < 1 ? 1 : size) {
    try {
      for (int number = 1; number < this->size(); ++number) threads_.emplace_back([this, number] { follow(number); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Team() { end(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Lets all members call `work(member)`, which has `phases` phases. When this returns, the work is done and no
  // member is in it. One caller at a time.
  template <class Work>
  void run(int phases, const Work& work);

  int size() const { return static_cast<int>(seats_.size()); }

  // The number of pieces that were kept by another member than the one that had taken them.
  int64_t helped() const { return helped_.load(std::memory_order_relaxed); }

 private:
  void end() {
    ends_ = true;
    call_.fetch_add(1);
    call_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void follow(int number);

  // Joins the current work, if it is not over: a member that wakes up too late is not waited for.
  bool joins() {
    int inside = inside_.load(std::memory_order_relaxed);
    while (inside > 0)
      if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
    return false;
  }

  std::vector<Seat> seats_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::atomic<uint32_t> call_{0};
  std::atomic<bool> ends_{false};
  void (*work_)(const void*, Member&) = nullptr;
  const void* argument_ = nullptr;
  uint64_t run_ = 0;  // number of the current run: tells a joining member which run it is
  std::unique_ptr<std::atomic<int>[]> taken_;  // number of taken pieces, by phase
  int taken_size_ = 0;
  std::atomic<int64_t> helped_{0};
  alignas(64) std::atomic<int> inside_{0};  // members in the work; 0 after it is closed
};

// One thread of a team during its work. All members go through the same phases.
class Team::Member {
 public:
  Member(Team& team, int number) : team_(team), number_(number) {}

  int team_size() const { return team_.size(); }

  // Computes each piece of a short phase once, without help; all are done on return.
  template <class Work>
  void each(int phase, int pieces, const Work& work) {
    enter(phase);
    for (int piece; (piece = take(phase, 1)) < pieces; ++done_) work(piece);
    mine().done.store(done_, std::memory_order_release);
    for (Waiting wait; !is_done(phase, pieces);) wait();
  }

  // The same for long phases; pieces are taken `at_once` at a time. `compute(piece, is_followed)` may run twice, so
  // it must write to memory that no other member reads; `is_followed` is true if the next piece is this member's,
  // too. `keep(piece)` stores the result computed last; only one member calls it for a piece.
  template <class Compute, class Keep>
  void share(int phase, int pieces, int at_once, const Compute& compute, const Keep& keep) {
    enter(phase);
    uint64_t now = ticks(), took = 0;
    for (int first; (first = take(phase, at_once)) < pieces;) {
      const int end = std::min(first + at_once, pieces);
      mine().range.store(Range::of(phase, first, end).bits, std::memory_order_release);
      work_off(mine(), phase, compute, keep);
      const uint64_t then = std::exchange(now, ticks());
      took = now - then;
    }
    const uint64_t patience = std::max(2 * took, LEAST_PATIENCE);
    for (Waiting wait; !is_done(phase, pieces); wait()) {
      if (ticks() - now < patience) continue;
      for (Seat& other : team_.seats_) work_off(other, phase, compute, keep);
    }
  }

 private:
  Seat& mine() { return team_.seats_[number_]; }

  void enter(int phase) {
    done_ = uint64_t(phase + 1) << 32;
    mine().done.store(done_, std::memory_order_release);
  }

  int take(int phase, int count) { return team_.taken_[phase].fetch_add(count, std::memory_order_relaxed); }

  // Computes the pieces that are left of a range.
  template <class Compute, class Keep>
  void work_off(Seat& seat, int phase, const Compute& compute, const Keep& keep) {
    Range range{seat.range.load(std::memory_order_acquire)};
    while (range.has_any_of(phase)) {
      const int piece = range.next();
      compute(piece, range.left() > 1);
      // The member that advances the range keeps the piece; the exchange gives the other the new range.
      if (!seat.range.compare_exchange_strong(range.bits, range.behind_next().bits, std::memory_order_acq_rel)) continue;
      range = range.behind_next();
      keep(piece);
      mine().done.store(++done_, std::memory_order_release);
      if (&seat != &mine()) team_.helped_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  bool is_done(int phase, int pieces) const {
    uint64_t sum = 0;
    for (const Seat& seat : team_.seats_) {
      const uint64_t done = seat.done.load(std::memory_order_acquire), of = done >> 32;
      if (of > uint64_t(phase + 1)) return true;  // a member is in a later phase, so this one is done
      if (of == uint64_t(phase + 1)) sum += done & 0xFFFFFFFF;
    }
    return sum == uint64_t(pieces);
  }

  Team& team_;
  const int number_;
  uint64_t done_ = 0;  // `Seat::done` of this member
};

template <class Work>
void Team::run(int phases, const Work& work) {
  const std::lock_guard<std::mutex> alone(mutex_);
  if (taken_size_ < phases) {
    taken_ = std::make_unique<std::atomic<int>[]>(phases);
    taken_size_ = phases;
  }
  for (int phase = 0; phase < phases; ++phase) taken_[phase].store(0, std::memory_order_relaxed);
  for (Seat& seat : seats_) {
    seat.range.store(0, std::memory_order_relaxed);
    seat.done.store(0, std::memory_order_relaxed);
  }
  work_ = [](const void* work, Member& member) { (*static_cast<const Work*>(work))(member); };
  argument_ = &work;
  ++run_;
  inside_.store(1, std::memory_order_release);
  if (size() > 1) {
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
  }
  Member first(*this, 0);
  work(first);
  int only = 1;
  for (Waiting wait; !inside_.compare_exchange_strong(only, 0, std::memory_order_acquire); only = 1) wait();
}

inline void Team::follow(int number) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "engine-team");
#endif
  uint32_t seen = 0;
  uint64_t last = 0;
  for (;;) {
    for (int turns = 0; turns < 2000 && call_.load(std::memory_order_acquire) == seen; ++turns) rest();
    call_.wait(seen, std::memory_order_acquire);
    seen = call_.load(std::memory_order_acquire);
    if (ends_) return;
    if (!joins()) continue;
    // A member that lost its core between the call and here may have joined the next run, and is then called to
    // it again. It must not go through a run twice, because it would reset what it had done.
    if (std::exchange(last, run_) != run_) {
      Member member(*this, number);
      work_(argument_, member);
    }
    inside_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace dalsegno
