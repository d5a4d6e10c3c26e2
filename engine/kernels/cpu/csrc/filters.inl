// Which tokens may be drawn: min_p, then top_k, then top_p, each as a least score to keep, so that all
// tokens that tie with the last kept one are kept, as in engine/sampling/filters.py.
//
// top_p's probabilities are float32 and their sums float64, as torch's are; exp and the sums' order
// differ, so the nucleus may end a token earlier or later where p lies within 1e-5 of such a sum.
#pragma once

#include "logarithm.inl"
#include "threshold.inl"

namespace {

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

// The k-th largest score; -inf where there are not so many. `scratch`: `size` floats.
float kth_largest(const float* scores, int32_t size, const Survey& survey, int32_t k, float* scratch) {
  if (k == 1) return survey.best;
  const Goal goal = {static_cast<float>(k), true, kNothing, 0.0f};
  return threshold_of(scores, size, survey, goal, scratch);
}

// The last score of the fewest most likely tokens, of at least `least`, whose probability reaches
// top_p (Holtzman et al. 2020).
float nucleus(const float* scores, int32_t size, const Survey& survey, float top_p, float least,
              float* scratch) {
  const double sum = sum_of_exponentials(scores, size, survey, least);
  const float total = survey.best + log_f32(static_cast<float>(sum));
  return threshold_of(scores, size, survey, {top_p, false, least, total}, scratch);
}

float least_kept(const float* scores, int32_t size, const Survey& survey, const SampleRow& row,
                 float* scratch) {
  float least = kNothing;
  if (row.min_p >= 0x1p-126f) least = survey.best + log_f32(row.min_p);
  if (row.top_k > 0 && row.top_k < size) {
    const float kth = kth_largest(scores, size, survey, row.top_k, scratch);
    if (kth > least) least = kth;
  }
  if (row.top_p < 1.0f) least = nucleus(scores, size, survey, row.top_p, least, scratch);
  return least;
}

}  // namespace
