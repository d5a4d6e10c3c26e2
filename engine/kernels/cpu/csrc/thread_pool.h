// A step's threads: the caller and `size - 1` others, which wait on a futex between steps.
//
// A run is a list of phases, each of units that any thread may take, some at a time; a phase begins
// when the last unit of the one before is done. Nobody waits for a thread, only for units that were
// taken: one that has lost its core to another process holds the rest up while it computes, and not
// at every phase, as it would at barriers.
//
// Waiting spins for a few microseconds and then sleeps: threads that only spin collapse when a core
// is shared (medians five times the best), and threads that only sleep pay a system call a phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace dovetail {

// How many units a thread takes of those that are left.
enum class Take : uint32_t {
  kOne,   // units that differ much
  kSome,  // first many, then few, so that all threads end together
  kMost,  // in long runs: of memory that is read once
};

class ThreadPool {
 public:
  static constexpr int32_t kMaxUnits = (1 << 18) - 1;

  // Units [first, last) of a phase.
  using Work = std::function<void(int thread, int phase, int32_t first, int32_t last)>;

  struct Phase {
    int32_t count;  // at most kMaxUnits; a phase without any is passed over
    Take take;
  };

  // Its threads run where the process may: who wants them pinned pins that.
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Does all units of all phases, here and on the others; returns when they are done. Until then
  // nothing that `work` reads may change; no thread reads it afterwards.
  void run(const std::vector<Phase>& phases, const Work& work);

 private:
  void serve(int index);
  bool take(int thread, uint64_t ticket);
  void begin(int phase);
  void wait_while(uint32_t epoch);

  const int size_;
  std::vector<std::thread> threads_;
  std::atomic<bool> is_stopping_{false};

  // Of the present run: read by who holds units, which no phase outlives.
  const std::vector<Phase>* phases_ = nullptr;
  const Work* work_ = nullptr;
  int phase_ = 0;

  // Number of the phase over all runs | how to take | units | units taken. Between runs: no units.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int32_t> num_done_{0};  // units of the present phase
  alignas(64) std::atomic<uint32_t> epoch_{0};    // counts tickets of new phases; what threads sleep on
  alignas(64) std::atomic<int32_t> num_asleep_{0};
};

}  // namespace dovetail
