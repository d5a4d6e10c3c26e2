// Sixteen vectors reduced at once, each over its lanes: a third of the work of one after the other.
#pragma once

#include "simd.h"

namespace dovetail {
namespace {

using Reduction = F32x16 (*)(F32x16, F32x16);

#if defined(__AVX512F__)

// Of each 128 bits: {a0 a2, b0 b2, a1 a3, b1 b3}.
template <Reduction kOf>
DT_INLINE __m512d fold_pair(F32x16 a, F32x16 b) {
  return _mm512_castps_pd(kOf(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
}

// Of each 128 bits: {a, b, c, d}.
template <Reduction kOf>
DT_INLINE F32x16 fold_four(const F32x16* from) {
  const __m512d ab = fold_pair<kOf>(from[0], from[1]), cd = fold_pair<kOf>(from[2], from[3]);
  return kOf(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

// 128 bits next to each other become one: {a0 a1, a2 a3, b0 b1, b2 b3}.
template <Reduction kOf>
DT_INLINE F32x16 fold_quarters(F32x16 a, F32x16 b) {
  return kOf(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Lane i < count: the reduction of from[i]; the others hold anything that `from` does. Four at least
// are there to be read.
template <Reduction kOf>
DT_INLINE F32x16 fold(const F32x16 (&from)[kLanes], int count) {
  if (count <= 4) {
    const F32x16 four = fold_four<kOf>(from), half = fold_quarters<kOf>(four, four);
    return fold_quarters<kOf>(half, half);
  }
  const F32x16 first = fold_quarters<kOf>(fold_four<kOf>(from), fold_four<kOf>(from + 4));
  const F32x16 second = fold_quarters<kOf>(fold_four<kOf>(from + 8), fold_four<kOf>(from + 12));
  return fold_quarters<kOf>(first, second);
}

#else

template <Reduction kOf>
DT_INLINE F32x16 fold(const F32x16 (&from)[kLanes], int) {
  alignas(64) float row[kLanes], column[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    store(row, from[i]);
    for (int k = 0; k < kLanes; ++k) column[k][i] = row[k];
  }
  F32x16 result = load(column[0]);
  for (int k = 1; k < kLanes; ++k) result = kOf(result, load(column[k]));
  return result;
}

#endif

}  // namespace
}  // namespace dovetail
