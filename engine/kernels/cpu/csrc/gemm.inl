// out = activations x weights^T, in register tiles of a few rows by one panel of 16 outputs.
//
// A tile keeps its sums in registers over the whole input, in input order: an output element is
// reduced in the same order whatever tile it falls into. Panels are the outer loop: a panel's weights
// come from memory once, as one stream, and serve all rows from the first-level cache, while the
// activations are broadcast from memory by the multiplying instructions themselves.
#pragma once

#include "epilogue.inl"
#include "gemm_bf16.inl"
#include "gemm_f32.inl"
#include "gemm_int8.inl"

namespace dovetail {
namespace {

template <class Weights, int kRows>
DT_INLINE void sum_panel(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                         F32x16 (&sums)[kRows]) {
  for (int r = 0; r < kRows; ++r) sums[r] = splat(0.0f);
  Weights::accumulate(matrix, panel, from, row, sums);
  add_bias(matrix, panel, sums);
}

template <class Weights, int kRows>
void tile(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row, const Destination& to) {
  F32x16 sums[kRows];
  sum_panel<Weights>(matrix, panel, from, row, sums);
  if (to.epilogue != Epilogue::kGatedSilu) return store_sums(sums, to);
  F32x16 up[kRows];
  sum_panel<Weights>(matrix, panel + 1, from, row, up);
  store_gated(sums, up, to);
}

// The tile of `count` rows, 1 to kRows.
template <class Weights, int kRows>
DT_INLINE void tile_of(int32_t count, const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                       const Destination& to) {
  if constexpr (kRows > 1) {
    if (count < kRows) return tile_of<Weights, kRows - 1>(count, matrix, panel, from, row, to);
  }
  tile<Weights, kRows>(matrix, panel, from, row, to);
}

template <class Weights>
void all_tiles(const Matrix& matrix, int32_t first_panel, int32_t last_panel, const Activations& from, int32_t rows,
               const Destination& to) {
  const bool is_gated = to.epilogue == Epilogue::kGatedSilu;
  constexpr int kMaxRows = Weights::kMaxRows;
  const int32_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int32_t panel = first_panel; panel < last_panel; panel += is_gated ? 2 : 1) {
    float* out = to.out + (is_gated ? panel / 2 : panel) * kPanel;
    for (int32_t i = 0, row = 0; i < tiles; ++i) {  // as even as can be: a tile of one row wastes its loads
      const int32_t count = (rows - row) / (tiles - i);
      tile_of<Weights, kMaxRows>(count, matrix, panel, from, row, {out + row * to.ld, to.ld, to.epilogue});
      row += count;
    }
  }
}

void gemm(const Matrix* matrix, int32_t first_panel, int32_t last_panel, const Activations* from, int32_t rows,
          float* out, int64_t out_ld, Epilogue epilogue) {
  const Destination to = {out, out_ld, epilogue};
  switch (matrix->type) {
    case WeightType::kF32: return all_tiles<F32Weights>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kBf16: return all_tiles<Bf16Weights>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kInt8:
      return all_tiles<QuantizedWeights<WeightType::kInt8>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ8_0:
      return all_tiles<QuantizedWeights<WeightType::kQ8_0>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ4_0:
      return all_tiles<QuantizedWeights<WeightType::kQ4_0>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ4_1:
      return all_tiles<QuantizedWeights<WeightType::kQ4_1>>(*matrix, first_panel, last_panel, *from, rows, to);
  }
}

}  // namespace
}  // namespace dovetail
