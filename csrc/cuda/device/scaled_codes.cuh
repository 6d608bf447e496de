// Operands of numbers times the scales of their groups of rows.
//
// e2m1 with byte scales (s0e5m3) of 16 or 32 rows: operands are exact in fp16 and bf16. The bits of a code, shifted to
// the places of T's exponent and mantissa, are a number 2**14 or 2**126 times too small, subnormal or not. The bits of a
// scale are a half with the right value, or a bfloat16 2**112 times too small. Two products with powers of two correct
// most of that; the second leaves a scale of up to 2**16 with a factor of 2**111. An operand is then 2**14 or 2**15
// times too small, with at most six significant bits. The byte of a scale has a bias of 15. In total a sum is 1 / kUnit
// of its true value.
//
// e4m3 with a power of two for 32 rows has scales in the same form, between 2**-14 and 2**7. The product with the
// smallest code, 2**-9, is 2**-23, and with the largest, 448, it is 57344. All are halves; NaN stays NaN.
//
// Tables of 16 entries (nf4, fp4 of bitsandbytes) have fp32 scales of 64 or 128 rows. Entries and scales are rounded to
// T, and their products once more. Byte permutations look up entries: the last three bits of four codes select from each
// half of the table, and the first bit selects one of both results.
//
// The scales of a tile of 128 rows are contiguous (layouts/strips.py). A lane reads those of its columns c and c + 8:
// four groups of 32 rows have a byte each, in pairs of neighbours; of groups of 16 rows, the upper ones of each 32 come
// before the lower ones; one or two groups have a float each, in pairs of neighbours.
#pragma once

#include "exact.cuh"

namespace qload::cuda {

constexpr int kScaledRows = 128;  // rows with contiguous scales

/// Bytes of scales of a column in 128 rows.
__host__ __device__ constexpr int column_scale_bytes(Code code, int group) {
  return (is_of_table(code) ? 4 : 1) * kScaledRows / group;
}
/// Whether kernels exist for groups of this size.
__host__ __device__ constexpr bool has_scales_of(Code code, int group) {
  return is_of_table(code) ? group == 64 || group == 128 : group == 32 || (group == 16 && code == Code::kE2m1);
}

/// Multiply two operands by the scales of column c + 8b.
template <class T>
__device__ __forceinline__ uint32_t times_scale(uint32_t two, uint32_t scales, int b) {
  using Two = typename Number<T>::Two;
  if constexpr (Number<T>::kMagic == 0)  // a product reads either half of a register without another instruction
    return as<uint32_t>(__hmul2(as<Two>(two), b ? __high2half2(as<Two>(scales)) : __low2half2(as<Two>(scales))));
  else
    return as<uint32_t>(__hmul2(as<Two>(two), b ? __high2bfloat162(as<Two>(scales)) : __low2bfloat162(as<Two>(scales))));
}

/// Byte scales (s0e5m3) of 16 or 32 rows as T; a bfloat16 is multiplied by 2**`more`.
template <class T, int more>
class ByteScales {
 public:
/// A lane's load for 128 rows at its first column: the scales of its rows, which lie in one half of 32.
  using LaneScales = uint2;
  static __device__ __forceinline__ LaneScales start_load(const unsigned char* at, int group, int half) {
    return __ldg(reinterpret_cast<const uint2*>(at + half * lower_at(group)));
  }
  /// The same from a copy in shared memory.
  static __device__ __forceinline__ LaneScales load(uint32_t at, int group, int half) {
    return load_shared_pair(at + half * lower_at(group));
  }
  static __device__ __forceinline__ uint2 kept(LaneScales asked) { return asked; }
/// Scales of step `step` of 32 rows.
  static __device__ __forceinline__ uint32_t of_rows(uint2 kept, int step) {
    return scales(step < 2 ? kept.x : kept.y, step % 2);
  }

/// Offset of the words of each 64 rows, and the distance between both words.
  static constexpr __device__ int words_at(int, int sixty_four) { return sixty_four * 4; }
  static constexpr __device__ int lower_at(int group) { return group == 16 ? 8 : 0; }
  static __device__ __forceinline__ uint2 kept(uint32_t upper, uint32_t lower) { return make_uint2(upper, lower); }
/// Scales of step `step` of 16 of 64 rows.
  static __device__ __forceinline__ uint32_t of_few_rows(uint2 kept, int step) {
    return scales(step % 2 ? kept.y : kept.x, step / 2);
  }

 private:
  static constexpr bool kHalf = Number<T>::kMagic == 0;

  static __device__ __forceinline__ uint32_t scales(uint32_t two_groups, int group) {
    using Two = typename Number<T>::Two;
    const uint32_t bytes = __byte_perm(two_groups, 0, group ? 0x3424 : 0x1404);  // each byte in the upper half of 16 bits
    if constexpr (kHalf) return bytes >> 1;
    const Two exact = __hmul2(as<Two>(bytes >> 4), as<Two>(0x77807780u));  // 2**112
    constexpr uint32_t kMore = (127 + more) << 7;
    return as<uint32_t>(more ? __hmul2(exact, as<Two>(kMore << 16 | kMore)) : exact);
  }
};

/// e2m1.
template <class T, Code code>
class ScaledCodes : public ByteScales<T, 111> {
 public:
  static constexpr float kUnit = Number<T>::kMagic == 0 ? 0.5f : 1.0f;

