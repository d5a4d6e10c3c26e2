// Sixteen floats at a time, by one interface: AVX-512, AVX2 with FMA, or plain loops.
//
// Every function is `static inline` in an anonymous namespace: this header is compiled once for each
// instruction set, and no symbol of one may serve another (it would be an illegal instruction there).
// Sums over lanes follow one fixed tree, so that a result never depends on who asks.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define DT_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

using F32x16 = __m512;

DT_INLINE F32x16 load(const float* from) { return _mm512_loadu_ps(from); }
DT_INLINE void store(float* to, F32x16 x) { _mm512_storeu_ps(to, x); }
DT_INLINE F32x16 splat(float x) { return _mm512_set1_ps(x); }
DT_INLINE F32x16 add(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
DT_INLINE F32x16 sub(F32x16 a, F32x16 b) { return _mm512_sub_ps(a, b); }
DT_INLINE F32x16 mul(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
DT_INLINE F32x16 div(F32x16 a, F32x16 b) { return _mm512_div_ps(a, b); }
DT_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
DT_INLINE F32x16 max(F32x16 a, F32x16 b) { return _mm512_max_ps(a, b); }
DT_INLINE F32x16 min(F32x16 a, F32x16 b) { return _mm512_min_ps(a, b); }
DT_INLINE F32x16 round_even(F32x16 x) { return _mm512_roundscale_ps(x, 8); }
// x * 2^n for whole n in [-126, 127].
DT_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) { return _mm512_scalef_ps(x, n); }
// bf16 [16] -> float.
DT_INLINE F32x16 load_bf16(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// 16 pairs (even, odd) of bf16 -> the even ones, the odd ones.
DT_INLINE void load_bf16_pairs(const uint16_t* from, F32x16& even, F32x16& odd) {
  const __m512i pairs = _mm512_loadu_si512(from);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
DT_INLINE F32x16 load_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct F32x16 {
  __m256 low, high;
};

DT_INLINE F32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
DT_INLINE void store(float* to, F32x16 x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
DT_INLINE F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
DT_INLINE F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
DT_INLINE F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
DT_INLINE F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
DT_INLINE F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
DT_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
DT_INLINE F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
DT_INLINE F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
DT_INLINE F32x16 round_even(F32x16 x) {
  return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
DT_INLINE __m256 power_of_two(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
DT_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) {
  return {_mm256_mul_ps(x.low, power_of_two(n.low)), _mm256_mul_ps(x.high, power_of_two(n.high))};
}
DT_INLINE __m256 widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
DT_INLINE F32x16 load_bf16(const uint16_t* from) {
  const auto* at = reinterpret_cast<const __m128i*>(from);
  return {widen_bf16(_mm_loadu_si128(at)), widen_bf16(_mm_loadu_si128(at + 1))};
}
DT_INLINE void load_bf16_pairs(const uint16_t* from, F32x16& even, F32x16& odd) {
  const auto* at = reinterpret_cast<const __m256i*>(from);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}
DT_INLINE F32x16 load_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

#else

struct F32x16 {
  float lane[kLanes];
};

#define DT_EACH(expression)                          \
  F32x16 result;                                     \
  for (int i = 0; i < kLanes; ++i) result.lane[i] = (expression); \
  return result

DT_INLINE F32x16 load(const float* from) { DT_EACH(from[i]); }
DT_INLINE void store(float* to, F32x16 x) { std::memcpy(to, x.lane, sizeof x.lane); }
DT_INLINE F32x16 splat(float x) { DT_EACH(x); }
DT_INLINE F32x16 add(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] + b.lane[i]); }
DT_INLINE F32x16 sub(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] - b.lane[i]); }
DT_INLINE F32x16 mul(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] * b.lane[i]); }
DT_INLINE F32x16 div(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] / b.lane[i]); }
// Two roundings: a processor without FMA takes hundreds of cycles for one.
DT_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { DT_EACH(a.lane[i] * b.lane[i] + c.lane[i]); }
DT_INLINE F32x16 max(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
DT_INLINE F32x16 min(F32x16 a, F32x16 b) { DT_EACH(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
DT_INLINE F32x16 round_even(F32x16 x) { DT_EACH(__builtin_rintf(x.lane[i])); }
DT_INLINE float power_of_two(float n) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}
DT_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) { DT_EACH(x.lane[i] * power_of_two(n.lane[i])); }
DT_INLINE float widen_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
DT_INLINE F32x16 load_bf16(const uint16_t* from) { DT_EACH(widen_bf16(from[i])); }
DT_INLINE void load_bf16_pairs(const uint16_t* from, F32x16& even, F32x16& odd) {
  for (int i = 0; i < kLanes; ++i) {
    even.lane[i] = widen_bf16(from[2 * i]);
    odd.lane[i] = widen_bf16(from[2 * i + 1]);
  }
}
DT_INLINE F32x16 load_int8(const int8_t* from) { DT_EACH(static_cast<float>(from[i])); }

#undef DT_EACH

#endif

// ((0+8)+(4+12)) + ... : halves are folded onto each other.
DT_INLINE float sum_of(F32x16 x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}
DT_INLINE float largest_of(F32x16 x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  float largest = lane[0];
  for (int i = 1; i < kLanes; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

DT_INLINE uint16_t to_bf16(float x) {  // to nearest, ties to even; x is finite or infinite
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
DT_INLINE float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// exp(x) as 2^n * 2^f with f in [-1/2, 1/2]: a polynomial of degree 6, relative error below 3e-7.
// Saturates at exp(-87) and exp(88).
DT_INLINE F32x16 exponential(F32x16 x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const F32x16 scaled = mul(x, splat(1.44269504f));
  const F32x16 n = round_even(scaled);
  const F32x16 f = sub(scaled, n);
  F32x16 p = splat(1.5403530e-4f);
  p = fma(p, f, splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, n);
}

}  // namespace
