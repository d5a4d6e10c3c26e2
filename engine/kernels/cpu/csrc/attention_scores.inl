// Queries times keys: a tile of rows against groups of 16 positions, which stand in lanes.
//
// A score is one chain of multiply-adds over head_dim in order, or, of int8 keys, an exact sum of
// products of quants (the query's have 16 bits): neither knows how many rows or groups are computed at once.
#pragma once

#include "attention_tiles.inl"

namespace dovetail {
namespace {

#if defined(__AVX512F__)
constexpr int kRowTile = 6;    // rows (a query head at a position) at once
constexpr int kGroupTile = 4;  // groups at once
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kRowTile = 3;
constexpr int kGroupTile = 2;
#else
constexpr int kRowTile = 3;
constexpr int kGroupTile = 1;
#endif

template <KvType type>
DT_INLINE void load_keys(const char* from, F32x16& even, F32x16& odd) {
  if (type == KvType::kF32)
    load_pairs(reinterpret_cast<const float*>(from), even, odd);
  else
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(from), even, odd);
}

// Queries of a tile's rows [rows][padded head_dim]: floats; or, for int8 keys, 16 bits in two parts,
// 256 * high + low, four quants of a part each: the high parts [head_dim / 4], and from the row's
// middle on the low ones. 8 bits alone would cost more accuracy than int8 keys and values do.
union Query {
  float value;
  int32_t quants;
};

// What a query row needs beside its quants: a key's quants are stored 128 higher.
struct QueryScale {
  float scale;
  int32_t high_excess, low_excess;  // 128 * sum of the part's quants
};

// The lines of a group's values that the step of a key run stands for: they are wanted next.
template <KvType type, int N>
DT_INLINE void prefetch_values(const char* const* values, int64_t at) {
  constexpr int64_t bytes = kLanes * kKeyRun<type> * kElementBytes<type>;
  DT_UNROLL
  for (int n = 0; n < N; ++n)
    for (int64_t line = 0; line < bytes; line += 64) prefetch(values[n] + at + line);
}

// scores [rows][kSegmentTokens] of groups [first, first + N).
template <KvType type, int R, int N>
void float_scores(const Segment& segment, int32_t first, const KvLayer& layer, const Query* queries,
                  float* scores) {
  F32x16 sums[R][N];
  DT_UNROLL
  for (int r = 0; r < R; ++r)
    DT_UNROLL
    for (int n = 0; n < N; ++n) sums[r][n] = splat(0.0f);
  const int64_t stride = layer.block_size * 2 * kElementBytes<type>, ld = padded(layer.head_dim);
  const char* const* keys = segment.keys + first;
  const char* const* values = segment.values + first;
  int64_t at = 0;
  for (int32_t d = 0; d < layer.head_dim; d += 2, at += stride, queries += 2) {
    prefetch_values<type, N>(values, d * kLanes * kElementBytes<type>);
    F32x16 even[N], odd[N];
    DT_UNROLL
    for (int n = 0; n < N; ++n) load_keys<type>(keys[n] + at, even[n], odd[n]);
    DT_UNROLL
    for (int r = 0; r < R; ++r)
      DT_UNROLL
      for (int n = 0; n < N; ++n) sums[r][n] = fma(even[n], splat(queries[r * ld].value), sums[r][n]);
    DT_UNROLL
    for (int r = 0; r < R; ++r)
      DT_UNROLL
      for (int n = 0; n < N; ++n) sums[r][n] = fma(odd[n], splat(queries[r * ld + 1].value), sums[r][n]);
  }
  DT_UNROLL
  for (int r = 0; r < R; ++r)
    DT_UNROLL
    for (int n = 0; n < N; ++n) store(scores + r * kSegmentTokens + (first + n) * kLanes, sums[r][n]);
}

// Keys of int8 are multiplied too fast to fetch this group's values from memory meanwhile: they are
// near already, and come into the first level. What is fetched is the first half of what comes much
// later, and while values are added, the second.
template <int R, int N>
void int8_scores(const Segment& segment, int32_t first, const KvLayer& layer, const char* const* wanted,
                 const Query* queries, const QueryScale* scales, float* scores) {
  I32x16 high[R][N], low[R][N];
  DT_UNROLL
  for (int r = 0; r < R; ++r)
    DT_UNROLL
    for (int n = 0; n < N; ++n) high[r][n] = low[r][n] = splat_int(0);
  const char* const* keys = segment.keys + first;
  wanted += first;
  const int64_t ld = padded(layer.head_dim);
  int64_t at = 0;
  for (int32_t d = 0; d < layer.head_dim; d += 4, at += layer.block_size * 4, ++queries) {
    prefetch_values<KvType::kInt8, N>(segment.values + first, d * kLanes);
    DT_UNROLL
    for (int n = 0; n < N; ++n) prefetch(wanted[n] + d * kLanes);
    DT_UNROLL
    for (int n = 0; n < N; ++n) {
      const I32x16 quads = load_bytes(keys[n] + at);
      DT_UNROLL
      for (int r = 0; r < R; ++r) {
        high[r][n] = dot_bytes(high[r][n], quads, queries[r * ld].quants);
        low[r][n] = dot_bytes(low[r][n], quads, queries[r * ld + ld / 2].quants);
      }
    }
  }
  DT_UNROLL
  for (int n = 0; n < N; ++n) {
    const F32x16 key_scales = load(segment.key_scales[first + n]);
    for (int64_t line = 2 * kLanes * layer.head_dim; line < kLanes * fetched_bytes<KvType::kInt8>(layer); line += 64)
      prefetch(wanted[n] + line);
    DT_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32x16 highs = to_float(sub_int(high[r][n], splat_int(scales[r].high_excess)));
      const F32x16 lows = to_float(sub_int(low[r][n], splat_int(scales[r].low_excess)));
      store(scores + r * kSegmentTokens + (first + n) * kLanes,
            mul(fma(highs, splat(256.0f), lows), mul(key_scales, splat(scales[r].scale))));
    }
  }
}

template <KvType type, int R, int N>
DT_INLINE void some_scores(const Segment& segment, int32_t first, const KvLayer& layer, const char* const* wanted,
                           const Query* queries, const QueryScale* scales, float* scores) {
  if constexpr (type == KvType::kInt8)
    int8_scores<R, N>(segment, first, layer, wanted, queries, scales, scores);
  else
    float_scores<type, R, N>(segment, first, layer, queries, scores);
}

template <KvType type, int R>
void tile_scores(const Segment& segment, int32_t first, int32_t last, const KvLayer& layer,
                 const char* const* wanted, const Query* queries, const QueryScale* scales, float* scores) {
  // Int8 keys take two sums a score.
  constexpr int kWide = type == KvType::kInt8 ? (kGroupTile + 1) / 2 : kGroupTile;
  for (; first + kWide <= last; first += kWide)
    some_scores<type, R, kWide>(segment, first, layer, wanted, queries, scales, scores);
  if (kWide > 2 && first + 2 <= last) {
    some_scores<type, R, 2>(segment, first, layer, wanted, queries, scales, scores);
    first += 2;
  }
  for (; first < last; ++first) some_scores<type, R, 1>(segment, first, layer, wanted, queries, scales, scores);
}

}  // namespace
}  // namespace dovetail
