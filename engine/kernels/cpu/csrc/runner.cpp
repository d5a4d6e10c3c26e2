#include "runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
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
      tasks_(static_cast<size_t>(num_threads)),
      logits_ld_(round_up(shape.vocab_size, 64)),
      prepared_(static_cast<size_t>(num_threads)) {
  for (int i = 0; i < num_threads; ++i) {
    private_.push_back(make_registers(shape));
    for (auto& one : private_.back()) one.reserve(kPrivateRows);
  }
  const auto head = std::find_if(ops_.begin(), ops_.end(),
                                 [](const Op& op) { return op.kind == OpKind::kSelectRows; });
  first_head_op_ = static_cast<int>(head - ops_.begin());
  check_ops();
}

// The head is what `list_head` can list: select, norm, logits.
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
    const Slots& slots = inputs.slots;
    const int32_t first_row = static_cast<int32_t>(row_token_.size()), start = slots.lengths[work.slot];
    sequences_.push_back({slots.tables + work.slot * slots.tables_ld, first_row, work.num_query, start});
    longest = std::max(longest, start + work.num_query);
    const int32_t* tokens = slots.token_ids + work.slot * slots.tokens_ld + start;
    for (int32_t row = 0; row < work.num_query; ++row) {
      row_sequence_.push_back(i);
      row_position_.push_back(start + row);
      row_token_.push_back(tokens[row]);
    }
  }
  num_rows_ = static_cast<int>(row_token_.size());
  reserve(num_rows_);
  const int64_t attention =
      kernels_.attention_scratch(longest, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim);
  const int64_t sampling = 2 * logits_ld_ + 4096;
  for (auto& scratch : scratch_) scratch.reserve(std::max(attention, sampling) + logits_ld_);
  list_parts();
}

void Runner::list_draws(const StepInputs& inputs) {
  slots_ = inputs.slots;
  work_.assign(inputs.work, inputs.work + inputs.num_work);
  selected_.clear();
  draws_.clear();
  ranges_.clear();
  int32_t end_row = 0;
  for (const WorkItem& work : work_) {
    end_row += work.num_query;
    const int32_t length = slots_.lengths[work.slot] + work.num_query;
    ranges_.push_back(static_cast<int32_t>(draws_.size()));
    for (int32_t left = work.num_samples > 0 ? work.num_drafts : -1; left >= 0; --left) {
      const auto row = static_cast<int32_t>(selected_.size());
      selected_.push_back(end_row - 1 - left);
      for (int32_t sample = 0; sample < work.num_samples; ++sample) {
        DrawItem draw = slots_.draws[work.slot];
        draw.row = row;
        draw.sampling.position = draw.sampling.num_history = length - left;
        if (work.num_samples > 1) draw.sampling.sample_index = sample;
        draws_.push_back(draw);
      }
    }
    ranges_.push_back(static_cast<int32_t>(draws_.size()));
  }
  if (inputs.selects_all) {
    selected_.resize(static_cast<size_t>(num_rows_));
    std::iota(selected_.begin(), selected_.end(), 0);
  }
}

void Runner::reserve(int64_t rows) {
  for (auto& one : registers_) one.reserve(rows);
}

// Tasks of whole groups of heads; of single heads where there are fewer than threads can share.
void Runner::list_parts() {
  parts_.clear();
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int at_once = kernels_.attention_rows(shape_.num_heads, shape_.num_kv_heads);
  int num_tasks = 0;
  for (const Sequence& one : sequences_) num_tasks += (one.num_rows + at_once - 1) / at_once;
  num_tasks *= shape_.num_kv_heads;
  is_split_ = pool_.size() > 1 && num_tasks < 4 * pool_.size();
  const int heads = is_split_ ? 1 : group;
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
  list_draws(inputs);
  const auto num_selected = static_cast<int32_t>(selected_.size());
  logits_.reserve(num_selected * logits_ld_);
  if (inputs.num_scores > 0) score_logits_.reserve(kScoredAtOnce * logits_ld_);
  if (num_rows_ == 0) return;
  stages_.clear();
  phases_.clear();
  for (auto& one : prepared_) one.phase = -1;
  list_body(inputs);
  for (int32_t i = 0; i < inputs.num_scores; ++i) list_score(inputs.scores[i]);
  if (num_selected > 0)
    list_head({selected_.data(), 0, num_selected, logits_.get(), inputs.hidden, nullptr, 0});
  pool_.run(phases_, [&](int thread, int phase, int32_t first, int32_t last) {
    work(thread, phase, first, last, inputs);
  });
}

