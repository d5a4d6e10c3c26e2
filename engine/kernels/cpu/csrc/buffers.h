// A step's memory: registers and scratch, which only grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernel_table.h"

namespace dovetail {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Zeroed when it grows; what was in it is lost then.
template <typename T>
class Aligned {
 public:
  T* reserve(int64_t count) {
    if (count > capacity_) {
      const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
      void* memory = std::aligned_alloc(64, bytes);
      if (memory == nullptr) throw std::bad_alloc();
      std::memset(memory, 0, bytes);
      memory_.reset(static_cast<T*>(memory));
      capacity_ = count;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t capacity_ = 0;
};

using AlignedFloats = Aligned<float>;

// One register: float rows, and their quantized form where a matrix wants it.
class Register {
 public:
  explicit Register(int32_t width) : ld_(round_up(width, 64)) {}

  const Activations& reserve(int64_t rows) {
    if (rows > rows_) {
      rows_ = rows;
      const int64_t groups = ld_ / 32;  // of the smallest size that a weight type has
      activations_ = {values_.reserve(rows * ld_), ld_, quants_.reserve(rows * ld_),
                      scales_.reserve(rows * groups), sums_.reserve(rows * groups),
                      middles_.reserve(rows * groups), centred_.reserve(rows * ((groups + 63) / 64))};
    }
    return activations_;
  }
  const Activations& get() const { return activations_; }

 private:
  const int64_t ld_;
  int64_t rows_ = 0;
  Activations activations_{};
  AlignedFloats values_;
  Aligned<int8_t> quants_;
  AlignedFloats scales_;
  Aligned<int32_t> sums_;
  AlignedFloats middles_;
  Aligned<uint64_t> centred_;
};

}  // namespace dovetail
