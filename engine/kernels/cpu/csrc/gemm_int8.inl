// Quantized weights and activations: exact integer dot products within a group, then one scale.
//
//   out = sum over groups, in order, of  weight scale * activation scale * dot
//         and for Q4_1 of                minimum * (activation scale * sum of activation quants)
#pragma once

#include "dot.inl"

namespace dovetail {
namespace {

template <WeightType kType>
struct QuantizedWeights {
  static constexpr bool kFourBits = kType == WeightType::kQ4_0 || kType == WeightType::kQ4_1;
  static constexpr bool kHasMinimum = kType == WeightType::kQ4_1;
  static constexpr int kGroup = kType == WeightType::kInt8 ? kInt8Group : kGgufGroup;
  static constexpr int kGroupBytes = kGroup * kPanel / (kFourBits ? 2 : 1);

  DT_INLINE F32x16 load_scales(const void* scales, int64_t at) {
    if (kType == WeightType::kInt8) return load(static_cast<const float*>(scales) + at);
    return load_f16(static_cast<const uint16_t*>(scales) + at);
  }

  template <int kRows, int kPanels>
  DT_INLINE void dot_group8(const uint8_t* weights, int64_t next_panel, const int8_t* x, int64_t next_row,
                                  I32x16 (&dots)[kRows][kPanels]) {
    for (int k = 0; k < kGroup; k += 4, weights += 4 * kPanel) {
      Bytes64 w[kPanels];
      for (int p = 0; p < kPanels; ++p) w[p] = load_quants8(weights + p * next_panel);
      for (int r = 0; r < kRows; ++r) {
        const int32_t quad = quad_at(x + r * next_row + k);
        for (int p = 0; p < kPanels; ++p) dots[r][p] = dot8(dots[r][p], w[p], quad);
      }
    }
  }

  template <int kRows, int kPanels>
  DT_INLINE void dot_group4(const uint8_t* weights, int64_t next_panel, const int8_t* x, int64_t next_row,
                                   I32x16 (&dots)[kRows][kPanels]) {
    for (int k = 0; k < kGroup; k += 8, weights += 4 * kPanel) {
      Bytes64 w[kPanels];
      for (int p = 0; p < kPanels; ++p) w[p] = low_quants4(weights + p * next_panel);
      for (int r = 0; r < kRows; ++r) {
        const int32_t quad = quad_at(x + r * next_row + k);
        for (int p = 0; p < kPanels; ++p) dots[r][p] = dot4(dots[r][p], w[p], quad);
      }
      for (int p = 0; p < kPanels; ++p) w[p] = high_quants4(weights + p * next_panel);
      for (int r = 0; r < kRows; ++r) {
        const int32_t quad = quad_at(x + r * next_row + k + 4);
        for (int p = 0; p < kPanels; ++p) dots[r][p] = dot4(dots[r][p], w[p], quad);
      }
    }
  }

  template <int kRows, int kPanels>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                                   F32x16 (&sums)[kRows][kPanels]) {
    const int64_t groups = groups_of(kType, matrix.in_features), padded = groups * kGroup;
    const int64_t next_panel = groups * kGroupBytes;
    const uint8_t* weights = panel_data(matrix, panel);
    const int8_t* x = from.quants + row * padded;
    const float* x_scales = from.scales + row * groups;
    const int32_t* starts = from.sums + row * groups;
    for (int64_t g = 0; g < groups; ++g, weights += kGroupBytes, x += kGroup) {
      I32x16 dots[kRows][kPanels];
      for (int r = 0; r < kRows; ++r) {
        const I32x16 start = splat_int(kHasMinimum ? 0 : starts[r * groups + g]);
        for (int p = 0; p < kPanels; ++p) dots[r][p] = start;
      }
      if (kFourBits) dot_group4(weights, next_panel, x, padded, dots);
      else dot_group8(weights, next_panel, x, padded, dots);
      for (int p = 0; p < kPanels; ++p) {
        const int64_t at = scales_at(matrix, panel + p, g);
        const F32x16 scale = load_scales(matrix.scales, at);
        const F32x16 minimum = kHasMinimum ? load_scales(matrix.minimums, at) : splat(0.0f);
        for (int r = 0; r < kRows; ++r) {
          const F32x16 both = mul(scale, splat(x_scales[r * groups + g]));
          sums[r][p] = fma(to_float(dots[r][p]), both, sums[r][p]);
          if (!kHasMinimum) continue;
          float total;
          std::memcpy(&total, starts + r * groups + g, sizeof total);
          sums[r][p] = fma(minimum, splat(total), sums[r][p]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace dovetail
