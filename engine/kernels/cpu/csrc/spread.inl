// A rotation that spreads outliers over a head's dimensions before it is rounded to 8 bits.
//
// Keys have dimensions that are much larger than the rest, and one scale a row must fit them. The
// Hadamard transform is orthonormal, so queries and keys that both went through it have the same
// products, and its outputs are of one size (QuaRot, Ashkboos et al. 2024).
#pragma once

#include "simd.h"

namespace dovetail {
namespace {

// One of log2(size) equal stages: sums of neighbours to the first half, differences to the second.
DT_INLINE void spread_stage(const float* from, int32_t size, float factor, float* to) {
  const int32_t half = size / 2;
  int32_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    F32x16 even, odd;
    load_pairs(from + 2 * i, even, odd);
    store(to + i, mul(add(even, odd), splat(factor)));
    store(to + half + i, mul(sub(even, odd), splat(factor)));
  }
  for (; i < half; ++i) {
    const float even = from[2 * i], odd = from[2 * i + 1];
    to[i] = (even + odd) * factor;
    to[half + i] = (even - odd) * factor;
  }
}

constexpr int32_t kMostSpread = 128;

// In place; dimensions in runs of the largest power of two, up to 128, that divides head_dim.
void spread(float* head, int32_t head_dim) {
  int32_t size = head_dim & -head_dim;
  if (size > kMostSpread) size = kMostSpread;
  alignas(64) float other[kMostSpread];
  for (float* run = head; run != head + head_dim; run += size) {
    float *from = run, *to = other;
    for (int32_t left = size; left > 1; left /= 2) {
      spread_stage(from, size, 0.70710678f, to);
      float* swapped = from;
      from = to;
      to = swapped;
    }
    if (from != run) std::memcpy(run, from, static_cast<size_t>(size) * sizeof(float));
  }
}

}  // namespace
}  // namespace dovetail
