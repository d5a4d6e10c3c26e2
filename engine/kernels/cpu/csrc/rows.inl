// Ops on single rows: RMSNorm, and its form for heads; rotations, with the writing of keys and values.
#pragma once

#include "kv_write.inl"
#include "spread.inl"

namespace dovetail {
namespace {

// Sum of squares in four chains of 16 lanes.
DT_INLINE float sum_of_squares(const float* x, int32_t width) {
  F32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int32_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int chain = 0; chain < 4; ++chain) {
      const F32x16 part = load(x + i + chain * kLanes);
      sums[chain] = fma(part, part, sums[chain]);
    }
  for (int chain = 0; i < width; i += kLanes, ++chain) {
    const F32x16 part = i + kLanes <= width ? load(x + i) : load_some(x + i, width - i);
    sums[chain] = fma(part, part, sums[chain]);
  }
  return sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

DT_INLINE float inverse_rms(const float* x, int32_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / static_cast<float>(width) + eps);
}

// out[i] = x[i] * factor * weight[i]; may be in place.
DT_INLINE void scale_row(const float* x, const float* weight, float factor, int32_t width, float* out) {
  const F32x16 factors = splat(factor);
  int32_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    store(out + i, mul(mul(load(x + i), factors), load(weight + i)));
  for (; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

void rms_norm(const float* x, const float* weight, int32_t width, float eps, float* out) {
  scale_row(x, weight, inverse_rms(x, width, eps), width, out);
}

void qk_norm(float* heads, const float* weight, int32_t num_heads, int32_t head_dim, float eps) {
  for (int32_t head = 0; head < num_heads; ++head) {
    float* x = heads + head * head_dim;
    scale_row(x, weight + head * head_dim, inverse_rms(x, head_dim, eps), head_dim, x);
  }
}

// Rotates pairs (x[i], x[i + head_dim / 2]), in place, and scales them.
DT_INLINE void rotate_head(float* x, const float* cos, const float* sin, int32_t head_dim, float scale) {
  const int32_t half = head_dim / 2;
  float *first = x, *second = x + half;
  const F32x16 scales = splat(scale);
  int32_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32x16 a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
    store(first + i, mul(sub(mul(a, c), mul(b, s)), scales));
    store(second + i, mul(add(mul(b, c), mul(a, s)), scales));
  }
  for (; i < half; ++i) {
    const float a = first[i], b = second[i];
    first[i] = (a * cos[i] - b * sin[i]) * scale;
    second[i] = (b * cos[i] + a * sin[i]) * scale;
  }
}

DT_INLINE void scale_head(float* x, int32_t head_dim, float scale) {
  for (int32_t i = 0; i < head_dim; ++i) x[i] *= scale;
}

void rope_kv_write(float* qkv, const float* cos, const float* sin, int32_t num_heads, float scale,
                   const KvLayer* layer, int32_t block, int32_t offset, int32_t first_kv_head,
                   int32_t last_kv_head) {
  const int32_t head_dim = layer->head_dim, num_kv_heads = layer->num_kv_heads;
  const int32_t group = num_heads / num_kv_heads;
  for (int32_t head = first_kv_head * group; head < last_kv_head * group; ++head) {
    float* query = qkv + static_cast<int64_t>(head) * head_dim;
    if (cos != nullptr) rotate_head(query, cos, sin, head_dim, scale);
    else scale_head(query, head_dim, scale);
    if (layer->type == KvType::kInt8) spread(query, head_dim);
  }
  for (int32_t head = first_kv_head; head < last_kv_head; ++head) {
    float* key = qkv + static_cast<int64_t>(num_heads + head) * head_dim;
    if (cos != nullptr) rotate_head(key, cos, sin, head_dim, 1.0f);
    if (layer->type == KvType::kInt8) spread(key, head_dim);
    write_token(key, key + static_cast<int64_t>(num_kv_heads) * head_dim, *layer, block, head, offset);
  }
}

}  // namespace
}  // namespace dovetail
