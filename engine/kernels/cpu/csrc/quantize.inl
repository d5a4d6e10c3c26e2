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

DT_INLINE float largest_magnitude16(const float* x, int count) {
  F32x16 largest = splat(0.0f);
  for (int k = 0; k < count; k += kLanes) {
    largest = max(largest, magnitude(load(x + k)));
  }
  return largest_of(largest);
}

void prepare_row(const Matrix* for_matrix, const Activations* to, int32_t row) {
  const WeightType type = for_matrix->type;
  if (type == WeightType::kF32 || type == WeightType::kBf16) return;
  const int group = group_of(type), padded = padded_inputs(type, for_matrix->in_features);
  const int64_t groups = padded / group;
  const float* x = to->values + row * to->ld;
  int8_t* quants = to->quants + static_cast<int64_t>(row) * padded;
  for (int64_t g = 0; g < groups; ++g, x += group, quants += group) {
    const float largest = largest_magnitude16(x, group);
    const bool is_zero = largest < kSmallestGroup;
    const float scale = is_zero ? 0.0f : largest / kLargestQuant;
    const F32x16 inverse = splat(is_zero ? 0.0f : kLargestQuant / largest);
    I32x16 sums = splat_int(0);
    for (int k = 0; k < group; k += kLanes) sums = add_int(sums, round_to_bytes(quants + k, mul(load(x + k), inverse)));
    to->scales[row * groups + g] = scale;
    to->sums[row * groups + g] = correction_of(type, sum_of_ints(sums), scale);
  }
}

}  // namespace
}  // namespace dovetail
