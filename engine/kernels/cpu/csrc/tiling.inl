// What the register tiles of all weight types share: their sizes, and fetching weights ahead.
//
// Every loop over a tile's rows or panels is unrolled by a pragma: a tile that is indexed by a
// variable even once lives in memory, and each multiplication then loads and stores its sum.
#pragma once

#include "matrix_layout.inl"

namespace dovetail {
namespace {

// A tile's rows or panels, one for each instruction set: what its registers hold, and x86's few pointers address.
DT_INLINE constexpr int by_set(int avx512, int avx2, int portable) {
#if defined(__AVX512F__)
  return (void)avx2, (void)portable, avx512;
#elif defined(__AVX2__)
  return (void)avx512, (void)portable, avx2;
#else
  return (void)avx512, (void)avx2, portable;
#endif
}

// The processor's own prefetcher follows a panel too late: one row is then a third slower, and eight
// wait for memory before they multiply. One or two rows come to the line soon: into the first level.
// More take longer over a panel than a line would stay there: into the second. Measured on Zen 4.
template <int kRows, int kPanels>
DT_INLINE void prefetch_ahead(const void* weights, int64_t next_panel) {
  constexpr bool kIsSoon = kRows <= 2 && kPanels == 1;
  const int64_t bytes_ahead = kPanels > 1 ? kPanels * next_panel : kIsSoon ? 4096 : 9216;
  __builtin_prefetch(static_cast<const uint8_t*>(weights) + bytes_ahead, 0, kIsSoon ? 3 : 2);
}

}  // namespace
}  // namespace dovetail
