#include "runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace dovetail {
namespace {

// Logits that exist at once while a prompt is scored: 13 MB of a vocabulary of 49,152.
constexpr int kScoredAtOnce = 64;

bool is_quantized(WeightType type) { return type != WeightType::kF32 && type != WeightType::kBf16; }

int panels_of(const Matrix& matrix) { return (matrix.out_features + 15) / 16; }

std::vector<Register> make_registers(const ModelShape& shape) {
  std::vector<Register> registers;
  for (int i = 0; i < shape.num_registers; ++i) registers.emplace_back(shape.register_widths[i]);
  return registers;
}

}  // namespace

Runner::Runner(const KernelTable& kernels, const ModelShape& shape, int num_threads)
    : kernels_(kernels),
      shape_(shape),
      ops_(shape.ops, shape.ops + shape.num_ops),
      layer_offsets_(shape.layers, shape.layers + shape.num_layers),
      layers_(layer_offsets_),
      pool_(num_threads),
      registers_(make_registers(shape)),
      scratch_(static_cast<size_t>(num_threads)),
      logits_ld_(round_up(shape.vocab_size, 64)),
      next_(new std::atomic<int>[static_cast<size_t>(shape.num_ops)]) {
  for (int i = 0; i < num_threads; ++i) {
    private_.push_back(make_registers(shape));
    for (auto& one : private_.back()) one.reserve(kPrivateRows);
  }
  const auto head = std::find_if(ops_.begin(), ops_.end(),
                                 [](const Op& op) { return op.kind == OpKind::kSelectRows; });
  first_head_op_ = static_cast<int>(head - ops_.begin());
  check_ops();
}

// The head is what `run_head` can run: select, norm, logits.
void Runner::check_ops() const {
  const size_t head = static_cast<size_t>(first_head_op_);
  if (head + 3 != ops_.size() || ops_[head + 1].kind != OpKind::kNorm ||
      ops_[head + 2].kind != OpKind::kLogits)
    throw std::invalid_argument("the program must end with SelectRows, Norm, Logits");
}

// -- laying out ----------------------------------------------------------------------------------

void Runner::lay_out(const StepInputs& inputs) {
  for (size_t i = 0; i < layers_.size(); ++i)
    layers_[i].base = inputs.region + reinterpret_cast<intptr_t>(layer_offsets_[i].base);
  sequences_.clear();
  row_sequence_.clear();
  row_position_.clear();
  row_token_.clear();
  int longest = 0;
  for (int32_t i = 0; i < inputs.num_work; ++i) {
    const WorkItem& work = inputs.work[i];
    const int32_t first_row = static_cast<int32_t>(row_token_.size());
    sequences_.push_back({inputs.tables + work.slot * inputs.tables_ld, first_row, work.num_rows, work.start});
    longest = std::max(longest, work.start + work.num_rows);
    const int32_t* tokens = inputs.token_ids + work.slot * inputs.tokens_ld + work.start;
    for (int32_t row = 0; row < work.num_rows; ++row) {
      row_sequence_.push_back(i);
      row_position_.push_back(work.start + row);
      row_token_.push_back(tokens[row]);
    }
  }
  num_rows_ = static_cast<int>(row_token_.size());
  reserve(num_rows_);
  const int64_t attention =
      kernels_.attention_scratch(longest, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim);
  const int64_t sampling = 2 * logits_ld_ + 4096;
  for (auto& scratch : scratch_) scratch.reserve(std::max(attention, sampling) + logits_ld_);
  list_attention();
  for (int32_t i = 0; i < shape_.num_ops; ++i) next_[i].store(0, std::memory_order_relaxed);
}

void Runner::reserve(int64_t rows) {
  for (auto& one : registers_) one.reserve(rows);
}

