// bf16 weights, float32 arithmetic: as for float32 weights, two input features a load.
#pragma once

#include "tiling.inl"

namespace dovetail {
namespace {

struct Bf16Weights {
  static constexpr int kFewRows = by_set(6, 4, 4), kManyRows = kFewRows, kManyPanels = 1;

  template <int kRows>
  DT_INLINE void accumulate(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                            F32x16 (&sums)[kRows][1]) {
    const auto* weights = reinterpret_cast<const uint16_t*>(panel_data(matrix, panel));
    const float* x = from.values + row * from.ld;
    for (int64_t k = 0; k < matrix.in_features; k += 2, weights += 2 * kPanel, x += 2) {
      F32x16 even, odd;
      load_bf16_pairs(weights, even, odd);
      prefetch_ahead<kRows, 1>(weights, 0);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][0] = fma(even, splat(x[r * from.ld]), sums[r][0]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][0] = fma(odd, splat(x[r * from.ld + 1]), sums[r][0]);
    }
  }
};

}  // namespace
}  // namespace dovetail
