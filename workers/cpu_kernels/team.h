// Threads that compute one step together, and how they share it.
//
// A step is a row of phases, a phase so many pieces. Members take pieces as they get to them, and the next phase
// begins when all pieces of one are done, whoever did them. In short phases (`each`) that is waited for. In long
// ones (`share`) nobody waits for a member whose core the operating system has given to somebody else: who has
// waited longer than pieces take computes the other's piece once more, where nobody else sees it. Who is ready
// first keeps it; the other one throws its own away and comes after, through the phases that were done without it.
// Only at the end of a call is everybody in it waited for.
//
// Such a straggler reads what others already write for later phases. That is meant: what it comes to is never
// kept, and it takes no index from there.
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

// Time that goes on evenly, in units of its own.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

constexpr uint64_t LEAST_PATIENCE = 50'000;  // ticks, some tens of microseconds: also of who took no piece itself

// Waits, and lets others have the core when that takes long.
class Waiting {
 public:
  void operator()() {
    if (++turns_ < 4000)
      rest();
    else
      std::this_thread::yield();  // a member's core is somebody else's at the moment: perhaps this one helps
  }

 private:
  int turns_ = 0;
};

// Pieces of a phase that a member has taken and that nobody has kept yet: `left` of them, from `next` on.
struct Range {
  uint64_t bits;  // phase + 1 (16), next (32), how many are left from there on (16)
  static Range of(int phase, int next, int end) {
    return {uint64_t(phase + 1) << 48 | uint64_t(next) << 16 | uint64_t(end - next)};
  }
  int next() const { return static_cast<int>(bits >> 16 & 0xFFFFFFFF); }
  int left() const { return static_cast<int>(bits & 0xFFFF); }
  bool has_any_of(int phase) const { return bits >> 48 == uint64_t(phase + 1) && left(); }
  Range behind_next() const { return {bits + (uint64_t(1) << 16) - 1}; }
};

// What the others see of a member, in a cache line of its own.
struct alignas(64) Seat {
  std::atomic<uint64_t> range{0};   // `Range`
  std::atomic<uint64_t> done{0};    // phase + 1, and how many pieces of it this member has kept
};

class Team {
 public:
  class Member;

  // Throws std::system_error where the operating system has no thread left for it.
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

  // Have members call `work(member)`, whose pieces are in so many phases. It is done when this returns, and
  // nobody is in it. One caller at a time.
  template <class Work>
  void run(int phases, const Work& work);

  int size() const { return static_cast<int>(seats_.size()); }

  // How many pieces were kept by another member than the one who had taken them.
  int64_t helped() const { return helped_.load(std::memory_order_relaxed); }

 private:
  void end() {
    ends_ = true;
    call_.fetch_add(1);
    call_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void follow(int number);

  // Whether there is something to take part in: who wakes up too late is not waited for.
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
  uint64_t run_ = 0;  // how many there were: tells who joins which one it is
  std::unique_ptr<std::atomic<int>[]> taken_;  // of each phase: how many pieces
  int taken_size_ = 0;
  std::atomic<int64_t> helped_{0};
  alignas(64) std::atomic<int> inside_{0};  // how many members are in the work; 0 where nobody may come any more
};

// One thread of a team, in its work. All members go through the same phases.
class Team::Member {
 public:
  Member(Team& team, int number) : team_(team), number_(number) {}

  int team_size() const { return team_.size(); }

  // Each piece of a phase once; all are done when it returns. For short ones: nobody helps with them.
  template <class Work>
  void each(int phase, int pieces, const Work& work) {
    enter(phase);
    for (int piece; (piece = take(phase, 1)) < pieces; ++done_) work(piece);
    mine().done.store(done_, std::memory_order_release);
    for (Waiting wait; !is_done(phase, pieces);) wait();
  }

  // The same for long ones, taken `at_once` at a time. `compute(piece, is_followed)` must write where no other member
  // reads, for it may be done twice; `is_followed` says that the next piece is this member's, too. `keep(piece)` puts
  // what was computed last in its place, and is called by one member alone.
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

  // Compute what is left of a range, as long as there is some.
  template <class Compute, class Keep>
  void work_off(Seat& seat, int phase, const Compute& compute, const Keep& keep) {
    Range range{seat.range.load(std::memory_order_acquire)};
    while (range.has_any_of(phase)) {
      const int piece = range.next();
      compute(piece, range.left() > 1);
      // Who moves the range on keeps the piece; who does not is told where it is now.
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
      if (of > uint64_t(phase + 1)) return true;  // it was, or nobody would be further on
      if (of == uint64_t(phase + 1)) sum += done & 0xFFFFFFFF;
    }
    return sum == uint64_t(pieces);
  }

  Team& team_;
  const int number_;
  uint64_t done_ = 0;  // `Seat::done` of this one
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
    // Who lost its core on the way from one run's call has come to the next run, and is called to it once more
    // when it is through. Nobody goes through a run twice: what it had done would be taken back.
    if (std::exchange(last, run_) != run_) {
      Member member(*this, number);
      work_(argument_, member);
    }
    inside_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace dalsegno
