#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace dovetail {
namespace {

// About 20 us on a core of our own: longer than the threads of a step differ, shorter than a time
// slice by far.
constexpr int kSpins = 4000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG,
                 value, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int size) : size_(size) {
  for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  is_stopping_ = true;
  advance(round_);
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& work) {
  if (size_ == 1) {
    work(0);
    return;
  }
  work_ = &work;
  advance(round_);
  work(0);
  barrier();
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    advance(phase_);
    return;
  }
  wait_while(phase_, phase);
}

void ThreadPool::serve(int index) {
  pthread_setname_np(pthread_self(), "step");
  for (uint32_t seen = 0;;) {
    wait_while(round_, seen);
    ++seen;
    if (is_stopping_) return;
    (*work_)(index);
    barrier();
  }
}

void ThreadPool::wait_while(const std::atomic<uint32_t>& word, uint32_t value) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != value) return;
    relax();
  }
  // Who goes to sleep says so before it looks again, who changes the word looks afterwards: one of
  // them sees the other. (Both sequentially consistent; the futex looks again by itself.)
  num_asleep_.fetch_add(1);
  while (word.load() == value) futex(word, FUTEX_WAIT, value);
  num_asleep_.fetch_sub(1);
}

void ThreadPool::advance(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  if (num_asleep_.load() > 0) futex(word, FUTEX_WAKE, INT_MAX);
}

}  // namespace dovetail
