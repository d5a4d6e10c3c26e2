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

// Bytes a token that are prefetched while the segment before is added up: its keys'. Int8 keys are
// multiplied too fast to fetch the values meanwhile, so there it is both tiles, which are neighbours.
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

}  // namespace
}  // namespace dovetail
