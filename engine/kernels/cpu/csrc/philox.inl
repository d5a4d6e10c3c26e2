// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), as engine/sampling/philox.py: eight counters, so
// the words of 32 tokens, at once.
#pragma once

#include "simd_integers.h"

namespace {

constexpr int kPhiloxRounds = 10;
constexpr int kWordsAtOnce = 32;

// What keys the noise of a row: counter = (token >> 2, position, sample index, 0), key = seed.
struct NoiseKey {
  uint64_t low[kPhiloxRounds], high[kPhiloxRounds];  // the key's words, round by round
  uint64_t position, sample_index;
};

DT_INLINE NoiseKey noise_key(const SampleRow& row) {
  NoiseKey key;
  auto low = static_cast<uint32_t>(row.seed), high = static_cast<uint32_t>(row.seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    key.low[round] = low;
    key.high[round] = high;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  key.position = static_cast<uint32_t>(row.position);
  key.sample_index = static_cast<uint32_t>(row.sample_index);
  return key;
}

// Words of tokens [first, first + 16) and [first + 16, first + 32); first is a multiple of 32.
//
// Lanes keep a word in their lower half; what a product leaves above it is never looked at.
DT_INLINE void philox_words(const NoiseKey& key, int32_t first, I32x16& words, I32x16& next_words) {
  // Such that zipping lanes in pairs puts the words in order.
  static constexpr uint64_t quads[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const U64x8 multiplier0 = splat_u64(0xD2511F53u), multiplier1 = splat_u64(0xCD9E8D57u);
  U64x8 c0 = add_u64(load_u64(quads), splat_u64(static_cast<uint32_t>(first) >> 2));
  U64x8 c1 = splat_u64(key.position), c2 = splat_u64(key.sample_index), c3 = splat_u64(0);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const U64x8 product0 = mul_low_words(c0, multiplier0), product1 = mul_low_words(c2, multiplier1);
    c0 = xor3(high_words(product1), c1, splat_u64(key.low[round]));
    c2 = xor3(high_words(product0), c3, splat_u64(key.high[round]));
    c1 = product1;
    c3 = product0;
  }
  words = zip_even(c0, c1, c2, c3);
  next_words = zip_odd(c0, c1, c2, c3);
}

}  // namespace