// Tasks of whole groups of heads; of single heads where there are fewer than threads can share.
void Runner::list_attention() {
  parts_.clear();
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int at_once = kernels_.attention_rows(shape_.num_heads, shape_.num_kv_heads);
  int num_tasks = 0;
  for (const Sequence& one : sequences_) num_tasks += (one.num_rows + at_once - 1) / at_once;
  num_tasks *= shape_.num_kv_heads;
  const bool is_split = pool_.size() > 1 && num_tasks < 4 * pool_.size();
  const int heads = is_split ? 1 : group;
  // The last rows of a chunk see most: the longest tasks come first.
  for (int32_t s = static_cast<int32_t>(sequences_.size()); s-- > 0;)
    for (int32_t first = (sequences_[s].num_rows - 1) / at_once * at_once; first >= 0; first -= at_once)
      for (int kv = 0; kv < shape_.num_kv_heads; ++kv)
        for (int head = kv * group; head < (kv + 1) * group; head += heads)
          parts_.push_back({s, first, std::min(at_once, sequences_[s].num_rows - first), kv, head, heads});
}

void Runner::copy_blocks(const StepInputs& inputs) {
  const auto bytes = static_cast<size_t>(shape_.block_bytes);
  const auto block = [&](int32_t id) { return inputs.region + id * shape_.block_bytes; };
  for (int32_t i = 0; i < inputs.num_zeroes; ++i) std::memset(block(inputs.zeroes[i]), 0, bytes);
  for (int32_t i = 0; i < inputs.num_copies; ++i)
    std::memcpy(block(inputs.copies[2 * i + 1]), block(inputs.copies[2 * i]), bytes);
}

// -- a step --------------------------------------------------------------------------------------

void Runner::forward(const StepInputs& inputs) {
  copy_blocks(inputs);
  lay_out(inputs);
  logits_.reserve(inputs.num_selected * logits_ld_);
  if (inputs.num_scores > 0) score_logits_.reserve(kScoredAtOnce * logits_ld_);
  if (num_rows_ == 0) return;
  pool_.run([&](int thread) {
    run_body(thread, inputs);
    for (int32_t i = 0; i < inputs.num_scores; ++i) score(thread, inputs.scores[i]);
    if (inputs.num_selected > 0)
      run_head(thread, inputs.selected, 0, inputs.num_selected, logits_.get(), inputs.hidden);
  });
}

void Runner::run_body(int thread, const StepInputs& inputs) {
  for (int i = 0; i < first_head_op_; ++i) {
    const Op& op = ops_[static_cast<size_t>(i)];
    switch (op.kind) {
      case OpKind::kEmbed: embed(thread, op); break;
      case OpKind::kNorm: {
        const Op& next = ops_[static_cast<size_t>(i) + 1];
        if (next.kind == OpKind::kLinear && next.src == op.out) {
          norm_linear(thread, op, next);
          ++i;
        } else {
          norm(thread, op, num_rows_);
          pool_.barrier();
        }
        break;
      }
      case OpKind::kLinear: linear(thread, op); break;
      case OpKind::kQkNorm: qk_norm(thread, op); break;
      case OpKind::kRopeKvWrite: rope_kv_write(thread, op); break;
      case OpKind::kAttention: attend(thread, op); break;
      case OpKind::kSignal:
        if (thread == 0 && inputs.on_signal != nullptr) inputs.on_signal(op.layer);
        break;
      case OpKind::kSelectRows:
      case OpKind::kLogits: break;  // the head's
    }
  }
}

// Logits of rows [first, first + count) of the list `rows`; null: rows of the step themselves.
void Runner::run_head(int thread, const int32_t* rows, int first, int count, float* logits,
                      float* hidden) {
  const auto head = static_cast<size_t>(first_head_op_);
  const Op &select = ops_[head], &normed = ops_[head + 1], &out = ops_[head + 2];
  const Activations& from = registers_[static_cast<size_t>(select.src)].get();
  const Activations& to = registers_[static_cast<size_t>(normed.out)].get();
  const int width = shape_.hidden_size;
  for (int i = thread; i < count; i += pool_.size()) {
    const int64_t row = rows != nullptr ? rows[first + i] : first + i;
    float* values = to.values + i * to.ld;
    kernels_.rms_norm(from.values + row * from.ld, normed.weight, width, normed.eps, values);
    if (hidden != nullptr)
      std::memcpy(hidden + static_cast<int64_t>(first + i) * width, values, sizeof(float) * static_cast<size_t>(width));
    kernels_.prepare_row(out.matrix, &to, i);
  }
  pool_.barrier();
  const Range panels = share(thread, panels_of(*out.matrix), 1);
  kernels_.gemm(out.matrix, panels.first, panels.last, &to, count, logits, logits_ld_, Epilogue::kStore);
  pool_.barrier();
}

