// What one instruction set's kernels offer to the step (step.cpp), and the data that they work on.
//
// A kernel computes a part of an op's rows or outputs; who computes which part is the step's decision
// and never changes a bit: the order in which an output element is reduced depends on the model's
// shapes only, not on the number of rows, on the chunking, or on the threads.
//
// Registers are float32 rows with a stride (`ld`, in floats) that is a multiple of 64; rows start on
// 64 bytes, and what stands between a row's width and its stride is zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dovetail {

// Values are part of the ABI (library.py).
enum class WeightType : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5 };
enum class KvType : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2 };

// A linear layer, packed in panels of 16 outputs (see matrix_layout.inl for each type's order).
//
// in_features is padded with zero weights to a multiple of `group` (of 2 for bf16), out_features to
// a multiple of 16; panels follow each other. An interleaved pair of halves has 2 * ceil(half / 16)
// panels. `bias` is null or float32 [panels][16] in the panels' order. The memory is zero before the
// first row is packed.
struct Matrix {
  WeightType type;
  int32_t out_features, in_features;  // unpadded
  int32_t group;                      // input features that share a scale: 64 (int8), 32 (GGUF types)
  const void* data;
  const void* scales;    // per panel: [groups][16], float32 (int8) or float16 (GGUF types); null for f32 and bf16
  const void* minimums;  // likewise, Q4_1 only: added to scale * q
  const void* sums;      // int16 [groups][panels][16], GGUF types: of the group's quants without their offset.
                         // Null: rows are rounded without middles, in less time and with less precision
  const float* bias;
};

// Rows of activations in the form that a matrix' type wants; made by `prepare_row`, read by `gemm`.
struct Activations {
  float* values;     // [rows][ld]: f32 and bf16 weights read these
  int64_t ld;
  int8_t* quants;    // [rows][padded in_features]: quantized types read these three
  float* scales;     // [rows][groups]
  int32_t* sums;     // [rows][groups]: of the group's quants, times what the weights want (quantize.inl)
  float* middles;    // [rows][groups]: taken from the group before rounding, mostly 0; read of matrices with sums
  uint64_t* centred; // [rows][ceil(groups / 64)]: bits of groups whose middle is not 0; likewise
};

enum class Epilogue : int32_t {
  kStore = 0,
  kAdd = 1,        // out += : a residual connection
  kGatedSilu = 2,  // panels alternate gate, up: out[16 * p + i] = silu(gate) * up, half as wide
};

// One layer of the pool, as bytes; see core/kv_layout.py. Tiles are [block_size, head_dim]:
//   f32, bf16 keys   "pairs": [head_dim / 2][token][2]; values token-major
//   int8 keys        "quads": [head_dim / 4][token][4], unsigned with 128 added, then float32 scales
//                    [token], 64-byte aligned; values token-major int8, then float32 scales [token].
//                    Keys, and queries in place, have gone through `spread` (spread.inl).
struct KvLayer {
  char* base;  // address of block 0's part of this layer
  int64_t block_stride, head_stride, value_offset;  // bytes; value_offset from a head's keys
  int64_t scale_offset;                             // bytes from a tile's start; int8 only
  KvType type;
  int32_t block_size, num_kv_heads, head_dim;
};

// Rows of one sequence that follow each other, [first_row, first_row + num_rows), the first of them
// at position `start`.
struct Sequence {
  const int32_t* table;  // block ids
  int32_t first_row, num_rows, start;
};

struct AttentionTask {
  const KvLayer* layer;
  const Sequence* sequence;
  int32_t first, count;     // rows of the sequence, relative to its first
  int32_t kv_head;
  int32_t first_head, num_heads;  // query heads of this task, all of that kv head: all of its group,
                                  // or, where tasks are few, some; the bits are the same
  int32_t window;           // positions that a row sees, its own included; 0: all
  const float* queries;     // scaled rows [.. heads * head_dim]: row of the step r at queries + r * ld
  int64_t queries_ld;
  float* out;               // [.. heads * head_dim], row r at out + r * out_ld
  int64_t out_ld;
  float* scratch;           // this thread's, at least `attention_scratch` floats
  // What this thread attends to right before and after, or null: each task fetches the first keys and
  // values of the one after it.
  const AttentionTask *before, *after;
};

