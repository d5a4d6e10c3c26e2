// The nucleus (Holtzman et al. 2020): the fewest most likely tokens whose probability reaches p.
//
// Probabilities are float32, their sums float64, as torch's are; the sums' order differs, so p is
// reached a token earlier or later where it lies within 1e-6 of a sum.
#pragma once

#include "logarithm.inl"
#include "top_k.inl"

namespace {

constexpr int32_t kSummedInFloat = 32 * kLanes;

// Sum of exp(score - survey.best) over scores of at least `least`.
double sum_of_exponentials(const float* scores, int32_t size, const Survey& survey, float least) {
  const F32x16 bound = splat(least), best = splat(survey.best);
  double total = 0.0;
  for (int32_t block = 0; block < survey.num_blocks; ++block) {
    if (!has_at_least(survey, block, bound)) continue;
    const int32_t end = smaller((block + 1) * survey.block_size, size);
    F32x16 sum = splat(0.0f);
    for (int32_t at = block * survey.block_size; at < end; at += kLanes) {
      const F32x16 x = load_scores(scores + at, size - at);
      sum = add(sum, keep_at_least(x, bound, exponential(sub(x, best))));
    }
    total += static_cast<double>(sum_of(sum));
  }
  return total;
}

// Probabilities of scores, nothing for those below `least`; `total` is the log of their sum.
void probabilities_of(const float* scores, int32_t size, float least, float total, float* to) {
  const F32x16 bound = splat(least), shift = splat(total);
  for (int32_t at = 0; at < size; at += kLanes) {
    const F32x16 x = load_scores(scores + at, size - at);
    store_scores(to + at, size - at, keep_at_least(x, bound, exponential(sub(x, shift))));
  }
}

double probability_at_least(const float* scores, const float* probabilities, int32_t size, float least) {
  const F32x16 bound = splat(least);
  double total = 0.0;
  for (int32_t first = 0; first < size; first += kSummedInFloat) {
    const int32_t end = smaller(first + kSummedInFloat, size);
    F32x16 sum = splat(0.0f);
    for (int32_t at = first; at < end; at += kLanes) {
      const int32_t left = size - at;
      sum = add(sum, keep_at_least(load_scores(scores + at, left), bound, load_scores(probabilities + at, left)));
    }
    total += static_cast<double>(sum_of(sum));
  }
  return total;
}

// The largest score whose tokens and better ones reach `top_p`; `low` if it takes all.
float nucleus_of(const float* scores, const float* probabilities, int32_t size, float top_p, float low,
                 float high) {
  Bisection bisection(low, high);
  while (bisection.is_open()) {
    const double reached = probability_at_least(scores, probabilities, size, bisection.middle());
    bisection.narrow(static_cast<float>(reached) >= top_p);
  }
  return bisection.found();
}

// The least score that top_p keeps among those of at least `least`.
//
// The probability of the maxima alone bounds it from below; where that is of use, few are left to
// judge. `scratch`: `size` floats.
float nucleus(const float* scores, int32_t size, const Survey& survey, float top_p, float least,
              float* scratch) {
  const double sum = sum_of_exponentials(scores, size, survey, least);
  const float total = survey.best + log_f32(static_cast<float>(sum));
  const int32_t num_maxima = survey.num_blocks * kLanes, half = size / 2;
  float low = least;
  if (num_maxima <= size) {
    probabilities_of(survey.maxima, num_maxima, least, total, scratch);
    low = nucleus_of(survey.maxima, scratch, num_maxima, top_p, least, survey.best);
  }
  const int32_t count = gather_at_least(scores, size, survey, low, scratch, half);
  if (count < 0) {
    probabilities_of(scores, size, least, total, scratch);
    return nucleus_of(scores, scratch, size, top_p, low, survey.best);
  }
  probabilities_of(scratch, count, least, total, scratch + half);
  return nucleus_of(scratch, scratch + half, count, top_p, low, survey.best);
}

}  // namespace
