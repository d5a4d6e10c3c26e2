// Float32 weights: one fused multiply-add an input feature, in order.
#pragma once

#include "tiling.inl"

namespace dovetail {
namespace {

struct F32Weights {
  static constexpr int kFewRows = by_set(8, 6, 4), kManyRows = kFewRows, kManyPanels = 1;

  template <int kRows>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                            F32x16 (&sums)[kRows][1]) {
    const auto* weights = reinterpret_cast<const float*>(panel_data(matrix, panel));
    const float* x = from.values + row * from.ld;
    for (int64_t k = 0; k < matrix.in_features; ++k, weights += kPanel, ++x) {
      const F32x16 w = load(weights);
      prefetch_ahead<kRows, 1>(weights, 0);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][0] = fma(w, splat(x[r * from.ld]), sums[r][0]);
    }
  }
};

}  // namespace
}  // namespace dovetail
