// Addition of a block's sums over teams and two blocks, and the store of y or a part of it.
//
// A lane has, for each strip of 16 columns, sums of columns c and c + 8 of tokens 2t, 2t + 1 of each eight tokens: four
// consecutive sums per eight, with both columns of a token apart.
#pragma once

#include <type_traits>

#include "../device/number.cuh"
#include "../device/slices.cuh"
#include "../device/wgmma.cuh"
#include "ring.cuh"

namespace qload::cuda::many_room {

/// A sum is `of` times the unit of its column, c or c + 8.
template <int strips, int eights>
struct Sums {
  float of[strips][eights * 4], unit[strips][2];
};

/// Position of a lane's sums in its block: first column of its group of warps, its own offset from it, its first token,
/// and the first token of all lanes.
struct Share {
  int columns, column, token, first;
};

/// Teams of one or two blocks have sums of the same tile. Each keeps a share of the eights and receives the other teams'
/// sums for it, which it adds in the order of teams. Shares are multiples of the unit of `store`; if teams' shares would
/// not be, the first team of each block keeps the whole share of the block. `own`: number of a team among all.
template <int own, int ranks, int teams, int threads, int strips, int eights>
struct Sharing {
  static constexpr int parts = ranks * teams, of_block = eights / ranks;  // teams, and eights of one block
  static constexpr int keepers = of_block % (teams * (kTransposeTokens / 8)) == 0 ? teams : 1;  // of a block
  static constexpr int share = of_block / keepers;
  static constexpr bool keeps = own % teams < keepers;
  static constexpr int kept = own / teams * keepers + own % teams;      // number of the share
  static constexpr int others = parts - 1, fours = strips * share * threads;  // of one team for another
  static constexpr int bytes = keepers * others * fours * 16;           // that a block receives

  using All = Sums<strips, eights>;
  using Kept = Sums<strips, share>;

  /// Send the other teams their shares. `room`: a buffer in the shared memory of each block without pending copies;
  /// `arrived`: a barrier of the block, if there are two blocks.
  static __device__ __forceinline__ void send_shares(const All& all, float4* room, uint64_t* arrived) {
#pragma unroll
    for (int number = 0; number < ranks * keepers; ++number) {
      if (team(number) == own) continue;
      float4* to = place(room, own, number);
      const int rank = number / keepers;
      const uint32_t there = ranks == 1 ? 0 : remote_address(to, rank), peer_barrier = ranks == 1 ? 0 : remote_address(arrived, rank);
#pragma unroll
      for (int i = 0; i < strips * share; ++i) {
        const float4 four = of(all, i / share, number * share + i % share);
        if constexpr (ranks == 1)
          to[i * threads] = four;
        else
          send(four, there + i * threads * 16, peer_barrier);
      }
    }
  }

  /// The team's own share with the received sums added.
  static __device__ __forceinline__ Kept added(const All& all, float4* room) {
    Kept sums;
#pragma unroll
    for (int j = 0; j < strips; ++j) {
      sums.unit[j][0] = sums.unit[j][1] = 1;
#pragma unroll
      for (int i = 0; i < share; ++i) {
        float4 sum{};
#pragma unroll
        for (int from = 0; from < parts; ++from) {
          const float4 its = from == own ? of(all, j, kept * share + i) : place(room, from, kept)[(j * share + i) * threads];
          if (from == 0)
            sum = its;
          else
            add(sum, its);
        }
        float* to = sums.of[j] + 4 * i;
        to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
      }
    }
    return sums;
  }

 private:
  /// The team that keeps share `number`.
  static constexpr __device__ int team(int number) { return number / keepers * teams + number % keepers; }

  /// Buffer in a block for the sums of team `from` for share `number`.
  static __device__ __forceinline__ float4* place(float4* room, int from, int number) {
    const int slot = from < team(number) ? from : from - 1;
    return room + (number % keepers * others + slot) * fours + threadIdx.x % threads;
  }

  /// Rounded before the addition, so that a sum does not depend on the team that keeps it.
  static __device__ __forceinline__ float4 of(const All& all, int strip, int eight) {
    const float* at = all.of[strip] + 4 * eight;
    const float first = all.unit[strip][0], second = all.unit[strip][1];
    return make_float4(__fmul_rn(at[0], first), __fmul_rn(at[1], first), __fmul_rn(at[2], second), __fmul_rn(at[3], second));
  }
};

/// Store a part of y, in fp32.
template <int strips, int eights>
__device__ __forceinline__ void store_part(const Many& call, const Place& place, int first_token, const Share& share,
                                           const Sums<strips, eights>& sums) {
  float* parts = static_cast<float*>(call.parts) + int64_t{place.slice} * call.M * call.N;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int n = place.column + share.columns + share.column + j * kTile;
    if (n >= call.N) continue;
#pragma unroll
    for (int i = 0; i < eights * 4; ++i) {
      const int m = first_token + share.token + i / 4 * 8 + i % 2;
      if (m < call.M) parts[int64_t{m} * call.N + n + i / 2 % 2 * 8] = sums.of[j][i] * sums.unit[j][i / 2 % 2];
    }
  }
}

