// Runs steps of one model on a pool of threads.
//
//     forward:  lay out -> body ops over all rows -> scores -> head ops over the selected rows
//     draw:     one token an item, from the logits that forward left
//
// An op is rows (each thread some), panels of outputs, or attention tasks, and ends at a barrier.
// With one or two rows each thread normalizes and quantizes them for itself, which costs less than
// the barrier that sharing needs. Nobody's share depends on anything that could change a bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffers.h"
#include "kernel_table.h"
#include "step.h"
#include "thread_pool.h"

namespace dovetail {

class Runner {
 public:
  // Copies shape, ops and layers; matrices, weights and the tables of rotations stay the caller's
  // and must outlive this.
  Runner(const KernelTable& kernels, const ModelShape& shape, int num_threads);

  void forward(const StepInputs& inputs);

  // Each item's logits are overwritten, unless several items draw from one row.
  void draw(DrawItem* items, int32_t num_items);

  // Of selected row `row` of the last forward pass: [vocab_size].
  float* logits(int32_t row) { return logits_.get() + row * logits_ld_; }

 private:
  struct AttentionPart {
    int32_t sequence, first, count, kv_head, first_head, num_heads;
  };
  struct Range {
    int first, last;
  };

  void check_ops() const;
  void lay_out(const StepInputs& inputs);
  void list_attention();
  void copy_blocks(const StepInputs& inputs);
  void reserve(int64_t rows);

  void run_body(int thread, const StepInputs& inputs);
  void run_head(int thread, const int32_t* rows, int first, int count, float* logits, float* hidden);
  void score(int thread, const ScoreItem& item);

  void embed(int thread, const Op& op);
  void norm(int thread, const Op& op, int num_rows);
  void norm_linear(int thread, const Op& norm, const Op& linear);
  void linear(int thread, const Op& op);
  void qk_norm(int thread, const Op& op);
  void rope_kv_write(int thread, const Op& op);
  void attend(int thread, const Op& op);
  void multiply(int thread, const Op& op, const Activations& from, int num_rows);

  bool is_private(int num_rows) const { return num_rows <= kPrivateRows; }
  Range share(int thread, int count, int multiple_of) const;

  static constexpr int kPrivateRows = 2;

  const KernelTable& kernels_;
  ModelShape shape_;
  std::vector<Op> ops_;
  int first_head_op_ = 0;
  std::vector<KvLayer> layer_offsets_, layers_;
  ThreadPool pool_;

  std::vector<Register> registers_;
  std::vector<std::vector<Register>> private_;  // [thread][register]
  std::vector<AlignedFloats> scratch_;          // [thread]
  AlignedFloats logits_, score_logits_;
  int64_t logits_ld_ = 0;

  std::vector<Sequence> sequences_;
  std::vector<int32_t> row_sequence_, row_position_, row_token_;
  std::vector<AttentionPart> parts_;
  int num_rows_ = 0;
  std::unique_ptr<std::atomic<int>[]> next_;  // [op]: what is taken next of it
};

}  // namespace dovetail
