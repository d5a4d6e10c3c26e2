// What a core can do at most with its registers alone: sums that depend on nothing but themselves.
#include <immintrin.h>

#include <cstdint>

namespace {
constexpr int kSums = 12;  // more than an instruction's latency times its throughput
}

// Multiplications and additions of bytes: 128 an instruction.
extern "C" double peak_int8(int64_t rounds) {
  __m512i sums[kSums];
#pragma GCC unroll 12
  for (int k = 0; k < kSums; ++k) sums[k] = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kSums; ++k) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sums[k]) : "v"(a));
  }
  return 128.0 * kSums * static_cast<double>(rounds);
}

// Of float32: 32 an instruction.
extern "C" double peak_f32(int64_t rounds) {
  __m512 sums[kSums];
#pragma GCC unroll 12
  for (int k = 0; k < kSums; ++k) sums[k] = _mm512_setzero_ps();
  __m512 a = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kSums; ++k) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[k]) : "v"(a));
  }
  return 32.0 * kSums * static_cast<double>(rounds);
}
