// Where a task reads: groups of up to 16 positions of one head, their keys in one vector's lanes.
//
// A block of 16 positions is one group, one of 32 two, one of 24 a group of 16 and one of 8. Groups
// are counted from the sequence's first position, and a segment is a fixed run of them.
#pragma once

#include "kv_write.inl"

namespace dovetail {
namespace {

constexpr int kSegmentGroups = 16;
constexpr int kSegmentTokens = kSegmentGroups * kLanes;

template <KvType type>
constexpr int64_t kElementBytes = type == KvType::kF32 ? 4 : type == KvType::kBf16 ? 2 : 1;
// Elements of one token's key that stand together: pairs or quads.
template <KvType type>
constexpr int32_t kKeyRun = type == KvType::kInt8 ? 4 : 2;

// Bytes a token that are fetched long before: its keys'. Of int8 both tiles', which are neighbours.
template <KvType type>
DT_INLINE int64_t fetched_bytes(const KvLayer& layer) {
  if (type == KvType::kInt8) return layer.head_stride / layer.block_size;
  return layer.head_dim * kElementBytes<type>;
}

DT_INLINE int64_t padded(int32_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// The positions [first, last) that a row sees.
struct Visible {
  int32_t first, last;
};

// One segment's groups, of those that some row of the task sees.
struct Segment {
  int32_t num_groups;
  bool has_halves;                   // of an odd block: some group has 8 tokens
  int32_t position[kSegmentGroups];  // of a group's first token
  int32_t tokens[kSegmentGroups];    // 16, or 8 at the end of an odd block
  const char* keys[kSegmentGroups];
  const char* wanted[kSegmentGroups];  // fetched_bytes a token
  const char* values[kSegmentGroups];
  const float* key_scales[kSegmentGroups];  // int8 only
  const float* value_scales[kSegmentGroups];
};

// A sequence's positions in groups.
struct Groups {
  int32_t block_size, per_block;

  explicit Groups(int32_t size) : block_size(size), per_block((size + kLanes - 1) / kLanes) {}
  int32_t group_of(int32_t position) const {
    return position / block_size * per_block + position % block_size / kLanes;
  }
};

// Lists groups [first, last) of the sequence, at most a segment.
template <KvType type>
void list_groups(const AttentionTask& task, const Groups& groups, int32_t first, int32_t last, Segment& to) {
  const KvLayer& layer = *task.layer;
  to.num_groups = last - first;
  to.has_halves = groups.block_size % kLanes != 0;
  for (int32_t i = 0; i < to.num_groups; ++i) {
    const int32_t block = (first + i) / groups.per_block;
    const int32_t offset = (first + i) % groups.per_block * kLanes;
    const char* tile = tile_of(layer, task.sequence->table[block], task.kv_head);
    const char* value_tile = tile + layer.value_offset;
    to.position[i] = block * groups.block_size + offset;
    to.tokens[i] = groups.block_size - offset < kLanes ? groups.block_size - offset : kLanes;
    to.keys[i] = tile + offset * kKeyRun<type> * kElementBytes<type>;
    to.wanted[i] = tile + offset * fetched_bytes<type>(layer);
    to.values[i] = value_tile + offset * layer.head_dim * kElementBytes<type>;
    if (type == KvType::kInt8) {
      to.key_scales[i] = reinterpret_cast<const float*>(tile + layer.scale_offset) + offset;
      to.value_scales[i] = reinterpret_cast<const float*>(value_tile + layer.scale_offset) + offset;
    }
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

// Where a group stands, as much of it as is prefetched.
template <KvType type>
DT_INLINE const char* place_of(const AttentionTask& task, const Groups& groups, int32_t group) {
  const char* tile = tile_of(*task.layer, task.sequence->table[group / groups.per_block], task.kv_head);
  return tile + group % groups.per_block * kLanes * fetched_bytes<type>(*task.layer);
}

template <KvType type>
void prefetch_group(const char* place, const KvLayer& layer) {
  const int64_t bytes = kLanes * fetched_bytes<type>(layer);
  for (int64_t line = 0; line < bytes; line += 64) prefetch(place + line);
}

// The groups that a task reads, [first, last).
struct Range {
  int32_t first, last;

  // Groups that are on their way while one is read. A task ends with those of the next. Measured on
  // Zen 4: with 8 or 32, steps at context 512 take 6 to 10% longer.
  int32_t num_ahead() const { return last - first < 24 ? last - first : 24; }
};

DT_INLINE Range range_of(const AttentionTask& task, const Groups& groups) {
  const int32_t position = task.sequence->start + task.first;
  const int32_t seen = task.window > 0 && position >= task.window ? position - task.window + 1 : 0;
  return {groups.group_of(seen), groups.group_of(position + task.count - 1) + 1};
}

// The segments of one task, one after the other: each knows what is fetched meanwhile.
template <KvType type>
class Segments {
 public:
  explicit Segments(const AttentionTask& task)
      : task_(task), groups_(task.layer->block_size), range_(range_of(task, groups_)) {
    const int32_t fetched = task.before != nullptr ? range_of(*task.before, groups_).num_ahead() : 0;
    for (int32_t g = fetched; g < range_.num_ahead(); ++g)
      prefetch_group<type>(place_of<type>(task, groups_, range_.first + g), *task.layer);
    at_ = range_.first / kSegmentGroups * kSegmentGroups;
    list();
  }

  const Segment& current() const { return current_; }
  const char* const* wanted() const { return wanted_; }

  bool advance() {
    at_ += kSegmentGroups;
    if (at_ >= range_.last) return false;
    list();
    return true;
  }

 private:
  void list() {
    const int32_t first = at_ < range_.first ? range_.first : at_;
    const int32_t last = range_.last - at_ < kSegmentGroups ? range_.last : at_ + kSegmentGroups;
    list_groups<type>(task_, groups_, first, last, current_);
    const Range after = task_.after != nullptr ? range_of(*task_.after, groups_) : Range{0, 0};
    for (int32_t g = 0; g < current_.num_groups; ++g) {
      const int32_t ahead = first + g + range_.num_ahead(), beyond = ahead - range_.last + after.first;
      if (ahead < range_.last)
        wanted_[g] = place_of<type>(task_, groups_, ahead);
      else
        wanted_[g] = beyond < after.last ? place_of<type>(*task_.after, groups_, beyond) : current_.wanted[g];
    }
  }

  const AttentionTask& task_;
  const Groups groups_;
  const Range range_;
  int32_t at_;
  Segment current_;
  const char* wanted_[kSegmentGroups];
};

}  // namespace
}  // namespace dovetail
