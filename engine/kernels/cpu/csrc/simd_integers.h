// Integers beside simd.h's floats: more of sixteen lanes of 32 bits, and eight lanes of 64. Compiled
// once for each instruction set, as that is.
#pragma once

#include "simd.h"

namespace {

#if defined(__AVX512F__)

using U64x8 = __m512i;

DT_INLINE I32x16 bits_of(F32x16 x) { return _mm512_castps_si512(x); }
DT_INLINE F32x16 from_bits(I32x16 x) { return _mm512_castsi512_ps(x); }
DT_INLINE I32x16 or_int(I32x16 a, I32x16 b) { return _mm512_or_si512(a, b); }
template <int kBits>
DT_INLINE I32x16 shift_left(I32x16 x) { return _mm512_slli_epi32(x, kBits); }
template <int kBits>
DT_INLINE I32x16 shift_right(I32x16 x) { return _mm512_srai_epi32(x, kBits); }  // keeps the sign
template <int kBits>
DT_INLINE I32x16 shift_right_zero(I32x16 x) { return _mm512_srli_epi32(x, kBits); }

DT_INLINE U64x8 splat_u64(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
DT_INLINE U64x8 load_u64(const uint64_t* from) { return _mm512_loadu_si512(from); }
DT_INLINE U64x8 add_u64(U64x8 a, U64x8 b) { return _mm512_add_epi64(a, b); }
// The lower 32 bits of a times those of b, in 64 bits.
DT_INLINE U64x8 mul_low_words(U64x8 a, U64x8 b) { return _mm512_mul_epu32(a, b); }
DT_INLINE U64x8 high_words(U64x8 x) { return _mm512_srli_epi64(x, 32); }
DT_INLINE U64x8 xor3(U64x8 a, U64x8 b, U64x8 c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
// Lower words of even lanes, as a[0] b[0] c[0] d[0] a[2] b[2] ...; `zip_odd` likewise.
DT_INLINE I32x16 join_words(U64x8 low, U64x8 high) {
  return _mm512_mask_mov_epi32(low, 0xAAAA, _mm512_slli_epi64(high, 32));
}
DT_INLINE I32x16 zip_even(U64x8 a, U64x8 b, U64x8 c, U64x8 d) {
  return _mm512_unpacklo_epi64(join_words(a, b), join_words(c, d));
}
DT_INLINE I32x16 zip_odd(U64x8 a, U64x8 b, U64x8 c, U64x8 d) {
  return _mm512_unpackhi_epi64(join_words(a, b), join_words(c, d));
}

#elif defined(__AVX2__) && defined(__FMA__)

using U64x8 = I32x16;

DT_INLINE I32x16 bits_of(F32x16 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
DT_INLINE F32x16 from_bits(I32x16 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
DT_INLINE I32x16 or_int(I32x16 a, I32x16 b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
template <int kBits>
DT_INLINE I32x16 shift_left(I32x16 x) {
  return {_mm256_slli_epi32(x.low, kBits), _mm256_slli_epi32(x.high, kBits)};
}
template <int kBits>
DT_INLINE I32x16 shift_right(I32x16 x) {
  return {_mm256_srai_epi32(x.low, kBits), _mm256_srai_epi32(x.high, kBits)};
}
template <int kBits>
DT_INLINE I32x16 shift_right_zero(I32x16 x) {
  return {_mm256_srli_epi32(x.low, kBits), _mm256_srli_epi32(x.high, kBits)};
}

DT_INLINE U64x8 splat_u64(uint64_t x) {
  const __m256i all = _mm256_set1_epi64x(static_cast<long long>(x));
  return {all, all};
}
DT_INLINE U64x8 load_u64(const uint64_t* from) {
  const auto* at = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
DT_INLINE U64x8 add_u64(U64x8 a, U64x8 b) {
  return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
DT_INLINE U64x8 mul_low_words(U64x8 a, U64x8 b) {
  return {_mm256_mul_epu32(a.low, b.low), _mm256_mul_epu32(a.high, b.high)};
}
DT_INLINE U64x8 high_words(U64x8 x) { return {_mm256_srli_epi64(x.low, 32), _mm256_srli_epi64(x.high, 32)}; }
DT_INLINE U64x8 xor3(U64x8 a, U64x8 b, U64x8 c) {
  return {_mm256_xor_si256(_mm256_xor_si256(a.low, b.low), c.low),
          _mm256_xor_si256(_mm256_xor_si256(a.high, b.high), c.high)};
}
DT_INLINE __m256i join_words(__m256i low, __m256i high) {
  return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA);
}
DT_INLINE I32x16 zip_even(U64x8 a, U64x8 b, U64x8 c, U64x8 d) {
  return {_mm256_unpacklo_epi64(join_words(a.low, b.low), join_words(c.low, d.low)),
          _mm256_unpacklo_epi64(join_words(a.high, b.high), join_words(c.high, d.high))};
}
DT_INLINE I32x16 zip_odd(U64x8 a, U64x8 b, U64x8 c, U64x8 d) {
  return {_mm256_unpackhi_epi64(join_words(a.low, b.low), join_words(c.low, d.low)),
          _mm256_unpackhi_epi64(join_words(a.high, b.high), join_words(c.high, d.high))};
}

#else

struct U64x8 {
  uint64_t lane[kLanes / 2];
};

#define DT_EACH(type, expression)                                        \
  type result;                                                           \
  constexpr int count = sizeof result.lane / sizeof result.lane[0];      \
  for (int i = 0; i < count; ++i) result.lane[i] = (expression);         \
  return result

DT_INLINE uint32_t as_unsigned(int32_t x) { return static_cast<uint32_t>(x); }
DT_INLINE I32x16 bits_of(F32x16 x) {
  I32x16 result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}
DT_INLINE F32x16 from_bits(I32x16 x) {
  F32x16 result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}
DT_INLINE I32x16 or_int(I32x16 a, I32x16 b) { DT_EACH(I32x16, a.lane[i] | b.lane[i]); }
template <int kBits>
DT_INLINE I32x16 shift_left(I32x16 x) {
  DT_EACH(I32x16, static_cast<int32_t>(as_unsigned(x.lane[i]) << kBits));
}
template <int kBits>
DT_INLINE I32x16 shift_right(I32x16 x) { DT_EACH(I32x16, x.lane[i] >> kBits); }
template <int kBits>
DT_INLINE I32x16 shift_right_zero(I32x16 x) {
  DT_EACH(I32x16, static_cast<int32_t>(as_unsigned(x.lane[i]) >> kBits));
}

DT_INLINE U64x8 splat_u64(uint64_t x) { DT_EACH(U64x8, x); }
DT_INLINE U64x8 load_u64(const uint64_t* from) { DT_EACH(U64x8, from[i]); }
DT_INLINE U64x8 add_u64(U64x8 a, U64x8 b) { DT_EACH(U64x8, a.lane[i] + b.lane[i]); }
DT_INLINE U64x8 mul_low_words(U64x8 a, U64x8 b) {
  DT_EACH(U64x8, (a.lane[i] & 0xffffffffu) * (b.lane[i] & 0xffffffffu));
}
DT_INLINE U64x8 high_words(U64x8 x) { DT_EACH(U64x8, x.lane[i] >> 32); }
DT_INLINE U64x8 xor3(U64x8 a, U64x8 b, U64x8 c) { DT_EACH(U64x8, a.lane[i] ^ b.lane[i] ^ c.lane[i]); }
DT_INLINE I32x16 zip_from(int first, const U64x8& a, const U64x8& b, const U64x8& c, const U64x8& d) {
  I32x16 result;
  for (int i = 0; i < kLanes / 4; ++i) {
    result.lane[4 * i] = static_cast<int32_t>(a.lane[first + 2 * i]);
    result.lane[4 * i + 1] = static_cast<int32_t>(b.lane[first + 2 * i]);
    result.lane[4 * i + 2] = static_cast<int32_t>(c.lane[first + 2 * i]);
    result.lane[4 * i + 3] = static_cast<int32_t>(d.lane[first + 2 * i]);
  }
  return result;
}
DT_INLINE I32x16 zip_even(U64x8 a, U64x8 b, U64x8 c, U64x8 d) { return zip_from(0, a, b, c, d); }
DT_INLINE I32x16 zip_odd(U64x8 a, U64x8 b, U64x8 c, U64x8 d) { return zip_from(1, a, b, c, d); }

#undef DT_EACH

#endif

}  // namespace
