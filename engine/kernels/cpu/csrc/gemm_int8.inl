// Quantized weights and activations: exact integer dot products within a group, then one scale.
//
//   out = sum over groups, in order, of  weight scale * activation scale * dot
//         and for Q4_1 of                minimum * sum of rounded activations
//         and of groups with a middle    middle * sum of the group's weights (without minimum)
#pragma once

#include "dot.inl"
#include "tiling.inl"

namespace dovetail {
namespace {

template <WeightType kType>
struct QuantizedWeights {
  static constexpr int kFewRows = by_set(8, 4, 4);
  static constexpr int kManyRows = by_set(6, 4, 4), kManyPanels = by_set(2, 1, 1);
  static constexpr bool kFourBits = kType == WeightType::kQ4_0 || kType == WeightType::kQ4_1;
  static constexpr bool kHasMinimum = kType == WeightType::kQ4_1;
  static constexpr int kGroup = kType == WeightType::kInt8 ? kInt8Group : kGgufGroup;
  static constexpr int kGroupBytes = kGroup * kPanel / (kFourBits ? 2 : 1);

  DT_INLINE F32x16 load_scales(const void* scales, int64_t at) {
    if constexpr (kType == WeightType::kInt8) return load(static_cast<const float*>(scales) + at);
    else return load_f16(static_cast<const uint16_t*>(scales) + at);
  }

  // dots += x quad k of each row times a step's weights of each panel.
  template <int kRows, int kPanels>
  DT_INLINE void dot_step(const Bytes64 (&w)[kPanels], const int8_t* x, int64_t next_row,
                          I32x16 (&dots)[kRows][kPanels]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t quad = quad_at(x + r * next_row);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p)
        dots[r][p] = kFourBits ? dot4(dots[r][p], w[p], quad) : dot8(dots[r][p], w[p], quad);
    }
  }

  // The group's dot products are one block of straight code: GCC copies the sums around in a loop.
  template <int kRows, int kPanels>
  DT_INLINE void dot_group8(const uint8_t* weights, int64_t next_panel, const int8_t* x, int64_t next_row,
                            I32x16 (&dots)[kRows][kPanels]) {
    Bytes64 w[kPanels];
#pragma GCC unroll 16
    for (int k = 0; k < kGroup; k += 4, weights += 4 * kPanel) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        w[p] = load_quants8(weights + p * next_panel);
        prefetch_ahead<kRows, kPanels>(weights + p * next_panel, next_panel);
      }
      dot_step(w, x + k, next_row, dots);
    }
  }

  template <int kRows, int kPanels>
  DT_INLINE void dot_group4(const uint8_t* weights, int64_t next_panel, const int8_t* x, int64_t next_row,
                            I32x16 (&dots)[kRows][kPanels]) {
    Bytes64 w[kPanels];
#pragma GCC unroll 8
    for (int k = 0; k < kGroup; k += 8, weights += 4 * kPanel) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        w[p] = low_quants4(weights + p * next_panel);
        prefetch_ahead<kRows, kPanels>(weights + p * next_panel, next_panel);
      }
      dot_step(w, x + k, next_row, dots);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) w[p] = high_quants4(weights + p * next_panel);
      dot_step(w, x + k + 4, next_row, dots);
    }
  }

  // sums += a group's dot products, scaled; `x_scales` and `x_sums` are of the group and row 0.
  template <int kRows, int kPanels>
  DT_INLINE void add_scaled(const Matrix& matrix, int64_t scales, int64_t groups, const float* x_scales,
                            const int32_t* x_sums, const I32x16 (&dots)[kRows][kPanels],
                            F32x16 (&sums)[kRows][kPanels]) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p, scales += groups * kPanel) {
      const F32x16 scale = load_scales(matrix.scales, scales);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        sums[r][p] = fma(to_float(dots[r][p]), mul(scale, splat(x_scales[r * groups])), sums[r][p]);
      if constexpr (kHasMinimum) {
        const F32x16 minimum = load_scales(matrix.minimums, scales);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][p] = fma(minimum, splat(float_at(x_sums + r * groups)), sums[r][p]);
      }
    }
  }

  // What `quantize_centred` took from some groups of these rows. A row without a middle there adds
  // zero, so a row's sums do not depend on its neighbours.
  template <int kRows, int kPanels>
  DT_INLINE void add_middles(const Matrix& matrix, int32_t panel, int64_t groups, const Activations& from,
                             int32_t row, F32x16 (&sums)[kRows][kPanels]) {
    const int64_t words = words_of(groups), next_panel = groups * kPanel;
    for (int64_t word = 0; word < words; ++word) {
      uint64_t bits = 0;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) bits |= from.centred[(row + r) * words + word];
      for (; bits != 0; bits &= bits - 1) {
        const int64_t group = word * 64 + __builtin_ctzll(bits);
        const int64_t at = panel * next_panel + group * kPanel;
        const float* middles = from.middles + row * groups + group;
        const auto* weight_sums = static_cast<const int16_t*>(matrix.sums) + sums_at(matrix, panel, group);
        __builtin_prefetch(weight_sums + 8 * kPanel);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const F32x16 total = mul(load_scales(matrix.scales, at + p * next_panel), load_int16(weight_sums + p * kPanel));
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r][p] = fma(total, splat(middles[r * groups]), sums[r][p]);
        }
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
    const int32_t* x_sums = from.sums + row * groups;
    const int64_t scales = panel * groups * kPanel;
    for (int64_t g = 0; g < groups; ++g, weights += kGroupBytes, x += kGroup) {
      I32x16 dots[kRows][kPanels];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const I32x16 start = splat_int(kHasMinimum ? 0 : x_sums[r * groups + g]);
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) dots[r][p] = start;
      }
      if constexpr (kFourBits) dot_group4(weights, next_panel, x, padded, dots);
      else dot_group8(weights, next_panel, x, padded, dots);
      add_scaled(matrix, scales + g * kPanel, groups, x_scales + g, x_sums + g, dots, sums);
    }
    if constexpr (kType != WeightType::kInt8)
      if (matrix.sums != nullptr) add_middles(matrix, panel, groups, from, row, sums);
  }
};

}  // namespace
}  // namespace dovetail
