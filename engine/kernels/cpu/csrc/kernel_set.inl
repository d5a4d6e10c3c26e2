// One instruction set's kernels: included by kernels_<set>.cpp, which says DT_NAME, DT_TABLE and
// DT_SUPPORTED, and is compiled with that set's flags. Everything but the table has internal linkage.
#include "kernel_table.h"
#include "simd.h"

namespace {
using namespace dovetail;
}

#include "rows.inl"
#include "quantize.inl"
#include "pack.inl"
#include "gemm.inl"
#include "attention.inl"
#include "sampler.inl"

namespace dovetail {

const KernelTable* DT_TABLE() {
  static constexpr KernelTable table = {
      DT_NAME,    DT_SUPPORTED, packed_sizes, pack_rows,     prepare_row,       prepare_groups, gemm,
      unpack_row, rms_norm,     qk_norm,      rope_kv_write, attention_scratch, attention_rows, attention,
      sample,     score,
  };
  return &table;
}

}  // namespace dovetail
