// Rows of scores: where the large ones are.
//
// A survey cuts a row into blocks and keeps, of each, the largest of every sixteenth score. A look at
// sixteen floats then tells whether a block holds anything of at least some score, and k of the
// maxima bound the k-th largest score from below.
//
// NaN is no score: it compares with nothing, and `max` keeps what it had.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

constexpr float kNothing = -__builtin_inff();
constexpr int32_t kSurveyFloats = 4096;
constexpr int32_t kSurveyBlocks = kSurveyFloats / kLanes;

struct Survey {
  const float* maxima;  // [num_blocks][kLanes]
  int32_t block_size, num_blocks;
  float best;
};

// The next sixteen scores; NaN behind the row's end.
DT_INLINE F32x16 load_scores(const float* from, int32_t left) {
  if (left >= kLanes) return load(from);
  alignas(64) float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = i < left ? from[i] : __builtin_nanf("");
  return load(lane);
}

DT_INLINE void store_scores(float* to, int32_t left, F32x16 x) {
  if (left >= kLanes) {
    store(to, x);
    return;
  }
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < left; ++i) to[i] = lane[i];
}

DT_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Multiplies the scores by `scale` on the way where kScaled.
template <bool kScaled>
DT_INLINE Survey survey_scores(float* scores, int32_t size, float scale, float* maxima) {
  int32_t block_size = 256;
  while (block_size * kSurveyBlocks < size) block_size *= 2;
  F32x16 largest = splat(kNothing);
  int32_t num_blocks = 0;
  for (int32_t first = 0; first < size; first += block_size, ++num_blocks) {
    const int32_t end = smaller(first + block_size, size);
    F32x16 in_block = splat(kNothing);
    for (int32_t at = first; at < end; at += kLanes) {
      F32x16 x = load_scores(scores + at, size - at);
      if (kScaled) {
        x = mul(x, splat(scale));
        store_scores(scores + at, size - at, x);
      }
      in_block = max(x, in_block);
    }
    store(maxima + num_blocks * kLanes, in_block);
    largest = max(in_block, largest);
  }
  return {maxima, block_size, num_blocks, largest_of(largest)};
}

Survey survey_of(const float* scores, int32_t size, float* maxima) {
  return survey_scores<false>(const_cast<float*>(scores), size, 1.0f, maxima);
}

Survey scale_and_survey(float* scores, int32_t size, float scale, float* maxima) {
  return survey_scores<true>(scores, size, scale, maxima);
}

DT_INLINE bool has_at_least(const Survey& survey, int32_t block, F32x16 least) {
  return mask_at_least(load(survey.maxima + block * kLanes), least) != 0;
}

// The lowest id of the largest score; 0 where there is none.
int32_t likeliest(const float* scores, int32_t size, const Survey& survey) {
  const F32x16 best = splat(survey.best);
  int32_t block = 0;
  while (block < survey.num_blocks && !has_at_least(survey, block, best)) ++block;
  for (int32_t at = block * survey.block_size; at < size; at += kLanes)
    if (const uint32_t found = mask_at_least(load_scores(scores + at, size - at), best))
      return smaller(at + __builtin_ctz(found), size - 1);
  return 0;
}

int32_t count_at_least(const float* scores, int32_t size, float least) {
  const F32x16 bound = splat(least);
  int32_t count = 0;
  for (int32_t at = 0; at < size; at += kLanes)
    count += __builtin_popcount(mask_at_least(load_scores(scores + at, size - at), bound));
  return count;
}

}  // namespace
