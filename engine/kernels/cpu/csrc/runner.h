// Runs steps of one model on a pool of threads.
//
//     forward:  lay out -> body ops over all rows -> scores -> head ops over the selected rows
//     draw:     tokens, from the logits that forward left -> append them, move the slots on
//
// An op is one or two phases of the pool: of rows, panels of outputs, or attention tasks. What the next
// op does to each part of an output alone is done with it: quantizing attention's and a gated product's,
// rotating the one row that a task attends for. With one or two rows each thread normalizes and
// quantizes them for itself, which costs less than a phase. Who takes which units cannot change a bit.
#pragma once

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

  // What `draw` draws, in the order of the work. Item by item, logits are overwritten, unless several
  // items draw from one row.
  DrawItem* draws() { return draws_.data(); }

  // Once a forward pass.
  StepOutputs draw();

  // Of selected row `row` of the last forward pass: [vocab_size].
  float* logits(int32_t row) { return logits_.get() + row * logits_ld_; }

 private:
  struct AttentionPart {
    int32_t sequence, first, count, kv_head, first_head, num_heads;
  };
  // Rows of the head: of the step, or of the list of those that are selected.
  struct HeadPart {
    const int32_t* rows;  // null: of the step
    int32_t first, count;
    float* logits;
    float* hidden;           // or null
    const ScoreItem* score;  // or null
    int32_t scored;          // rows of `score` before this part
  };
  enum class Unit {  // of a phase: a row unless it says otherwise
    kEmbedded,
    kNormed,
    kPrepared,  // for a product: normed, if its source is normed with it, and quantized
    kPanels,    // `panels` of a product's
    kHeads,
    kRotated,
    kAttended,  // an AttentionPart
    kSignal,
    kSelected,
    kLogits,  // a panel
    kScored,
  };
  struct Stage {
    Unit unit;
    const Op* op;
    const Op* norm = nullptr;      // of the op's source
    HeadPart head{};
    int32_t panels = 2;            // pairs: a gate and its up, or a tile's two
    const Matrix* next = nullptr;  // whose source the output is: quantized for it at once
    const Op* rope = nullptr;      // of the rows that a task attends for, before it does
    bool has_quants = false;       // the op's source was quantized when it was made
  };

  void check_ops() const;
  void lay_out(const StepInputs& inputs);
  void list_draws(const StepInputs& inputs);
  void draw_one(int thread, DrawItem& draw);
  void move_on(const WorkItem& work, int32_t first, int32_t& end);
  void list_parts();
  void copy_blocks(const StepInputs& inputs);
  void reserve(int64_t rows);

  void list_body(const StepInputs& inputs);
  void list_linear(const Op& op, const Op* norm);
  void list_attention(const Op& op, const Op* rope);
  const Matrix* quantized_with(const Op& op, int32_t width) const;
  void list_head(const HeadPart& part);
  void list_score(const ScoreItem& item);
  void add(const Stage& stage, int32_t count, Take take);

  void work(int thread, int phase, int32_t first, int32_t last, const StepInputs& inputs);
  void embed(const Op& op, int32_t row);
  void norm(const Op& op, int32_t row, const Activations& to);
  void prepare(const Stage& stage, int32_t row, const Activations& to);
  void multiply(int thread, int phase, int32_t first, int32_t last);
  void qk_norm(const Op& op, int32_t row);
  void rope_kv_write(const Op& op, int32_t row, int32_t first_kv_head, int32_t last_kv_head);
  void attend(int thread, const Stage& stage, int32_t first, int32_t last);
  void quantize(const Stage& stage, int32_t row, int32_t first, int32_t last);
  void select(const HeadPart& part, int32_t i);
  void score(int thread, const HeadPart& part, int32_t i);

  bool is_private() const { return num_rows_ <= kPrivateRows; }
  bool are_alone() const { return num_rows_ == static_cast<int>(sequences_.size()); }  // one row a sequence
  const Activations& shared(int32_t number) const { return registers_[static_cast<size_t>(number)].get(); }
  Activations shared_source_of(int thread, const Stage& stage, int32_t row);
  Activations source_of(int thread, int phase, const Stage& stage);

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
  std::vector<std::vector<AttentionTask>> tasks_;  // [thread]: those it does in one go
  AlignedFloats logits_, score_logits_;
  int64_t logits_ld_ = 0;

  std::vector<Sequence> sequences_;
  std::vector<int32_t> row_sequence_, row_position_, row_token_;
  std::vector<int32_t> selected_;  // rows
  Slots slots_{};
  std::vector<WorkItem> work_;
  std::vector<DrawItem> draws_;
  std::vector<int32_t> tokens_, ranges_;  // of the draws; [work items][2]
  std::vector<AttentionPart> parts_;
  bool is_split_ = false;  // parts are of single heads
  int num_rows_ = 0;
  std::vector<Stage> stages_;  // of the pool's phases
  std::vector<ThreadPool::Phase> phases_;
  struct alignas(64) Prepared {
    int phase = -1;
  };
  std::vector<Prepared> prepared_;  // [thread]: whose source it has prepared for itself
};

}  // namespace dovetail
