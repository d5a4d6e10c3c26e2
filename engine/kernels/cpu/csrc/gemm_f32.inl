// Float32 weights: one fused multiply-add an input feature, in order.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

struct F32Weights {
  template <int kRows, int kPanels>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                                   F32x16 (&sums)[kRows][kPanels]) {
    const auto* weights = reinterpret_cast<const float*>(panel_data(matrix, panel));
    const int64_t inputs = matrix.in_features, next_panel = inputs * kPanel;
    const float* x = from.values + row * from.ld;
    for (int64_t k = 0; k < inputs; ++k, weights += kPanel, ++x) {
      F32x16 w[kPanels];
      for (int p = 0; p < kPanels; ++p) w[p] = load(weights + p * next_panel);
      for (int r = 0; r < kRows; ++r) {
        const F32x16 input = splat(x[r * from.ld]);
        for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(w[p], input, sums[r][p]);
      }
    }
  }
};

}  // namespace
}  // namespace dovetail
