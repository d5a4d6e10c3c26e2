// The least score that a filter keeps, by bisection on the order of floats: no sort, nothing moved.
//
// Both filters ask for the same: the largest score whose weight, with that of all better ones,
// reaches a goal. top_k counts tokens, top_p sums their probabilities.
#pragma once

#include "survey.inl"

namespace {

constexpr int32_t kSummedInFloat = 1024;
constexpr int kNarrowings = 8;         // of the range of scores, before what is left is gathered
constexpr float kLikelyRange = 32.0f;  // below the best score

struct Goal {
  float amount;
  bool counts;         // tokens, or else their probabilities exp(score - total)
  float least, total;  // scores below `least` weigh nothing
};

// Floats as integers in the same order (NaN left out; -0 comes right before 0).
DT_INLINE int64_t order_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

DT_INLINE float float_at(int64_t order) {
  int32_t bits = static_cast<int32_t>(order);
  bits ^= (bits >> 31) & 0x7fffffff;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

DT_INLINE F32x16 weight_at(const float* scores, const float* weights, int32_t left, F32x16 bound) {
  const F32x16 weight = weights == nullptr ? splat(1.0f) : load_scores(weights, left);
  return keep_at_least(load_scores(scores, left), bound, weight);
}

// Weight of the scores of at least `least`; without `weights`, their number.
//
// Four sums of every fourth vector in float, added up in double every kSummedInFloat scores.
DT_INLINE double sum_weights(const float* scores, const float* weights, int32_t size, float least) {
  const F32x16 bound = splat(least);
  double total = 0.0;
  for (int32_t first = 0; first < size; first += kSummedInFloat) {
    const int32_t end = smaller(first + kSummedInFloat, size);
    F32x16 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int32_t at = first;
    for (; at + 4 * kLanes <= end; at += 4 * kLanes)
      for (int i = 0; i < 4; ++i) {
        const F32x16 weight = weights == nullptr ? splat(1.0f) : load(weights + at + i * kLanes);
        sum[i] = add(sum[i], keep_at_least(load(scores + at + i * kLanes), bound, weight));
      }
    for (; at < end; at += kLanes) {
      const float* const own = weights == nullptr ? nullptr : weights + at;
      sum[0] = add(sum[0], weight_at(scores + at, own, end - at, bound));
    }
    total += static_cast<double>(sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3]))));
  }
  return total;
}

double weight_at_least(const float* scores, const float* weights, int32_t size, float least) {
  return weights == nullptr ? sum_weights(scores, nullptr, size, least)
                            : sum_weights(scores, weights, size, least);
}

// Probabilities of scores, in `to`; null where tokens are counted.
const float* weights_of(const Goal& goal, const float* scores, int32_t size, float* to) {
  if (goal.counts) return nullptr;
  const F32x16 bound = splat(goal.least), shift = splat(goal.total);
  for (int32_t at = 0; at < size; at += kLanes) {
    const F32x16 x = load_scores(scores + at, size - at);
    store_scores(to + at, size - at, keep_at_least(x, bound, exponential(sub(x, shift))));
  }
  return to;
}

// Where the threshold is: `low` reaches the goal or is as low as it gets; `high` does not, as all from
// there on weigh `above`.
struct ScoreRange {
  float low, high;
  double above;
};

// Finds the threshold among `size` scores; those of the range, at least, are there.
float bisect(const float* scores, const float* weights, int32_t size, float amount, const ScoreRange& range,
             double elsewhere) {
  int64_t low = order_of(range.low), high = order_of(range.high) - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const double reached = elsewhere + weight_at_least(scores, weights, size, float_at(middle));
    if (static_cast<float>(reached) >= amount)
      low = middle;
    else
      high = middle - 1;
  }
  return float_at(low);
}

// Halves the range of scores a few times: then few are left in it, unless they are equal.
void narrow(const float* scores, const float* weights, int32_t size, float amount, ScoreRange& range) {
  const float first = range.high - kLikelyRange;
  for (int i = 0; i < kNarrowings; ++i) {
    const float middle = range.low < first ? first : range.low + (range.high - range.low) * 0.5f;
    if (!(range.low < middle && middle < range.high)) return;
    const double reached = weight_at_least(scores, weights, size, middle);
    if (static_cast<float>(reached) >= amount) {
      range.low = middle;
    } else {
      range.high = middle;
      range.above = reached;
      if (range.low < first) return;
    }
  }
}

// Copies the range's scores, in their order; returns how many, or -1 if more than `room`.
int32_t gather(const float* scores, int32_t size, const Survey& survey, const ScoreRange& range, float* to,
               int32_t room) {
  const F32x16 low = splat(range.low), high = splat(range.high);
  int32_t count = 0;
  for (int32_t block = 0; block < survey.num_blocks; ++block) {
    if (!has_at_least(survey, block, low)) continue;
    const int32_t end = smaller((block + 1) * survey.block_size, size);
    for (int32_t at = block * survey.block_size; at < end; at += kLanes) {
      const F32x16 x = load_scores(scores + at, size - at);
      uint32_t found = mask_at_least(x, low) & ~mask_at_least(x, high);
      if (count + __builtin_popcount(found) > room) return -1;
      for (; found != 0; found &= found - 1) to[count++] = scores[at + __builtin_ctz(found)];
    }
  }
  return count;
}

// The threshold of a surveyed row; goal.least where all together do not reach the goal.
//
// What the maxima alone reach bounds it from below; mostly few scores are left to judge, and where the
// row is flat, few are after some narrowing. `scratch`: `size` floats.
float threshold_of(const float* scores, int32_t size, const Survey& survey, const Goal& goal, float* scratch) {
  ScoreRange range = {goal.least, float_at(order_of(survey.best) + 1), 0.0};
  const int32_t num_maxima = survey.num_blocks * kLanes, few = size / 4;
  if (num_maxima <= size) {
    const float* weights = weights_of(goal, survey.maxima, num_maxima, scratch);
    if (static_cast<float>(weight_at_least(survey.maxima, weights, num_maxima, goal.least)) >= goal.amount)
      range.low = bisect(survey.maxima, weights, num_maxima, goal.amount, range, 0.0);
  }
  int32_t count = range.low > kNothing ? gather(scores, size, survey, range, scratch, few) : -1;
  if (count < 0) {
    narrow(scores, weights_of(goal, scores, size, scratch), size, goal.amount, range);
    count = gather(scores, size, survey, range, scratch, few);
  }
  if (count < 0) {
    const float* weights = weights_of(goal, scores, size, scratch);
    return bisect(scores, weights, size, goal.amount, range, 0.0);
  }
  const float* weights = weights_of(goal, scratch, count, scratch + few);
  return bisect(scratch, weights, count, goal.amount, range, range.above);
}

}  // namespace
