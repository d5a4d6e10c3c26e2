// A step's threads: the caller and `size - 1` others, which wait on a futex between steps.
//
// Waiting spins for a few microseconds and then sleeps: threads that only spin collapse when a core
// is shared (medians five times the best), and threads that only sleep pay a system call a barrier.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace dovetail {

class ThreadPool {
 public:
  // Its threads run where the process may: who wants them pinned pins that.
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Runs work(0) here and work(i) on the others; returns when all have ended.
  void run(const std::function<void(int)>& work);

  // Inside `run`: returns once all threads have come here.
  void barrier();

 private:
  void serve(int index);
  void wait_while(const std::atomic<uint32_t>& word, uint32_t value);
  void advance(std::atomic<uint32_t>& word);

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool is_stopping_ = false;
  alignas(64) std::atomic<uint32_t> round_{0};    // counts runs; changes wake the threads
  alignas(64) std::atomic<uint32_t> arrived_{0};  // at the barrier
  alignas(64) std::atomic<uint32_t> phase_{0};    // counts barriers
  alignas(64) std::atomic<int32_t> num_asleep_{0};
};

}  // namespace dovetail
