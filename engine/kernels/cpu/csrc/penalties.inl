// Rules that change logits before a token is chosen, in the order of engine/sampling/sampler.py.
#pragma once

#include "survey.inl"

namespace {

constexpr float kLargestLogit = 1e30f;  // so that no temperature makes a logit infinite
constexpr float kIsPenalized = -1.0f;

DT_INLINE bool is_token(int32_t token, int32_t vocab_size) {
  return static_cast<uint32_t>(token) < static_cast<uint32_t>(vocab_size);
}

// The allowed-token mask, banned ids, logit_bias.
void restrict_logits(float* logits, int32_t vocab_size, const SampleRow& row) {
  if (row.allowed != nullptr)
    for (int32_t token = 0; token < vocab_size; ++token)
      logits[token] = row.allowed[token] != 0 ? logits[token] : kNothing;
  for (int32_t i = 0; i < row.num_banned; ++i)
    if (is_token(row.banned[i], vocab_size)) logits[row.banned[i]] = kNothing;
  for (int32_t i = 0; i < row.num_bias; ++i)
    if (is_token(row.bias_ids[i], vocab_size)) logits[row.bias_ids[i]] += row.bias[i];
}

DT_INLINE float penalized(float logit, float count, float repetition, const SampleRow& row) {
  float seen = logit > 0.0f ? logit / repetition : logit * repetition;
  seen -= row.frequency_penalty * count;
  seen -= row.presence_penalty * (count > 0.0f ? 1.0f : 0.0f);
  return seen > kLargestLogit ? kLargestLogit : seen;
}

// Repetition on every token of prompt and output, then frequency and presence on those of the output.
//
// `counts`: vocab_size floats, of which only the history's are touched.
void penalize_logits(float* logits, int32_t vocab_size, const SampleRow& row, float* counts) {
  // A client's float64 may be 0 or infinite in float32.
  const float above = row.repetition_penalty > 0x1p-126f ? row.repetition_penalty : 0x1p-126f;
  const float repetition = above < 0x1.fffffep127f ? above : 0x1.fffffep127f;
  const int32_t* const end = row.history + row.num_history;
  for (const int32_t* token = row.history; token < end; ++token)
    if (is_token(*token, vocab_size)) counts[*token] = 0.0f;
  for (const int32_t* token = row.history + row.num_prompt; token < end; ++token)
    if (is_token(*token, vocab_size)) counts[*token] += 1.0f;
  for (const int32_t* token = row.history; token < end; ++token) {
    if (!is_token(*token, vocab_size) || counts[*token] == kIsPenalized) continue;
    logits[*token] = penalized(logits[*token], counts[*token], repetition, row);
    counts[*token] = kIsPenalized;
  }
}

}  // namespace