void Runner::add(const Stage& stage, int32_t count, Take take) {
  stages_.push_back(stage);
  phases_.push_back({count, take});
}

void Runner::list_body(const StepInputs& inputs) {
  const Op *norm = nullptr, *rope = nullptr;  // done with the op that follows
  for (int i = 0; i < first_head_op_; ++i) {
    const Op &op = ops_[static_cast<size_t>(i)], &next = ops_[static_cast<size_t>(i) + 1];
    switch (op.kind) {
      case OpKind::kEmbed: add({Unit::kEmbedded, &op}, num_rows_, Take::kSome); break;
      case OpKind::kNorm:
        if (next.kind == OpKind::kLinear && next.src == op.out) norm = &op;
        else add({Unit::kNormed, &op}, num_rows_, Take::kSome);
        break;
      case OpKind::kLinear:
        list_linear(op, norm);
        norm = nullptr;
        break;
      case OpKind::kQkNorm: add({Unit::kHeads, &op}, num_rows_, Take::kSome); break;
      case OpKind::kRopeKvWrite:
        if (are_alone() && !is_split_ && inputs.on_signal == nullptr) rope = &op;
        else add({Unit::kRotated, &op}, num_rows_, Take::kSome);
        break;
      case OpKind::kAttention:
        list_attention(op, rope);
        rope = nullptr;
        break;
      case OpKind::kSignal:
        if (inputs.on_signal != nullptr) add({Unit::kSignal, &op}, 1, Take::kOne);
        break;
      case OpKind::kSelectRows:
      case OpKind::kLogits: break;  // the head's
    }
  }
}

// The matrix whose source an op's output is, if that is to be quantized in parts of so many values. Of
// many rows, parts lie far apart in memory, and a pass over whole rows is faster.
const Matrix* Runner::quantized_with(const Op& op, int32_t width) const {
  constexpr int kFewRows = 64;
  const Op& next = (&op)[1];
  if (num_rows_ > kFewRows) return nullptr;
  if (next.kind != OpKind::kLinear || next.src != op.out || !is_quantized(next.matrix->type)) return nullptr;
  const bool is_by_group = next.matrix->type == WeightType::kInt8 || next.matrix->sums == nullptr;
  return is_by_group && width % next.matrix->group == 0 ? next.matrix : nullptr;
}

// Of few rows the weights are all there is to read, and long runs of them are read fastest.
void Runner::list_linear(const Op& op, const Op* norm) {
  constexpr int kManyRows = 8, kWholeGroups = 8;
  Stage stage = {Unit::kPanels, &op, norm};
  const bool is_gated = op.epilogue == Epilogue::kGatedSilu;
  stage.has_quants = !stages_.empty() && stages_.back().next == op.matrix;
  stage.next = is_gated ? quantized_with(op, kWholeGroups / 2 * 16) : nullptr;
  if (stage.next != nullptr) stage.panels = kWholeGroups;
  const bool is_prepared = norm != nullptr || (is_quantized(op.matrix->type) && !stage.has_quants);
  if (is_prepared && !is_private()) add({Unit::kPrepared, &op, norm}, num_rows_, Take::kSome);
  add(stage, (panels_of(*op.matrix) + stage.panels - 1) / stage.panels,
      num_rows_ <= kManyRows ? Take::kMost : Take::kSome);
}

void Runner::list_attention(const Op& op, const Op* rope) {
  Stage stage = {Unit::kAttended, &op};
  stage.rope = rope;
  const int heads = is_split_ ? 1 : shape_.num_heads / shape_.num_kv_heads;
  stage.next = quantized_with(op, heads * shape_.head_dim);
  // Rows alone cost alike, and keys that follow each other are fetched ahead.
  add(stage, static_cast<int32_t>(parts_.size()), are_alone() ? Take::kSome : Take::kOne);
}

