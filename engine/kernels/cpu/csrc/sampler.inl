// Logits -> one token a row, by the rules of engine/sampling/sampler.py, in their order. A row's token
// depends on its logits and its SampleRow alone.
//
// Scratch: kSurveyFloats, and two rows of vocab_size. No rule moves or sorts the row: a filter is a
// least score, and the next one judges what is above.
#pragma once

#include "filters.inl"
#include "gumbel.inl"
#include "logprobs.inl"
#include "penalties.inl"
#include "survey.inl"

namespace {

int32_t draw(float* logits, int32_t vocab_size, const SampleRow& row, float* maxima, float* scratch) {
  const Survey survey = scale_and_survey(logits, vocab_size, row.inverse_temperature, maxima);
  // Nothing is allowed, or nothing can be told apart: a token all the same, the torch sampler's.
  if (!(__builtin_fabsf(survey.best) < __builtin_inff())) return vocab_size - 1;
  const float least = least_kept(logits, vocab_size, survey, row, scratch);
  const int32_t best_id = likeliest(logits, vocab_size, survey);
  return gumbel_argmax(logits, vocab_size, survey, least, best_id, noise_key(row));
}

int32_t choose(float* logits, int32_t vocab_size, const SampleRow& row, float* maxima, float* scratch) {
  restrict_logits(logits, vocab_size, row);
  if (row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f)
    penalize_logits(logits, vocab_size, row, scratch);
  if (row.inverse_temperature != 0.0f) return draw(logits, vocab_size, row, maxima, scratch);
  return likeliest(logits, vocab_size, survey_of(logits, vocab_size, maxima));
}

int32_t sample(float* logits, int32_t vocab_size, const SampleRow* row, float* scratch, float* chosen,
               int32_t* top_ids, float* top) {
  float* const maxima = scratch;
  float* const unmodified = scratch + kSurveyFloats;
  float* const row_scratch = unmodified + vocab_size;
  if (row->num_logprobs < 0) return choose(logits, vocab_size, *row, maxima, row_scratch);
  const Survey survey = survey_of(logits, vocab_size, maxima);
  const LogSoftmax softmax = log_softmax(logits, vocab_size, survey);
  most_likely(logits, vocab_size, survey, softmax, row->num_logprobs, row_scratch, top_ids, top);
  std::memcpy(unmodified, logits, sizeof(float) * static_cast<size_t>(vocab_size));
  const int32_t token = choose(logits, vocab_size, *row, maxima, row_scratch);
  *chosen = log_probability(softmax, unmodified[token]);
  return token;
}

void score(const float* logits, int32_t vocab_size, int32_t token, int32_t num_top, float* scratch,
           float* logprob, int32_t* rank, int32_t* top_ids, float* top) {
  const Survey survey = survey_of(logits, vocab_size, scratch);
  const LogSoftmax softmax = log_softmax(logits, vocab_size, survey);
  *logprob = log_probability(softmax, logits[token]);
  *rank = count_at_least(logits, vocab_size, logits[token]);
  most_likely(logits, vocab_size, survey, softmax, num_top, scratch + kSurveyFloats, top_ids, top);
}

}  // namespace
