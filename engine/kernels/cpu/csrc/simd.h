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
// Before a loop of a known, small number of steps whose arrays should become registers.
#define DT_UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int kLanes = 16;

// Into the second-level cache, which takes more lines at once than the first.
DT_INLINE void prefetch(const char* line) { __builtin_prefetch(line, 0, 2); }

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
// Bit i: x[i] >= least[i]; never so where either is NaN.
DT_INLINE uint32_t mask_at_least(F32x16 x, F32x16 least) {
  return _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
}
// y where x >= least, else 0.
DT_INLINE F32x16 keep_at_least(F32x16 x, F32x16 least, F32x16 y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), y);
}
DT_INLINE F32x16 round_even(F32x16 x) { return _mm512_roundscale_ps(x, 8); }
// x * 2^n for whole n in [-126, 127].
DT_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) { return _mm512_scalef_ps(x, n); }
// x - floor(x), and x * 2^floor(n) for n in [-126, 127].
DT_INLINE F32x16 fraction_of(F32x16 x) { return _mm512_reduce_ps(x, 9); }
DT_INLINE F32x16 scale_by_floor(F32x16 x, F32x16 n) { return _mm512_scalef_ps(x, n); }
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
// 16 pairs (even, odd) of floats -> the even ones, the odd ones; and back.
DT_INLINE void load_pairs(const float* from, F32x16& even, F32x16& odd) {
  const __m512 low = load(from), high = load(from + 16);
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  even = _mm512_permutex2var_ps(low, evens, high);
  odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
}
DT_INLINE void store_pairs(float* to, F32x16 even, F32x16 odd) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  store(to, _mm512_permutex2var_ps(even, low, odd));
  store(to + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
}
// Lanes [first, last) of x, `other` elsewhere.
DT_INLINE F32x16 select_lanes(F32x16 x, int first, int last, float other) {
  const auto mask = static_cast<__mmask16>(((1u << last) - 1u) & ~((1u << first) - 1u));
  return _mm512_mask_blend_ps(mask, splat(other), x);
}
DT_INLINE F32x16 magnitude(F32x16 x) { return _mm512_abs_ps(x); }
// To nearest, ties to even; finite or infinite.
DT_INLINE void store_bf16(uint16_t* to, F32x16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// Whole numbers in [-128, 127].
DT_INLINE void store_int8(int8_t* to, F32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

using I32x16 = __m512i;

DT_INLINE I32x16 splat_int(int32_t x) { return _mm512_set1_epi32(x); }
DT_INLINE I32x16 sub_int(I32x16 a, I32x16 b) { return _mm512_sub_epi32(a, b); }
DT_INLINE F32x16 to_float(I32x16 x) { return _mm512_cvtepi32_ps(x); }
DT_INLINE I32x16 load_bytes(const void* from) { return _mm512_loadu_si512(from); }
// sum += a * b over the four bytes of each lane; a unsigned, b signed, which holds four for all lanes.
// In assembly, as GCC 12 copies the sum of its intrinsic to and fro, and spills it.
DT_INLINE I32x16 dot_bytes(I32x16 sum, I32x16 a, int32_t b) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(splat_int(b)));
  return sum;
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
DT_INLINE uint32_t mask_at_least(F32x16 x, F32x16 least) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.low, least.low, _CMP_GE_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(x.high, least.high, _CMP_GE_OQ));
  return static_cast<uint32_t>(low | high << 8);
}
DT_INLINE F32x16 keep_at_least(F32x16 x, F32x16 least, F32x16 y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.low, least.low, _CMP_GE_OQ), y.low),
          _mm256_and_ps(_mm256_cmp_ps(x.high, least.high, _CMP_GE_OQ), y.high)};
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
DT_INLINE F32x16 floor_of(F32x16 x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
DT_INLINE F32x16 fraction_of(F32x16 x) { return sub(x, floor_of(x)); }
DT_INLINE F32x16 scale_by_floor(F32x16 x, F32x16 n) { return scale_by_power(x, floor_of(n)); }
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
DT_INLINE __m256 in_order(__m256 x) {  // undoes what in-lane shuffles of two halves leave
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}
DT_INLINE void load_pairs(const float* from, F32x16& even, F32x16& odd) {
  const F32x16 low = load(from), high = load(from + 16);
  even = {in_order(_mm256_shuffle_ps(low.low, low.high, 0x88)), in_order(_mm256_shuffle_ps(high.low, high.high, 0x88))};
  odd = {in_order(_mm256_shuffle_ps(low.low, low.high, 0xdd)), in_order(_mm256_shuffle_ps(high.low, high.high, 0xdd))};
}
DT_INLINE void store_eight_pairs(float* to, __m256 even, __m256 odd) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
DT_INLINE void store_pairs(float* to, F32x16 even, F32x16 odd) {
  store_eight_pairs(to, even.low, odd.low);
  store_eight_pairs(to + 16, even.high, odd.high);
}
DT_INLINE __m256 select_eight(__m256 x, __m256i lane, int first, int last, __m256 other) {
  const __m256i below_last = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
  const __m256i below_first = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(below_first, below_last)));
}
DT_INLINE F32x16 select_lanes(F32x16 x, int first, int last, float other) {
  const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256 rest = _mm256_set1_ps(other);
  return {select_eight(x.low, lane, first, last, rest), select_eight(x.high, lane, first - 8, last - 8, rest)};
}
DT_INLINE F32x16 magnitude(F32x16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
DT_INLINE __m256i round_to_bf16(__m256 x) {  // in the low half of each lane
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last), 16);
}
DT_INLINE void store_bf16(uint16_t* to, F32x16 x) {
  const __m256i halves = _mm256_packus_epi32(round_to_bf16(x.low), round_to_bf16(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(halves, 0xd8));
}
DT_INLINE void store_int8(int8_t* to, F32x16 x) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

struct I32x16 {
  __m256i low, high;
};

DT_INLINE I32x16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
DT_INLINE I32x16 sub_int(I32x16 a, I32x16 b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
DT_INLINE F32x16 to_float(I32x16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
DT_INLINE I32x16 load_bytes(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
// In 16 bits: maddubs would saturate.
DT_INLINE __m256i dot_eight(__m256i sum, __m256i a, __m256i b_even, __m256i b_odd) {
  const __m256i even = _mm256_and_si256(a, _mm256_set1_epi32(0x00ff00ff)), odd = _mm256_srli_epi16(a, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, b_even), _mm256_madd_epi16(odd, b_odd)));
}
DT_INLINE I32x16 dot_bytes(I32x16 sum, I32x16 a, int32_t b) {
  const __m256i all = _mm256_set1_epi32(b);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
  return {dot_eight(sum.low, a.low, even, odd), dot_eight(sum.high, a.high, even, odd)};
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
DT_INLINE uint32_t mask_at_least(F32x16 x, F32x16 least) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(x.lane[i] >= least.lane[i]) << i;
  return mask;
}
DT_INLINE F32x16 keep_at_least(F32x16 x, F32x16 least, F32x16 y) {
  DT_EACH(x.lane[i] >= least.lane[i] ? y.lane[i] : 0.0f);
}
DT_INLINE F32x16 round_even(F32x16 x) { DT_EACH(__builtin_rintf(x.lane[i])); }
DT_INLINE float power_of_two(float n) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}
DT_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) { DT_EACH(x.lane[i] * power_of_two(n.lane[i])); }
DT_INLINE float floor_of(float x) {  // of what an int32 holds
  const float whole = static_cast<float>(static_cast<int32_t>(x));
  return whole > x ? whole - 1.0f : whole;
}
DT_INLINE F32x16 fraction_of(F32x16 x) { DT_EACH(x.lane[i] - floor_of(x.lane[i])); }
DT_INLINE F32x16 scale_by_floor(F32x16 x, F32x16 n) { DT_EACH(x.lane[i] * power_of_two(floor_of(n.lane[i]))); }
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
DT_INLINE void load_pairs(const float* from, F32x16& even, F32x16& odd) {
  for (int i = 0; i < kLanes; ++i) {
    even.lane[i] = from[2 * i];
    odd.lane[i] = from[2 * i + 1];
  }
}
DT_INLINE void store_pairs(float* to, F32x16 even, F32x16 odd) {
  for (int i = 0; i < kLanes; ++i) {
    to[2 * i] = even.lane[i];
    to[2 * i + 1] = odd.lane[i];
  }
}
DT_INLINE F32x16 select_lanes(F32x16 x, int first, int last, float other) {
  DT_EACH(i >= first && i < last ? x.lane[i] : other);
}
DT_INLINE F32x16 magnitude(F32x16 x) { DT_EACH(__builtin_fabsf(x.lane[i])); }
DT_INLINE void store_bf16(uint16_t* to, F32x16 x) {
  uint32_t bits[kLanes];
  std::memcpy(bits, x.lane, sizeof bits);
  for (int i = 0; i < kLanes; ++i)
    to[i] = static_cast<uint16_t>((bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16);
}
DT_INLINE void store_int8(int8_t* to, F32x16 x) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(x.lane[i]);
}

