// Quantized weights and activations: exact integer dot products within a group, then one scale.
//
//   out = sum over groups, in order, of  weight scale * activation scale * dot
//         and for Q4_1 of                minimum * (activation scale * sum of activation quants)
#pragma once

#include "dot.inl"
#include "tiling.inl"

namespace dovetail {
namespace {

template <WeightType kType>
struct QuantizedWeights {
  static constexpr int kMaxRows = rows_of(8, 4, 2);
  static constexpr bool kFourBits = kType == WeightType::kQ4_0 || kType == WeightType::kQ4_1;
  static constexpr bool kHasMinimum = kType == WeightType::kQ4_1;
  static constexpr int kGroup = kType == WeightType::kInt8 ? kInt8Group : kGgufGroup;
  static constexpr int kGroupBytes = kGroup * kPanel / (kFourBits ? 2 : 1);

  DT_INLINE F32x16 load_scales(const void* scales, int64_t at) {
    if constexpr (kType == WeightType::kInt8) return load(static_cast<const float*>(scales) + at);
    else return load_f16(static_cast<const uint16_t*>(scales) + at);
  }

  // The group's dot products are one block of straight code: GCC copies the sums around in a loop.
  template <int kRows>
  DT_INLINE void dot_group8(const uint8_t* weights, const int8_t* x, int64_t next_row, I32x16 (&dots)[kRows]) {
#pragma GCC unroll 16
    for (int k = 0; k < kGroup; k += 4, weights += 4 * kPanel) {
      const Bytes64 w = load_quants8(weights);
      prefetch_ahead<kRows>(weights);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) dots[r] = dot8(dots[r], w, quad_at(x + r * next_row + k));
    }
  }

  template <int kRows>
  DT_INLINE void dot_group4(const uint8_t* weights, const int8_t* x, int64_t next_row, I32x16 (&dots)[kRows]) {
#pragma GCC unroll 8
    for (int k = 0; k < kGroup; k += 8, weights += 4 * kPanel) {
      const Bytes64 low = low_quants4(weights), high = high_quants4(weights);
      prefetch_ahead<kRows>(weights);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) dots[r] = dot4(dots[r], low, quad_at(x + r * next_row + k));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) dots[r] = dot4(dots[r], high, quad_at(x + r * next_row + k + 4));
    }
  }

  template <int kRows>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                            F32x16 (&sums)[kRows]) {
    const int64_t groups = groups_of(kType, matrix.in_features), padded = groups * kGroup;
    const uint8_t* weights = panel_data(matrix, panel);
    const int8_t* x = from.quants + row * padded;
    const float* x_scales = from.scales + row * groups;
    const int32_t* x_sums = from.sums + row * groups;
    int64_t scales_of_group = panel * groups * kPanel;
    for (int64_t g = 0; g < groups; ++g, weights += kGroupBytes, x += kGroup, scales_of_group += kPanel) {
      I32x16 dots[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) dots[r] = splat_int(kHasMinimum ? 0 : x_sums[r * groups + g]);
      if constexpr (kFourBits) dot_group4(weights, x, padded, dots);
      else dot_group8(weights, x, padded, dots);
      const F32x16 scale = load_scales(matrix.scales, scales_of_group);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r] = fma(to_float(dots[r]), mul(scale, splat(x_scales[r * groups + g])), sums[r]);
      }
      if constexpr (kHasMinimum) {
        const F32x16 minimum = load_scales(matrix.minimums, scales_of_group);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) sums[r] = fma(minimum, splat(float_at(x_sums + r * groups + g)), sums[r]);
      }
    }
  }
};

}  // namespace
}  // namespace dovetail