void Runner::list_head(const HeadPart& part) {
  const Op& op = ops_.back();
  add({Unit::kSelected, &op, nullptr, part}, part.count, Take::kSome);
  add({Unit::kLogits, &op, nullptr, part}, panels_of(*op.matrix), Take::kMost);
}

void Runner::list_score(const ScoreItem& item) {
  for (int32_t done = 0; done < item.num_rows; done += kScoredAtOnce) {
    const int32_t count = std::min(kScoredAtOnce, item.num_rows - done);
    const HeadPart part = {nullptr, item.first_row + done, count, score_logits_.get(), nullptr, &item, done};
    list_head(part);
    add({Unit::kScored, nullptr, nullptr, part}, count, Take::kOne);
  }
}

void Runner::work(int thread, int phase, int32_t first, int32_t last, const StepInputs& inputs) {
  const Stage& stage = stages_[static_cast<size_t>(phase)];
  switch (stage.unit) {
    case Unit::kPanels: multiply(thread, phase, stage.panels * first, stage.panels * last); return;
    case Unit::kAttended: attend(thread, stage, first, last); return;
    case Unit::kLogits:
      kernels_.gemm(stage.op->matrix, first, last, &shared(stage.op->src), stage.head.count, stage.head.logits,
                    logits_ld_, Epilogue::kStore);
      return;
    default: break;
  }
  for (int32_t i = first; i < last; ++i) {
    switch (stage.unit) {
      case Unit::kEmbedded: embed(*stage.op, i); break;
      case Unit::kNormed: norm(*stage.op, i, shared(stage.op->out)); break;
      case Unit::kPrepared: prepare(stage, i, shared_source_of(thread, stage, i)); break;
      case Unit::kHeads: qk_norm(*stage.op, i); break;
      case Unit::kRotated: rope_kv_write(*stage.op, i, 0, shape_.num_kv_heads); break;
      case Unit::kSignal: inputs.on_signal(stage.op->layer); break;
      case Unit::kSelected: select(stage.head, i); break;
      case Unit::kScored: score(thread, stage.head, i); break;
      case Unit::kPanels:
      case Unit::kAttended:
      case Unit::kLogits: break;
    }
  }
}

// -- drawing -------------------------------------------------------------------------------------

StepOutputs Runner::draw() {
  const auto num_draws = static_cast<int32_t>(draws_.size());
  const auto draw_some = [&](int thread, int, int32_t first, int32_t last) {
    for (int32_t i = first; i < last; ++i) draw_one(thread, draws_[static_cast<size_t>(i)]);
  };
  if (num_draws == 1)  // not worth a wake-up
    draw_some(0, 0, 0, 1);
  else if (num_draws > 1)
    pool_.run({{num_draws, Take::kOne}}, draw_some);
  tokens_.clear();
  for (const DrawItem& draw : draws_) tokens_.push_back(draw.token);
  for (size_t i = 0; i < work_.size(); ++i) move_on(work_[i], ranges_[2 * i], ranges_[2 * i + 1]);
  return {tokens_.data(), ranges_.data(), num_draws};
}

void Runner::draw_one(int thread, DrawItem& draw) {
  float* scratch = scratch_[static_cast<size_t>(thread)].get();
  float* own = logits(draw.row);
  const auto is_of = [&](const DrawItem& other) { return other.row == draw.row; };
  const bool is_shared = (&draw != &draws_.front() && is_of((&draw)[-1])) ||
                         (&draw != &draws_.back() && is_of((&draw)[1]));
  if (is_shared) {
    std::memcpy(scratch, own, sizeof(float) * static_cast<size_t>(shape_.vocab_size));
    own = scratch;
    scratch += logits_ld_;
  }
  draw.token =
      kernels_.sample(own, shape_.vocab_size, &draw.sampling, scratch, draw.chosen, draw.top_ids, draw.top);
}

