// The one natural logarithm of engine/sampling/logarithm.py (Cephes logf), bit for bit: every product
// and every sum is rounded on its own, in this order. For positive normal x.
#pragma once

#include "simd_integers.h"

namespace {

DT_INLINE F32x16 log_f32(F32x16 x) {
  const I32x16 bits = bits_of(x);
  const I32x16 exponent = shift_right<23>(sub_int(bits, splat_int(0x3F3504F3)));
  const F32x16 f = sub(from_bits(sub_int(bits, shift_left<23>(exponent))), splat(1.0f));
  const F32x16 e = to_float(exponent);
  const F32x16 square = mul(f, f);
  F32x16 y = mul(f, splat(7.0376836292e-2f));
  y = mul(add(y, splat(-1.1514610310e-1f)), f);
  y = mul(add(y, splat(1.1676998740e-1f)), f);
  y = mul(add(y, splat(-1.2420140846e-1f)), f);
  y = mul(add(y, splat(1.4249322787e-1f)), f);
  y = mul(add(y, splat(-1.6668057665e-1f)), f);
  y = mul(add(y, splat(2.0000714765e-1f)), f);
  y = mul(add(y, splat(-2.4999993993e-1f)), f);
  y = mul(mul(add(y, splat(3.3333331174e-1f)), f), square);
  y = add(y, mul(e, splat(-2.12194440e-4f)));
  y = sub(y, mul(square, splat(0.5f)));
  return add(add(f, y), mul(e, splat(0.693359375f)));
}

DT_INLINE float log_f32(float x) {
  alignas(64) float lane[kLanes];
  store(lane, log_f32(splat(x)));
  return lane[0];
}

}  // namespace