struct I32x16 {
  int32_t lane[kLanes];
};

DT_INLINE I32x16 splat_int(int32_t x) {
  I32x16 all;
  for (int i = 0; i < kLanes; ++i) all.lane[i] = x;
  return all;
}
DT_INLINE I32x16 sub_int(I32x16 a, I32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] -= b.lane[i];
  return a;
}
DT_INLINE F32x16 to_float(I32x16 x) { DT_EACH(static_cast<float>(x.lane[i])); }
DT_INLINE I32x16 load_bytes(const void* from) {
  I32x16 bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}
DT_INLINE I32x16 dot_bytes(I32x16 sum, I32x16 a, int32_t b) {
  for (int byte = 0; byte < 4; ++byte) {
    const int32_t factor = static_cast<int8_t>(static_cast<uint32_t>(b) >> (8 * byte));
    for (int i = 0; i < kLanes; ++i)
      sum.lane[i] += factor * static_cast<int32_t>((static_cast<uint32_t>(a.lane[i]) >> (8 * byte)) & 0xffu);
  }
  return sum;
}

#undef DT_EACH

#endif

// The first n <= 16 of what stands there, then zeros; and to there.
#if defined(__AVX512F__)
DT_INLINE F32x16 load_some(const float* from, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), from);
}
DT_INLINE void store_some(float* to, F32x16 x, int n) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1u), x);
}
#else
DT_INLINE F32x16 load_some(const float* from, int n) {
  alignas(64) float lane[kLanes] = {};
  for (int i = 0; i < n; ++i) lane[i] = from[i];
  return load(lane);
}
DT_INLINE void store_some(float* to, F32x16 x, int n) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < n; ++i) to[i] = lane[i];
}
#endif
// ((0+8)+(4+12)) + ... : halves are folded onto each other.
DT_INLINE float sum_of(F32x16 x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}
#if defined(__AVX512F__)
DT_INLINE float largest_of(F32x16 x) { return _mm512_reduce_max_ps(x); }
#else
DT_INLINE float largest_of(F32x16 x) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  float largest = lane[0];
  for (int i = 1; i < kLanes; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}
#endif

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
