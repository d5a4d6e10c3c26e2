// Dot products of bytes, by one interface: four input features of 16 outputs at a time.
//
// A weight byte is unsigned and an activation byte signed, as the instruction wants it. AVX-512 VNNI
// multiplies 8-bit quants with their offset of 128 still in (`kDotOffset8`; prepare_row's corrections
// take it out). AVX2's maddubs would saturate there, so it multiplies |w| with the activation that
// takes w's sign: at most 2 * 128 * 127 < 2^15. Sums are exact, so their order is free.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

DT_INLINE int32_t quad_at(const int8_t* quants) {
  int32_t quad;
  std::memcpy(&quad, quants, sizeof quad);
  return quad;
}

DT_INLINE float float_at(const int32_t* bits) {
  float value;
  std::memcpy(&value, bits, sizeof value);
  return value;
}

#if defined(__AVX512VNNI__)

constexpr int kDotOffset8 = kOffset8;
using Bytes64 = I32x16;

DT_INLINE Bytes64 load_quants8(const uint8_t* from) { return _mm512_loadu_si512(from); }
DT_INLINE Bytes64 low_quants4(const uint8_t* from) {
  return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(15));
}
DT_INLINE Bytes64 high_quants4(const uint8_t* from) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(from), 4), _mm512_set1_epi8(15));
}
DT_INLINE I32x16 dot8(I32x16 sum, Bytes64 weights, int32_t quad) {
  return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(quad));
}
DT_INLINE I32x16 dot4(I32x16 sum, Bytes64 weights, int32_t quad) { return dot8(sum, weights, quad); }
DT_INLINE F32x16 load_f16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
DT_INLINE F32x16 load_int16(const int16_t* from) {
  return to_float(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
// Rounds 16 values, each within [-127.5, 127.5], and returns their sum lane by lane.
DT_INLINE I32x16 round_to_bytes(int8_t* to, F32x16 x) {
  const __m512i whole = _mm512_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(whole));
  return whole;
}
DT_INLINE I32x16 add_int(I32x16 a, I32x16 b) { return _mm512_add_epi32(a, b); }

#elif defined(__AVX2__)

constexpr int kDotOffset8 = 0;
using Bytes64 = I32x16;

DT_INLINE Bytes64 load_quants8(const uint8_t* from) {
  const Bytes64 bytes = load_bytes(from);
  const __m256i offset = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(bytes.low, offset), _mm256_xor_si256(bytes.high, offset)};
}
DT_INLINE __m256i low_halves(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
DT_INLINE Bytes64 low_quants4(const uint8_t* from) {
  const Bytes64 bytes = load_bytes(from);
  return {low_halves(bytes.low), low_halves(bytes.high)};
}
DT_INLINE Bytes64 high_quants4(const uint8_t* from) {
  const Bytes64 bytes = load_bytes(from);
  return {low_halves(_mm256_srli_epi16(bytes.low, 4)), low_halves(_mm256_srli_epi16(bytes.high, 4))};
}
DT_INLINE __m256i add_quads(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
DT_INLINE __m256i signed_dot(__m256i sum, __m256i weights, __m256i quads) {
  return add_quads(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(quads, weights)));
}
DT_INLINE I32x16 dot8(I32x16 sum, Bytes64 weights, int32_t quad) {
  const __m256i quads = _mm256_set1_epi32(quad);
  return {signed_dot(sum.low, weights.low, quads), signed_dot(sum.high, weights.high, quads)};
}
DT_INLINE I32x16 dot4(I32x16 sum, Bytes64 weights, int32_t quad) {
  const __m256i quads = _mm256_set1_epi32(quad);
  return {add_quads(sum.low, _mm256_maddubs_epi16(weights.low, quads)),
          add_quads(sum.high, _mm256_maddubs_epi16(weights.high, quads))};
}
// Without F16C, which AVX2 does not imply: the bits' value times 2^112, which rescales subnormals too.
DT_INLINE __m256 widen_f16(__m128i halves) {
  const __m256i wide = _mm256_cvtepu16_epi32(halves);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x8000)), 16);
  const __m256i rest = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7fff)), 13);
  const __m256 magnitude = _mm256_mul_ps(_mm256_castsi256_ps(rest), _mm256_set1_ps(0x1p112f));
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}
DT_INLINE F32x16 load_f16(const uint16_t* from) {
  const auto* at = reinterpret_cast<const __m128i*>(from);
  return {widen_f16(_mm_loadu_si128(at)), widen_f16(_mm_loadu_si128(at + 1))};
}
DT_INLINE F32x16 load_int16(const int16_t* from) {
  const auto* at = reinterpret_cast<const __m128i*>(from);
  const I32x16 wide = {_mm256_cvtepi16_epi32(_mm_loadu_si128(at)), _mm256_cvtepi16_epi32(_mm_loadu_si128(at + 1))};
  return to_float(wide);
}
DT_INLINE I32x16 round_to_bytes(int8_t* to, F32x16 x) {
  const I32x16 whole = {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.low, whole.high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  return whole;
}
DT_INLINE I32x16 add_int(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

#else

constexpr int kDotOffset8 = 0;
struct Bytes64 {  // by feature, widened: what compilers turn into 16-bit products of many lanes
  int16_t feature[4][kLanes];
};

#define DT_EACH_BYTE(expression)             \
  Bytes64 result;                            \
  for (int j = 0; j < 4; ++j)                \
    for (int i = 0; i < kLanes; ++i) {       \
      const int byte = from[4 * i + j];      \
      result.feature[j][i] = static_cast<int16_t>(expression); \
    }                                        \
  return result

DT_INLINE Bytes64 load_quants8(const uint8_t* from) { DT_EACH_BYTE(byte - kOffset8); }
DT_INLINE Bytes64 low_quants4(const uint8_t* from) { DT_EACH_BYTE(byte & 15); }
DT_INLINE Bytes64 high_quants4(const uint8_t* from) { DT_EACH_BYTE(byte >> 4); }
#undef DT_EACH_BYTE

DT_INLINE I32x16 dot8(I32x16 sum, const Bytes64& weights, int32_t quad) {
  int8_t x[4];
  std::memcpy(x, &quad, sizeof x);
  for (int j = 0; j < 4; j += 2) {
    const int16_t first = x[j], second = x[j + 1];
    for (int i = 0; i < kLanes; ++i) {  // at most 2 * 128 * 127 < 2^15
      sum.lane[i] += static_cast<int16_t>(weights.feature[j][i] * first + weights.feature[j + 1][i] * second);
    }
  }
  return sum;
}
DT_INLINE I32x16 dot4(I32x16 sum, const Bytes64& weights, int32_t quad) { return dot8(sum, weights, quad); }
DT_INLINE F32x16 load_f16(const uint16_t* from) {
  F32x16 result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = from_f16(from[i]);
  return result;
}
DT_INLINE F32x16 load_int16(const int16_t* from) {
  F32x16 result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = static_cast<float>(from[i]);
  return result;
}
DT_INLINE I32x16 round_to_bytes(int8_t* to, F32x16 x) {
  I32x16 whole;
  for (int i = 0; i < kLanes; ++i) whole.lane[i] = static_cast<int32_t>(__builtin_rintf(x.lane[i]));
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(whole.lane[i]);
  return whole;
}
DT_INLINE I32x16 add_int(I32x16 a, I32x16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
  return a;
}

#endif

}  // namespace
}  // namespace dovetail
