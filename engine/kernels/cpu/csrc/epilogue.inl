// What becomes of a tile of sums: the bias, then the store that the op asks for.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

// Where the outputs of a tile go: its first row and panel.
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
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
    const F32x16 bias = load(matrix.bias + (panel + p) * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r][p] = add(sums[r][p], bias);
  }
}

template <int kRows, int kPanels>
DT_INLINE void store_sums(const F32x16 (&sums)[kRows][kPanels], const Destination& to) {
  const bool adds = to.epilogue == Epilogue::kAdd;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      float* out = to.out + r * to.ld + p * kPanel;
      store(out, adds ? add(load(out), sums[r][p]) : sums[r][p]);
    }
  }
}

}  // namespace
}  // namespace dovetail
