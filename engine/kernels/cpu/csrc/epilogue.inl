// What becomes of a tile of sums: the bias, then the store that the op asks for.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

// Where a tile of outputs goes: row 0 of it, first panel of it.
struct Destination {
  float* out;
  int64_t ld;
  Epilogue epilogue;
};

DT_INLINE F32x16 silu_times(F32x16 gate, F32x16 up) {
  const F32x16 below = add(splat(1.0f), exponential(sub(splat(0.0f), gate)));
  return div(mul(gate, up), below);
}

template <int kRows, int kPanels>
DT_INLINE void add_bias(const Matrix& matrix, int32_t panel, F32x16 (&sums)[kRows][kPanels]) {
  if (matrix.bias == nullptr) return;
  for (int p = 0; p < kPanels; ++p) {
    const F32x16 bias = load(matrix.bias + (panel + p) * kPanel);
    for (int r = 0; r < kRows; ++r) sums[r][p] = add(sums[r][p], bias);
  }
}

template <int kRows, int kPanels>
DT_INLINE void finish(const Matrix& matrix, int32_t panel, const Destination& to, F32x16 (&sums)[kRows][kPanels]) {
  add_bias(matrix, panel, sums);
  if (to.epilogue == Epilogue::kGatedSilu) {
    for (int r = 0; r < kRows; ++r) {
      float* out = to.out + r * to.ld + panel / 2 * kPanel;
      for (int p = 0; p + 1 < kPanels; p += 2) store(out + p / 2 * kPanel, silu_times(sums[r][p], sums[r][p + 1]));
    }
    return;
  }
  const bool adds = to.epilogue == Epilogue::kAdd;
  for (int r = 0; r < kRows; ++r) {
    float* out = to.out + r * to.ld + panel * kPanel;
    for (int p = 0; p < kPanels; ++p) {
      const F32x16 sum = sums[r][p];
      store(out + p * kPanel, adds ? add(load(out + p * kPanel), sum) : sum);
    }
  }
}

}  // namespace
}  // namespace dovetail
