// Rows of 4-bit codes with a scale byte for each 32 or 16 codes (MXFP4, NVFP4), in registers of AVX-512 with BF16. 16
// scales at once are converted to the float32 of scales.h, without a copy in memory. Products and sums are as in
// pairs.h; the sum of a run, in one lane or two, is multiplied by its scale once.
//
// If one of the scales of a row is NaN, the whole row is NaN, so one check for each row is enough.
#pragma once

#include "rows_bf16.h"
#include "scales_avx512.h"

namespace qload::cpu {
namespace {

template <class Scales, int Count>
class StoredPairs : public PairedInputs<Count> {
 public:
  using S = LanesAvx512;
  using Inputs = PairedInputs<Count>;
  static constexpr int kBlock = 128, kBytes = 64, kSpan = Scales::kRun;
  static constexpr bool kScales = true;

  StoredPairs(const Meaning& m, const ByteScales& scales) : codes_(m), scales_(scales) {
    for (int i = 0; i < kShared; ++i) {
      alignas(64) int32_t lane[16];
      for (int j = 0; j < 16; ++j) lane[j] = i * kEach + j * 8 / Scales::kRun;
      at_[i] = _mm512_load_si512(lane);
    }
  }

  static bool reads(const Meaning& m) {
    return m.run == Scales::kRun && !m.divide && m.factor == 1 && SixteenPairs<Count>::reads(m);
  }
  static int code(int at, const Meaning& m) { return SixteenPairs<Count>::code(at, m); }

  /// Adds columns [begin, end) of R rows times T tokens; `x` are their inputs from `begin` on.
  template <int T, int R>
  void add(const RowsOfCodes& rows, int row, int64_t begin, int64_t end, const uint32_t* x, float* totals) const {
    const uint8_t* from = rows.codes + row * rows.row_bytes + begin / 2;
    const uint8_t* const* const scales = rows.scales + row;
    const int64_t groups = (end + Scales::kRun - 1) / Scales::kRun;
    __m512 total[R][T], scale[R];
#pragma GCC unroll 2
    for (auto& of_row : total)
#pragma GCC unroll 8
      for (auto& sum : of_row) sum = S::all(0);
    int64_t c = begin, g = begin / Scales::kRun;
    for (; c + kShared * kBlock <= end; c += kShared * kBlock, g += 16) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r)
        scale[r] = scales_.of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales[r] + g)));
#pragma GCC unroll 4
      for (int i = 0; i < kShared; ++i, from += kBytes, x += T * kWords<StoredPairs>) {
        const uint8_t* codes[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          codes[r] = from + r * rows.row_bytes;
          ask_ahead(codes[r]);
        }
        block(codes, x, at_[i], scale, total);
      }
    }
    if (c < end) {
      const auto left = static_cast<__mmask16>((1u << (groups - g)) - 1);
      for (int r = 0; r < R; ++r) scale[r] = scales_.of(_mm_maskz_loadu_epi8(left, scales[r] + g));
      for (int i = 0; c < end; ++i, c += kBlock, from += kBytes, x += T * kWords<StoredPairs>) {
        alignas(64) uint8_t last[R][kBytes] = {};
        const uint8_t* codes[R];
        for (int r = 0; r < R; ++r) {
          codes[r] = last[r];
          std::memcpy(last[r], from + r * rows.row_bytes,
                      static_cast<size_t>(std::min<int64_t>(kBytes, (end - c + 1) / 2)));
        }
        block(codes, x, at_[i], scale, total);
      }
    }
    for (int r = 0; r < R; ++r) {
      const float none = is_number(scales[r], begin / Scales::kRun, groups) ? 0 : __builtin_nanf("");
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) totals[t * kPanel + r] += S::across(total[r][t]) + none;
    }
  }

 private:
  static constexpr int kEach = kBlock / Scales::kRun, kShared = 16 / kEach;  // scales of a block, blocks of 16 scales

  template <int T, int R>
  [[gnu::always_inline]] inline void block(const uint8_t* const (&from)[R], const uint32_t* x, __m512i at,
                                           const __m512 (&scale)[R], __m512 (&total)[R][T]) const {
    __m512i words[R];
    __m512 sums[R][T];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      words[r] = codes_.load(from[r]);
#pragma GCC unroll 8
      for (auto& sum : sums[r]) sum = S::all(0);
    }
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m512i value[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) value[r] = codes_.value(words[r], part);
#pragma GCC unroll 2
      for (int input = 0; input < Count; ++input)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r)
            sums[r][t] = Inputs::plus_product(sums[r][t], x + ((part * Count + input) * T + t) * S::kLanes, value[r]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      const __m512 scales = _mm512_permutexvar_ps(at, scale[r]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) total[r][t] = S::plus_product(total[r][t], sums[r][t], scales);
    }
  }

  static bool is_number(const uint8_t* scales, int64_t begin, int64_t end) {
    __mmask64 none = 0;
    for (int64_t g = begin; g < end; g += 64) {
      const __mmask64 some = end - g < 64 ? (1ull << (end - g)) - 1 : ~0ull;
      none |= Scales::none(_mm512_maskz_loadu_epi8(some, scales + g)) & some;
    }
    return !none;
  }

  SixteenPairs<Count> codes_;
  Scales scales_;
  __m512i at_[kShared];
};

template <class Scales, int Count>
bool takes_scales(const Meaning& m, FewRows& way) {
  way.stored = agrees<Scales>(*way.scales) && takes<StoredPairs<Scales, Count>>(m, way);
  return way.stored;
}

template <int Count>
bool takes_stored(const Meaning& m, FewRows& way) {
  if (way.scales->kind == ByteScales::kNone) return false;
  return takes_scales<Exponents, Count>(m, way) || takes_scales<Bytes8<false>, Count>(m, way) ||
         takes_scales<Bytes8<true>, Count>(m, way);
}

}  // namespace
}  // namespace qload::cpu
