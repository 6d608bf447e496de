// x times a weight of 4 or 8 bits in strips, best from 17 tokens on, on Hopper.
//
//   y[m, n] = sum over k of x[m, k] * round(scale[g, n] * (code[k, n] - zero[g, n]) - offset[g, n])  + bias[n],   g = k / group
//             numbers: scale * sum over k of x[m, k] * code[k, n], one scale per column, or per tile of 128 rows, 64 columns
//
//   in   see many.h; x and weights in boxes of 128-byte rows, both swizzled by 128 bytes
//   out  y      fp16 or bf16 (M, outputs), rounded once from fp32; or parts of it in fp32 for add_slices
//
//   needs    K in multiples of 128, N of 64; groups of 32, 64, 128, or one
//   grid     (1 or 2, y, z): y z tiles at once, 384 to 640 threads. Two blocks are a cluster and share x, or rows of K. A
//            block takes one tile after another, and starts the copies of the next one while it stores sums.
//   Weights are the 64-row operand of wgmma, in registers, tokens its columns: y^T = w^T x^T. Two groups of four warps
//   have strips of 64 columns each, a warp 16 of each strip; or teams of one or two groups take stages in turns and add
//   their sums at the end. A lane's words have the rows of eights in the order of x (layouts/strips.py). The swizzle of
//   their copy puts the words that a warp reads at once into different banks. Words become operands while earlier
//   products run. One thread fills the ring of weights, before the previous kernel has ended; another one fills that of
//   x, since only x may depend on the previous kernel.
//   The matrix unit is the limit from 128 tokens on; below, products and the conversion of operands alternate. With equal
//   zero points an operand takes one fma (device/symmetric.cuh). Numbers are exact operands (device/exact.cuh) with scales
//   for the sums, or are scaled (device/scaled_codes.cuh).
//
// Equals x @ StripsWeight.dequantize().T (qload/kernel_formats/strips.py), the weight rounded to the type of x, up to the
// rounding of fp32 sums.
#pragma once

#include <type_traits>

#include "../device/exact.cuh"
#include "../device/scaled_codes.cuh"
#include "../device/wgmma.cuh"
#include "operands.cuh"
#include "ring.cuh"
#include "sums.cuh"

namespace qload::cuda {

using ManyKernel = void (*)(const many_room::Work, const Many, const many_room::Matrices);

/// Kernel for a call, or null if no block has so many tokens and columns.
template <class T, Code code>
ManyKernel many_of(const Many& call);

/// The same for experts.
template <class T, Code code>
ManyKernel many_experts_of(const Many& call);

namespace many_room {

/// Registers of a thread: at the start, then for the threads that fill and the `threads` that multiply. The remaining
/// registers of a multiprocessor have room for a waiting block of add_slices, except with three groups of four warps.
template <int tokens, int threads>
struct Registers {
  static constexpr int kFirst = threads == 512 ? 96 : threads == 384 ? 128 : tokens > 192 ? 168 : 160;
  static constexpr int kGive = threads > 256 ? 32 : 40;
  static constexpr int kTake = threads == 512 ? 112 : threads == 384 ? 160 : tokens > 192 ? 232 : 216;
};

/// Stored scales and zero points, or offsets, of a group. Scaled numbers have two words of scales of 64 rows, the second
/// in place of zero points.
template <int strips>
struct Group {
  uint32_t scales[strips], zeros[strips];
};

/// Addresses of a lane's loads from stages. They stay in registers: otherwise the compiler recomputes them each time.
template <class T, Code code, int columns, int strips, Zeros zeros_of>
struct Lane {
  using Scaled = ScaledCodes<T, code>;
  static constexpr int bits = bits_of(code), kTileBytes = tile_bytes(bits);
  static constexpr bool kOffsets = zeros_of == Zeros::kOffsets;
  static constexpr int kZeroBytes = kTile * zero_width(bits, kOffsets) / 8;  // of a tile

  const Work& work;
  int words[4], scales, zeros;  // for scaled numbers `zeros` is the distance to the second word of scales
  bool grouped;

