// A thread that was late for one run comes to the next, and is called to that once more when it is through it.
// Ends with 1 where it then goes through a run twice.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
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

#define private public  // to call once more, as if the thread had been late
#include "team.h"
#undef private

int main() {
  dalsegno::Team team(2);
  for (int turn = 0; turn < 200; ++turn) {
    std::atomic<int> entered{0};
    team.run(1, [&](dalsegno::Team::Member& member) {
      const bool follows = member.number_ == 1;
      if (follows) {
        if (entered.fetch_add(1)) std::_Exit(1);
        team.call_.fetch_add(1);
      }
      member.each(0, 2, [](int) {});
      if (follows) return;
      while (!entered) std::this_thread::yield();
      while (team.inside_ > 1) std::this_thread::yield();
      for (int turns = 0; turns < 1000; ++turns) dalsegno::rest();
    });
  }
  return 0;
}
