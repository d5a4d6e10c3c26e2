// One token's keys and values, rounded to the pool's type, into a block's tiles (see kernel_table.h).
#pragma once

#include "kernel_table.h"
#include "simd.h"

namespace dovetail {
namespace {

DT_INLINE char* tile_of(const KvLayer& layer, int64_t block, int32_t head) {
  return layer.base + block * layer.block_stride + head * layer.head_stride;
}

DT_INLINE float largest_magnitude(const float* x, int32_t width) {
  F32x16 largest = splat(0.0f);
  int32_t i = 0;
  for (; i + kLanes <= width; i += kLanes) largest = max(largest, magnitude(load(x + i)));
  if (i < width) largest = max(largest, magnitude(load_some(x + i, width - i)));
  return largest_of(largest);
}

// Symmetric in 8 bits, one scale a row: x is near quant * scale.
struct RowScale {
  float scale, inverse;
};

DT_INLINE RowScale row_scale(const float* x, int32_t width) {
  const float largest = largest_magnitude(x, width);
  if (!(largest > 1e-30f)) return {0.0f, 0.0f};  // else 1 / scale could be infinite
  return {largest / 127.0f, 127.0f / largest};
}

// Quantizes x[first, first + 16), zeros beyond `width`.
DT_INLINE void quantize_sixteen(const float* x, int32_t first, int32_t width, float inverse, int8_t* quants) {
  const F32x16 part = first + kLanes <= width ? load(x + first) : load_some(x + first, width - first);
  const F32x16 rounded = round_even(mul(part, splat(inverse)));
  store_int8(quants, min(max(rounded, splat(-127.0f)), splat(127.0f)));
}

void write_int8(const float* keys, const float* values, const KvLayer& layer, char* tile, int32_t offset) {
  const int32_t head_dim = layer.head_dim;
  const RowScale key = row_scale(keys, head_dim), value = row_scale(values, head_dim);
  char* value_tile = tile + layer.value_offset;
  char* row = value_tile + static_cast<int64_t>(offset) * head_dim;
  for (int32_t first = 0; first < head_dim; first += kLanes) {
    const int32_t count = head_dim - first < kLanes ? head_dim - first : kLanes;
    int8_t quants[kLanes];
    quantize_sixteen(keys, first, head_dim, key.inverse, quants);
    for (int32_t i = 0; i < count; ++i)
      tile[(static_cast<int64_t>((first + i) / 4) * layer.block_size + offset) * 4 + i % 4] =
          static_cast<char>(quants[i] + 128);
    quantize_sixteen(values, first, head_dim, value.inverse, quants);
    std::memcpy(row + first, quants, static_cast<size_t>(count));
  }
  std::memcpy(tile + layer.scale_offset + offset * 4, &key.scale, sizeof key.scale);
  std::memcpy(value_tile + layer.scale_offset + offset * 4, &value.scale, sizeof value.scale);
}

void write_bf16(const float* keys, const float* values, const KvLayer& layer, char* tile, int32_t offset) {
  const int32_t head_dim = layer.head_dim;
  auto* pairs = reinterpret_cast<uint16_t*>(tile) + 2 * offset;
  for (int32_t d = 0; d < head_dim; d += 2, pairs += 2 * layer.block_size) {
    pairs[0] = to_bf16(keys[d]);
    pairs[1] = to_bf16(keys[d + 1]);
  }
  auto* row = reinterpret_cast<uint16_t*>(tile + layer.value_offset);
  row += static_cast<int64_t>(offset) * head_dim;
  int32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_bf16(row + d, load(values + d));
  for (; d < head_dim; ++d) row[d] = to_bf16(values[d]);
}

void write_f32(const float* keys, const float* values, const KvLayer& layer, char* tile, int32_t offset) {
  const int32_t head_dim = layer.head_dim;
  float* pairs = reinterpret_cast<float*>(tile) + 2 * offset;
  for (int32_t d = 0; d < head_dim; d += 2, pairs += 2 * layer.block_size)
    std::memcpy(pairs, keys + d, 2 * sizeof(float));
  std::memcpy(reinterpret_cast<float*>(tile + layer.value_offset) + static_cast<int64_t>(offset) * head_dim,
              values, static_cast<size_t>(head_dim) * sizeof(float));
}

void write_token(const float* keys, const float* values, const KvLayer& layer, int32_t block, int32_t head,
                 int32_t offset) {
  char* tile = tile_of(layer, block, head);
  switch (layer.type) {
    case KvType::kF32: write_f32(keys, values, layer, tile, offset); break;
    case KvType::kBf16: write_bf16(keys, values, layer, tile, offset); break;
    case KvType::kInt8: write_int8(keys, values, layer, tile, offset); break;
  }
}

}  // namespace
}  // namespace dovetail