  /// `tile`: the lane's first.
  __device__ __forceinline__ Lane(const Work& work, const unsigned char* memory, bool grouped, int tile)
      : work(work), grouped(grouped) {
    const int lane = threadIdx.x % 32, c = lane / 4, u = lane % 4, j = threadIdx.x / 32 % 4;
    const int line = j * 4 + c / 2;  // of 128 bytes, with eight 16-byte units swizzled by the number of the line
    const int first = shared_address(memory), at = first + work.weights_at + tile * kTileBytes + line * 128 + u * 4;
#pragma unroll
    for (int t = 0; t < 4; ++t) words[t] = opaque(at + ((c % 2 * 4 + t) ^ (line % 8)) * 16);
    if constexpr (is_scaled(code)) {
      const int of_column = column_scale_bytes(code, work.group);
      scales = opaque(first + work.scales_at + tile * (kTile * of_column) + (j * 16 + c * 2) * of_column);
      zeros = Scaled::lower_at(work.group);
      return;
    }
    // With one scale per column their order differs: n = 32 a + 8 j + 2 t + r is at 32 a + 8 t + 2 j + r.
    const int own = grouped ? c * 8 + j * 2 : j / 2 * 32 + c / 2 * 8 + j % 2 * 4 + c % 2;
    scales = opaque(first + work.scales_at + (tile * kTile + own) * 2);
    zeros = opaque(first + work.zeros_at + tile * kZeroBytes + c * (kZeroBytes / 8) +
                     (kOffsets ? j * 4 : bits == 8 ? j / 2 * 4 : 0));
  }

  /// Load words of eights [first, last) of 32 rows of a piece of the stage.
  __device__ __forceinline__ void load(int stage, int piece, int first, int last, uint32_t (&to)[strips][4]) const {
    const int from = stage * (columns / kTile * kTileBytes) + piece * kPieceBytes;
#pragma unroll
    for (int i = first; i < last; ++i)
#pragma unroll
      for (int j = 0; j < strips; ++j) to[j][i] = load_shared(from + words[i] + j * kTileBytes);
  }

  /// Load group `row` of the stage.
  __device__ __forceinline__ void load(int stage, int row, Group<strips>& to) const {
    if constexpr (is_scaled(code)) {
      const int from = stage * work.scale_bytes + Scaled::words_at(work.group, row) + scales;
#pragma unroll
      for (int j = 0; j < strips; ++j) {
        const int place = from + j * (work.scale_bytes / (columns / kTile));
        to.scales[j] = load_shared(place), to.zeros[j] = load_shared(place + zeros);
      }
      return;
    }
    const int from = stage * work.scale_bytes + row * columns * 2 + scales;
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      const int place = from + j * (kTile * 2);
      if (grouped) {
        to.scales[j] = load_shared(place);
      } else {  // halves of two words
        const uint32_t first = load_shared(place & ~3), second = load_shared((place & ~3) + 4);
        to.scales[j] = __byte_perm(first, second, place & 2 ? 0x7632 : 0x5410);
      }
      if (zeros_of != Zeros::kSame)
        to.zeros[j] = load_shared(stage * work.zero_bytes + row * (columns / kTile * kZeroBytes) + zeros + j * kZeroBytes);
    }
  }
};

/// fp32 scales of numbers. With a scale for each tile of 128 rows, sums are in units of the latest one, so that no second
/// set of sums is needed; the next scale is in flight.
template <int strips>
struct TileScales {
  const float* at;
  int tiles, last;  // tiles in a row of scales; index of the last one from the first on
  float now[strips], next[strips];

