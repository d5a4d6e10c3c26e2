// out = activations x weights^T in register tiles of a few rows by a few panels.
//
// A tile keeps its sums in registers over the whole input, in input order: an output element is
// reduced in the same order whatever tile it falls into. Panels are the outer loop, so that a
// panel's weights come from memory once and serve all rows from the cache.
#pragma once

#include "epilogue.inl"
#include "gemm_bf16.inl"
#include "gemm_f32.inl"
#include "gemm_int8.inl"

namespace dovetail {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kMaxPanels = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kMaxPanels = 2;
#else
constexpr int kMaxRows = 2, kMaxPanels = 2;
#endif

template <class Weights, int kRows, int kPanels>
void tile(const Matrix& matrix, int32_t panel, const Activations& from, int32_t row, const Destination& to) {
  F32x16 sums[kRows][kPanels];
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) sums[r][p] = splat(0.0f);
  Weights::accumulate(matrix, panel, from, row, sums);
  finish(matrix, panel, {to.out + row * to.ld, to.ld, to.epilogue}, sums);
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

template <class Weights, int kPanels>
void all_rows(const Matrix& matrix, int32_t panel, const Activations& from, int32_t rows, const Destination& to) {
  const int32_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int32_t i = 0, row = 0; i < tiles; ++i) {  // as even as can be: a tile of one row wastes its loads
    const int32_t count = (rows - row) / (tiles - i);
    tile_of<Weights, kMaxRows, kPanels>(count, matrix, panel, from, row, to);
    row += count;
  }
}

template <class Weights, int kPanels = kMaxPanels>
DT_INLINE void all_panels(const Matrix& matrix, int32_t panel, int32_t last, const Activations& from, int32_t rows,
                          const Destination& to) {
  for (; panel + kPanels <= last; panel += kPanels) all_rows<Weights, kPanels>(matrix, panel, from, rows, to);
  if constexpr (kPanels > 1) all_panels<Weights, kPanels / 2>(matrix, panel, last, from, rows, to);
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
