// The k-th largest score, by bisection on the order of floats: no sort, nothing moved.
#pragma once

#include "survey.inl"

namespace {

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

// Finds the largest float in [low, high] for which something holds that holds at `low` and for no
// float above one where it does not.
class Bisection {
 public:
  Bisection(float low, float high) : low_(order_of(low)), high_(order_of(high)) {}
  bool is_open() const { return low_ < high_; }
  float middle() const { return float_at(low_ + (high_ - low_ + 1) / 2); }
  void narrow(bool holds) {
    const int64_t at = low_ + (high_ - low_ + 1) / 2;
    (holds ? low_ : high_) = holds ? at : at - 1;
  }
  float found() const { return float_at(low_); }

 private:
  int64_t low_, high_;
};

int32_t count_at_least(const float* scores, int32_t size, float least) {
  const F32x16 bound = splat(least);
  int32_t count = 0;
  for (int32_t at = 0; at < size; at += kLanes)
    count += __builtin_popcount(mask_at_least(load_scores(scores + at, size - at), bound));
  return count;
}

// The k-th largest of `size` scores in [low, high]; `low` where there are not so many.
float kth_largest_of(const float* scores, int32_t size, int32_t k, float low, float high) {
  Bisection bisection(low, high);
  while (bisection.is_open()) bisection.narrow(count_at_least(scores, size, bisection.middle()) >= k);
  return bisection.found();
}

// The k-th largest score of a surveyed row; -inf where there are not so many.
//
// `scratch`: `size` floats.
float kth_largest(const float* scores, int32_t size, const Survey& survey, int32_t k, float* scratch) {
  if (k == 1) return survey.best;
  const int32_t num_maxima = survey.num_blocks * kLanes;
  if (k > num_maxima) return kth_largest_of(scores, size, k, kNothing, survey.best);
  const float bound = kth_largest_of(survey.maxima, num_maxima, k, kNothing, survey.best);
  const int32_t count = gather_at_least(scores, size, survey, bound, scratch, size);
  return kth_largest_of(scratch, count, k, bound, survey.best);
}

}  // namespace
