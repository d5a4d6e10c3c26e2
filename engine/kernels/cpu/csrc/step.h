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

// Work of one slot: `num_query` known tokens after its computed ones, of which the last `num_drafts`
// are proposed ones. Where num_samples is 1, a token is drawn after the last of them, or after each
// from the one before the drafts on, as if the drafts were right; where it is more, so many tokens
// are drawn after the last, for samples 0, 1, ...
struct WorkItem {
  int32_t slot, num_query, num_samples, num_drafts;
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

// The batch. Steps append what they draw to `token_ids` and move `lengths` on; all else is the
// executor's to change, between steps.
struct Slots {
  int32_t* token_ids;     // [slots][tokens_ld]: known tokens, computed or not
  int64_t tokens_ld;
  const int32_t* tables;  // [slots][tables_ld]: block ids
  int64_t tables_ld;
  int32_t* lengths;       // [slots]: computed positions
  const DrawItem* draws;  // [slots]: of each slot, without what moves
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
  Slots slots;
  const WorkItem* work;
  int32_t num_work;
  int32_t selects_all;       // every row's logits are wanted, and nothing is drawn
  const int32_t* zeroes;     // blocks
  int32_t num_zeroes;
  const int32_t* copies;     // (source, target) pairs of blocks
  int32_t num_copies;
  const ScoreItem* scores;
  int32_t num_scores;
  void (*on_signal)(int32_t layer);  // or null
  float* hidden;                     // [selected rows][hidden_size], or null
};

// What a step drew; the runner's, until its next step.
struct StepOutputs {
  const int32_t* tokens;  // of all draws
  const int32_t* ranges;  // [work items][2]: the first of its draws, and behind the last that counts:
                          // the token after a wrong draft does not
  int32_t num_tokens;
};

}  // namespace dovetail