  /// `unit`: of each column, if no tile has scales; `column`: the first of the strips; `own`: the lane's offset from it.
  __device__ __forceinline__ void begin(const Many& call, bool of_tiles, int expert, int stage, int column, int own,
                                        float (&unit)[strips][2]) {
    tiles = call.N / kTile, last = max(0, tiles - 1 - column / kTile);
    const int of_expert = of_tiles ? call.K / kStage * tiles : call.N, first = of_tiles ? stage * tiles + min(column / kTile, tiles - 1) : 0;
    at = opaque(static_cast<const float*>(call.scales) + int64_t{expert} * of_expert + first);
    if (!of_tiles) return of_columns(at, call.N, column + own, unit);
#pragma unroll
    for (int j = 0; j < strips; ++j) now[j] = next[j] = __ldg(at + min(j, last));
  }
  /// Scales of columns as units.
  static __device__ __forceinline__ void of_columns(const float* scales, int N, int own, float (&unit)[strips][2]) {
#pragma unroll
    for (int j = 0; j < strips; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) unit[j][b] = __ldg(scales + min(own + j * kTile + 8 * b, N - 1));
  }

  /// Begin a stage; `more`: another one follows `stages` later. `settle()` waits for products in flight.
  template <int values, class Settle>
  __device__ __forceinline__ void enter(bool more, int stages, float (&sums)[strips][values], const Settle& settle) {
    settle();
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      const float times = __fdividef(now[j], next[j]);
#pragma unroll
      for (int i = 0; i < values; ++i) sums[j][i] *= times;
      now[j] = next[j];
    }
    if (more) advance(stages);
  }

  /// Load the scales `stages` later.
  __device__ __forceinline__ void advance(int stages) {
    at = opaque(at + stages * tiles);
#pragma unroll
    for (int j = 0; j < strips; ++j) next[j] = __ldg(at + min(j, last));
  }
};

/// For codes with operands other than ScaledCodes.
struct OtherCodes {
  __device__ __forceinline__ explicit OtherCodes(Code) {}
};

