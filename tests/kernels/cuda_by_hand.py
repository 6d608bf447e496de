"""The CUDA module on memory of the CPU, slowly: what its headers say, from pointers and sizes alone."""

from collections.abc import Callable
from ctypes import c_uint8
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qload.devices.tensors import FLOATS
from qload.layouts import exllama as shuffled
from qload.layouts import fp4, gptq, marlin, strips
from qload.layouts.bnb import TABLES

# Of pointers: x, weights, scales, zeros, g_idx, parts, bias, factors of tokens, y; then the stream.
Start = Callable[..., None]
STREAM = 7
WORD = torch.int32
LIMITS = {"decode": (1, 48), "many": (1, 1 << 20), "mma": (1, 1 << 20), "exllama": (1, 64)}


def at(pointer: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The numbers that start at a pointer; a kernel that copies in bulk would trap at any other address."""
    count = torch.Size(shape).numel()
    assert pointer
    assert pointer % dtype.itemsize == 0
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((c_uint8 * (count * dtype.itemsize)).from_address(pointer), dtype=dtype).view(
        shape
    )


class Hand:
    """A module `_cuda`; `called`: names, in turns."""

    Meaning = SimpleNamespace
    chips, ptx = "80 86 89 90a 100 120", "80 90"

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.called, self.hopper = capability, list[str](), True
        self.early = True  # as the last call was
        self.gathered = list[int]()  # tokens whose inputs were put in order, in turns

    def decode(self, sizes, code, group, offset_zero, wide, own, *rest) -> Start:
        """See decode.h."""

        def start(x, weights, scales, zeros, g_idx, parts, bias, factors, y, stream) -> None:
            symmetric = code == 4 and not zeros and group >= 128
            assert sizes[0] <= (16 if not own else 48 if symmetric else 24)
            assert (own and g_idx, weights % 16, scales % 16) in ((False, 0, 0), (0, 0, 0))
            operands = x, weights, scales, zeros, g_idx, bias, factors, y
            kind = group, offset_zero, wide, own
            self._multiply("decode", operands, stream, sizes, code, *kind, *rest)

        return start

    def many(self, sizes, code, group, offset_zero, bf16, division, *rest) -> Start:
        """See many.h."""
        tokens, columns, pairs, slices, neighbours, teams = division
        assert self.capability[0] == 9
        assert (tokens % 16, columns % 64, pairs + neighbours in (0, 1)) == (0, 0, True)
        assert teams == 1 or not neighbours
        assert sizes[1] // 128 >= slices * (1 + pairs) * teams
        assert (sizes[1] % 128, sizes[3] % 8) == (0, 0)
        assert code & 0xFF == 4 or columns < 512

        def start(x, weights, scales, zeros, g_idx, parts, bias, factors, y, stream) -> None:
            assert bool(parts) == (slices > 1)
            assert [each % 16 for each in (x, weights, scales, zeros)] == [0] * 4
            operands = x, weights, scales, zeros, 0, bias, factors, y
            kind = group, offset_zero, False, True, bf16
            self._multiply("many", operands, stream, sizes, code, *kind, columns, slices, *rest)

        return start

    def w8a8(self, sizes, code, group, offset_zero, bf16, division, *rest) -> Start:
        """See w8a8.cuh."""
        kind = {0x108: torch.int8, 0x208: torch.float8_e4m3fn}[code]
        M, _, _, inputs, _ = sizes
        assert (inputs % 32, division[1], division[5]) == (0, 128, 1)
        many = self.many(sizes, code, group, offset_zero, bf16, division, *rest)

        def start(x, *operands) -> None:
            permuted = at(x, torch.uint8, M, inputs).view(M, -1, 2, 4, 4).transpose(2, 3)
            numbers = permuted.reshape(M, inputs).view(kind).to(torch.bfloat16 if bf16 else torch.float16)
            many(numbers.data_ptr(), *operands)
            self.called[-1] = "w8a8"

        return start

    def mma(self, sizes, code, group, offset_zero, wide, bf16, division, *rest) -> Start:
        """See mma.h."""
        tokens, tiles, row_warps, slices = division
        assert (tokens in ((32, 48) if wide else (32, 48, 64)), 8 % (tiles * row_warps)) == (True, 0)
        assert not wide or group < sizes[1]
        assert sizes[1] // 128 >= slices * row_warps
        assert (sizes[1] % 128, sizes[3] % 8) == (0, 0)

        def start(x, weights, scales, zeros, g_idx, parts, bias, factors, y, stream) -> None:
            assert bool(parts) == (slices > 1)
            assert [each % 16 for each in (x, weights, scales, zeros)] == [0] * 4
            operands = x, weights, scales, zeros, 0, bias, factors, y
            kind = group, offset_zero, wide, True, bf16
            self._multiply("mma", operands, stream, sizes, code, *kind, tiles, slices, *rest)

        return start

    def _multiply(self, name, operands, stream, sizes, code, group, offset_zero, wide, own, *rest) -> None:
        x, weights, scales, zeros, g_idx, bias, factors, y = operands
        bits = code & 0xFF
        bf16, columns, split, early = rest
        self.early = early
        M, K, N, inputs, outputs = sizes
        fewest, most = LIMITS[name]
        assert (fewest <= M <= most, K % 64, N % 64, stream) == (True, 0, 0, STREAM)
        assert (type(own), type(bf16), type(early)) == (bool, bool, bool)
        assert columns >= 0 <= split
        assert inputs <= K
        assert outputs <= N
        T = torch.bfloat16 if bf16 else torch.float16
        order = strips.rows(bits) if own else marlin.rows(bits)
        shape = (N // 64, K * bits * 2) if own else (K // 16, N * bits // 2)
        inputs_of_rows = torch.nn.functional.pad(at(x, T, M, inputs), (0, K - inputs)).double()
        if factors:
            inputs_of_rows = inputs_of_rows * at(factors, torch.float32, M, 1).double()
        codes = order.unpack(at(weights, WORD, *shape))
        if code > 0xFF:
            assert own
            if zeros:
                values = scaled_numbers(codes, code, scales, zeros, group)
            else:
                values = numbers(codes, code, scales, group)
            self._put(name, inputs_of_rows @ values, bias, y, T, M, outputs)
            return
        of_row = torch.zeros(K, dtype=torch.long) if group >= K else torch.arange(K) // group
        if g_idx:
            of_row = at(g_idx, WORD, K).long()
        G = int(of_row.max()) + 1
        per_column = group >= K and not g_idx
        assert (type(wide), offset_zero >= 0 and not own) == (bool, False)
        order = marlin.SCALES_PER_COLUMN if per_column and not wide else marlin.SCALES_GROUPED
        floats = torch.float32 if wide else T
        plain, offsets = order.undo(at(scales, floats, G, N)), torch.zeros(G, N)
        points = torch.full((G, N), 2 ** (bits - 1))
        if offset_zero >= 0:
            offsets, points = (
                marlin.SCALES_GROUPED.undo(at(zeros, floats, G, N)),
                torch.full((G, N), offset_zero),
            )
        elif zeros:
            points = marlin.zeros(bits).unpack(at(zeros, WORD, G, N * bits // 32))
        w = plain.double()[of_row] * (codes.double() - points.double()[of_row]) - offsets.double()[of_row]
        self._put(name, inputs_of_rows @ w, bias, y, T, M, outputs)

    def exllama(
        self, x, weights, zeros, scales, g_idx, perm, bias, y, sizes, bits, group, zero, *rest
    ) -> None:
        """See exllama.h."""
        bf16, *_, self.early, stream = rest
        M, K, N, G = sizes
        word, add, mask = zero
        assert (N % 4, stream, group >= 1, weights % 16, scales % 8) == (0, STREAM, True, 0, 0)
        T = torch.bfloat16 if bf16 else torch.float16
        words = at(zeros, WORD, G, N * bits // 32)
        fields = gptq.columns(bits).unpack((words.long() + word).to(WORD))
        points = ((fields.long() + add) & mask).double()
        of_row = at(g_idx, WORD, K).long()
        codes = shuffled.rows(bits).unpack(at(weights, WORD, K * bits // 32, N)).double()
        w = at(scales, T, G, N).double()[of_row] * (codes - points[of_row])
        wide = at(x, T, M, K).double()
        self._put("exllama", (wide[:, at(perm, WORD, K).long()] if perm else wide) @ w, bias, y, T, M, N)

    def rounded_three(self, weights, zeros, scales, g_idx, w, sizes, zero, bf16, stream) -> None:
        """See rounded.h."""
        K, N, first, columns = sizes
        assert (K % 32, N % 32, first % 4, columns % 4) == (0, 0, 0, 0)
        assert (weights % 16, scales % 8, stream) == (0, 0, STREAM)
        T = torch.bfloat16 if bf16 else torch.float16
        of_row = at(g_idx, WORD, K).long()
        G, own = int(of_row.max()) + 1, slice(first, first + columns)
        fields = gptq.columns(3).unpack(at(zeros, WORD, G, N * 3 // 32))
        points = ((fields.long() + zero[1]) & zero[2]).float()
        codes = shuffled.rows(3).unpack(at(weights, WORD, K * 3 // 32, N)).float()
        made = at(scales, T, G, N).float()[of_row] * (codes - points[of_row])
        at(w, T, K, columns).copy_(made[:, own])
        self.called.append("rounded_three")

    def gather_inputs(self, x, perm, y, sizes, staged, early, stream) -> None:
        """See gather.h."""
        M, inputs, rows = sizes
        assert (rows % 8, perm % 16, y % 16, stream) == (0, 0, 0, STREAM)
        assert (type(staged), type(early)) == (bool, bool)
        bits = torch.nn.functional.pad(at(x, torch.int16, M, inputs), (0, rows - inputs))
        at(y, torch.int16, M, rows).copy_(bits[:, at(perm, WORD, rows).long()])
        self.gathered.append(M)

    def _put(self, name: str, sums: Tensor, bias: int, y: int, T: torch.dtype, M: int, N: int) -> None:
        made = sums[:, :N]
        at(y, T, M, N).copy_(made + at(bias, T, N).double() if bias else made)
        self.called.append(name)

    def dequantize(self, bits, quads, row_bits, meaning, codes, N, K, kind, out, stream) -> bool:
        """See dequantize.h."""
        here = there = torch.zeros(1, dtype=torch.long)
        for size, source, target, _ in quads:
            steps = torch.arange(size)[:, None]
            here, there = (steps * source + here).flatten(), (steps * target + there).flatten()
        words = at(codes, WORD, int(here.max()) * bits // 32 + 1).long()
        found = words[here * bits // 32] >> (here * bits % 32) & 2**bits - 1
        n, k = there >> row_bits, there & (1 << row_bits) - 1
        inside = (n < N) & (k < K)
        made = torch.full((N, K), -1, dtype=torch.long)
        made[n[inside], k[inside]] = found[inside]
        assert bool((made >= 0).all())
        self._mean(made, meaning, N, K, kind, out, stream, "dequantize")
        return True

    def dequantize_single(self, kind, stride_n, stride_k, meaning, codes, N, K, to, out, stream) -> None:
        """See dequantize.h."""
        dtype = {1: torch.uint8, -1: torch.int8, -2: torch.int16, -4: WORD, -8: torch.int64}[kind]
        flat = at(codes, dtype, (N - 1) * stride_n + (K - 1) * stride_k + 1)
        made = flat.as_strided((N, K), (stride_n, stride_k)).long()
        self._mean(made, meaning, N, K, to, out, stream, "dequantize_single")

    def _mean(
        self, codes: Tensor, m: Any, N: int, K: int, kind: int, out: int, stream: int, name: str
    ) -> None:
        assert (stream, m.divide, m.factor, m.lookup) == (STREAM, False, 1.0, 0)
        n, k = torch.arange(N), torch.arange(K)
        n_group = at(m.n_table, WORD, N).long() if m.n_table else n // m.n_run
        k_group = at(m.k_table, WORD, K).long() if m.k_table else k // m.k_run
        scale_at = (placed(n_group, m.scale_places) * m.scale_n)[:, None] + k_group * m.scale_k
        points = (placed(n_group, m.zero_places) * m.zero_n)[:, None] + k_group * m.zero_k
        scales = at(m.scales, FLOATS[m.scale_type], int(scale_at.max()) + 1).float()[scale_at]
        if m.zeros_kind == 1:
            zero = torch.full_like(codes, m.zero)
        elif m.zeros_kind == 2:
            bit = points * m.zero_bits
            words = at(m.zeros, WORD, int(bit.max()) // 32 + 1).long() + m.zero_word
            zero = ((words[bit // 32] >> (bit % 32) & 2**m.zero_bits - 1) + m.zero_add) & m.zero_mask
        else:
            zero = (
                at(m.zeros, WORD, int(points.max()) + 1)[points] if m.zeros_kind else torch.zeros_like(codes)
            )
        made = scales * (codes - zero).float()
        if getattr(m, "offsets", 0):
            offset_at = (placed(n_group, m.offset_places) * m.scale_n)[:, None] + k_group * m.scale_k
            made -= at(m.offsets, FLOATS[m.scale_type], int(offset_at.max()) + 1).float()[offset_at]
        at(out, FLOATS[kind], N, K).copy_(made)
        self.called.append(name)


def numbers(codes: Tensor, code: int, scales: int, group: int) -> Tensor:
    """Weight (K, N) of int8 or FP8, by scales of columns or of tiles of 128 rows and 64 columns."""
    (K, N), dtypes = codes.shape, {0x208: torch.float8_e4m3fn, 0x708: torch.float8_e5m2}
    values = codes.double() - 128 if code == 0x108 else codes.to(torch.uint8).view(dtypes[code]).double()
    assert group >= K or group == 128
    if group >= K:
        return values * at(scales, torch.float32, N).double()
    tiles = at(scales, torch.float32, K // 128, N // 64).double()
    return values * tiles.repeat_interleave(128, 0).repeat_interleave(64, 1)


def scaled_numbers(codes: Tensor, code: int, scales: int, columns: int, group: int) -> Tensor:
    """Weight (K, N) of scaled codes, by scales of groups and of columns: device/scaled_codes.cuh."""
    (K, N), order = codes.shape, strips.group_scales(group)
    shape = K // 128, N * 128 // group
    if code == 0x608:
        values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        sizes = fp4.from_s0e5m3(order.undo(at(scales, torch.uint8, *shape))) * 2.0**-7
    elif code == 0x304:
        values = fp4.values(codes.device)
        sizes = fp4.from_s0e5m3(order.undo(at(scales, torch.uint8, *shape))) * 2.0**-15
    else:
        values = torch.tensor(TABLES[{0x404: "nf4", 0x504: "fp4"}[code]])
        sizes = order.undo(at(scales, torch.float32, *shape))
    in_rows = values.double()[codes.long()] * sizes.double().repeat_interleave(group, 0)
    return in_rows * at(columns, torch.float32, N).double()


def placed(n: Tensor, places: int) -> Tensor:
    """Bit i of the last six goes to where hex digit i of `places` says."""
    moved = n >> 6 << 6
    for bit in range(6):
        moved = moved | (n >> bit & 1) << (places >> 4 * bit & 15)
    return moved
