// Activations of quantized weights: signed bytes with one scale a row and group.
//
// A group's scale is its largest magnitude / 127, so the step is at most 1/254 of it. Beside the
// scale stands what the group's dot product needs for the weights' offset (`Activations::sums`).
//
// Models have inputs that are many times larger than their neighbours, always the same few. For
// int8, rotation.inl spreads them. The GGUF types' weights cannot be rotated: where a matrix has
// their sums, the middle of a row's worst groups is taken away before they are rounded, which halves
// the step of a lone outlier, and comes back as middle * sum of weights (`add_middles`). Worst: it
// lowers the sum of all groups' squared steps by a fifth or more, so these are few.
#pragma once

#include "dot.inl"
#include "fold.inl"
#include "rotation.inl"

namespace dovetail {
namespace {

constexpr float kWorthCentring = 0.2f;  // of the row's sum of squared largest magnitudes

// What a matrix' stored quants have added to them when they are multiplied.
DT_INLINE int32_t offset_of(WeightType type) {
  switch (type) {
    case WeightType::kInt8:
    case WeightType::kQ8_0: return kDotOffset8;
    case WeightType::kQ4_0: return kOffsetQ4_0;
    default: return 0;
  }
}

// Groups [first, first + count) of a row, sixteen at most; lanes behind them hold anything finite.
struct GroupScales {
  F32x16 scales, inverses, middles;
};

DT_INLINE GroupScales scales_of(F32x16 largest, F32x16 middles) {
  const F32x16 divisor = max(largest, splat(kSmallestGroup));  // a group of zeros divides by it too
  return {div(divisor, splat(kLargestQuant)), div(splat(kLargestQuant), divisor), middles};
}

// Reduces each group to a lane; those behind `count` hold anything finite.
template <Reduction kOf, int kGroup>
DT_INLINE F32x16 reduce_groups(const float* x, int count) {
  F32x16 each[kLanes];
  for (int i = 0; i < count; ++i, x += kGroup) {
    each[i] = load(x);
    for (int k = kLanes; k < kGroup; k += kLanes) each[i] = kOf(each[i], load(x + k));
  }
  for (int i = count; i < kLanes; ++i) each[i] = splat(0.0f);
  return fold<kOf>(each, count);
}

// Rounds groups to bytes and returns the sum of each one's.
template <int kGroup>
DT_INLINE F32x16 round_groups(const float* x, int count, const GroupScales& by, int8_t* quants) {
  alignas(64) float inverse[kLanes], middle[kLanes];
  store(inverse, by.inverses);
  store(middle, by.middles);
  F32x16 sums[kLanes];
  for (int i = 0; i < count; ++i, x += kGroup, quants += kGroup) {
    const F32x16 factor = splat(inverse[i]), shift = splat(middle[i]);
    I32x16 sum = round_to_bytes(quants, mul(sub(load(x), shift), factor));
    for (int k = kLanes; k < kGroup; k += kLanes)
      sum = add_int(sum, round_to_bytes(quants + k, mul(sub(load(x + k), shift), factor)));
    sums[i] = to_float(sum);
  }
  for (int i = count; i < kLanes; ++i) sums[i] = splat(0.0f);
  return fold<add>(sums, count);
}

// sum((w + offset) * x) = sum(w * x) + offset * sum(x): the integer to start from. Q4_1's minimum is
// added to every weight alike: the float that it is multiplied with, the sum of what was rounded.
DT_INLINE void store_corrections(WeightType type, F32x16 sums, const GroupScales& by, int count, int32_t* to) {
  if (type == WeightType::kQ4_1) {
    const F32x16 totals = fma(sums, by.scales, mul(by.middles, splat(static_cast<float>(kGgufGroup))));
    return store_some(reinterpret_cast<float*>(to), totals, count);
  }
  alignas(64) float sum[kLanes];
  store(sum, sums);
  for (int i = 0; i < count; ++i) to[i] = -offset_of(type) * static_cast<int32_t>(sum[i]);
}

DT_INLINE F32x16 magnitude_of(F32x16 lowest, F32x16 highest) { return max(highest, sub(splat(0.0f), lowest)); }

// Where the range of each group lies, into middles (lowest) and scales (highest) for now; returns the
// sum of their squared largest magnitudes.
DT_INLINE float survey_groups(const float* x, int64_t groups, float* lowest, float* highest) {
  for (int64_t first = 0; first < groups; first += kLanes, x += kLanes * kGgufGroup) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    store_some(lowest + first, reduce_groups<min, kGgufGroup>(x, count), count);
    store_some(highest + first, reduce_groups<max, kGgufGroup>(x, count), count);
  }
  F32x16 squares = splat(0.0f);
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    const F32x16 largest = magnitude_of(load_some(lowest + first, count), load_some(highest + first, count));
    squares = fma(largest, largest, squares);
  }
  return sum_of(squares);
}

