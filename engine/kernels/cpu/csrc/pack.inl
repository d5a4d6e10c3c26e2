// Packing of a linear layer's rows into panels, and the way back for one row (see matrix_layout.inl).
#pragma once

#include "rotation.inl"

namespace dovetail {
namespace {

// Where a row of the layer lives.
struct Place {
  int64_t panel;
  int lane;
};

DT_INLINE Place place_of(int32_t row) { return {row / kPanel, row % kPanel}; }

DT_INLINE Place place_interleaved(int32_t row, int32_t half) {
  const bool is_up = row >= half;
  const Place alone = place_of(is_up ? row - half : row);
  return {2 * alone.panel + is_up, alone.lane};
}

DT_INLINE uint8_t* panel_to_fill(const Matrix& to, int64_t panel) {
  return const_cast<uint8_t*>(panel_data(to, panel));
}

DT_INLINE void pack_f32(const Matrix& to, Place at, const float* row) {
  auto* panel = reinterpret_cast<float*>(panel_to_fill(to, at.panel)) + at.lane;
  for (int k = 0; k < to.in_features; ++k) panel[k * kPanel] = row[k];
}

DT_INLINE void pack_bf16(const Matrix& to, Place at, const float* row) {
  auto* panel = reinterpret_cast<uint16_t*>(panel_to_fill(to, at.panel)) + at.lane * 2;
  for (int k = 0; k < to.in_features; ++k) panel[(k & ~1) * kPanel + (k & 1)] = to_bf16(row[k]);
}

// Largest magnitude of row[0 .. count).
DT_INLINE float largest_in_row(const float* row, int count) {
  float largest = 0.0f;
  for (int k = 0; k < count; ++k) largest = __builtin_fabsf(row[k]) > largest ? __builtin_fabsf(row[k]) : largest;
  return largest;
}

DT_INLINE void pack_int8(const Matrix& to, Place at, const float* row) {
  uint8_t* panel = panel_to_fill(to, at.panel);
  auto* scales = static_cast<float*>(const_cast<void*>(to.scales));
  for (int first = 0, group = 0; first < to.in_features; first += kInt8Group, ++group) {
    alignas(64) float rotated[kInt8Group] = {};
    const int count = to.in_features - first < kInt8Group ? to.in_features - first : kInt8Group;
    std::memcpy(rotated, row + first, static_cast<size_t>(count) * sizeof(float));
    rotate_weights(rotated, kRotationFactor, rotated);
    const float largest = largest_in_row(rotated, kInt8Group);
    const bool is_zero = largest < kSmallestGroup;
    scales[scales_at(to, at.panel, group) + at.lane] = is_zero ? 0.0f : largest / kLargestQuant;
    const float inverse = is_zero ? 0.0f : kLargestQuant / largest;
    for (int k = 0; k < kInt8Group; ++k) {
      const int quant = static_cast<int>(__builtin_rintf(rotated[k] * inverse));
      panel[byte_of_8(first + k, at.lane)] = static_cast<uint8_t>(quant + kOffset8);
    }
  }
}

DT_INLINE uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half;
}

// Of a block's quants as they count: a weight is scale * quant (+ minimum).
DT_INLINE int16_t sum_of_block(WeightType type, const uint8_t* quants) {
  int sum = type == WeightType::kQ4_0 ? -kOffsetQ4_0 * kGgufGroup : 0;
  if (is_four_bits(type)) {
    for (int i = 0; i < kGgufGroup / 2; ++i) sum += (quants[i] & 15) + (quants[i] >> 4);
  } else {
    for (int i = 0; i < kGgufGroup; ++i) sum += static_cast<int8_t>(quants[i]);
  }
  return static_cast<int16_t>(sum);
}

DT_INLINE void put_half(const void* halves, int64_t at, uint16_t half) {
  static_cast<uint16_t*>(const_cast<void*>(halves))[at] = half;
}

// GGUF blocks: float16 scale, for Q4_1 a float16 minimum, then 32 signed bytes or 16 bytes whose
// low halves are elements 0..15 and whose high halves are 16..31.
DT_INLINE int block_bytes(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0: return 2 + kGgufGroup;
    case WeightType::kQ4_0: return 2 + kGgufGroup / 2;
    default: return 4 + kGgufGroup / 2;
  }
}

DT_INLINE void pack_q8_block(uint8_t* panel, int first, int lane, const uint8_t* quants) {
  for (int i = 0; i < kGgufGroup; ++i) {
    panel[byte_of_8(first + i, lane)] = static_cast<uint8_t>(quants[i] ^ kOffset8);  // adds 128
  }
}

DT_INLINE void pack_q4_block(uint8_t* panel, int first, int lane, const uint8_t* quants) {
  for (int i = 0; i < kGgufGroup; ++i) {
    if (i & 4) continue;  // written with element i - 4
    const int shift = i < kGgufGroup / 2 ? 0 : 4, from = i % (kGgufGroup / 2);
    const int low = (quants[from] >> shift) & 15, high = (quants[from + 4] >> shift) & 15;
    panel[byte_of_4(first + i, lane)] = static_cast<uint8_t>(low | high << 4);
  }
}

