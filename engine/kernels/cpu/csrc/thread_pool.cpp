#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>

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

// A ticket's fields: phase (26 bits) | take (2) | units (18) | taken (18). The phase's number makes a
// ticket fail that a thread has read long ago: it comes again after some 60 million phases.
constexpr int kUnitBits = 18;
constexpr uint64_t kUnits = (uint64_t{1} << kUnitBits) - 1;
constexpr uint64_t kPhase = uint64_t{1} << (2 * kUnitBits + 2);
static_assert(kUnits == ThreadPool::kMaxUnits);

uint64_t ticket_of(uint64_t before, const ThreadPool::Phase& phase) {
  const uint64_t number = before / kPhase + 1;
  return number * kPhase + (static_cast<uint64_t>(phase.take) << (2 * kUnitBits)) +
         (static_cast<uint64_t>(phase.count) << kUnitBits);
}

int32_t count_of(uint64_t ticket) { return static_cast<int32_t>(ticket >> kUnitBits & kUnits); }
int32_t taken_of(uint64_t ticket) { return static_cast<int32_t>(ticket & kUnits); }

int32_t part_of(uint64_t ticket, int threads) {
  const int32_t left = count_of(ticket) - taken_of(ticket);
  switch (static_cast<Take>(ticket >> (2 * kUnitBits) & 3)) {
    case Take::kOne: break;
    case Take::kSome: return left / (2 * threads) + 1;
    case Take::kMost: return 3 * left / (4 * threads) + 1;
  }
  return 1;
}

}  // namespace

ThreadPool::ThreadPool(int size) : size_(size) {
  for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  is_stopping_ = true;
  epoch_.fetch_add(1);
  futex(epoch_, FUTEX_WAKE, INT_MAX);
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(const std::vector<Phase>& phases, const Work& work) {
  for (const Phase& phase : phases)
    if (phase.count > kMaxUnits) throw std::length_error("a step of too many rows");
  if (size_ == 1) {
    for (size_t i = 0; i < phases.size(); ++i)
      if (phases[i].count > 0) work(0, static_cast<int>(i), 0, phases[i].count);
    return;
  }
  phases_ = &phases;
  work_ = &work;
  begin(0);
  for (;;) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (count_of(ticket) == 0) return;
    if (!take(0, ticket)) wait_while(epoch);
  }
}

void ThreadPool::serve(int index) {
  pthread_setname_np(pthread_self(), "step");
  for (;;) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (is_stopping_) return;  // looked at after the epoch, which changes after it
    if (!take(index, ticket_.load(std::memory_order_acquire))) wait_while(epoch);
  }
}

// Does some of the ticket's units; false where none are left.
bool ThreadPool::take(int thread, uint64_t ticket) {
  const int32_t count = count_of(ticket), first = taken_of(ticket);
  if (first == count) return false;
  const int32_t part = part_of(ticket, size_);
  // Who has taken units holds the phase: until they are done, all that belongs to it stays.
  if (!ticket_.compare_exchange_strong(ticket, ticket + static_cast<uint64_t>(part),
                                       std::memory_order_acq_rel))
    return true;
  (*work_)(thread, phase_, first, first + part);
  if (num_done_.fetch_add(part, std::memory_order_acq_rel) + part == count) begin(phase_ + 1);
  return true;
}

// Alone: nobody holds units.
void ThreadPool::begin(int phase) {
  const int num_phases = static_cast<int>(phases_->size());
  while (phase < num_phases && (*phases_)[static_cast<size_t>(phase)].count == 0) ++phase;
  phase_ = phase;
  num_done_.store(0, std::memory_order_relaxed);
  const Phase next = phase < num_phases ? (*phases_)[static_cast<size_t>(phase)] : Phase{0, Take::kOne};
  ticket_.store(ticket_of(ticket_.load(std::memory_order_relaxed), next), std::memory_order_release);
  // Who goes to sleep says so before it looks again, who changes the word looks afterwards: one of
  // them sees the other. (Both sequentially consistent; the futex looks again by itself.)
  epoch_.fetch_add(1);
  if (num_asleep_.load() > 0) futex(epoch_, FUTEX_WAKE, INT_MAX);
}

void ThreadPool::wait_while(uint32_t epoch) {
  for (int i = 0; i < kSpins; ++i) {
    if (epoch_.load(std::memory_order_acquire) != epoch) return;
    relax();
  }
  num_asleep_.fetch_add(1);
  while (epoch_.load() == epoch) futex(epoch_, FUTEX_WAIT, epoch);
  num_asleep_.fetch_sub(1);
}

}  // namespace dovetail
