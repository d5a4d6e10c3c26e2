// Weights times values: a tile of rows, 32 or 64 dimensions at a time, over runs of tokens in order.
//
// An output element is one chain of multiply-adds over the positions that its row sees, in order.
// Dimensions of bf16 stand as the even ones and the odd ones of 32 until the row is finished.
#pragma once

#include "attention_tiles.inl"

namespace dovetail {
namespace {

#if defined(__AVX512F__)
constexpr int kValueUnits = 2;  // of 32 dimensions, at once
#else
constexpr int kValueUnits = 1;
#endif
constexpr int kUnit = 2 * kLanes;

// Tokens that follow each other in a tile, and the place of their weights in a row's.
struct Run {
  const char* values;
  const char* wanted;  // what is read next: as many bytes of it as are read here are prefetched
  int32_t first_weight, count;
};

template <KvType type>
DT_INLINE void load_unit(const char* from, F32x16& a, F32x16& b) {
  if (type == KvType::kF32) {
    a = load(reinterpret_cast<const float*>(from));
    b = load(reinterpret_cast<const float*>(from) + kLanes);
  } else if (type == KvType::kBf16) {
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(from), a, b);
  } else {
    a = load_int8(reinterpret_cast<const int8_t*>(from));
    b = load_int8(reinterpret_cast<const int8_t*>(from) + kLanes);
  }
}

template <KvType type>
DT_INLINE F32x16 load_sixteen(const char* from) {
  if (type == KvType::kF32) return load(reinterpret_cast<const float*>(from));
  if (type == KvType::kBf16) return load_bf16(reinterpret_cast<const uint16_t*>(from));
  return load_int8(reinterpret_cast<const int8_t*>(from));
}

// out [rows][out_ld] += the runs' weighted values, of U units from the dimension that `runs` and
// `out` start at by `offset` bytes.
template <KvType type, int R, int U>
void add_units(const Run* runs, int32_t num_runs, int64_t offset, const KvLayer& layer, const float* weights,
               float* out, int64_t out_ld) {
  F32x16 sums[R][2 * U];
  DT_UNROLL
  for (int r = 0; r < R; ++r)
    DT_UNROLL
    for (int c = 0; c < 2 * U; ++c) sums[r][c] = load(out + r * out_ld + c * kLanes);
  const int64_t stride = layer.head_dim * kElementBytes<type>;
  const int64_t fetched = offset == 0 ? stride : 0;
  for (const Run* run = runs; run != runs + num_runs; ++run) {
    const char* values = run->values + offset;
    const char* wanted = run->wanted;
    const float* weight = weights + run->first_weight;
    for (int32_t token = 0; token < run->count; ++token, values += stride, wanted += fetched, ++weight) {
      for (int64_t line = 0; line < fetched; line += 64) prefetch(wanted + line);
      F32x16 part[2 * U];
      DT_UNROLL
      for (int u = 0; u < U; ++u)
        load_unit<type>(values + u * kUnit * kElementBytes<type>, part[2 * u], part[2 * u + 1]);
      DT_UNROLL
      for (int r = 0; r < R; ++r) {
        const F32x16 factor = splat(weight[r * kSegmentTokens]);
        DT_UNROLL
        for (int c = 0; c < 2 * U; ++c) sums[r][c] = fma(part[c], factor, sums[r][c]);
      }
    }
  }
  DT_UNROLL
  for (int r = 0; r < R; ++r)
    DT_UNROLL
    for (int c = 0; c < 2 * U; ++c) store(out + r * out_ld + c * kLanes, sums[r][c]);
}

// The last up to 16 dimensions of a head whose size is no multiple of 32.
template <KvType type, int R>
void add_rest(const Run* runs, int32_t num_runs, int64_t offset, int32_t width, int32_t head_dim,
              const float* weights, float* out, int64_t out_ld) {
  F32x16 sums[R];
  DT_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = load(out + r * out_ld);
  const int64_t stride = head_dim * kElementBytes<type>;
  alignas(64) char rest[kLanes * 4] = {};
  for (const Run* run = runs; run != runs + num_runs; ++run) {
    const char* values = run->values + offset;
    const float* weight = weights + run->first_weight;
    for (int32_t token = 0; token < run->count; ++token, values += stride, ++weight) {
      const char* from = values;
      if (width < kLanes) {
        std::memcpy(rest, values, static_cast<size_t>(width * kElementBytes<type>));
        from = rest;
      }
      const F32x16 part = load_sixteen<type>(from);
      DT_UNROLL
      for (int r = 0; r < R; ++r) sums[r] = fma(part, splat(weight[r * kSegmentTokens]), sums[r]);
    }
  }
  DT_UNROLL
  for (int r = 0; r < R; ++r) store(out + r * out_ld, sums[r]);
}

// All of a head's dimensions; out [rows][padded head_dim].
template <KvType type, int R>
void add_values(const Run* runs, int32_t num_runs, const KvLayer& layer, const float* weights, float* out) {
  const int32_t head_dim = layer.head_dim;
  const int64_t out_ld = padded(head_dim);
  int32_t d = 0;
  for (; d + kValueUnits * kUnit <= head_dim; d += kValueUnits * kUnit)
    add_units<type, R, kValueUnits>(runs, num_runs, d * kElementBytes<type>, layer, weights, out + d, out_ld);
  for (; d + kUnit <= head_dim; d += kUnit)
    add_units<type, R, 1>(runs, num_runs, d * kElementBytes<type>, layer, weights, out + d, out_ld);
  for (; d < head_dim; d += kLanes) {
    const int32_t width = head_dim - d < kLanes ? head_dim - d : kLanes;
    add_rest<type, R>(runs, num_runs, d * kElementBytes<type>, width, head_dim, weights, out + d, out_ld);
  }
}

// sums [head_dim] * factor -> out, dimensions in their order.
template <KvType type>
void finish_row(const float* sums, float factor, int32_t head_dim, float* out) {
  const F32x16 factors = splat(factor);
  int32_t d = 0;
  for (; d + kUnit <= head_dim; d += kUnit) {
    const F32x16 a = mul(load(sums + d), factors), b = mul(load(sums + d + kLanes), factors);
    if (type == KvType::kBf16) {
      store_pairs(out + d, a, b);
    } else {
      store(out + d, a);
      store(out + d + kLanes, b);
    }
  }
  for (; d < head_dim; ++d) out[d] = sums[d] * factor;
}

}  // namespace
}  // namespace dovetail
