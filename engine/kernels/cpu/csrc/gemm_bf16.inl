// bf16 weights, float32 arithmetic: as for float32 weights, two input features a load.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

struct Bf16Weights {
  template <int kRows, int kPanels>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                                   F32x16 (&sums)[kRows][kPanels]) {
    const auto* weights = reinterpret_cast<const uint16_t*>(panel_data(matrix, panel));
    const int64_t inputs = padded_inputs(matrix.type, matrix.in_features), next_panel = inputs * kPanel;
    const float* x = from.values + row * from.ld;
    for (int64_t k = 0; k < inputs; k += 2, weights += 2 * kPanel, x += 2) {
      F32x16 even[kPanels], odd[kPanels];
      for (int p = 0; p < kPanels; ++p) load_bf16_pairs(weights + p * next_panel, even[p], odd[p]);
      for (int r = 0; r < kRows; ++r) {
        const F32x16 first = splat(x[r * from.ld]), second = splat(x[r * from.ld + 1]);
        for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(odd[p], second, fma(even[p], first, sums[r][p]));
      }
    }
  }
};

}  // namespace
}  // namespace dovetail
