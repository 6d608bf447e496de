// Codes in int32 to packed codes and back, row by row, in loops that compilers vectorize.
//
//   narrow  int32 (count,) -> bytes (ceil(count * bits / 8),), first code in the low bits
//   widen   the inverse; also for 3, 5, 6 and 7 bits, a bit stream with codes across byte borders
//   fields  words to words, bit field by bit field, a lane for each run of words
//
// `narrow` takes 2, 4 and 8 bits, `fields` any width. Memory is the limit: 4 bytes of int32 for half a byte of codes.
// Equal Packing.pack and Packing.unpack (qload/layouts/packing.py) for the plain order, bit for bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace qload::cpu {
namespace {

template <int Bits>
uint32_t narrow_bits(const int32_t* words, int64_t count, int shift, uint8_t* codes) {
  constexpr int per = 8 / Bits;
  constexpr uint32_t mask = (1u << Bits) - 1;
  const int64_t whole = count / per;
  uint32_t seen = 0;
  for (int64_t i = 0; i < whole; ++i) {
    uint32_t byte = 0;
    for (int j = 0; j < per; ++j) {
      const uint32_t code = static_cast<uint32_t>(words[i * per + j]) >> shift;
      seen |= code;
      byte |= (code & mask) << (j * Bits);
    }
    codes[i] = static_cast<uint8_t>(byte);
  }
  if (whole * per == count) return seen;
  uint32_t byte = 0;
  for (int64_t j = whole * per; j < count; ++j) {
    const uint32_t code = static_cast<uint32_t>(words[j]) >> shift;
    seen |= code;
    byte |= (code & mask) << ((j - whole * per) * Bits);
  }
  codes[whole] = static_cast<uint8_t>(byte);
  return seen;
}

// Packs pairs of words at once: a single shift puts the second next to the first.
template <>
uint32_t narrow_bits<4>(const int32_t* words, int64_t count, int shift, uint8_t* codes) {
  const int64_t whole = count / 2;
  const uint64_t mask = 0x0000000F0000000F;
  uint64_t seen = 0;
  for (int64_t i = 0; i < whole; ++i) {
    uint64_t pair;
    std::memcpy(&pair, words + 2 * i, 8);
    seen |= pair;
    pair = (pair >> shift) & mask;
    codes[i] = static_cast<uint8_t>(pair | (pair >> 28));
  }
  uint32_t both = static_cast<uint32_t>(seen) | static_cast<uint32_t>(seen >> 32);
  if (count % 2) {
    const uint32_t last = static_cast<uint32_t>(words[count - 1]);
    both |= last;
    codes[whole] = static_cast<uint8_t>((last >> shift) & 0xF);
  }
  return both >> shift;
}

/// Packs codes of four bits; `S` packs any even number of them and returns it, the loop below packs the others.
template <class S>
uint32_t narrow(int bits, const int32_t* words, int64_t count, int shift, uint8_t* codes) {
  if (bits == 2) return narrow_bits<2>(words, count, shift, codes);
  if (bits == 4) {
    uint32_t seen = 0;
    const int64_t done = S::narrow(words, count, shift, codes, seen);
    return seen | narrow_bits<4>(words + done, count - done, shift, codes + done / 2);
  }
  return narrow_bits<8>(words, count, shift, codes);
}

template <int Bits>
void widen_bits(const uint8_t* codes, int64_t count, int32_t* words) {
  constexpr int per = 8 / Bits;
  constexpr int mask = (1 << Bits) - 1;
  const int64_t whole = count / per;
  for (int64_t i = 0; i < whole; ++i)
    for (int j = 0; j < per; ++j) words[i * per + j] = (codes[i] >> (j * Bits)) & mask;
  for (int64_t j = whole * per; j < count; ++j) words[j] = (codes[whole] >> ((j - whole * per) * Bits)) & mask;
}

/// Reads 3 to 7 bytes as a number, by two overlapping loads: a load after stores of single bytes would wait for them.
template <int Bytes>
uint64_t few(const uint8_t* from) {
  using Half = std::conditional_t<(Bytes < 4), uint16_t, uint32_t>;
  constexpr int rest = Bytes - static_cast<int>(sizeof(Half));
  Half first, last;
  std::memcpy(&first, from, sizeof first);
  std::memcpy(&last, from + rest, sizeof last);
  return first | static_cast<uint64_t>(last) << 8 * rest;
}

// Spreads eight codes of a bit stream to a byte each: halves, quarters and eighths of the 64 bits, one after another.
template <int Bits>
uint64_t apart(uint64_t eight) {
  constexpr uint64_t pair = ((1u << 2 * Bits) - 1) * 0x0000000100000001ull;
  constexpr uint64_t one = ((1u << Bits) - 1) * 0x0001000100010001ull;
  eight = (eight & ((1ull << 4 * Bits) - 1)) | eight >> 4 * Bits << 32;
  eight = (eight & pair) | (eight >> 2 * Bits & pair) << 16;
  return (eight & one) | (eight >> Bits & one) << 8;
}

// Eight codes take as many bytes as a code has bits.
template <int Bits>
void widen_stream(const uint8_t* codes, int64_t count, int32_t* words) {
  constexpr int64_t most = 32;
  uint64_t bytes[most];
  for (int64_t done = 0; done < count; done += 8 * most, codes += most * Bits) {
    const int64_t some = count - done < 8 * most ? count - done : 8 * most, whole = some / 8;
    for (int64_t run = 0; run < whole; ++run) bytes[run] = apart<Bits>(few<Bits>(codes + run * Bits));
    if (some % 8) {
      uint64_t last = 0;
      std::memcpy(&last, codes + whole * Bits, static_cast<size_t>((some % 8 * Bits + 7) / 8));
      bytes[whole] = apart<Bits>(last & ((1ull << some % 8 * Bits) - 1));
    }
    widen_bits<8>(reinterpret_cast<const uint8_t*>(bytes), some, words + done);
  }
}

void widen(int bits, const uint8_t* codes, int64_t count, int32_t* words) {
  if (bits == 3) return widen_stream<3>(codes, count, words);
  if (bits == 5) return widen_stream<5>(codes, count, words);
  if (bits == 6) return widen_stream<6>(codes, count, words);
  if (bits == 7) return widen_stream<7>(codes, count, words);
  if (bits == 2) return widen_bits<2>(codes, count, words);
  if (bits == 4) return widen_bits<4>(codes, count, words);
  widen_bits<8>(codes, count, words);
}

constexpr int kLanes = 128;

// `Lanes`: the number of lanes as a constant; 0: it is `some`.
template <bool Unit, int Lanes>
uint32_t fields_of(const Runs& runs, const Field* fields, int count, int from_words, int to_words, int some) {
  const int lanes = Lanes ? Lanes : some;
  uint32_t in[kMostWords][kLanes], out[kMostWords][kLanes], seen = 0;
  for (int w = 0; w < from_words; ++w)
    for (int lane = 0; lane < lanes; ++lane)
      seen |= in[w][lane] = runs.from[w * runs.from_word + lane * (Unit ? 1 : runs.from_lane)];
  for (int w = 0; w < to_words; ++w)
    for (int lane = 0; lane < lanes; ++lane) out[w][lane] = 0;
  for (int f = 0; f < count; ++f) {
    const Field& field = fields[f];
    const uint32_t mask = (field.width == 32 ? ~0u : (1u << field.width) - 1) << field.to_bit;
    const uint32_t* const source = in[field.from];
    uint32_t* const target = out[field.to];
    const int up = field.to_bit - field.from_bit;  // one shift, then the mask, which clears the bits of other fields
    if (up >= 0)
      for (int lane = 0; lane < lanes; ++lane) target[lane] |= source[lane] << up & mask;
    else
      for (int lane = 0; lane < lanes; ++lane) target[lane] |= source[lane] >> -up & mask;
  }
  for (int w = 0; w < to_words; ++w)
    for (int lane = 0; lane < lanes; ++lane)
      runs.to[w * runs.to_word + lane * (Unit ? 1 : runs.to_lane)] = out[w][lane];
  return seen;
}

uint32_t fields(const Runs& runs, const Field* list, int count, int from_words, int to_words, int64_t lanes) {
  uint32_t seen = 0;
  Runs here = runs;
  const bool unit = runs.from_lane == 1 && runs.to_lane == 1;
  for (int64_t done = 0; done < lanes; done += kLanes) {
    const int some = static_cast<int>(lanes - done < kLanes ? lanes - done : kLanes);
    seen |= !unit ? fields_of<false, 0>(here, list, count, from_words, to_words, some)
            : some < kLanes ? fields_of<true, 0>(here, list, count, from_words, to_words, some)
                            : fields_of<true, kLanes>(here, list, count, from_words, to_words, some);
    here.from += kLanes * runs.from_lane;
    here.to += kLanes * runs.to_lane;
  }
  return seen;
}

}  // namespace
}  // namespace qload::cpu
