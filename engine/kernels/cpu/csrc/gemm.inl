// out = activations x weights^T, in register tiles of a few rows by one panel of 16 outputs, or two.
//
// A tile keeps its sums in registers over the whole input, in input order: an output element is
// reduced in the same order whatever tile it falls into. Panels are the outer loop: a panel's weights
// come from memory once, as one stream, and serve all rows from the first-level cache, while the
// activations are broadcast from memory by the multiplying instructions themselves. Many rows take
// two panels at a time where that saves such broadcasts.
#pragma once

#include "epilogue.inl"
#include "gemm_bf16.inl"
#include "gemm_f32.inl"
#include "gemm_int8.inl"

namespace dovetail {
namespace {

template <class Weights, int kRows, int kPanels>
DT_INLINE void sum_panels(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                          F32x16 (&sums)[kRows][kPanels]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) sums[r][p] = splat(0.0f);
  Weights::accumulate(matrix, panel, from, row, sums);
  add_bias(matrix, panel, sums);
}

template <class Weights, int kRows, int kPanels>
DT_INLINE void gated_tile(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                          const Destination& to, const F32x16 (&sums)[kRows][kPanels]) {
  if constexpr (kPanels == 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(to.out + r * to.ld, silu_times(sums[r][0], sums[r][1]));
  } else {
    F32x16 up[kRows][1];
    sum_panels<Weights>(matrix, panel + 1, from, row, up);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(to.out + r * to.ld, silu_times(sums[r][0], up[r][0]));
  }
}

template <class Weights, int kRows, int kPanels>
void tile(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row, const Destination& to) {
  F32x16 sums[kRows][kPanels];
  sum_panels<Weights>(matrix, panel, from, row, sums);
  if (to.epilogue == Epilogue::kGatedSilu) gated_tile<Weights>(matrix, panel, from, row, to, sums);
  else store_sums(sums, to);
}

// The tile of `count` rows, 1 to kRows.
template <class Weights, int kRows, int kPanels>
DT_INLINE void tile_of(int32_t count, const Matrix& matrix, int32_t panel, const Activations& from, int32_t row,
                       const Destination& to) {
  if constexpr (kRows > 1) {
    if (count < kRows) return tile_of<Weights, kRows - 1, kPanels>(count, matrix, panel, from, row, to);
  }
  tile<Weights, kRows, kPanels>(matrix, panel, from, row, to);
}

// All rows of kPanels panels, or of a gated pair; `to` is the whole output.
template <class Weights, int kMaxRows, int kPanels>
DT_INLINE void all_rows(const Matrix& matrix, int32_t panel, const Activations& from, int32_t rows,
                        const Destination& to) {
  float* out = to.out + (to.epilogue == Epilogue::kGatedSilu ? panel / 2 : panel) * kPanel;
  const int32_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int32_t i = 0, row = 0; i < tiles; ++i) {  // as even as can be: a tile of one row wastes its loads
    const int32_t count = (rows - row) / (tiles - i);
    tile_of<Weights, kMaxRows, kPanels>(count, matrix, panel, from, row, {out + row * to.ld, to.ld, to.epilogue});
    row += count;
  }
}

template <class Weights>
void all_panels(const Matrix& matrix, int32_t panel, int32_t last, const Activations& from, int32_t rows,
                const Destination& to) {
  if constexpr (Weights::kManyPanels == 2) {
    if (rows > Weights::kFewRows)
      for (; panel + 1 < last; panel += 2) all_rows<Weights, Weights::kManyRows, 2>(matrix, panel, from, rows, to);
  }
  const int32_t step = to.epilogue == Epilogue::kGatedSilu ? 2 : 1;
  for (; panel < last; panel += step) all_rows<Weights, Weights::kFewRows, 1>(matrix, panel, from, rows, to);
}

void gemm(const Matrix* matrix, int32_t first_panel, int32_t last_panel, const Activations* from, int32_t rows,
          float* out, int64_t out_ld, Epilogue epilogue) {
  const Destination to = {out, out_ld, epilogue};
  switch (matrix->type) {
    case WeightType::kF32: return all_panels<F32Weights>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kBf16: return all_panels<Bf16Weights>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kInt8:
      return all_panels<QuantizedWeights<WeightType::kInt8>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ8_0:
      return all_panels<QuantizedWeights<WeightType::kQ8_0>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ4_0:
      return all_panels<QuantizedWeights<WeightType::kQ4_0>>(*matrix, first_panel, last_panel, *from, rows, to);
    case WeightType::kQ4_1:
      return all_panels<QuantizedWeights<WeightType::kQ4_1>>(*matrix, first_panel, last_panel, *from, rows, to);
  }
}

}  // namespace
}  // namespace dovetail