DT_INLINE void pack_gguf(const Matrix& to, Place at, const uint8_t* blocks) {
  uint8_t* panel = panel_to_fill(to, at.panel);
  const bool has_minimum = to.type == WeightType::kQ4_1;
  for (int first = 0, group = 0; first < to.in_features; first += kGgufGroup, ++group) {
    const int64_t scale = scales_at(to, at.panel, group) + at.lane;
    put_half(to.scales, scale, half_at(blocks));
    if (has_minimum) put_half(to.minimums, scale, half_at(blocks + 2));
    const uint8_t* quants = blocks + (has_minimum ? 4 : 2);
    if (to.sums != nullptr)
      put_half(to.sums, sums_at(to, at.panel, group) + at.lane, static_cast<uint16_t>(sum_of_block(to.type, quants)));
    if (is_four_bits(to.type)) pack_q4_block(panel, first, at.lane, quants);
    else pack_q8_block(panel, first, at.lane, quants);
    blocks += block_bytes(to.type);
  }
}

// Bytes of one row as pack_rows is given it.
DT_INLINE int64_t row_bytes(const Matrix& to) {
  if (group_of(to.type) != kGgufGroup) return static_cast<int64_t>(to.in_features) * 4;
  return groups_of(to.type, to.in_features) * block_bytes(to.type);
}

void pack_rows(const Matrix* to, const void* rows, int32_t first_row, int32_t num_rows, bool interleave) {
  const auto* from = static_cast<const uint8_t*>(rows);
  for (int32_t row = first_row; row < first_row + num_rows; ++row, from += row_bytes(*to)) {
    const Place at = interleave ? place_interleaved(row, to->out_features / 2) : place_of(row);
    switch (to->type) {
      case WeightType::kF32: pack_f32(*to, at, reinterpret_cast<const float*>(from)); break;
      case WeightType::kBf16: pack_bf16(*to, at, reinterpret_cast<const float*>(from)); break;
      case WeightType::kInt8: pack_int8(*to, at, reinterpret_cast<const float*>(from)); break;
      default: pack_gguf(*to, at, from);
    }
  }
}

void packed_sizes(WeightType type, int32_t out_features, int32_t in_features, int64_t sizes[4]) {
  // An even number of panels: interleaved halves of 8 outputs are two panels.
  const int64_t panels = round_up(out_features, 2 * kPanel) / kPanel;
  const int64_t scales = panels * groups_of(type, in_features) * kPanel;
  const bool is_gguf = group_of(type) == kGgufGroup;
  sizes[0] = panels * panel_bytes(type, in_features);
  sizes[1] = is_gguf ? scales * 2 : type == WeightType::kInt8 ? scales * 4 : 0;
  sizes[2] = type == WeightType::kQ4_1 ? scales * 2 : 0;
  sizes[3] = is_gguf ? scales * 2 : 0;
}

DT_INLINE void unpack_int8(const Matrix& matrix, Place at, float* out) {
  const uint8_t* panel = panel_data(matrix, at.panel);
  const auto* scales = static_cast<const float*>(matrix.scales);
  for (int first = 0, group = 0; first < matrix.in_features; first += kInt8Group, ++group) {
    const float scale = scales[scales_at(matrix, at.panel, group) + at.lane];
    alignas(64) float row[kInt8Group];
    for (int k = 0; k < kInt8Group; ++k) {
      row[k] = scale * static_cast<float>(panel[byte_of_8(first + k, at.lane)] - kOffset8);
    }
    rotate_weights(row, 1.0f, row);
    const int count = matrix.in_features - first < kInt8Group ? matrix.in_features - first : kInt8Group;
    std::memcpy(out + first, row, static_cast<size_t>(count) * sizeof(float));
  }
}

DT_INLINE void unpack_gguf(const Matrix& matrix, Place at, float* out) {
  const uint8_t* panel = panel_data(matrix, at.panel);
  for (int k = 0; k < matrix.in_features; ++k) {
    const int64_t scale_index = scales_at(matrix, at.panel, k / kGgufGroup) + at.lane;
    const float scale = from_f16(static_cast<const uint16_t*>(matrix.scales)[scale_index]);
    if (!is_four_bits(matrix.type)) {
      out[k] = scale * static_cast<float>(panel[byte_of_8(k, at.lane)] - kOffset8);
      continue;
    }
    const int quant = (panel[byte_of_4(k, at.lane)] >> (k & 4)) & 15;
    if (matrix.type == WeightType::kQ4_0) out[k] = scale * static_cast<float>(quant - kOffsetQ4_0);
    else out[k] = scale * static_cast<float>(quant) + from_f16(static_cast<const uint16_t*>(matrix.minimums)[scale_index]);
  }
}

void unpack_row(const Matrix* matrix, int32_t row, float* out) {
  const Place at = place_of(row);
  const uint8_t* panel = panel_data(*matrix, at.panel);
  if (matrix->type == WeightType::kF32) {
    const auto* from = reinterpret_cast<const float*>(panel) + at.lane;
    for (int k = 0; k < matrix->in_features; ++k) out[k] = from[k * kPanel];
  } else if (matrix->type == WeightType::kBf16) {
    const auto* from = reinterpret_cast<const uint16_t*>(panel) + at.lane * 2;
    for (int k = 0; k < matrix->in_features; ++k) out[k] = from_bf16(from[(k & ~1) * kPanel + (k & 1)]);
  } else if (matrix->type == WeightType::kInt8) {
    unpack_int8(*matrix, at, out);
  } else {
    unpack_gguf(*matrix, at, out);
  }
}

}  // namespace
}  // namespace dovetail
