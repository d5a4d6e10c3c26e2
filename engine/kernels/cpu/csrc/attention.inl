// Grouped-query attention over paged keys and values.
//
//     for each segment of 256 positions:  for each tile of rows:
//         scores -> weights, by the largest score so far -> sums of weighted values
//
// Segments stand at fixed positions, and every sum runs over the positions that its row sees, in
// order: the bits of a row are the same in any tile, chunk or task. What a row does not see is
// selected away, not multiplied by zero: free blocks and tails may hold anything, NaN too.
//
// A task's rows are (position, query head) pairs, heads innermost; a tile is some heads of some
// positions.
#pragma once

#include "attention_scores.inl"
#include "attention_values.inl"

namespace dovetail {
namespace {

constexpr int32_t kTaskRows = 32;
constexpr float kLog2E = 1.44269504f;  // scores are kept in powers of two
constexpr float kInfinity = __builtin_inff();

int32_t attention_rows(int32_t, int32_t) { return kTaskRows; }

// Of a row: its queries, its sums of values, its sum of weights by lane, its largest score, and
// its scale and excess.
DT_INLINE int64_t row_floats(int32_t head_dim) { return 2 * padded(head_dim) + 2 * kLanes; }

int64_t attention_scratch(int32_t, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  return row_floats(head_dim) * kTaskRows * (num_heads / num_kv_heads);
}

// What stands in a task's scratch.
struct RowStates {
  Query* queries;       // tile by tile: [rows of all tiles before it * padded head_dim]
  float* sums;          // [rows][padded head_dim]
  float* totals;        // [rows][16]
  float* largest;       // [rows]
  QueryScale* scales;   // [rows]
};

DT_INLINE RowStates lay_out(const AttentionTask& task) {
  const int64_t rows = static_cast<int64_t>(task.count) * task.num_heads;
  const int64_t width = padded(task.layer->head_dim);
  RowStates states;
  states.sums = task.scratch;
  states.totals = states.sums + rows * width;
  states.queries = reinterpret_cast<Query*>(states.totals + rows * kLanes);
  states.largest = reinterpret_cast<float*>(states.queries + rows * width);
  states.scales = reinterpret_cast<QueryScale*>(states.largest + rows);
  for (int64_t i = 0; i < rows * (width + kLanes); ++i) task.scratch[i] = 0.0f;  // sums, totals
  for (int64_t row = 0; row < rows; ++row) states.largest[row] = -kInfinity;
  return states;
}

// Some heads of some positions of a task: rows row(0, 0) ... of `RowStates` do not follow each
// other where the task has more heads.
struct Tile {
  int32_t first, positions;  // of the task's rows of the sequence
  int32_t head, heads;       // from the task's first head
  int32_t rows;              // positions * heads
  int64_t state;             // of its first row; the others follow
};

// Copies a row's query, scaled so that scores are powers of two.
DT_INLINE void pack_floats(const float* from, int32_t head_dim, Query* to) {
  int32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(&to[d].value, mul(load(from + d), splat(kLog2E)));
  for (; d < head_dim; ++d) to[d].value = from[d] * kLog2E;
}

// Rounds a row's query to 8 bits: int8 keys are multiplied with it exactly.
DT_INLINE QueryScale pack_quants(const float* from, int32_t head_dim, Query* to) {
  const RowScale scale = row_scale(from, head_dim);
  int32_t sum = 0;
  for (int32_t d = 0; d < head_dim; d += kLanes, to += kLanes / 4) {
    int8_t quants[kLanes];
    quantize_sixteen(from, d, head_dim, scale.inverse, quants);
    std::memcpy(&to->quants, quants, sizeof quants);
    for (int32_t i = 0; i < kLanes; ++i) sum += quants[i];
  }
  return {scale.scale * kLog2E, 128 * sum};
}

template <KvType type>
void pack_queries(const AttentionTask& task, const Tile& tile, const RowStates& states) {
  const int32_t head_dim = task.layer->head_dim;
  Query* to = states.queries + tile.state * padded(head_dim);
  for (int32_t r = 0; r < tile.rows; ++r, to += padded(head_dim)) {
    const int64_t row = task.sequence->first_row + task.first + tile.first + r / tile.heads;
    const int64_t head = task.first_head + tile.head + r % tile.heads;
    const float* from = task.queries + row * task.queries_ld + head * head_dim;
    if constexpr (type == KvType::kInt8)
      states.scales[tile.state + r] = pack_quants(from, head_dim, to);
    else
      pack_floats(from, head_dim, to);
  }
}

DT_INLINE int32_t clamp(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

// Lanes [first, last) of a group that a row sees.
DT_INLINE Visible lanes_of(const Segment& segment, int32_t group, Visible visible) {
  return {clamp(visible.first - segment.position[group], 0, segment.tokens[group]),
          clamp(visible.last - segment.position[group], 0, segment.tokens[group])};
}

DT_INLINE bool is_whole(const Segment& segment, int32_t group, Visible visible) {
  return visible.first <= segment.position[group] &&
         visible.last >= segment.position[group] + segment.tokens[group];
}

// Groups [first, last) of the segment that hold some of the positions.
DT_INLINE Visible groups_with(const Segment& segment, Visible visible) {
  int32_t first = 0, last = segment.num_groups;
  while (first < last && segment.position[first] + segment.tokens[first] <= visible.first) ++first;
  while (last > first && segment.position[last - 1] >= visible.last) --last;
  return {first, last};
}

// 2^x for x <= 0, as 2^floor(x) times a polynomial of degree 5: relative error below 2e-7, and
// exactly 1 at 0. Saturates at 2^-126.
DT_INLINE F32x16 exp2_nonpositive(F32x16 x) {
  x = max(x, splat(-126.0f));
  const F32x16 f = fraction_of(x);
  F32x16 p = splat(1.86713028e-3f);
  p = fma(p, f, splat(9.01702978e-3f));
  p = fma(p, f, splat(5.57999127e-2f));
  p = fma(p, f, splat(2.40164444e-1f));
  p = fma(p, f, splat(6.93151295e-1f));
  p = fma(p, f, splat(1.0f));
  return scale_by_floor(p, x);
}

DT_INLINE F32x16 keep_visible(F32x16 x, Visible lanes, float other) {
  return lanes.first > 0 || lanes.last < kLanes ? select_lanes(x, lanes.first, lanes.last, other) : x;
}

// A row's earlier sums, made relative to a new largest score.
DT_INLINE void rescale(const RowStates& states, int64_t row, float largest, int64_t width) {
  const F32x16 factor = exp2_nonpositive(splat(states.largest[row] - largest));
  float* totals = states.totals + row * kLanes;
  store(totals, mul(load(totals), factor));
  float* sums = states.sums + row * width;
  for (int64_t d = 0; d < width; d += kLanes) store(sums + d, mul(load(sums + d), factor));
  states.largest[row] = largest;
}

// One row's scores of a segment become weights.
template <KvType type>
void soften(const Segment& segment, Visible visible, float* scores, const RowStates& states, int64_t row,
            int64_t width) {
  const Visible groups = groups_with(segment, visible);
  if (groups.first == groups.last) return;
  F32x16 most = splat(states.largest[row]);
  for (int32_t g = groups.first; g < groups.last; ++g)
    most = max(most, keep_visible(load(scores + g * kLanes), lanes_of(segment, g, visible), -kInfinity));
  const float largest = largest_of(most);
  if (largest != states.largest[row]) rescale(states, row, largest, width);
  F32x16 total = load(states.totals + row * kLanes);
  for (int32_t g = groups.first; g < groups.last; ++g) {
    F32x16 weight = exp2_nonpositive(sub(load(scores + g * kLanes), splat(largest)));
    weight = keep_visible(weight, lanes_of(segment, g, visible), 0.0f);
    total = add(total, weight);
    if constexpr (type == KvType::kInt8) weight = mul(weight, load(segment.value_scales[g]));
    store(scores + g * kLanes, weight);
  }
  store(states.totals + row * kLanes, total);
}

// Calls `Function<rows>::call(...)`.
template <template <int> class Function, int R = kRowTile, typename... Arguments>
DT_INLINE void with_rows(int32_t rows, Arguments... arguments) {
  if constexpr (R == 1)
    Function<1>::call(arguments...);
  else if (rows == R)
    Function<R>::call(arguments...);
  else
    with_rows<Function, R - 1>(rows, arguments...);
}

template <KvType type>
struct Kernels {
  template <int R>
  struct Scores {
    static void call(const Segment* segment, Visible groups, const KvLayer* layer, const Query* queries,
                     const QueryScale* scales, float* scores) {
      tile_scores<type, R>(*segment, groups.first, groups.last, *layer, queries, scales, scores);
    }
  };
  template <int R>
  struct Values {
    static void call(const Run* runs, int32_t num_runs, const KvLayer* layer, const float* weights, float* sums) {
      add_values<type, R>(runs, num_runs, *layer, weights, sums);
    }
  };
};

// One tile's rows over one segment.
template <KvType type>
struct TilePass {
  const AttentionTask& task;
  const Segment& segment;
  const RowStates& states;
  const Tile& tile;
  const char* const* wanted;  // by group: what is read after this pass

  Visible sees(int32_t position) const {  // of the tile's
    const int32_t last = task.sequence->start + task.first + tile.first + position + 1;
    return {task.window > 0 && last > task.window ? last - task.window : 0, last};
  }

  void run() {
    const int32_t head_dim = task.layer->head_dim;
    const Visible groups = groups_with(segment, {sees(0).first, sees(tile.positions - 1).last});
    if (groups.first == groups.last) return;
    alignas(64) float scores[kRowTile * kSegmentTokens];
    with_rows<Kernels<type>::template Scores>(tile.rows, &segment, groups, task.layer,
                                              static_cast<const Query*>(states.queries + tile.state * padded(head_dim)),
                                              static_cast<const QueryScale*>(states.scales + tile.state), scores + 0);
    for (int32_t r = 0; r < tile.rows; ++r)
      soften<type>(segment, sees(r / tile.heads), scores + r * kSegmentTokens, states, tile.state + r,
                   padded(head_dim));
    add(groups, scores);
  }

  // Groups that all rows see whole are added for all rows at once; those before and after, position
  // by position.
  void add(Visible groups, const float* weights) {
    const Visible latest = sees(tile.positions - 1), earliest = sees(0);
    int32_t first = groups.first, last = groups.last;
    while (first < last && segment.position[first] < latest.first) ++first;
    while (last > first && segment.position[last - 1] + segment.tokens[last - 1] > earliest.last) --last;
    add_by_position({groups.first, first}, weights);
    add_rows(0, tile.rows, {first, last}, {0, earliest.last}, weights);
    add_by_position({last, groups.last}, weights);
  }

  void add_by_position(Visible groups, const float* weights) {
    if (groups.first == groups.last) return;
    for (int32_t position = 0; position < tile.positions; ++position)
      add_rows(position * tile.heads, tile.heads, groups, sees(position), weights);
  }

  void add_rows(int32_t first_row, int32_t rows, Visible groups, Visible visible, const float* weights) {
    Run runs[kSegmentGroups];
    int32_t num_runs = 0;
    const int32_t head_dim = task.layer->head_dim;
    const int64_t stride = head_dim * kElementBytes<type>;
    for (int32_t g = groups.first; g < groups.last; ++g) {
      const Visible lanes = lanes_of(segment, g, visible);
      if (lanes.first < lanes.last)
        runs[num_runs++] = {segment.values[g] + lanes.first * stride, wanted[g] + lanes.first * fetched_bytes<type>(*task.layer),
                            g * kLanes + lanes.first, lanes.last - lanes.first};
    }
    if (num_runs == 0) return;
    with_rows<Kernels<type>::template Values>(rows, static_cast<const Run*>(runs), num_runs, task.layer,
                                              weights + first_row * kSegmentTokens,
                                              states.sums + (tile.state + first_row) * padded(head_dim));
  }
};

// The tile that follows the one that starts at (position, head) of the task.
DT_INLINE Tile tile_at(const AttentionTask& task, int32_t position, int32_t head, int64_t state) {
  Tile tile{position, 1, head, 0, 0, state};
  if (task.num_heads <= kRowTile) {
    tile.heads = task.num_heads;
    tile.positions = clamp(kRowTile / task.num_heads, 1, task.count - position);
  } else {  // heads in tiles as equal as can be
    const int32_t parts = (task.num_heads + kRowTile - 1) / kRowTile;
    tile.heads = clamp((task.num_heads + parts - 1) / parts, 1, task.num_heads - head);
  }
  tile.rows = tile.positions * tile.heads;
  return tile;
}

template <typename Function>
DT_INLINE void for_each_tile(const AttentionTask& task, Function&& function) {
  int64_t state = 0;
  for (int32_t position = 0; position < task.count;) {
    int32_t head = 0, positions = 1;
    while (head < task.num_heads) {
      const Tile tile = tile_at(task, position, head, state);
      function(tile);
      head += tile.heads;
      positions = tile.positions;
      state += tile.rows;
    }
    position += positions;
  }
}

template <KvType type>
void finish(const AttentionTask& task, const Tile& tile, const RowStates& states) {
  const int32_t head_dim = task.layer->head_dim;
  for (int32_t r = 0; r < tile.rows; ++r) {
    const int64_t row = task.sequence->first_row + task.first + tile.first + r / tile.heads;
    const int64_t head = task.first_head + tile.head + r % tile.heads;
    const float total = sum_of(load(states.totals + (tile.state + r) * kLanes));
    finish_row<type>(states.sums + (tile.state + r) * padded(head_dim), 1.0f / total, head_dim,
                     task.out + row * task.out_ld + head * head_dim);
  }
}

template <KvType type>
void prefetch_group(const char* wanted, const KvLayer& layer) {
  const int64_t bytes = kLanes * fetched_bytes<type>(layer);
  for (int64_t line = 0; line < bytes; line += 64) prefetch(wanted + line);
}

// The segments of one task, one after the other: each knows what is read after it.
template <KvType type>
class Segments {
 public:
  explicit Segments(const AttentionTask& task) : task_(task), groups_(task.layer->block_size) {
    const int32_t position = task.sequence->start + task.first;
    const int32_t seen = task.window > 0 && position >= task.window ? position - task.window + 1 : 0;
    first_ = groups_.group_of(seen);
    last_ = groups_.group_of(position + task.count - 1) + 1;
    at_ = first_ / kSegmentGroups * kSegmentGroups;
    list(at_, current_);
    for (int32_t g = 0; g < current_.num_groups; ++g) prefetch_group<type>(current_.wanted[g], *task.layer);
    look_ahead();
  }

  const Segment& current() const { return current_; }
  const char* const* wanted() const { return wanted_; }

  bool advance() {
    at_ += kSegmentGroups;
    if (at_ >= last_) return false;
    current_ = next_;
    look_ahead();
    return true;
  }

 private:
  void list(int32_t at, Segment& to) const {
    list_groups<type>(task_, groups_, at < first_ ? first_ : at,
                      last_ - at < kSegmentGroups ? last_ : at + kSegmentGroups, to);
  }

  // After the last segment comes, most likely, the next head's first: near enough the same groups.
  void look_ahead() {
    const bool is_last = at_ + kSegmentGroups >= last_;
    if (!is_last) list(at_ + kSegmentGroups, next_);
    const Segment& after = is_last ? current_ : next_;
    const int64_t offset = is_last ? task_.layer->head_stride : 0;
    for (int32_t g = 0; g < current_.num_groups; ++g)
      wanted_[g] = g < after.num_groups ? after.wanted[g] + offset : current_.wanted[g];
  }

  const AttentionTask& task_;
  const Groups groups_;
  int32_t first_, last_, at_;
  Segment current_, next_;
  const char* wanted_[kSegmentGroups];
};

template <KvType type>
void attend(const AttentionTask& task) {
  const RowStates states = lay_out(task);
  for_each_tile(task, [&](const Tile& tile) { pack_queries<type>(task, tile, states); });
  const int64_t num_rows = static_cast<int64_t>(task.count) * task.num_heads;
  Segments<type> segments(task);
  do {
    const Segment& segment = segments.current();
    for_each_tile(task, [&](const Tile& tile) {
      const bool is_last = tile.state + tile.rows == num_rows;  // others are followed by the same keys
      TilePass<type>{task, segment, states, tile, is_last ? segments.wanted() : segment.wanted}.run();
    });
  } while (segments.advance());
  for_each_tile(task, [&](const Tile& tile) { finish<type>(task, tile, states); });
}

void attention(const AttentionTask* task) {
  switch (task->layer->type) {
    case KvType::kF32: attend<KvType::kF32>(*task); break;
    case KvType::kBf16: attend<KvType::kBf16>(*task); break;
    case KvType::kInt8: attend<KvType::kInt8>(*task); break;
  }
}

}  // namespace
}  // namespace dovetail