// One row to draw from; see sampler.inl.
struct SampleRow {
  uint64_t seed;
  float inverse_temperature;  // 0: greedy
  float min_p, top_p;         // 0 and 1 keep all
  int32_t top_k;              // 0 keeps all
  int32_t sample_index, position;
  float repetition_penalty, presence_penalty, frequency_penalty;  // 1, 0, 0: none
  const int32_t* history;     // tokens so far, prompt first
  int32_t num_history, num_prompt;
  const int32_t* banned;      // ids whose logits become -inf (min_tokens, bad words), or null
  int32_t num_banned;
  const int32_t* bias_ids;    // logit_bias, or null
  const float* bias;
  int32_t num_bias;
  const uint8_t* allowed;     // [vocab] 0 or 1, or null
  int32_t num_logprobs;       // -1: none; else so many alternatives, and the chosen one's
};

struct KernelTable {
  const char* name;  // "avx512-vnni", "avx2", "portable"
  bool (*is_supported)();

  // -- linear layers (gemm.inl, quantize.inl, pack.inl)
  // Bytes of a packed matrix: [0] data, [1] scales, [2] minimums, [3] sums.
  void (*packed_sizes)(WeightType type, int32_t out_features, int32_t in_features, int64_t sizes[4]);
  // Pack rows [first_row, first_row + num_rows) of a matrix from float32 [num_rows, in_features]; Q
  // types from the file's own blocks. With `interleave`, row r of the file goes to the panel that
  // kGatedSilu wants: gate rows first, then up rows, each out_features / 2.
  void (*pack_rows)(const Matrix* to, const void* rows, int32_t first_row, int32_t num_rows, bool interleave);
  // values row `row` is there; fill in what the type needs beside it.
  void (*prepare_row)(const Matrix* for_matrix, const Activations* to, int32_t row);
  // The same of groups [first, last) of the row; not of GGUF types' matrices with sums.
  void (*prepare_groups)(const Matrix* for_matrix, const Activations* to, int32_t row, int32_t first,
                         int32_t last);
  // Outputs of panels [first_panel, last_panel) for `rows` rows. kGatedSilu needs even bounds.
  void (*gemm)(const Matrix* matrix, int32_t first_panel, int32_t last_panel, const Activations* from,
               int32_t rows, float* out, int64_t out_ld, Epilogue epilogue);
  // One row of the weight, as float32 [in_features]: the embedding of a token.
  void (*unpack_row)(const Matrix* matrix, int32_t row, float* out);

  // -- rows (rows.inl)
  void (*rms_norm)(const float* x, const float* weight, int32_t width, float eps, float* out);
  // Normalizes each of num_heads heads of head_dim; weight float32 [num_heads, head_dim].
  void (*qk_norm)(float* heads, const float* weight, int32_t num_heads, int32_t head_dim, float eps);
  // One token's kv heads [first_kv_head, last_kv_head): rotates their query heads (in place, scaled by
  // `scale`) and key heads of qkv = [heads | kv heads | kv heads] by cos, sin (float32 [head_dim / 2] of
  // its position; null: no rotation) and writes keys and values, rounded, into `block` at `offset`.
  void (*rope_kv_write)(float* qkv, const float* cos, const float* sin, int32_t num_heads, float scale,
                        const KvLayer* layer, int32_t block, int32_t offset, int32_t first_kv_head,
                        int32_t last_kv_head);

  // -- attention (attention.inl)
  // Floats of scratch for up to `context` positions.
  int64_t (*attention_scratch)(int32_t context, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);
  // Rows of a sequence that one task takes at most.
  int32_t (*attention_rows)(int32_t num_heads, int32_t num_kv_heads);
  void (*attention)(const AttentionTask* task);

  // -- sampling (sampler.inl)
  // Draws one token; overwrites the logits. Fills logprob outputs where asked for: chosen[1],
  // top_ids and top, [num_logprobs], most likely first, of the unmodified logits.
  int32_t (*sample)(float* logits, int32_t vocab_size, const SampleRow* row, float* scratch,
                    float* chosen, int32_t* top_ids, float* top);
  // Log-probability of `token`, its rank (1: most likely) and the most likely alternatives, for
  // prompt_logprobs.
  void (*score)(const float* logits, int32_t vocab_size, int32_t token, int32_t num_top, float* scratch,
                float* logprob, int32_t* rank, int32_t* top_ids, float* top);
};

const KernelTable* avx512_kernels();
const KernelTable* avx2_kernels();
const KernelTable* portable_kernels();

}  // namespace dovetail