// Drafts are accepted while they equal the tokens that were drawn in their places: the token after a
// draft counts only if that was right. What else was drawn is overwritten by the next step.
void Runner::move_on(const WorkItem& work, int32_t first, int32_t& end) {
  int32_t& length = slots_.lengths[work.slot];
  int32_t* known = slots_.token_ids + work.slot * slots_.tokens_ld + length + work.num_query - work.num_drafts;
  length += work.num_query;
  if (first == end) return;
  int32_t num_right = 0;
  while (num_right < work.num_drafts && tokens_[static_cast<size_t>(first + num_right)] == known[num_right])
    ++num_right;
  length -= work.num_drafts - num_right;
  // Of several samples the first is the slot's own; the others become slots when they are added.
  if (work.num_samples == 1) end = first + num_right + 1;
  std::copy_n(tokens_.begin() + first, num_right + 1, known);
}

// -- ops -----------------------------------------------------------------------------------------

void Runner::embed(const Op& op, int32_t row) {
  const Activations& to = shared(op.out);
  kernels_.unpack_row(op.matrix, row_token_[static_cast<size_t>(row)], to.values + row * to.ld);
}

void Runner::norm(const Op& op, int32_t row, const Activations& to) {
  const Activations& from = shared(op.src);
  kernels_.rms_norm(from.values + row * from.ld, op.weight, shape_.register_widths[op.src], op.eps,
                    to.values + row * to.ld);
}

// Norms a row of a product's source, where that goes with it, and quantizes it.
void Runner::prepare(const Stage& stage, int32_t row, const Activations& to) {
  if (stage.norm != nullptr) norm(*stage.norm, row, to);
  kernels_.prepare_row(stage.op->matrix, &to, row);
}

// A product's source to be prepared row by row. Of a quantized product only the quants are read by
// other threads: what is normed for it stays here, and makes no other core fetch its lines.
Activations Runner::shared_source_of(int thread, const Stage& stage, int32_t row) {
  const auto src = static_cast<size_t>(stage.op->src);
  Activations source = registers_[src].get();
  if (stage.norm != nullptr && is_quantized(stage.op->matrix->type))
    source.values = private_[static_cast<size_t>(thread)][src].get().values - row * source.ld;
  return source;
}

// A product's source; of few rows a thread's own, which it prepares once a phase: only quants, where
// nothing is normed.
Activations Runner::source_of(int thread, int phase, const Stage& stage) {
  const auto src = static_cast<size_t>(stage.op->src);
  const Activations& common = registers_[src].get();
  const bool is_prepared = stage.norm != nullptr || is_quantized(stage.op->matrix->type);
  if (!is_private() || !is_prepared || stage.has_quants) return common;
  Activations own = private_[static_cast<size_t>(thread)][src].get();
  if (stage.norm == nullptr) own.values = common.values;
  int& prepared = prepared_[static_cast<size_t>(thread)].phase;
  if (prepared != phase) {
    for (int32_t row = 0; row < num_rows_; ++row) prepare(stage, row, own);
    prepared = phase;
  }
  return own;
}

void Runner::multiply(int thread, int phase, int32_t first, int32_t last) {
  const Stage& stage = stages_[static_cast<size_t>(phase)];
  const Op& op = *stage.op;
  const Activations from = source_of(thread, phase, stage);
  const Activations& to = shared(op.out);
  last = std::min(last, panels_of(*op.matrix));
  kernels_.gemm(op.matrix, first, last, &from, num_rows_, to.values, to.ld, op.epilogue);
  if (stage.next == nullptr) return;
  for (int32_t row = 0; row < num_rows_; ++row) quantize(stage, row, first / 2 * 16, last / 2 * 16);
}

// Values [first, last) of a row of the op's output, whole groups but for the last.
void Runner::quantize(const Stage& stage, int32_t row, int32_t first, int32_t last) {
  const int32_t group = stage.next->group;
  kernels_.prepare_groups(stage.next, &shared(stage.op->out), row, first / group, (last + group - 1) / group);
}

