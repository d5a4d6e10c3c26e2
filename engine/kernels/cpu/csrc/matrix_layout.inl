// How a packed linear layer stands in memory; the same for every instruction set.
//
// Outputs stand in panels of 16, one output a lane, and a panel holds its whole input, so that a
// thread reads one stream. Within a panel, k counts input features:
//   f32     [k][16]
//   bf16    [k / 2][16][2]
//   8 bits  [k / 4][16][4]   unsigned: quant + 128
//   4 bits  [k / 8][16][4]   byte i of a lane: feature k + i in its low half, k + 4 + i in its high
// Scales and minimums stand beside it, [panel][group][16]: float32 for int8, and for the GGUF types
// the file's own float16. Sums of quants stand [group][panel][16], as 16 bits: few groups' are read,
// and these of all panels.
//
// All memory is zero before the first row is packed: padding has a scale of zero.
#pragma once

#include "kernel_table.h"
#include "simd.h"

namespace dovetail {
namespace {

constexpr int kPanel = 16;       // outputs
constexpr int kGgufGroup = 32;   // elements of a GGUF block
constexpr int kInt8Group = 64;
constexpr int kOffset8 = 128;    // what is added to an 8-bit quant
constexpr int kOffsetQ4_0 = 8;   // what the file adds to a Q4_0 quant

constexpr float kLargestQuant = 127.0f;
constexpr float kSmallestGroup = 1e-30f;  // a group whose values are all smaller is zero: no 1 / 0

DT_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

DT_INLINE int group_of(WeightType type) {
  switch (type) {
    case WeightType::kF32: return 1;
    case WeightType::kBf16: return 2;
    case WeightType::kInt8: return kInt8Group;
    default: return kGgufGroup;
  }
}

DT_INLINE int padded_inputs(WeightType type, int32_t in_features) {
  return static_cast<int>(round_up(in_features, group_of(type)));
}

DT_INLINE bool is_four_bits(WeightType type) { return type == WeightType::kQ4_0 || type == WeightType::kQ4_1; }

DT_INLINE int64_t panel_bytes(WeightType type, int32_t in_features) {
  const int64_t elements = static_cast<int64_t>(padded_inputs(type, in_features)) * kPanel;
  switch (type) {
    case WeightType::kF32: return elements * 4;
    case WeightType::kBf16: return elements * 2;
    case WeightType::kQ4_0:
    case WeightType::kQ4_1: return elements / 2;
    default: return elements;
  }
}

DT_INLINE int64_t groups_of(WeightType type, int32_t in_features) {
  return padded_inputs(type, in_features) / group_of(type);
}

// Where the 16 sums of a panel's group start.
DT_INLINE int64_t sums_at(const Matrix& matrix, int64_t panel, int64_t group) {
  return (group * (round_up(matrix.out_features, 2 * kPanel) / kPanel) + panel) * kPanel;
}

// 64-bit words of a bit a group.
DT_INLINE int64_t words_of(int64_t groups) { return (groups + 63) / 64; }

// Where the 16 scales of a panel's group start.
DT_INLINE int64_t scales_at(const Matrix& matrix, int64_t panel, int64_t group) {
  return (panel * groups_of(matrix.type, matrix.in_features) + group) * kPanel;
}

DT_INLINE const uint8_t* panel_data(const Matrix& matrix, int64_t panel) {
  return static_cast<const uint8_t*>(matrix.data) + panel * panel_bytes(matrix.type, matrix.in_features);
}

// Byte of an 8-bit panel that holds input k of a lane.
DT_INLINE int64_t byte_of_8(int k, int lane) { return static_cast<int64_t>(k & ~3) * kPanel + lane * 4 + (k & 3); }

// Byte of a 4-bit panel that holds input k of a lane, in its low half where k & 4 is 0.
DT_INLINE int64_t byte_of_4(int k, int lane) {
  return static_cast<int64_t>(k & ~7) / 2 * kPanel + lane * 4 + (k & 3);
}

// IEEE half precision to float, exactly.
DT_INLINE float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest < 0x400u) {  // zero or subnormal: a whole number of 2^-24
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t exponent = rest >= 0x7c00u ? 0x70000000u : 0x38000000u;  // infinities and NaNs, or rebiased
  const uint32_t bits = sign | ((rest << 13) + exponent);
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

}  // namespace
}  // namespace dovetail
