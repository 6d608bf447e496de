// Dequantization of packed codes, row by row: the last step of every dequantize on a CPU.
//
//   row[place[k]] = (value(code[k]) - zero[g]) * scale[g] * factor,   g = group[k] or k / run
//
//   in   codes   2 to 8 bits, plain order, packed: a stream
//        lookup  fp32  (2**bits,)   the value of each code; without it, the code itself
//        scale   fp32  (G,)         of this row; with `divide`, the divisor
//        zero    fp32  (G,)         of this row; optional
//        group   int32 (K,)         each 0 <= g < G: the builder of the weight checks it
//   out  row     fp32, fp16, bf16
//
// Codes of up to 4 bits with the same scale have at most 16 values. These are computed and rounded once for a run, and
// looked up in a register; codes of 3 bits are first widened to 4. All other codes are computed in blocks that stay in
// the cache. `S` has the shuffles and conversions of an instruction set; each may process fewer codes and returns the
// number.
//
// Equals Codes.dequantize (qload/spec/weight.py) followed by one `.to(dtype)`, bit for bit: float32 products
// in the same order, one rounding to nearest even each.
#pragma once

#include <cstdint>
#include <cstring>

#include "halves.h"
#include "kernels.h"
#include "narrow.h"

namespace qload::cpu {
namespace {

constexpr int kCodes = 256;  // codes in a block
constexpr int kValues = 16;  // of a code of 4 bits
constexpr int kSpread = 2048;  // codes of 3 bits widened at a time

template <class S>
void round_halves(const float* values, int64_t count, Float type, uint16_t* to) {
  if (type == Float::kBfloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat16_of(values[i]);
    return;
  }
  for (int64_t i = S::halves(values, count, to); i < count; ++i) to[i] = float16_of(values[i]);
}

// Scales values of one group: a separate loop for each step, so that compilers vectorize each.
inline void mean(const Meaning& m, int64_t group, int64_t count, float* values) {
  if (m.zero) {
    const float zero = m.zero[group];
    for (int64_t i = 0; i < count; ++i) values[i] -= zero;
  }
  const float scale = m.scale[group];
  if (m.divide)
    for (int64_t i = 0; i < count; ++i) values[i] /= scale;
  else
    for (int64_t i = 0; i < count; ++i) values[i] *= scale;
  if (m.factor != 1)
    for (int64_t i = 0; i < count; ++i) values[i] *= m.factor;
}

inline int64_t code_at(const Meaning& m, const uint8_t* codes, int64_t i) {
  if (m.bits == 8) return codes[i];
  if (m.bits == 2) return codes[i / 4] >> (2 * (i % 4)) & 3;
  return codes[i / 2] >> (i % 2 == m.high_first ? 0 : 4) & 15;
}

template <class Word>
int64_t look_up(const Meaning& m, const uint8_t* codes, int64_t done, int64_t count, const Word* table, Word* out) {
  for (; done < count; ++done) out[done] = table[code_at(m, codes, done)];
  return done;
}

// Dequantizes a run of one scale, of at most 4 bits a code, by a table of its values.
template <class S, class Word>
void expand_run(const Meaning& m, const float* all, const uint8_t* codes, int64_t group, int64_t count, Word* out,
                bool stream) {
  alignas(64) Word table[kValues];
  S::table(m, all, group, table);
  const int64_t done = m.bits == 4 ? S::look_up(codes, m.high_first, count, table, out, stream) : 0;
  look_up(m, codes, done, count, table, out);
}

// Computes codes [begin, begin + count) of a row, in any number of groups, as float32.
void compute(const Meaning& m, const uint8_t* codes, int64_t begin, int64_t count, float* values) {
  if (m.bits == 8 && m.lookup) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; ++i) values[i] = m.lookup[codes[i]];
  } else {
    int32_t code[kCodes];
    if (m.bits == 4 && m.high_first)
      for (int64_t i = 0; i < count; ++i) code[i] = static_cast<int32_t>(code_at(m, codes, i));
    else
      widen(m.bits, codes, count, code);
    if (m.lookup)
      for (int64_t i = 0; i < count; ++i) values[i] = m.lookup[code[i]];
    else
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(code[i]);
  }
  for (int64_t i = 0; i < count;) {
    int64_t next = count;
    if (!m.group) {
      const int64_t group = (begin + i) / m.run, end = (group + 1) * m.run - begin;
      next = end < count ? end : count;
      mean(m, group, next - i, values + i);
    } else {
      const int32_t* group = m.group + begin;
      if (m.zero)
        for (int64_t j = 0; j < count; ++j) values[j] -= m.zero[group[j]];
      if (m.divide)
        for (int64_t j = 0; j < count; ++j) values[j] /= m.scale[group[j]];
      else
        for (int64_t j = 0; j < count; ++j) values[j] *= m.scale[group[j]];
      for (int64_t j = 0; j < count; ++j) values[j] *= m.factor;
    }
    i = next;
  }
}