void Runner::qk_norm(const Op& op, int32_t row) {
  const Activations& heads = shared(op.src);
  kernels_.qk_norm(heads.values + row * heads.ld, op.weight, shape_.num_heads + shape_.num_kv_heads,
                   shape_.head_dim, op.eps);
}

void Runner::rope_kv_write(const Op& op, int32_t row, int32_t first_kv_head, int32_t last_kv_head) {
  const Activations& qkv = shared(op.src);
  const KvLayer& layer = layers_[static_cast<size_t>(op.layer)];
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  const int64_t half = shape_.head_dim / 2;
  const int64_t position = row_position_[static_cast<size_t>(row)];
  const Sequence& sequence = sequences_[static_cast<size_t>(row_sequence_[static_cast<size_t>(row)])];
  const float* cos = op.is_rotary ? shape_.cos + position * half : nullptr;
  const float* sin = op.is_rotary ? shape_.sin + position * half : nullptr;
  kernels_.rope_kv_write(qkv.values + row * qkv.ld, cos, sin, shape_.num_heads, scale, &layer,
                         sequence.table[position / layer.block_size],
                         static_cast<int32_t>(position % layer.block_size), first_kv_head, last_kv_head);
}

void Runner::attend(int thread, const Stage& stage, int32_t first, int32_t last) {
  const Op& op = *stage.op;
  const Activations &queries = shared(op.src), &to = shared(op.out);
  auto& tasks = tasks_[static_cast<size_t>(thread)];
  tasks.clear();
  for (int32_t i = first; i < last; ++i) {
    const AttentionPart& part = parts_[static_cast<size_t>(i)];
    tasks.push_back({&layers_[static_cast<size_t>(op.layer)], &sequences_[static_cast<size_t>(part.sequence)],
                     part.first, part.count, part.kv_head, part.first_head, part.num_heads, op.window,
                     queries.values, queries.ld, to.values, to.ld,
                     scratch_[static_cast<size_t>(thread)].get(), nullptr, nullptr});
  }
  for (size_t i = 1; i < tasks.size(); ++i) {
    tasks[i].before = &tasks[i - 1];
    tasks[i - 1].after = &tasks[i];
  }
  for (const AttentionTask& task : tasks) {
    const int32_t row = task.sequence->first_row + task.first;
    if (stage.rope != nullptr) rope_kv_write(*stage.rope, row, task.kv_head, task.kv_head + 1);
    kernels_.attention(&task);
    if (stage.next == nullptr) continue;
    const int32_t begin = task.first_head * shape_.head_dim, width = task.num_heads * shape_.head_dim;
    for (int32_t i = 0; i < task.count; ++i) quantize(stage, row + i, begin, begin + width);
  }
}

// -- the head ------------------------------------------------------------------------------------

void Runner::select(const HeadPart& part, int32_t i) {
  const auto head = static_cast<size_t>(first_head_op_);
  const Op &select = ops_[head], &normed = ops_[head + 1], &out = ops_[head + 2];
  const Activations &from = shared(select.src), &to = shared(normed.out);
  const int width = shape_.hidden_size;
  const int64_t row = part.rows != nullptr ? part.rows[part.first + i] : part.first + i;
  float* values = to.values + i * to.ld;
  kernels_.rms_norm(from.values + row * from.ld, normed.weight, width, normed.eps, values);
  if (part.hidden != nullptr)
    std::memcpy(part.hidden + static_cast<int64_t>(part.first + i) * width, values,
                sizeof(float) * static_cast<size_t>(width));
  kernels_.prepare_row(out.matrix, &to, i);
}

void Runner::score(int thread, const HeadPart& part, int32_t i) {
  const ScoreItem& item = *part.score;
  const int64_t at = part.scored + i;
  kernels_.score(part.logits + i * logits_ld_, shape_.vocab_size, item.tokens[at], item.num_top,
                 scratch_[static_cast<size_t>(thread)].get(), item.logprobs + at, item.ranks + at,
                 item.top_ids + at * item.num_top, item.top + at * item.num_top);
}

}  // namespace dovetail
