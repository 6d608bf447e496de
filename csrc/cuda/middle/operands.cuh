// Words as operands in registers, scaled: scale * (code - zero), the difference exact, the product rounded to T.
//
// A lane has, of each strip of 16 columns, four rows of columns c and c + 8: of Marlin's order rows 2t, 2t + 1, 2t + 8,
// 2t + 9 of 16, of our own 8t + 4p + 2h + r of 32. Of 4 bits they are in a word, nibbles numbered r b h (Marlin's) or
// r h b (our own) from the highest bit; of 8 bits in a word for each of the two columns, bytes numbered r h.
// Registers of an operand: (h, b) = (0, 0), (0, 1), (1, 0), (1, 1), rows of r side by side.
#pragma once

#include "../w4a16/weights.cuh"
#include "ring.cuh"

namespace qload::cuda::middle_room {

template <class T>
constexpr bool is_half = Number<T>::kMagic == 0;

/// (word & mask) | magic in one instruction, if `magic` lies in a register.
template <uint32_t mask>
__device__ __forceinline__ uint32_t pick(uint32_t word, uint32_t magic) {
  uint32_t codes;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(codes) : "r"(word), "n"(mask), "r"(magic));
  return codes;
}

template <class T>
__device__ __forceinline__ uint32_t scaled(uint32_t codes, uint32_t zero, uint32_t scale) {
  using Two = typename Number<T>::Two;
  return as<uint32_t>(__hmul2(__hsub2(as<Two>(codes), as<Two>(zero)), as<Two>(scale)));
}

/// Two columns' scales side by side, and zero points, each twice in a register, as codes are before they are taken off.
struct Columns {
  uint32_t scales, zero[2];

  template <class Two> __device__ __forceinline__ uint32_t scale_(int b) const { return as<uint32_t>(b ? __high2half2(as<__half2>(scales)) : __low2half2(as<__half2>(scales))); }
 uint32_t __device__ scale(int b) const { return scale_<__half2>(b); }
};

// A code four bits higher in a half lies beside 64 as it does beside 1024: no shift.
constexpr uint32_t kHigher = 0x54005400;

/// A zero point of column b. Of our own order all codes of the second column lie four bits higher.
template <class T, int bits, bool own>
__device__ __forceinline__ uint32_t zero_of(uint32_t zero, int b) {
  if constexpr (bits == 8 && !is_half<T>) return 0x4B000000u | zero;  // of a float
  if (own && bits == 4 && is_half<T> && b) return zero * 0x100010 | kHigher;
  return zero * 0x10001 | Number<T>::kExact;
}

template <class T, bool own, bool has_zeros>
__device__ __forceinline__ void operand_of(const uint32_t (&word)[1], const Columns& at, uint32_t (&to)[4]) {
  constexpr uint32_t exact = Number<T>::kExact;
  if constexpr (is_half<T> && (own || !has_zeros)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = own ? 2 * i : i, high = own ? low + 1 : low + 2;
      const uint32_t here = word[0] >> (8 * i);
      to[low] = scaled<T>(pick<0x000F000F>(here, exact), has_zeros ? at.zero[low % 2] : exact | 0x00080008,
                          at.scale(low % 2));
      to[high] = scaled<T>(pick<0x00F000F0>(here, kHigher), has_zeros ? at.zero[high % 2] : kHigher | 0x00800080,
                           at.scale(high % 2));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t here = word[0] >> (own ? 4 * i : 8 * (i % 2) + 4 * (i / 2));
      const uint32_t zero = has_zeros ? at.zero[i % 2] : exact | 0x00080008;
      to[i] = scaled<T>(pick<0x000F000F>(here, exact), zero, at.scale(i % 2));
    }
  }
}

template <class T, bool own, bool has_zeros>
__device__ __forceinline__ void operand_of(const uint32_t (&word)[2], const Columns& at, uint32_t (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int b = i % 2, h = i / 2;
    if constexpr (is_half<T>) {
      const uint32_t codes = __byte_perm(word[b], 0x64646464, h ? 0x4341 : 0x4240);
      to[i] = scaled<T>(codes, has_zeros ? at.zero[b] : 0x64806480, at.scale(b));
    } else {  // eight bits are exact in a bfloat16, but not beside an offset
      const float zero = __uint_as_float(has_zeros ? at.zero[b] : 0x4B000080);
      const float low = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7651 : 0x7650)) - zero;
      const float high = __uint_as_float(__byte_perm(word[b], 0x4B000000, h ? 0x7653 : 0x7652)) - zero;
      to[i] = as<uint32_t>(__hmul2(__floats2bfloat162_rn(low, high), as<__nv_bfloat162>(at.scale(b))));
    }
  }
}

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

/// What the compiler keeps in a register: left to itself it computes addresses again and again.
__device__ __forceinline__ int kept(int value) { return __shfl_sync(0xFFFFFFFF, value, threadIdx.x % 32); }

/// Where in a stage the words, scales and zero points of a lane lie.
template <int bits, bool own, int strips>
class Lane {
 public:
  using Words = uint32_t[strips][bits / 4];

  __device__ __forceinline__ Lane(const Place<strips>& place, const Work& work, int weights_at)
      : c_(place.lane / 4), first_strip_(place.first_strip) {
    int tile, lane;  // a row of a box has a tile of our own order, or four of Marlin's of 4 bits, two of 8
    if constexpr (own)
      tile = place.tile * 2048, lane = place.lane * 16 + first_strip_ * (bits == 4 ? 4 : 256);
    else
      tile = bits == 4 ? place.tile * 512 : place.tile / 2 * kBoxBytes<4> + place.tile % 2 * 1024,
      lane = place.lane * 4 * bits + first_strip_ * bits;
    words_ = kept(weights_at + place.quad * kBoxBytes<bits> + tile + lane);
    const int column = (place.quad * work.group_rows * kQuad + place.tile) * kTile;
    scales_ = kept(work.scales_at + (column + 8 * c_ + 2 * first_strip_) * 2);
    zeros_ = kept(work.zeros_at + (column + 8 * c_) * bits / 8 + (bits == 4 ? 0 : first_strip_ * 2));
  }

  __device__ __forceinline__ void words(const unsigned char* stage, int step, Words& to) const {
    constexpr int pieces = own && bits == 8 ? strips / 2 : 1;  // of our own order strips 0, 1 lie apart from 2, 3
    const int at = !own ? step * 2048 : bits == 4 ? step * 512 : step / 2 * kBoxBytes<4> + step % 2 * 1024;
#pragma unroll
    for (int i = 0; i < pieces; ++i)
      memcpy(to[i * strips / pieces], __builtin_assume_aligned(stage + words_ + at + i * 512, sizeof to == 8 ? 8 : 16),
             sizeof to / pieces);
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
    const auto scales = reinterpret_cast<const uint16_t*>(stage + scales_) - 8 * c_ + c_ / 2 * 8 + c_ % 2 - 2 * first_strip_;
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      const int eighth = 2 * (first_strip_ + j), at = eighth / 4 * 32 + eighth % 4 * 2;
      to.scales[j] = scales[at] | scales[at + 2] << 16;
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
          at[j].zero[b] = zero_of<T, 4, own>(group.zeros[0] >> (4 * (4 * b + first_strip_ + j)) & 15, b);
        if constexpr (has_zeros && bits == 8)
          at[j].zero[b] = zero_of<T, 8, own>(group.zeros[j / 2] >> (8 * (2 * b + j % 2)) & 255, b);
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
