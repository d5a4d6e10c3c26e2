// A model's ops, its buffers, and the running of a step: the C ABI's structs (mirrored in
// library.py), which the executor fills.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace dovetail {

enum class OpKind : int32_t {
  kEmbed = 0,        // out = rows of `matrix` by token id
  kNorm = 1,         // out = RMSNorm(src) * weight
  kLinear = 2,       // out (epilogue)= src @ matrix.T + bias
  kQkNorm = 3,       // src's heads, in place; weight [heads + kv heads, head_dim]
  kRopeKvWrite = 4,  // src = [heads | kv heads | kv heads]: queries rotated in place, K and V written
  kAttention = 5,    // out = attention of src's queries
  kSignal = 6,       // the layer's KV of this step is in the pool
  kSelectRows = 7,   // out = the rows of src that are wanted; all ops after it run on these
  kLogits = 8,       // out = src @ matrix.T
};

struct Op {
  OpKind kind;
  int32_t src, out;  // registers
  int32_t layer;
  Epilogue epilogue;
  int32_t window;     // 0: none
  int32_t is_rotary;
  float eps;
  const Matrix* matrix;  // kEmbed, kLinear, kLogits
  const float* weight;   // kNorm, kQkNorm
};

struct ModelShape {
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t vocab_size, hidden_size;
  int32_t max_positions;
  const float* cos;  // [max_positions][head_dim / 2]
  const float* sin;
  const int32_t* register_widths;
  int32_t num_registers;
  const Op* ops;
  int32_t num_ops;
  // The pool: layers' `base` is the offset from the region's start here, an address in a step.
  const KvLayer* layers;
  int32_t num_layers;
  int64_t block_bytes;
};

// Work of one slot: `num_rows` query tokens from position `start` on.
struct WorkItem {
  int32_t slot, start, num_rows;
};

// A slice of a prompt to score: after row `first_row + i` of the step comes tokens[i].
struct ScoreItem {
  int32_t first_row, num_rows, num_top;
  const int32_t* tokens;
  float* logprobs;    // [num_rows]
  int32_t* ranks;     // [num_rows]
  int32_t* top_ids;   // [num_rows][num_top]
  float* top;         // [num_rows][num_top]
};

struct StepInputs {
  char* region;
  const WorkItem* work;
  int32_t num_work;
  const int32_t* token_ids;  // [slots][tokens_ld]
  int64_t tokens_ld;
  const int32_t* tables;     // [slots][tables_ld]
  int64_t tables_ld;
  const int32_t* zeroes;     // blocks
  int32_t num_zeroes;
  const int32_t* copies;     // (source, target) pairs of blocks
  int32_t num_copies;
  const int32_t* selected;   // rows whose logits are wanted
  int32_t num_selected;
  const ScoreItem* scores;
  int32_t num_scores;
  void (*on_signal)(int32_t layer);  // or null
  float* hidden;                     // [num_selected][hidden_size], or null
};

// One token to draw: from selected row `row` of the last forward pass.
struct DrawItem {
  int32_t row;
  SampleRow sampling;
  float* chosen;     // log-probability of the drawn token, where asked for
  int32_t* top_ids;
  float* top;
  int32_t token;     // result
};

}  // namespace dovetail
