// Log-probabilities of unmodified logits, and the most likely tokens.
#pragma once

#include "filters.inl"

namespace {

// Log-softmax of a row: a logit's log-probability is (logit - best) - log_sum.
struct LogSoftmax {
  float best, log_sum;
};

DT_INLINE float log_probability(const LogSoftmax& of, float logit) { return (logit - of.best) - of.log_sum; }

LogSoftmax log_softmax(const float* logits, int32_t vocab_size, const Survey& survey) {
  const double sum = sum_of_exponentials(logits, vocab_size, survey, kNothing);
  return {survey.best, log_f32(static_cast<float>(sum))};
}

// Whether a candidate comes after another: less likely, or of a higher id.
DT_INLINE bool comes_after(const float* values, const int32_t* ids, int32_t a, int32_t b) {
  return values[a] < values[b] || (values[a] == values[b] && ids[a] > ids[b]);
}

DT_INLINE void exchange(float* values, int32_t* ids, int32_t a, int32_t b) {
  const float value = values[a];
  const int32_t id = ids[a];
  values[a] = values[b];
  ids[a] = ids[b];
  values[b] = value;
  ids[b] = id;
}

// Restores the heap below `root`: what comes last is on top.
DT_INLINE void sift_down(float* values, int32_t* ids, int32_t root, int32_t size) {
  for (int32_t child = 2 * root + 1; child < size; child = 2 * root + 1) {
    if (child + 1 < size && comes_after(values, ids, child + 1, child)) ++child;
    if (!comes_after(values, ids, child, root)) return;
    exchange(values, ids, root, child);
    root = child;
  }
}

// Heapsort, most likely first, the lowest id among equals.
void sort_by_likelihood(float* values, int32_t* ids, int32_t size) {
  for (int32_t root = size / 2 - 1; root >= 0; --root) sift_down(values, ids, root, size);
  for (int32_t last = size - 1; last > 0; --last) {
    exchange(values, ids, 0, last);
    sift_down(values, ids, 0, last);
  }
}

// Appends tokens of at least `least`, in their order, or of exactly that score; up to num_top in all.
template <bool kEqual>
DT_INLINE int32_t append_tokens(const float* logits, int32_t size, const Survey& survey, float least,
                                int32_t count, int32_t num_top, int32_t* top_ids, float* top) {
  const F32x16 bound = splat(least);
  for (int32_t block = 0; block < survey.num_blocks; ++block) {
    if (!has_at_least(survey, block, bound)) continue;
    const int32_t end = smaller((block + 1) * survey.block_size, size);
    for (int32_t at = block * survey.block_size; at < end; at += kLanes) {
      uint32_t found = mask_at_least(load_scores(logits + at, size - at), bound);
      for (; found != 0; found &= found - 1) {
        const int32_t token = at + __builtin_ctz(found);
        if ((logits[token] == least) != kEqual) continue;
        if (count == num_top) return count;
        top_ids[count] = token;
        top[count++] = logits[token];
      }
    }
  }
  return count;
}

// The num_top most likely tokens and their log-probabilities; `scratch`: vocab_size floats.
void most_likely(const float* logits, int32_t vocab_size, const Survey& survey, const LogSoftmax& softmax,
                 int32_t num_top, float* scratch, int32_t* top_ids, float* top) {
  if (num_top == 0) return;
  const float least = kth_largest(logits, vocab_size, survey, num_top, scratch);
  int32_t count = append_tokens<false>(logits, vocab_size, survey, least, 0, num_top, top_ids, top);
  count = append_tokens<true>(logits, vocab_size, survey, least, count, num_top, top_ids, top);
  for (; count < num_top; ++count) {  // a row with NaN has fewer scores
    top_ids[count] = 0;
    top[count] = kNothing;
  }
  sort_by_likelihood(top, top_ids, num_top);
  for (int32_t i = 0; i < num_top; ++i) top[i] = log_probability(softmax, top[i]);
}

}  // namespace
