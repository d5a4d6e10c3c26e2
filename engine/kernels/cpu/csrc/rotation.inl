// A rotation of int8's inputs and weights, group by group, that spreads outliers before both are
// rounded to bytes with one scale a group.
//
// A Hadamard transform of sixteen elements (four of four vectors, four neighbours of each) is its own
// inverse but for a factor of 16, so products of rotated rows are 16 times those of the rows (QuaRot,
// Ashkboos et al. 2024). The weights carry that factor, a power of two: it costs no bit.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

constexpr int kRotatedVectors = kInt8Group / kLanes;
constexpr float kRotationFactor = 1.0f / 16.0f;

#if defined(__AVX512F__)

// Lane i of x's lane i ^ kDistance, which is 1 or 2.
template <int kDistance>
DT_INLINE F32x16 swap_neighbours(F32x16 x) { return _mm512_permute_ps(x, kDistance == 1 ? 0xb1 : 0x4e); }

#elif defined(__AVX2__)

template <int kDistance>
DT_INLINE F32x16 swap_neighbours(F32x16 x) {
  constexpr int kOrder = kDistance == 1 ? 0xb1 : 0x4e;
  return {_mm256_permute_ps(x.low, kOrder), _mm256_permute_ps(x.high, kOrder)};
}

#else

template <int kDistance>
DT_INLINE F32x16 swap_neighbours(F32x16 x) {
  F32x16 result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = x.lane[i ^ kDistance];
  return result;
}

#endif

// (a, b) -> (a + b, a - b), of lanes kDistance apart.
template <int kDistance>
DT_INLINE F32x16 rotate_lanes(F32x16 x) {
  alignas(64) static constexpr float kSigns[2][kLanes] = {
      {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
      {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
  };
  return fma(x, load(kSigns[kDistance - 1]), swap_neighbours<kDistance>(x));
}

// One group; may be in place.
DT_INLINE void rotate_group(const float* x, F32x16 (&out)[kRotatedVectors]) {
  const F32x16 a = load(x), b = load(x + kLanes), c = load(x + 2 * kLanes), d = load(x + 3 * kLanes);
  const F32x16 ab = add(a, b), cd = add(c, d), a_b = sub(a, b), c_d = sub(c, d);
  const F32x16 mixed[kRotatedVectors] = {add(ab, cd), add(a_b, c_d), sub(ab, cd), sub(a_b, c_d)};
  for (int i = 0; i < kRotatedVectors; ++i) out[i] = rotate_lanes<2>(rotate_lanes<1>(mixed[i]));
}

// The weights' side of one group, and the way back from its `inverse`.
DT_INLINE void rotate_weights(const float* x, float factor, float* out) {
  F32x16 rotated[kRotatedVectors];
  rotate_group(x, rotated);
  for (int i = 0; i < kRotatedVectors; ++i) store(out + i * kLanes, mul(rotated[i], splat(factor)));
}

}  // namespace
}  // namespace dovetail
