// Activations of quantized weights: signed bytes with one scale a row and group.
//
// A group's scale is its largest magnitude / 127, so the step is at most 1/254 of it. Beside the
// scale stands what the group's dot product needs for the weights' offset (`Activations::sums`).
#pragma once

#include "dot.inl"

namespace dovetail {
namespace {

// What a matrix' stored quants have added to them when they are multiplied.
DT_INLINE int32_t offset_of(WeightType type) {
  switch (type) {
    case WeightType::kInt8:
    case WeightType::kQ8_0: return kDotOffset8;
    case WeightType::kQ4_0: return kOffsetQ4_0;
    default: return 0;
  }
}

// sum((w + offset) * x) = sum(w * x) + offset * sum(x): the integer to start from. Q4_1's minimum
// is added to every weight alike: the float that it is multiplied with, scale * sum(x).
DT_INLINE int32_t correction_of(WeightType type, int32_t sum, float scale) {
  if (type != WeightType::kQ4_1) return -offset_of(type) * sum;
  const float total = scale * static_cast<float>(sum);
  int32_t bits;
  std::memcpy(&bits, &total, sizeof bits);
  return bits;
}

DT_INLINE float largest_of_group(const float* x, int group) {
  F32x16 largest = magnitude(load(x));
  for (int k = kLanes; k < group; k += kLanes) largest = max(largest, magnitude(load(x + k)));
  return largest_of(largest);
}

// Rounds a group to bytes and returns their sum.
DT_INLINE int32_t quantize_group(const float* x, int group, float inverse, int8_t* quants) {
  const F32x16 factor = splat(inverse);
  I32x16 sums = round_to_bytes(quants, mul(load(x), factor));
  for (int k = kLanes; k < group; k += kLanes) {
    sums = add_int(sums, round_to_bytes(quants + k, mul(load(x + k), factor)));
  }
  return sum_of_ints(sums);
}

// Sixteen groups at a time, so that their scales are divided at once.
DT_INLINE void quantize_row(WeightType type, int group, int64_t groups, const float* x, int8_t* quants, float* scales,
                            int32_t* sums) {
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    alignas(64) float largest[kLanes] = {}, scale[kLanes], inverse[kLanes];
    for (int i = 0; i < count; ++i) largest[i] = largest_of_group(x + i * group, group);
    const F32x16 divisor = max(load(largest), splat(kSmallestGroup));  // a group of zeros divides by it too
    store(scale, div(divisor, splat(kLargestQuant)));
    store(inverse, div(splat(kLargestQuant), divisor));
    for (int i = 0; i < count; ++i, x += group, quants += group) {
      const int32_t sum = quantize_group(x, group, inverse[i], quants);
      scales[first + i] = scale[i];
      sums[first + i] = correction_of(type, sum, scale[i]);
    }
  }
}

void prepare_row(const Matrix* for_matrix, const Activations* to, int32_t row) {
  const WeightType type = for_matrix->type;
  if (type == WeightType::kF32 || type == WeightType::kBf16) return;
  const int64_t groups = groups_of(type, for_matrix->in_features), at = row * groups;
  const float* x = to->values + row * to->ld;
  float* scales = to->scales + at;
  int32_t* sums = to->sums + at;
  // Each with its group known, so that a group is straight code.
  if (type == WeightType::kInt8) quantize_row(type, kInt8Group, groups, x, to->quants + at * kInt8Group, scales, sums);
  else quantize_row(type, kGgufGroup, groups, x, to->quants + at * kGgufGroup, scales, sums);
}

}  // namespace
}  // namespace dovetail
