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

#include "attention_rows.inl"
#include "attention_scores.inl"
#include "attention_values.inl"

namespace dovetail {
namespace {

constexpr int32_t kTaskRows = 32;

int32_t attention_rows(int32_t, int32_t) { return kTaskRows; }

// Of a row: its queries, its sums of values, its sum of weights by lane, its largest score, and
// its scale and excess.
DT_INLINE int64_t row_floats(int32_t head_dim) { return 2 * padded(head_dim) + 2 * kLanes; }

int64_t attention_scratch(int32_t, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  return row_floats(head_dim) * kTaskRows * (num_heads / num_kv_heads);
}

// Some heads of some positions of a task.
struct Tile {
  int32_t first, positions;  // of the task's rows of the sequence
  int32_t head, heads;       // from the task's first head
  int32_t rows;              // positions * heads
  int64_t state;             // of its first row in RowStates; the others follow
};

// Calls function(state, offset) for each row of a tile; offset: of its head in the task's queries
// and outputs, whose rows are `ld` apart.
template <typename Function>
DT_INLINE void for_each_row(const AttentionTask& task, const Tile& tile, int64_t ld, Function&& function) {
  int64_t state = tile.state;
  const int64_t first_row = task.sequence->first_row + task.first + tile.first;
  for (int64_t row = first_row; row < first_row + tile.positions; ++row)
    for (int64_t head = task.first_head + tile.head; head < task.first_head + tile.head + tile.heads; ++head)
      function(state++, row * ld + head * task.layer->head_dim);
}

template <KvType type>
void pack_queries(const AttentionTask& task, const Tile& tile, const RowStates& states) {
  const int32_t head_dim = task.layer->head_dim;
  for_each_row(task, tile, task.queries_ld, [&](int64_t state, int64_t offset) {
    Query* to = states.queries + state * padded(head_dim);
    if constexpr (type == KvType::kInt8)
      states.scales[state] = pack_quants(task.queries + offset, head_dim, to);
    else
      pack_floats(task.queries + offset, head_dim, to);
  });
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
    static void call(const Segment* segment, Visible groups, const KvLayer* layer, const char* const* wanted,
                     const Query* queries, const QueryScale* scales, float* scores) {
      tile_scores<type, R>(*segment, groups.first, groups.last, *layer, wanted, queries, scales, scores);
    }
  };
  template <int R>
  struct Values {
    static void call(const Run* runs, int32_t num_runs, const KvLayer* layer, const float* weights,
                     float* sums) {
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
    const Query* queries = states.queries + tile.state * padded(head_dim);
    const QueryScale* scales = states.scales + tile.state;
    with_rows<Kernels<type>::template Scores>(tile.rows, &segment, groups, task.layer, wanted, queries, scales,
                                              static_cast<float*>(scores));
    int32_t row = 0;
    for (int32_t position = 0; position < tile.positions; ++position)
      for (int32_t head = 0; head < tile.heads; ++head, ++row)
        soften<type>(segment, sees(position), scores + row * kSegmentTokens, states, tile.state + row,
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
    // Of int8, the first half was fetched with the scores.
    const int64_t skipped = type == KvType::kInt8 ? kLanes * stride : 0;
    for (int32_t g = groups.first; g < groups.last; ++g) {
      const Visible lanes = lanes_of(segment, g, visible);
      if (lanes.first < lanes.last)
        runs[num_runs++] = {segment.values[g] + lanes.first * stride, wanted[g] + skipped + lanes.first * stride,
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
  for_each_row(task, tile, task.out_ld, [&](int64_t state, int64_t offset) {
    const float total = sum_of(load(states.totals + state * kLanes));
    finish_row<type>(states.sums + state * padded(head_dim), 1.0f / total, head_dim, task.out + offset);
  });
}

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