void Runner::score(int thread, const ScoreItem& item) {
  for (int done = 0; done < item.num_rows; done += kScoredAtOnce) {
    const int count = std::min(kScoredAtOnce, item.num_rows - done);
    run_head(thread, nullptr, item.first_row + done, count, score_logits_.get(), nullptr);
    for (int i = thread; i < count; i += pool_.size()) {
      const int64_t at = done + i;
      kernels_.score(score_logits_.get() + i * logits_ld_, shape_.vocab_size, item.tokens[at],
                     item.num_top, scratch_[static_cast<size_t>(thread)].get(), item.logprobs + at,
                     item.ranks + at, item.top_ids + at * item.num_top, item.top + at * item.num_top);
    }
    pool_.barrier();
  }
}

void Runner::draw(DrawItem* items, int32_t num_items) {
  std::vector<int> num_readers;
  for (int32_t i = 0; i < num_items; ++i) {
    const auto row = static_cast<size_t>(items[i].row);
    if (num_readers.size() <= row) num_readers.resize(row + 1);
    ++num_readers[row];
  }
  const auto draw_one = [&](int thread, DrawItem& item) {
    float* scratch = scratch_[static_cast<size_t>(thread)].get();
    float* own = logits(item.row);
    if (num_readers[static_cast<size_t>(item.row)] > 1) {
      std::memcpy(scratch, own, sizeof(float) * static_cast<size_t>(shape_.vocab_size));
      own = scratch;
      scratch += logits_ld_;
    }
    item.token = kernels_.sample(own, shape_.vocab_size, &item.sampling, scratch, item.chosen,
                                 item.top_ids, item.top);
  };
  if (num_items == 1) {  // not worth a wake-up
    draw_one(0, items[0]);
    return;
  }
  std::atomic<int> next{0};
  pool_.run([&](int thread) {
    for (int i = next++; i < num_items; i = next++) draw_one(thread, items[i]);
  });
}

// -- ops -----------------------------------------------------------------------------------------

Runner::Range Runner::share(int thread, int count, int multiple_of) const {
  const int units = (count + multiple_of - 1) / multiple_of;
  const int first = static_cast<int>(static_cast<int64_t>(units) * thread / pool_.size());
  const int last = static_cast<int>(static_cast<int64_t>(units) * (thread + 1) / pool_.size());
  return {std::min(count, first * multiple_of), std::min(count, last * multiple_of)};
}

void Runner::embed(int thread, const Op& op) {
  const Activations& to = registers_[static_cast<size_t>(op.out)].get();
  for (int row = thread; row < num_rows_; row += pool_.size())
    kernels_.unpack_row(op.matrix, row_token_[static_cast<size_t>(row)], to.values + row * to.ld);
  pool_.barrier();
}

void Runner::norm(int thread, const Op& op, int num_rows) {
  const Activations& from = registers_[static_cast<size_t>(op.src)].get();
  const Activations& to = registers_[static_cast<size_t>(op.out)].get();
  const int width = shape_.register_widths[op.src];
  for (int row = thread; row < num_rows; row += pool_.size())
    kernels_.rms_norm(from.values + row * from.ld, op.weight, width, op.eps, to.values + row * to.ld);
}

void Runner::norm_linear(int thread, const Op& norm_op, const Op& op) {
  const Activations& from = registers_[static_cast<size_t>(norm_op.src)].get();
  const auto out = static_cast<size_t>(norm_op.out);
  const bool own = is_private(num_rows_);
  const Activations& to = own ? private_[static_cast<size_t>(thread)][out].get() : registers_[out].get();
  const int width = shape_.register_widths[norm_op.src];
  for (int row = own ? 0 : thread; row < num_rows_; row += own ? 1 : pool_.size()) {
    kernels_.rms_norm(from.values + row * from.ld, norm_op.weight, width, norm_op.eps, to.values + row * to.ld);
    kernels_.prepare_row(op.matrix, &to, row);
  }
  if (!own) pool_.barrier();
  multiply(thread, op, to, num_rows_);
}

