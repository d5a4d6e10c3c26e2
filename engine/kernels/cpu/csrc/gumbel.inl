// Gumbel-max with counter-based noise, bit for bit that of engine/sampling/gumbel.py:
//
//     word = philox(counter = (token >> 2, position, sample index, 0), key = seed)[token & 3]
//     u    = ((word >> 8) | 1) * 2^-24
//     g    = -log_f32(-log_f32(u))            at most kLargestNoise
//
// and the token of the largest score + g wins, the lowest id among equals.
#pragma once

#include "logarithm.inl"
#include "philox.inl"
#include "survey.inl"

namespace {

constexpr float kLargestNoise = 16.6356f;

DT_INLINE F32x16 uniform_of(I32x16 words) {
  return mul(to_float(or_int(shift_right_zero<8>(words), splat_int(1))), splat(0x1p-24f));
}

DT_INLINE F32x16 noise_of(F32x16 uniform) {
  const F32x16 zero = splat(0.0f);
  return sub(zero, log_f32(sub(zero, log_f32(uniform))));
}

float noise_of_token(const NoiseKey& key, int32_t token) {
  I32x16 words[2];
  philox_words(key, token / kWordsAtOnce * kWordsAtOnce, words[0], words[1]);
  alignas(64) float lane[kLanes];
  store(lane, noise_of(uniform_of(words[token / kLanes % 2])));
  return lane[token % kLanes];
}

// What is known of the winner so far.
//
// `floor` is a sum that the winner reaches, less what rounding can do on either side of a comparison.
struct Race {
  float best_sum, floor, margin;
  int32_t winner;
};

DT_INLINE float least_that_can_win(const Race& race, float least) {
  const float needed = race.floor - kLargestNoise;
  return needed > least ? needed : least;
}

// Judges sixteen tokens that follow all judged before; `least` is the least score that may be drawn.
DT_INLINE void judge(F32x16 scores, F32x16 uniform, F32x16 least, int32_t first, Race& race) {
  const F32x16 sums = add(scores, noise_of(uniform));
  const uint32_t drawable = mask_at_least(scores, least);
  alignas(64) float lane[kLanes];
  store(lane, sums);
  for (uint32_t left = drawable; left != 0; left &= left - 1) {
    const int index = __builtin_ctz(left);
    if (lane[index] > race.best_sum) {
      race.best_sum = lane[index];
      race.winner = first + index;
    }
  }
  const float floor = race.best_sum - race.margin;
  if (floor > race.floor) race.floor = floor;
}

// Draws among scores of at least `least`; `best_id` is the likeliest.
//
// Only tokens that can still win get their logarithms: score - log(-log(u)) >= floor means -log(u) <=
// exp(score - floor), and 1 - u <= -log(u). The floor starts at the likeliest token's sum and rises;
// blocks whose scores cannot win with the largest noise get no noise at all. Neither changes a token.
int32_t gumbel_argmax(const float* scores, int32_t size, const Survey& survey, float least,
                      int32_t best_id, const NoiseKey& key) {
  const float margin = (__builtin_fabsf(survey.best) + kLargestNoise) * 0x1p-20f;
  const float reached = survey.best + noise_of_token(key, best_id);
  Race race = {kNothing, reached - margin, margin, best_id};
  const F32x16 drawable = splat(least), one = splat(1.0f);
  for (int32_t block = 0; block < survey.num_blocks; ++block) {
    F32x16 possible = splat(least_that_can_win(race, least));
    if (!has_at_least(survey, block, possible)) continue;
    // Of each lane's scores in this block, by their maximum.
    F32x16 bound = exponential(sub(load(survey.maxima + block * kLanes), splat(race.floor)));
    const int32_t end = smaller((block + 1) * survey.block_size, size);
    for (int32_t at = block * survey.block_size; at < end; at += kWordsAtOnce) {
      const F32x16 x[2] = {load_scores(scores + at, end - at),
                           load_scores(scores + at + kLanes, end - at - kLanes)};
      const uint32_t in_reach[2] = {mask_at_least(x[0], possible), mask_at_least(x[1], possible)};
      if ((in_reach[0] | in_reach[1]) == 0) continue;
      I32x16 words[2];
      philox_words(key, at, words[0], words[1]);
      for (int half = 0; half < 2; ++half) {
        const F32x16 uniform = uniform_of(words[half]);
        if ((mask_at_least(bound, sub(one, uniform)) & in_reach[half]) == 0) continue;
        judge(x[half], uniform, drawable, at + half * kLanes, race);
        possible = splat(least_that_can_win(race, least));
        bound = exponential(sub(load(survey.maxima + block * kLanes), splat(race.floor)));
      }
    }
  }
  return race.winner;
}

}  // namespace