  __device__ __forceinline__ explicit ScaledCodes(Code) {}

/// Operands of columns c and c + 8 from a word of strips; i: which of the two groups 32 rows apart. Each operand has two
/// neighbouring rows.
  __device__ __forceinline__ void pair(uint32_t word, int i, uint32_t scales, uint32_t& first, uint32_t& second) const {
    first = of(word, 2 * i, scales), second = of(word, 2 * i + 1, scales);
  }

 private:
  static constexpr bool kHalf = Number<T>::kMagic == 0;

  static __device__ __forceinline__ uint32_t of(uint32_t word, int nibble, uint32_t scales) {
    const int up = 12 - 4 * nibble, more = kHalf ? up - 3 : up - 6;  // shifts to the sign bit and to the other bits
    const uint32_t size = (more < 0 ? word >> -more : word << more) & (kHalf ? 0x0E000E00 : 0x01C001C0);
    return times_scale<T>((word << up & 0x80008000) | size, scales, nibble % 2);
  }
};

template <class T>
class ScaledCodes<T, Code::kMxfp8> : public ByteScales<T, 0> {
 public:
  static constexpr float kUnit = 1.0f / 128;  // the byte of a scale has a bias of 7

  __device__ __forceinline__ explicit ScaledCodes(Code) {}

/// A word has codes of two neighbouring rows.
  __device__ __forceinline__ void pair(uint32_t word, int, uint32_t scales, uint32_t& first, uint32_t& second) const {
    first = times_scale<T>(Exact<T, Code::kMxfp8>::of(word, 0), scales, 0);
    second = times_scale<T>(Exact<T, Code::kMxfp8>::of(word, 1), scales, 1);
  }
};

/// Entry `i` of nf4, or of fp4 of bitsandbytes.
__device__ __forceinline__ constexpr float table_entry(Code code, int i) {
  constexpr float nf4[16] = {
      -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
      0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
  constexpr float fp4[16] = {0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
                             -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
  return code == Code::kNf4 ? nf4[i] : fp4[i];
}

template <class T>
class ScaledCodes<T, Code::kNf4> {
 public:
  static constexpr float kUnit = 1;

/// `code`: selects the table.
  __device__ __forceinline__ explicit ScaledCodes(Code code) {
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const auto two = [&](int i) { return narrow<T>(table_entry(code, i), table_entry(code, i + 1)); };
      const uint32_t first = two(4 * four), second = two(4 * four + 2);
      low_[four] = in_register(__byte_perm(first, second, 0x6420)), high_[four] = in_register(__byte_perm(first, second, 0x7531));
    }
  }

  using LaneScales = uint4;
  static __device__ __forceinline__ LaneScales start_load(const unsigned char* at, int group, int) {
    const uint2 first = __ldg(reinterpret_cast<const uint2*>(at));
    const uint2 second = __ldg(reinterpret_cast<const uint2*>(at + words_at(group, 1)));
    return make_uint4(first.x, first.y, second.x, second.y);
  }
  static __device__ __forceinline__ LaneScales load(uint32_t at, int group, int) {
    const uint2 first = load_shared_pair(at), second = load_shared_pair(at + words_at(group, 1));
    return make_uint4(first.x, first.y, second.x, second.y);
  }
  static __device__ __forceinline__ uint2 kept(LaneScales asked) {
    return make_uint2(rounded(asked.x, asked.y), rounded(asked.z, asked.w));
  }
  static __device__ __forceinline__ uint32_t of_rows(uint2 kept, int step) { return step < 2 ? kept.x : kept.y; }

  static constexpr __device__ int words_at(int group, int sixty_four) { return group == 64 ? sixty_four * 8 : 0; }
  static constexpr __device__ int lower_at(int) { return 4; }  // to column c + 8
  static __device__ __forceinline__ uint2 kept(uint32_t first, uint32_t second) {
    return make_uint2(rounded(first, second), 0);
  }
  static __device__ __forceinline__ uint32_t of_few_rows(uint2 kept, int) { return kept.x; }

  __device__ __forceinline__ void pair(uint32_t word, int i, uint32_t scales, uint32_t& first, uint32_t& second) const {
    const uint32_t four = __byte_perm(word, 0, i ? 0x4431 : 0x4420);  // nibbles: rows r, columns b
    const uint32_t upper = chosen(four, four << 4, 0x9D8C), last = four & 0x7777;  // all bits of bytes from the upper half
    const uint32_t low = either(upper, chosen(low_[2], low_[3], last), chosen(low_[0], low_[1], last));
    const uint32_t high = either(upper, chosen(high_[2], high_[3], last), chosen(high_[0], high_[1], last));
    first = times_scale<T>(__byte_perm(low, high, 0x6240), scales, 0);
    second = times_scale<T>(__byte_perm(low, high, 0x7351), scales, 1);
  }

 private:
  uint32_t low_[4], high_[4];  // bytes of entries

  static __device__ __forceinline__ uint32_t rounded(uint32_t first, uint32_t second) {
    return narrow<T>(__uint_as_float(first), __uint_as_float(second));
  }
/// prmt: bytes of two registers selected by the nibbles of `by`; a nibble with bit 8 repeats the byte's sign.
  static __device__ __forceinline__ uint32_t chosen(uint32_t first, uint32_t second, uint32_t by) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "r"(by));
    return bytes;
  }
  static __device__ __forceinline__ uint32_t either(uint32_t mask, uint32_t first, uint32_t second) {
    return (mask & first) | (~mask & second);
  }
};

}  // namespace qload::cuda