/// `small`: groups of 32 or 64, or of any rows. `of_experts`: for experts, whose weights depend on routing.
template <class T, Code code, Zeros zeros_of, bool small, int tokens, int columns, int teams = 1, bool of_experts = false>
__global__ void __maxnreg__((Registers<tokens, multiplying(columns, teams)>::kFirst))
many_kernel(const __grid_constant__ Work work, const __grid_constant__ Many call,
            const __grid_constant__ Matrices from) {
#if QLOAD_WGMMA  // other chips do not use it, and it takes long to compile
  constexpr int bits = bits_of(code), strips = strips_of(columns, teams), eights = tokens / 8;
  constexpr int of_team = team_threads(columns, teams), multiply = multiplying(columns, teams);
  using Own = Registers<tokens, multiply>;
  constexpr int together = tokens <= 128 && strips <= 2 ? 2 : 1;  // steps of 16 rows in one group of products
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Barriers barriers;

  // A last turn follows the launch of whole turns, which had waited before this kernel could start: all inputs are complete.
  const bool follows = of_experts && call.turns == Turns::kLast;
  if (of_experts && !follows) wait_for_earlier_kernels();
  let_dependents_start();
  Rows<of_experts, tokens> own_rows(call, work);
  int item = first_item();
  if (item >= own_rows.items) {
    if (follows) wait_for_earlier_kernels();  // the next kernel takes all earlier ones as complete
    return;
  }
  start_rings(call, work, barriers, of_team);
  if (threadIdx.x == multiply) prefetch_description(from.weights);
  if (threadIdx.x == multiply + 32) prefetch_description(from.inputs);
  if (call.neighbours)
    cluster_arrive(), cluster_wait();
  else
    __syncthreads();

  if (threadIdx.x >= multiply) {
    release_registers<Own::kGive>();
    Filling<code, zeros_of, small, tokens, columns, teams, of_experts> filling{from, call, work, own_rows, memory, barriers};
    return fill<multiply>(filling);
  }

  acquire_registers<Own::kTake>();
  const int team = teams == 1 ? 0 : __shfl_sync(~0u, threadIdx.x / of_team, 0);  // uniform
  const int tile = threadIdx.x % of_team / 128 * strips, number = opaque(threadIdx.x % 32), strip = opaque(threadIdx.x / 32 % 4);
  const bool grouped = work.group < call.K;
  const Lane<T, code, columns, strips, zeros_of> lane(work, memory, grouped, tile);
  constexpr bool scaled = is_scaled(code), numbers = is_number(code) && !scaled;
  constexpr bool offsets = zeros_of == Zeros::kOffsets, has_zeros = zeros_of == Zeros::kPoints;
  constexpr bool symmetric = zeros_of == Zeros::kSame && !small && !numbers && !scaled;
  // Bits of the number of 32 rows that are zero for the first rows of a small group. Scaled numbers load scales for 64 rows.
  const int inside = scaled ? 1 : work.group / 32 - 1;
  using Integers = std::conditional_t<
      symmetric, Symmetric<T, bits>, std::conditional_t<offsets, OffsetColumns<T, bits>, Columns<T, bits>>>;
  using Numbers = std::conditional_t<scaled, uint2, Exact<T, code>>;
  std::conditional_t<numbers || scaled, Numbers, Integers> at[strips];
  [[maybe_unused]] const std::conditional_t<scaled, ScaledCodes<T, code>, OtherCodes> codes(call.code);
  [[maybe_unused]] TileScales<strips> scales;
  Group<strips> next;
  uint32_t word[strips][4], operand[2][together][strips][4];
  Sums<strips, eights> sum;
  Slot box{2 * team}, stage{team};
  int box_before = 0, stage_before = 0;
  constexpr int box_rows = tokens * kBox * 2 / 16;  // in units of `rows`
  const uint64_t all_rows = matrix_descriptor(memory);
  uint64_t rows = all_rows + 2 * team * box_rows;

  const auto enter = [&] {
    if constexpr (numbers) {
      return;
    } else if constexpr (scaled) {
#pragma unroll
      for (int j = 0; j < strips; ++j) at[j] = codes.kept(next.scales[j], next.zeros[j]);
    } else if constexpr (symmetric) {
      cuda::enter(at, next.scales, sum.of, [] { wait_for_products<0>(); });
    } else if constexpr (offsets) {
#pragma unroll
      for (int j = 0; j < strips; ++j) at[j].enter(next.scales[j], next.zeros[j], call.offset_zero);
    } else {
#pragma unroll
      for (int j = 0; j < strips; ++j) at[j].template enter<has_zeros>(next.scales[j], next.zeros[j], strip);
    }
  };
  const auto load_group = [&](int thirty_two) {
    if constexpr (!numbers) lane.load(stage.at, small ? thirty_two >> (inside ? 1 : 0) : 0, next);
  };
  const auto begins = [&](int thirty_two) { return small && !(thirty_two & inside); };

  // Release a box to its filling thread: here, and in the other block if a neighbour fills it; else once more here.
  const bool leaves_twice = number == 1 && call.neighbours;
  uint32_t left_at = 0;
  const auto leave_box = [&] {
    if (number == 0) arrive(barriers.x_free + box_before);
    if (leaves_twice) arrive_remote(left_at + box_before * 8);
  };

#pragma unroll 1
  do {
    const Place place(call, work, own_rows, columns, item);
    own_rows.enter(place.row);
    left_at = remote_address(barriers.x_free, place.shares_x ? 1 - blockIdx.x : blockIdx.x);
#pragma unroll
    for (int j = 0; j < strips; ++j)
#pragma unroll
      for (int i = 0; i < eights * 4; ++i) sum.of[j][i] = 0;
    wait_for(barriers.arrived + stage.at, stage.parity);
    load_group(0);
    if constexpr (symmetric)
      cuda::begin(at, next.scales);
    else
      enter();
    if constexpr (numbers)
      scales.begin(call, grouped, own_rows.expert(), place.first + team, place.column + tile * kTile, strip * 16 + number / 4, sum.unit);
    if constexpr (scaled)
      scales.of_columns(static_cast<const float*>(call.zeros) + int64_t{own_rows.expert()} * call.N, call.N, place.column + tile * kTile + strip * 16 + number / 4,
                        sum.unit);
    lane.load(stage.at, 0, 0, 4, word);

    const int all = (place.last - place.first - team + teams - 1) / teams;
#pragma unroll 1
    for (int left = all; left > 0; --left) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of a stage: a box of x
        const bool more = half == 0 || left > 1;
        wait_for(barriers.x_arrived + box.at, box.parity);
#pragma unroll
        for (int step = 0; step < 4; step += together) {
          auto& made = operand[step / together % 2];
#pragma unroll
          for (int s = 0; s < together; ++s) {
            if (step + s == 0 && (half == 0 ? grouped : begins(2))) enter();
            if (step + s == 2 && begins(2 * half + 1)) enter();
            const int i = (step + s) % 2 * 2;
#pragma unroll
            for (int j = 0; j < strips; ++j) {
              if constexpr (scaled) {
                const uint32_t both = codes.of_few_rows(at[j], step + s);
                uint32_t(&to)[4] = made[s][j];
                codes.pair(word[j][i], (step + s) / 2, both, to[0], to[1]);
                codes.pair(word[j][i + 1], (step + s) / 2, both, to[2], to[3]);
              } else {
                operand_of(word[j][i], word[j][i + 1], at[j], made[s][j]);
              }
              if (bits == 4 && step < 2 && !scaled) word[j][i] >>= 8, word[j][i + 1] >>= 8;
            }
          }
          if constexpr (numbers)
            if (half == 0 && step == 0 && grouped) scales.enter(left > 1, teams, sum.of, [] { wait_for_products<0>(); });
          fence_products();
#pragma unroll
          for (int s = 0; s < together; ++s)
#pragma unroll
            for (int j = 0; j < strips; ++j) multiply_async(sum.of[j], made[s][j], rows + 2 * (step + s), T{});
          group_products();
          // Load the next data while products run.
          if (step == 0 && begins(2 * half + 1)) load_group(2 * half + 1);
          if (step == 2 && more) {
            if (half == 1) {
              stage_before = stage.at;
              stage.template advance<teams>(work.stages);
              wait_for(barriers.arrived + stage.at, stage.parity);
            }
            if (half == 1 ? grouped : begins(2)) load_group(half == 1 ? 0 : 2);
          }
          const int eights_from = step % 2 * 2, eights_to = eights_from + 2 * together;
          if (bits == 8 && step < 2) lane.load(stage.at, 2 * half + 1, eights_from, eights_to, word);
          if (step >= 2 && more) lane.load(stage.at, (1 - half) * (bits / 4), eights_from, eights_to, word);
          wait_for_products<1>();
          if (step == 0 && (half == 1 || left < all)) {  // the previous box is free
            leave_box();
            if (half == 0) {
              __syncwarp();  // all lanes have read their words
              if (number == 0) arrive(barriers.free + stage_before);
            }
          }
        }
        box_before = box.at;
        if (teams > 1 && half == 1) {
          box.template advance<2 * teams - 1>(work.boxes);
          rows = all_rows + box.at * box_rows;
        } else {
          box.advance(work.boxes);
          rows += box.at ? box_rows : (1 - work.boxes) * box_rows;
        }
      }
    }
    wait_for_products<0>();
#pragma unroll
    for (int j = 0; j < strips; ++j)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if constexpr (scaled)
          sum.unit[j][b] *= ScaledCodes<T, code>::kUnit;
        else if constexpr (numbers)
          sum.unit[j][b] = grouped ? scales.now[j] : sum.unit[j][b];
        else if constexpr (symmetric)
          sum.unit[j][b] = at[j].unit(b);
        else
          sum.unit[j][b] = 1;
      }

    item += items_together();
    if (teams == 1 && item < own_rows.items) {  // the data of the last tile are free
      leave_box();
      __syncwarp();
      if (number == 0) arrive(barriers.free + stage.at);
      stage.advance(work.stages);
    }
    const Share share{tile * kTile, strip * 16 + number / 4, number % 4 * 2, 0};
    finish<teams, of_team>(call, place, own_rows, team, share, memory, reinterpret_cast<T*>(memory + work.transpose_at), &barriers.sums_arrived, sum);
  } while (teams == 1 && item < own_rows.items);
  if (follows) wait_for_earlier_kernels();
  if (call.neighbours) cluster_arrive(), cluster_wait();  // until then the neighbour may arrive at barriers here
#endif
}

}  // namespace many_room
}  // namespace qload::cuda
