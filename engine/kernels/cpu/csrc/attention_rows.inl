// What a task keeps of its rows: the query, and from segment to segment the sums of the softmax.
//
// Weights are relative to the largest score so far, in powers of two; the sums of earlier segments
// are scaled down when a larger score comes (Milakov and Gimelshein 2018).
#pragma once

#include "attention_scores.inl"
#include "attention_tiles.inl"

namespace dovetail {
namespace {

constexpr float kLog2E = 1.44269504f;  // scores are kept in powers of two
constexpr float kInfinity = __builtin_inff();

// What stands in a task's scratch.
struct RowStates {
  Query* queries;       // tile by tile: [rows of all tiles before it * padded head_dim]
  float* sums;          // [rows][padded head_dim]
  float* totals;        // [rows][16]
  float* largest;       // [rows]
  QueryScale* scales;   // [rows]
};

DT_INLINE RowStates lay_out(const AttentionTask& task) {
  const int64_t rows = static_cast<int64_t>(task.count) * task.num_heads;
  const int64_t width = padded(task.layer->head_dim);
  RowStates states;
  states.sums = task.scratch;
  states.totals = states.sums + rows * width;
  states.queries = reinterpret_cast<Query*>(states.totals + rows * kLanes);
  states.largest = reinterpret_cast<float*>(states.queries + rows * width);
  states.scales = reinterpret_cast<QueryScale*>(states.largest + rows);
  for (int64_t i = 0; i < rows * (width + kLanes); ++i) task.scratch[i] = 0.0f;  // sums, totals
  for (int64_t row = 0; row < rows; ++row) states.largest[row] = -kInfinity;
  return states;
}

// Copies a row's query, scaled so that scores are powers of two.
DT_INLINE void pack_floats(const float* from, int32_t head_dim, Query* to) {
  int32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(&to[d].value, mul(load(from + d), splat(kLog2E)));
  for (; d < head_dim; ++d) to[d].value = from[d] * kLog2E;
}

// Rounds a row's query to 16 bits, in two parts: int8 keys are multiplied with it exactly.
DT_INLINE QueryScale pack_quants(const float* from, int32_t head_dim, Query* to) {
  const RowScale row = row_scale(from, head_dim);
  const F32x16 inverse = splat(row.inverse * 256.0f);
  auto* high = reinterpret_cast<int8_t*>(to);
  auto* low = reinterpret_cast<int8_t*>(to + padded(head_dim) / 2);
  int32_t high_sum = 0, low_sum = 0;
  for (int32_t d = 0; d < head_dim; d += kLanes, high += kLanes, low += kLanes) {
    const F32x16 part = d + kLanes <= head_dim ? load(from + d) : load_some(from + d, head_dim - d);
    const F32x16 whole = round_even(mul(part, inverse));
    const F32x16 shifted = mul(add(whole, splat(128.0f)), splat(1.0f / 256.0f));
    const F32x16 highs = sub(shifted, fraction_of(shifted));
    store_int8(high, highs);
    store_int8(low, sub(whole, mul(highs, splat(256.0f))));  // in [-128, 127]
    for (int32_t i = 0; i < kLanes; ++i) {
      high_sum += high[i];
      low_sum += low[i];
    }
  }
  return {row.scale * (kLog2E / 256.0f), 128 * high_sum, 128 * low_sum};
}

// 2^x for x <= 0, as 2^floor(x) times a polynomial of degree 5: relative error below 2e-7, and
// exactly 1 at 0. Saturates at 2^-126.
DT_INLINE F32x16 exp2_nonpositive(F32x16 x) {
  x = max(x, splat(-126.0f));
  const F32x16 f = fraction_of(x);
  F32x16 p = splat(1.86713028e-3f);
  p = fma(p, f, splat(9.01702978e-3f));
  p = fma(p, f, splat(5.57999127e-2f));
  p = fma(p, f, splat(2.40164444e-1f));
  p = fma(p, f, splat(6.93151295e-1f));
  p = fma(p, f, splat(1.0f));
  return scale_by_floor(p, x);
}

// A row's earlier sums, made relative to a new largest score.
DT_INLINE void rescale(const RowStates& states, int64_t row, float largest, int64_t width) {
  const F32x16 factor = exp2_nonpositive(splat(states.largest[row] - largest));
  float* totals = states.totals + row * kLanes;
  store(totals, mul(load(totals), factor));
  float* sums = states.sums + row * width;
  for (int64_t d = 0; d < width; d += kLanes) store(sums + d, mul(load(sums + d), factor));
  states.largest[row] = largest;
}

// Scores that a row does not see, in groups of which it sees some, become -inf.
DT_INLINE void hide(const Segment& segment, int32_t group, Visible visible, float* scores) {
  if (segment.tokens[group] == kLanes && is_whole(segment, group, visible)) return;
  const Visible lanes = lanes_of(segment, group, visible);
  float* part = scores + group * kLanes;
  store(part, select_lanes(load(part), lanes.first, lanes.last, -kInfinity));
}

// One row's scores of a segment become weights. Those of hidden lanes, 2^-126 each, reach no value,
// and the total only beside one of at least 1 in some other lane.
template <KvType type>
void soften(const Segment& segment, Visible visible, float* scores, const RowStates& states, int64_t row,
            int64_t width) {
  const Visible groups = groups_with(segment, visible);
  if (groups.first == groups.last) return;
  hide(segment, groups.first, visible, scores);
  if (!segment.has_halves)
    hide(segment, groups.last - 1, visible, scores);
  else
    for (int32_t g = groups.first + 1; g < groups.last; ++g) hide(segment, g, visible, scores);
  F32x16 most = splat(states.largest[row]);
  for (int32_t g = groups.first; g < groups.last; ++g) most = max(most, load(scores + g * kLanes));
  const float largest = largest_of(most);
  if (largest != states.largest[row]) rescale(states, row, largest, width);
  F32x16 total = load(states.totals + row * kLanes);
  for (int32_t g = groups.first; g < groups.last; ++g) {
    F32x16 weight = exp2_nonpositive(sub(load(scores + g * kLanes), splat(largest)));
    total = add(total, weight);
    if constexpr (type == KvType::kInt8) weight = mul(weight, load(segment.value_scales[g]));
    store(scores + g * kLanes, weight);
  }
  store(states.totals + row * kLanes, total);
}

}  // namespace
}  // namespace dovetail