// One GGUF row of a matrix without sums.
DT_INLINE void quantize_plain(WeightType type, int64_t groups, const float* x, const Activations& row) {
  for (int64_t first = 0; first < groups; first += kLanes, x += kLanes * kGgufGroup) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    F32x16 each[kLanes];
    for (int i = 0; i < count; ++i)
      each[i] = max(magnitude(load(x + i * kGgufGroup)), magnitude(load(x + i * kGgufGroup + kLanes)));
    for (int i = count; i < kLanes; ++i) each[i] = splat(0.0f);
    const GroupScales by = scales_of(fold<max>(each, count), splat(0.0f));
    const F32x16 sums = round_groups<kGgufGroup>(x, count, by, row.quants + first * kGgufGroup);
    store_corrections(type, sums, by, count, row.sums + first);
    store_some(row.scales + first, by.scales, count);
  }
}

// One GGUF row of a matrix with sums; see the head of this file.
DT_INLINE void quantize_centred(WeightType type, int64_t groups, const float* x, const Activations& row) {
  const F32x16 least_gain = splat(kWorthCentring * survey_groups(x, groups, row.middles, row.scales) + 1e-30f);
  for (int64_t word = 0; word < words_of(groups); ++word) row.centred[word] = 0;
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    const F32x16 low = load_some(row.middles + first, count), high = load_some(row.scales + first, count);
    const F32x16 middle = mul(add(low, high), splat(0.5f)), half = sub(high, middle);
    const F32x16 largest = magnitude_of(low, high);
    const F32x16 gain = sub(mul(largest, largest), mul(half, half));
    const F32x16 taken = keep_at_least(gain, least_gain, middle);
    const GroupScales by = scales_of(magnitude_of(sub(low, taken), sub(high, taken)), taken);
    row.centred[first / 64] |= static_cast<uint64_t>(mask_at_least(gain, least_gain)) << first % 64;
    const F32x16 sums = round_groups<kGgufGroup>(x + first * kGgufGroup, count, by, row.quants + first * kGgufGroup);
    store_corrections(type, sums, by, count, row.sums + first);
    store_some(row.scales + first, by.scales, count);
    store_some(row.middles + first, by.middles, count);
  }
}

// One int8 row.
DT_INLINE void quantize_rotated(int64_t groups, const float* x, const Activations& row) {
  alignas(64) float rotated[kLanes * kInt8Group];
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int count = static_cast<int>(groups - first < kLanes ? groups - first : kLanes);
    F32x16 each[kLanes];
    for (int i = 0; i < kLanes; ++i) each[i] = splat(0.0f);
    for (int i = 0; i < count; ++i) {
      F32x16 group[kRotatedVectors];
      rotate_group(x + (first + i) * kInt8Group, group);
      for (int k = 0; k < kRotatedVectors; ++k) {
        each[i] = max(each[i], magnitude(group[k]));
        store(rotated + i * kInt8Group + k * kLanes, group[k]);
      }
    }
    const GroupScales by = scales_of(fold<max>(each, count), splat(0.0f));
    const F32x16 sums = round_groups<kInt8Group>(rotated, count, by, row.quants + first * kInt8Group);
    store_corrections(WeightType::kInt8, sums, by, count, row.sums + first);
    store_some(row.scales + first, by.scales, count);
  }
}

DT_INLINE Activations from_group(const Activations& all, int64_t at, int64_t group_size) {
  Activations rest = all;
  rest.quants += at * group_size;
  rest.scales += at;
  rest.sums += at;
  return rest;
}

void prepare_groups(const Matrix* for_matrix, const Activations* to, int32_t row, int32_t first, int32_t last) {
  const WeightType type = for_matrix->type;
  const int64_t size = group_of(type), groups = groups_of(type, for_matrix->in_features);
  const int64_t count = (last < groups ? last : groups) - first;
  const Activations some = from_group(*to, row * groups + first, size);
  const float* x = to->values + row * to->ld + first * size;
  if (type == WeightType::kInt8) quantize_rotated(count, x, some);
  else quantize_plain(type, count, x, some);
}

void prepare_row(const Matrix* for_matrix, const Activations* to, int32_t row) {
  const WeightType type = for_matrix->type;
  if (type == WeightType::kF32 || type == WeightType::kBf16) return;
  const int64_t groups = groups_of(type, for_matrix->in_features);
  if (type == WeightType::kInt8 || for_matrix->sums == nullptr)
    return prepare_groups(for_matrix, to, row, 0, static_cast<int32_t>(groups));
  Activations one = from_group(*to, row * groups, group_of(type));
  one.middles += row * groups;
  one.centred += row * words_of(groups);
  quantize_centred(type, groups, to->values + row * to->ld, one);
}

}  // namespace
}  // namespace dovetail
