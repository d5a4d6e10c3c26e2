// What becomes of a tile of sums: the bias, then the store that the op asks for.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

// Where the outputs of one panel go: row 0 of a tile.
struct Destination {
  float* out;
  int64_t ld;
  Epilogue epilogue;
};

DT_INLINE F32x16 silu_times(F32x16 gate, F32x16 up) {
  const F32x16 below = add(splat(1.0f), exponential(sub(splat(0.0f), gate)));
  return div(mul(gate, up), below);
}

template <int kRows>
DT_INLINE void add_bias(const Matrix& matrix, int32_t panel, F32x16 (&sums)[kRows]) {
  if (matrix.bias == nullptr) return;
  const F32x16 bias = load(matrix.bias + panel * kPanel);
  for (int r = 0; r < kRows; ++r) sums[r] = add(sums[r], bias);
}

template <int kRows>
DT_INLINE void store_sums(const F32x16 (&sums)[kRows], const Destination& to) {
  const bool adds = to.epilogue == Epilogue::kAdd;
  for (int r = 0; r < kRows; ++r) {
    float* out = to.out + r * to.ld;
    store(out, adds ? add(load(out), sums[r]) : sums[r]);
  }
}

template <int kRows>
DT_INLINE void store_gated(const F32x16 (&gate)[kRows], const F32x16 (&up)[kRows], const Destination& to) {
  for (int r = 0; r < kRows; ++r) store(to.out + r * to.ld, silu_times(gate[r], up[r]));
}

}  // namespace
}  // namespace dovetail
