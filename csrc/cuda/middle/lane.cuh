// Where a lane's words, scales and zero points lie in a stage of the ring.
#pragma once

#include <cstring>

#include "operands.cuh"
#include "ring.cuh"

namespace qload::cuda::middle_room {

/// Where the strips of a warp lie in the tiles of its block: warps of four beside each other share a quad of tiles.
template <int strips>
struct Place {
  static constexpr int kShare = 4 / strips;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int quad = warp / 4 / kShare, tile = warp % 4, first_strip = warp / 4 % kShare * strips;

  __device__ int column(int strip) const { return (quad * kQuad + tile) * kTile + 16 * (first_strip + strip); }
};

/// Scales of columns c and c + 8 of each strip side by side, and words with their zero points.
template <int bits, int strips>
struct Group {
  uint32_t scales[strips], zeros[bits == 4 ? 1 : strips / 2];
};

/// What has to stay in a register: compilers compute an address anew in every stage unless they cannot.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(0xFFFFFFFF, value, threadIdx.x % 32); }

/// Where in a stage the words, scales and zero points of a lane lie.
template <int bits, int strips>
class Lane {
 public:
  using Words = uint32_t[strips][bits / 4];

  __device__ __forceinline__ Lane(const Place<strips>& place, const Work& work, int weights_at)
      : c_(place.lane / 4), first_strip_(place.first_strip) {
    // A row of a box has four tiles of 4 bits, two of 8.
    const int tile = bits == 4 ? place.tile * 512 : place.tile / 2 * kBoxBytes<4> + place.tile % 2 * 1024;
    const int lane = place.lane * 4 * bits + first_strip_ * bits;
    words_ = kept(weights_at + place.quad * kBoxBytes<bits> + tile + lane);
    const int column = (place.quad * work.group_rows * kQuad + place.tile) * kTile;
    scales_ = kept(work.scales_at + (column + 8 * c_ + 2 * first_strip_) * 2);
    zeros_ = kept(work.zeros_at + (column + 8 * c_) * bits / 8 + (bits == 4 ? 0 : first_strip_ * 2));
  }

  __device__ __forceinline__ void words(const unsigned char* stage, int step, Words& to) const {
    memcpy(to, __builtin_assume_aligned(stage + words_ + step * 2048, sizeof to == 8 ? 8 : 16), sizeof to);
  }

  /// Of the group that is `row` among those of the stage.
  template <bool has_zeros>
  __device__ __forceinline__ void group(const unsigned char* stage, int row, Group<bits, strips>& to) const {
    constexpr int pitch = kQuad * kTile;
    memcpy(to.scales, __builtin_assume_aligned(stage + scales_ + row * pitch * 2, sizeof to.scales), sizeof to.scales);
    if (has_zeros) zeros(stage + row * pitch * bits / 8, to);
  }

  /// Where one scale serves a column, their order is another: n = 32 a + 8 j + 2 t + r lies at 32 a + 8 t + 2 j + r.
  template <bool has_zeros>
  __device__ __forceinline__ void whole(const unsigned char* stage, Group<bits, strips>& to) const {
    const auto scales = reinterpret_cast<const uint16_t*>(stage + scales_) - 8 * c_ - 2 * first_strip_;
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      const int strip = first_strip_ + j, at = strip / 2 * 32 + c_ / 2 * 8 + strip % 2 * 4 + c_ % 2;
      to.scales[j] = scales[at] | uint32_t{scales[at + 2]} << 16;
    }
    if (has_zeros) zeros(stage, to);
  }

  /// What operands of a group's rows are made with.
  template <class T, bool has_zeros>
  __device__ __forceinline__ void enter(const Group<bits, strips>& group, Columns (&at)[strips]) const {
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      at[j].scales = group.scales[j];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        at[j].zero[b] = 0;
        if constexpr (has_zeros && bits == 4)
          at[j].zero[b] = zero_of<T, 4>(group.zeros[0] >> (4 * (4 * b + first_strip_ + j)) & 15);
        if constexpr (has_zeros && bits == 8)
          at[j].zero[b] = zero_of<T, 8>(group.zeros[j / 2] >> (8 * (2 * b + j % 2)) & 255);
      }
    }
  }

 private:
  __device__ __forceinline__ void zeros(const unsigned char* stage, Group<bits, strips>& to) const {
    memcpy(to.zeros, __builtin_assume_aligned(stage + zeros_, sizeof to.zeros), sizeof to.zeros);
  }

  int c_, first_strip_, words_, scales_, zeros_;
};

}  // namespace qload::cuda::middle_room