void Runner::linear(int thread, const Op& op) {
  const auto src = static_cast<size_t>(op.src);
  Activations from = registers_[src].get();
  if (is_quantized(op.matrix->type)) {
    const bool own = is_private(num_rows_);
    if (own) {
      float* shared = from.values;
      from = private_[static_cast<size_t>(thread)][src].get();
      from.values = shared;
    }
    for (int row = own ? 0 : thread; row < num_rows_; row += own ? 1 : pool_.size())
      kernels_.prepare_row(op.matrix, &from, row);
    if (!own) pool_.barrier();
  }
  multiply(thread, op, from, num_rows_);
}

// Few rows: each thread its half of the weights, read in order. Many: panels are taken as threads
// come, first many, then few, so that one which was interrupted does not hold up the rest and both
// end together. Panels go in pairs: a gate and its up, or a tile's two.
void Runner::multiply(int thread, const Op& op, const Activations& from, int num_rows) {
  constexpr int kManyRows = 8;
  const Activations& to = registers_[static_cast<size_t>(op.out)].get();
  const int panels = panels_of(*op.matrix);
  const auto gemm = [&](int first, int last) {
    kernels_.gemm(op.matrix, first, last, &from, num_rows, to.values, to.ld, op.epilogue);
  };
  if (num_rows <= kManyRows || pool_.size() == 1) {
    const Range range = share(thread, panels, 2);
    gemm(range.first, range.last);
  } else {
    auto& next = next_[&op - ops_.data()];
    for (int first = next; first < panels;) {
      const int part = static_cast<int>(round_up((panels - first) / (2 * pool_.size()) + 1, 2));
      const int last = std::min(first + part, panels);
      if (!next.compare_exchange_weak(first, last)) continue;
      gemm(first, last);
      first = next;
    }
  }
  pool_.barrier();
}

void Runner::qk_norm(int thread, const Op& op) {
  const Activations& heads = registers_[static_cast<size_t>(op.src)].get();
  for (int row = thread; row < num_rows_; row += pool_.size())
    kernels_.qk_norm(heads.values + row * heads.ld, op.weight, shape_.num_heads + shape_.num_kv_heads,
                     shape_.head_dim, op.eps);
  pool_.barrier();
}

void Runner::rope_kv_write(int thread, const Op& op) {
  const Activations& qkv = registers_[static_cast<size_t>(op.src)].get();
  const KvLayer& layer = layers_[static_cast<size_t>(op.layer)];
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  const int64_t half = shape_.head_dim / 2;
  for (int row = thread; row < num_rows_; row += pool_.size()) {
    const int64_t position = row_position_[static_cast<size_t>(row)];
    const Sequence& sequence = sequences_[static_cast<size_t>(row_sequence_[static_cast<size_t>(row)])];
    const float* cos = op.is_rotary ? shape_.cos + position * half : nullptr;
    const float* sin = op.is_rotary ? shape_.sin + position * half : nullptr;
    kernels_.rope_kv_write(qkv.values + row * qkv.ld, cos, sin, shape_.num_heads, scale, &layer,
                           sequence.table[position / layer.block_size],
                           static_cast<int32_t>(position % layer.block_size));
  }
  pool_.barrier();
}

void Runner::attend(int thread, const Op& op) {
  const Activations& queries = registers_[static_cast<size_t>(op.src)].get();
  const Activations& to = registers_[static_cast<size_t>(op.out)].get();
  auto& next = next_[&op - ops_.data()];
  const int count = static_cast<int>(parts_.size());
  for (int i = next++; i < count; i = next++) {
    const AttentionPart& part = parts_[static_cast<size_t>(i)];
    const Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
    const AttentionTask task = {&layers_[static_cast<size_t>(op.layer)], &sequence, part.first, part.count,
                                part.kv_head, part.first_head, part.num_heads, op.window, queries.values,
                                queries.ld, to.values, to.ld, scratch_[static_cast<size_t>(thread)].get()};
    kernels_.attention(&task);
  }
  pool_.barrier();
}

}  // namespace dovetail
