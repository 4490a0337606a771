// Threads that compute one step together, and how they share it.
//
// Between two steps they sleep; within one they meet at barriers a few hundred times, so they spin there. Who is
// done takes the next piece of the phase, whichever that is: a thread whose core the operating system gives to
// somebody else for a moment then costs the others a piece, not a half.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
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

class Team {
 public:
  // Throws std::system_error where the operating system has no thread left for it.
  explicit Team(int size) : size_(size < 1 ? 1 : size) {
    try {
      for (int number = 1; number < size_; ++number) threads_.emplace_back([this] { follow(); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Team() { end(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Have every member call `work(*this)`, whose pieces are in so many phases. One caller at a time.
  template <class Work>
  void run(int phases, const Work& work) {
    const std::lock_guard<std::mutex> alone(mutex_);
    if (static_cast<int>(taken_size_) < phases) {
      taken_ = std::make_unique<std::atomic<int>[]>(phases);
      taken_size_ = phases;
    }
    for (int phase = 0; phase < phases; ++phase) taken_[phase].store(0, std::memory_order_relaxed);
    work_ = [](const void* work, Team& team) { (*static_cast<const Work*>(work))(team); };
    argument_ = &work;
    if (size_ > 1) {
      call_.fetch_add(1, std::memory_order_release);
      call_.notify_all();
    }
    work(*this);
    meet();  // nobody is in it any more
  }

  // The next piece of a phase that nobody has taken.
  int take(int phase) { return taken_[phase].fetch_add(1, std::memory_order_relaxed); }

  // Wait for all members.
  void meet() {
    if (size_ == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int turns = 0; turn_.load(std::memory_order_acquire) == turn; ++turns) {
      if (turns < 4000)
        rest();
      else
        std::this_thread::yield();  // a member's core is somebody else's at the moment: perhaps this one helps
    }
  }

  int size() const { return size_; }

 private:
  void end() {
    ends_ = true;
    call_.fetch_add(1);
    call_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void follow() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "engine-team");
#endif
    uint32_t seen = 0;
    for (;;) {
      for (int turns = 0; turns < 2000 && call_.load(std::memory_order_acquire) == seen; ++turns) rest();
      call_.wait(seen, std::memory_order_acquire);
      ++seen;
      if (ends_) return;
      work_(argument_, *this);
      meet();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::atomic<uint32_t> call_{0};
  std::atomic<bool> ends_{false};
  void (*work_)(const void*, Team&) = nullptr;
  const void* argument_ = nullptr;
  std::unique_ptr<std::atomic<int>[]> taken_;
  size_t taken_size_ = 0;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

}  // namespace dalsegno