inline uint32_t spread_eight(uint32_t eight) {
  eight = (eight & 0xFFF) | (eight & 0xFFF000) << 4;
  eight = (eight & 0x003F003F) | (eight & 0x0FC00FC0) << 2;
  return (eight & 0x07070707) | (eight & 0x38383838) << 1;
}

// Widens codes of 3 bits to 4, whole words of eight.
template <class S>
void spread_three(const uint8_t* codes, int64_t count, uint8_t* nibbles) {
  const int64_t whole = count / 8;
  for (int64_t i = S::spread(codes, count, nibbles) / 8; i < whole; ++i) {
    const uint32_t eight = spread_eight(static_cast<uint32_t>(few<3>(codes + 3 * i)));
    std::memcpy(nibbles + 4 * i, &eight, 4);
  }
  uint32_t last = 0;
  std::memcpy(&last, codes + 3 * whole, static_cast<size_t>((count % 8 * 3 + 7) / 8));
  last = spread_eight(last);
  if (count % 8) std::memcpy(nibbles + 4 * whole, &last, 4);
}

template <class S, class Word>
void expand_as(const Meaning& m, const uint8_t* codes, int64_t begin, int64_t end, Word* row, bool stream);

template <class S, class Word>
void expand_three(const Meaning& m, const uint8_t* codes, int64_t begin, int64_t end, Word* row, bool stream) {
  alignas(64) uint8_t nibbles[kSpread / 2];
  float values[kValues];
  Meaning wide = m;
  wide.bits = 4;
  for (int code = 0; m.lookup && code < kValues; ++code) values[code] = m.lookup[code & 7];
  if (m.lookup) wide.lookup = values;
  for (int64_t k = begin; k < end; k += kSpread) {
    const int64_t next = k + kSpread < end ? k + kSpread : end;
    spread_three<S>(codes + (k - begin) / 8 * 3, next - k, nibbles);
    expand_as<S>(wide, nibbles, k, next, row, stream);
  }
}

template <class S, class Word>
void expand_as(const Meaning& m, const uint8_t* codes, int64_t begin, int64_t end, Word* row, bool stream) {
  if (m.bits == 3) return expand_three<S>(m, codes, begin, end, row, stream);
  const int64_t per = 8 / m.bits;
  if (m.bits <= 4 && !m.group && !m.place && m.run % per == 0 && begin % per == 0 && m.run >= 16) {
    float all[kValues];
    for (int code = 0; code < kValues; ++code)
      all[code] = m.lookup ? m.lookup[code & ((1 << m.bits) - 1)] : static_cast<float>(code);
    int64_t group = begin / m.run;
    for (int64_t k = begin; k < end; ++group) {
      const int64_t next = (group + 1) * m.run < end ? (group + 1) * m.run : end;
      expand_run<S>(m, all, codes + (k - begin) / per, group, next - k, row + k, stream);
      k = next;
    }
    return;
  }
  float values[kCodes];
  alignas(64) Word rounded[kCodes];
  for (int64_t k = begin; k < end; k += kCodes) {
    const int64_t count = end - k < kCodes ? end - k : kCodes;
    if constexpr (sizeof(Word) == 4) {
      if (!m.place && !stream) {  // directly to the output
        compute(m, codes + (k - begin) * m.bits / 8, k, count, static_cast<float*>(static_cast<void*>(row)) + k);
        continue;
      }
    }
    compute(m, codes + (k - begin) * m.bits / 8, k, count, values);
    if constexpr (sizeof(Word) == 4)
      std::memcpy(rounded, values, static_cast<size_t>(count) * 4);
    else
      round_halves<S>(values, count, m.out, rounded);
    if (m.place)
      for (int64_t i = 0; i < count; ++i) row[m.place[k + i]] = rounded[i];
    else
      S::copy(reinterpret_cast<const uint8_t*>(rounded), reinterpret_cast<uint8_t*>(row + k),
              count * static_cast<int64_t>(sizeof(Word)), stream);
  }
}

template <class S>
void expand(const Meaning& m, const uint8_t* codes, int64_t begin, int64_t end, void* row, bool stream) {
  if (m.out == Float::kFloat32) return expand_as<S>(m, codes, begin, end, static_cast<uint32_t*>(row), stream);
  expand_as<S>(m, codes, begin, end, static_cast<uint16_t*>(row), stream);
}

}  // namespace
}  // namespace qload::cpu