/// Store y, 16 tokens by 64 columns at a time, through shared memory, so that a token's outputs are written together. Each
/// group of four warps fills one of two buffers while the other is read; the eights of a row are in different banks.
template <class T, int strips, int eights, class OwnRows>
__device__ __forceinline__ void store(const Many& call, const Place& place, const OwnRows& rows, const Share& share,
                                      T* room, const Sums<strips, eights>& sums) {
  constexpr int turns = eights * 8 / kTransposeTokens;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const int own_row = lane / 16 * 8 + lane % 8, row = thread / 8;
  const int own = own_row * kTile + (thread / 32 * 2 + lane / 8 % 2 ^ own_row % 8) * 8;
  const int from = row * kTile + (thread % 8 ^ row % 8) * 8;
  const int first = rows.first() + share.first + row, left = rows.end() - first;
  const bool whole = call.outputs % 8 == 0;  // opaque to the compiler, which then emits the following code once
  const bool scaled = call.token_scales;
  float of_token[(eights + 3) / 4];  // a lane has one of 32 tokens
  if (scaled)
#pragma unroll
    for (int i = 0; i < (eights + 3) / 4; ++i) of_token[i] = token_scale(call, rows.first() + share.first + 32 * i + lane);
  room += group * 2 * kTransposeTokens * kTile;
  uint4 values;
#pragma unroll
  for (int j = 0; j < strips; ++j) {
    const int n = place.column + share.columns + share.column + j * kTile;
    const int to_n = place.column + share.columns + j * kTile + thread % 8 * 8, there = call.outputs - to_n;
    T* to = static_cast<T*>(call.y) + int64_t{first} * call.outputs + to_n;
    const auto put = [&](int turn) {
      if (there <= 0 || turn * kTransposeTokens >= left) return;
      T* at = to + int64_t{turn * kTransposeTokens} * call.outputs;
      if (whole)
        __stcg(reinterpret_cast<uint4*>(at), values);
      else
#pragma unroll 1
        for (int i = 0; i < min(8, there); ++i) at[i] = room[(j * turns + turn) % 2 * kTransposeTokens * kTile + from + i];
    };
    float bias[2] = {};
#pragma unroll
    for (int b = 0; b < 2; ++b)
      if (call.bias && n + 8 * b < call.outputs)
        bias[b] = wide(static_cast<const T*>(call.bias)[int64_t{rows.expert()} * call.outputs + n + 8 * b]);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums.of[j] + 4 * (2 * turn + i / 2) + 2 * (i % 2);
        const float unit = sums.unit[j][i % 2];
        float first_sum = two[0], second_sum = two[1];
        if (scaled) {
          const int eight = 2 * turn + i / 2, from_lane = eight % 4 * 8 + lane % 4 * 2;
          first_sum *= __shfl_sync(~0u, of_token[eight / 4], from_lane);
          second_sum *= __shfl_sync(~0u, of_token[eight / 4], from_lane + 1);
        }
        pairs[i] = narrow<T>(fmaf(first_sum, unit, bias[i % 2]), fmaf(second_sum, unit, bias[i % 2]));
      }
      T* shared = room + (j * turns + turn) % 2 * kTransposeTokens * kTile;
      store_transposed(shared + own, pairs);
      if (turn > 0) put(turn - 1);  // while these loads are in flight
      barrier_of<128>(1 + group);
      values = *reinterpret_cast<const uint4*>(shared + from);
    }
    put(turns - 1);
  }
  if (strips * turns % 2) barrier_of<128>(1 + group);  // the next tile begins with the same buffer
}

/// Call `use` with `number` as a compile-time constant below `count`.
template <int count, class Use>
__device__ __forceinline__ void with_number(int number, const Use& use) {
  if constexpr (count > 1)
    if (number < count - 1) return with_number<count - 1>(number, use);
  use(std::integral_constant<int, count - 1>{});
}

/// Store a team's share of sums that teams of `ranks` blocks have in common: `put(kept, share)`.
template <int ranks, int teams, int threads, int strips, int eights, class Put>
__device__ __forceinline__ void divide_shares(int team, Share share, unsigned char* memory, uint64_t* arrived,
                                          const Sums<strips, eights>& sums, const Put& put) {
  using First = Sharing<0, ranks, teams, threads, strips, eights>;
  // Call `use` with the sharing of this team.
  const auto with_sharing = [&](const auto& use) {
    with_number<ranks * teams>((ranks == 1 ? 0 : blockIdx.x) * teams + team, [&](auto own) {
      use(Sharing<decltype(own)::value, ranks, teams, threads, strips, eights>{});
    });
  };
  float4* there = reinterpret_cast<float4*>(memory);
  barrier_of<teams * threads>();  // all threads of this block have read the rings,
  if (ranks > 1) {
    if (threadIdx.x == 0) expect_bytes(arrived, First::bytes);
    cluster_arrive(), cluster_wait();  // and so have those of the other block
  }
  with_sharing([&](auto own) { own.send_shares(sums, there, arrived); });
  if (ranks > 1)
    wait_for_cluster(arrived, 0);
  else
    barrier_of<teams * threads>();
  typename First::Kept kept;
  bool keeps = false;
  with_sharing([&](auto own) {
    using Own = decltype(own);
    if constexpr (Own::keeps) {
      share.first = Own::kept * Own::share * 8, share.token += share.first;
      kept = own.added(sums, there), keeps = true;
    }
  });
  if (keeps) put(kept, share);
}

/// Store the sums of a block, with those of the block that shares its rows, as y or a part of it.
template <int teams, int threads, class T, int strips, int eights, class OwnRows>
__device__ __forceinline__ void finish(const Many& call, const Place& place, const OwnRows& rows, int team, const Share& share,
                                       unsigned char* memory, T* room, uint64_t* arrived, const Sums<strips, eights>& sums) {
  const auto put = [&](const auto& own, const Share& its) {
    if (OwnRows::may_be_part && call.slices > 1)
      store_part(call, place, rows.first(), its, own);
    else
      store<T>(call, place, rows, its, room, own);
  };
  if (place.shares_rows)
    divide_shares<2, teams, threads>(team, share, memory, arrived, sums, put);
  else if constexpr (teams > 1)
    divide_shares<1, teams, threads>(team, share, memory, arrived, sums, put);
  else
    put(sums, share);
}

}  // namespace qload::cuda::many_room
