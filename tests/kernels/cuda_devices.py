"""Routines that move and dequantize, as in csrc/cuda/move and csrc/cuda/dequantize, on memory of the CPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload.devices.tensors import FLOATS
from tests.kernels.cuda_by_hand import STREAM, WORD, Hand, at, placed

BYTE, E8M0 = torch.uint8, 3
UNSIGNED, SIGNED, LOOKED, PAIRS, PAIRS_TURNED, HALVES, SPARSE = range(7)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FOURS = {3: [*MAGNITUDES, *(-each for each in MAGNITUDES)], 4: [*range(8), *range(-8, 0)]}
BYTES = {1: torch.float8_e4m3fn, 2: torch.float8_e5m2}


@dataclass
class Meaning:
    """The struct of meaning.h, with its defaults."""

    lookup: int = 0
    scales: int = 0
    scale_type: int = 0
    scale_n: int = 0
    scale_k: int = 0
    scale_places: int = 0x543210
    zeros_kind: int = 0
    zero: int = 0
    zeros: int = 0
    zero_n: int = 0
    zero_k: int = 0
    zero_places: int = 0x543210
    zero_bits: int = 4
    zero_word: int = 0
    zero_add: int = 0
    zero_mask: int = -1
    n_table: int = 0
    k_table: int = 0
    n_run: int = 1
    k_run: int = 1
    values: int = 0
    factors: int = 0
    divide: bool = False
    factor: float = 1.0


class HandOfDevices(Hand):
    """Moves, codes in words, and weights as formats store them."""

    Meaning = Meaning  # type: ignore[assignment]

    def move(self, bits, quads, source, starts, target, stream) -> None:
        here = there = row = torch.zeros(1, dtype=torch.long)
        for size, step, to, count in quads:
            each = torch.arange(size)[:, None]
            step = 0 if starts and count else step
            here, there, row = (
                (each * by + old).flatten() for by, old in ((step, here), (to, there), (count, row))
            )
        assert (stream, bits in (2, 4, 8, 16, 32), target % 4) == (STREAM, True, 0)
        if not len(here):
            return
        if starts:
            here = here + at(starts, torch.long, int(row.max()) + 1)[row]
        if bits == 32:
            at(target, WORD, int(there.max()) + 1)[there] = at(source, WORD, int(here.max()) + 1)[here]
            return
        read = at(source, BYTE, int(here.max()) * bits // 8 + -(-bits // 8)).long()
        written = at(target, BYTE, int(there.max()) * bits // 8 + -(-bits // 8))
        if bits >= 8:
            wide = bits // 8
            for i in range(wide):
                written[there * wide + i] = read[here * wide + i].to(BYTE)
            return
        found = read[here * bits // 8] >> (here * bits % 8) & 2**bits - 1
        held = torch.zeros((int(there.max()) // (8 // bits) + 1) * (8 // bits), dtype=torch.long)
        held[there] = found
        fields = held.view(-1, 8 // bits) << torch.arange(0, 8, bits)
        written.copy_(fields.sum(1).to(BYTE))

    def narrow(self, bits, codes, count, words, seen, stream) -> None:
        numbers = at(codes, WORD, count, 32 // bits).long()
        assert (stream, codes % 16) == (STREAM, 0)
        all_bits = 0
        for code in numbers.flatten().unique().tolist():
            all_bits |= code
        at(seen, WORD, 1).fill_(all_bits)
        fields = (numbers & 2**bits - 1) << torch.arange(0, 32, bits)
        at(words, WORD, count).copy_((fields.sum(1) + 2**31) % 2**32 - 2**31)

    def widen(self, bits, words, count, codes, stream) -> None:
        assert (stream, codes % 16) == (STREAM, 0)
        fields = at(words, WORD, count).long()[:, None] >> torch.arange(0, 32, bits) & 2**bits - 1
        at(codes, WORD, count, 32 // bits).copy_(fields)

    def dequantize_rows(self, source, codes, pitch, places, apart, m, N, K, kind, out, stream) -> bool:
        assert K % 8 == 0
        lines, width = N, K
        if source in (PAIRS, PAIRS_TURNED):
            width = K // 2
        elif source == HALVES:
            lines = -(-N // 2)
        elif source == SPARSE:
            width = K // 4
        read = at(codes, BYTE, (lines - 1) * pitch + width).as_strided((lines, width), (pitch, 1))
        low, high = read & 15, read >> 4
        if source in (PAIRS, PAIRS_TURNED):
            found = torch.stack([high, low] if source == PAIRS_TURNED else [low, high], -1).flatten(1)
        elif source == HALVES:
            found = torch.stack([low, high], 1).flatten(0, 1)[:N]
        elif source == SPARSE:
            kept = torch.stack([low, high], -1).flatten(1)
            eights = at(places, BYTE, (N - 1) * apart + K // 8).as_strided((N, K // 8), (apart, 1))
            where = eights[..., None].long() >> torch.arange(0, 8, 2) & 3
            where = where + torch.tensor([0, 0, 4, 4]) + 8 * torch.arange(K // 8)[:, None]
            found = torch.full((N, K), 8, dtype=BYTE).scatter_(1, where.flatten(1), kept)
        else:
            found = read
        if m.lookup or source not in (UNSIGNED, SIGNED, LOOKED):
            table = at(m.lookup, torch.float32, 256 if source == LOOKED else 16) if m.lookup else None
            if table is None:
                table = torch.tensor(FOURS.get(m.values, range(16))).float()
            values = table[found.long()]
        elif source == LOOKED:
            values = found.contiguous().view(BYTES[m.values]).float()
        else:
            values = (found.contiguous().view(torch.int8) if source == SIGNED else found).float()
        self._put_values(values, m, N, K, kind, out, stream, "dequantize_rows")
        return True

    def dequantize_table(self, codes, table, scales, block_bits, N, K, kind, out, stream) -> None:
        read = at(codes, BYTE, -(-N * K // 2))
        found = torch.stack([read >> 4, read & 15], -1).flatten()[: N * K].long()
        blocks = at(scales, torch.float32, -(-N * K >> block_bits))
        made = at(table, torch.float32, 16)[found] * blocks[torch.arange(N * K) >> block_bits]
        assert (stream, codes % 4, out % 16) == (STREAM, 0, 0)
        at(out, FLOATS[kind], N, K).copy_(made.view(N, K))
        self.called.append("dequantize_table")

    def dequantize_streams(
        self, words, R, bits, run, tables, order, scales, squares, zeros, N, K, kind, out, stream
    ) -> bool:
        starts, widths, groups = (at(each, WORD, K).long() if each else None for each in tables)
        rows = torch.arange(K)
        group = rows // run if groups is None else groups
        start, width = (rows * bits, torch.full((K,), bits)) if starts is None else (starts, widths)
        assert (stream, width is not None, K % 8) == (STREAM, True, 0)
        read = torch.nn.functional.pad(at(words, WORD, R, N).long() & 0xFFFFFFFF, (0, 0, 0, 1))
        both = read[start // 32] | read[start // 32 + 1] << 32
        codes = both >> (start % 32)[:, None] & (1 << width)[:, None] - 1
        G, (pointer, kind_of_scale, scale_n, scale_k) = int(group.max()) + 1, scales
        if squares[0]:
            roots = at(squares[0], WORD, G, N // 8).long()[..., None] >> torch.arange(0, 32, 4) & 15
            units = (at(squares[1], torch.float16, G).float() / 256).half().float()
            scale = ((roots.flatten(1) + 1).square() * units[:, None]).half().float()
            zero = (1 << width - 1)[:, None].float()
        else:
            flat = at(pointer, FLOATS[kind_of_scale], (N - 1) * scale_n + (G - 1) * scale_k + 1)
            scale = flat.as_strided((G, N), (scale_k, scale_n)).float()
            points, pitch, add, mask = zeros
            packed = at(points, WORD, (G - 1) * pitch + -(-N * bits // 32)).long() & 0xFFFFFFFF
            packed = torch.nn.functional.pad(packed, (0, 1))
            bit = torch.arange(N) * bits
            place = torch.arange(G)[:, None] * pitch + bit // 32
            fields = (packed[place] | packed[place + 1] << 32) >> bit % 32 & (1 << bits) - 1
            zero = ((fields + add) & mask).float()[group]
        made = (codes.float() - zero) * scale[group]
        if squares[0]:
            made = made.half()
        made = made[at(order, WORD, K).long()] if order else made
        at(out, FLOATS[kind], N, K).copy_(made.T)
        self.called.append("dequantize_streams")
        return True

    def _mean(
        self, codes: Tensor, m: Any, N: int, K: int, kind: int, out: int, stream: int, name: str
    ) -> None:
        values = at(m.lookup, torch.float32, int(codes.max()) + 1)[codes] if m.lookup else codes.float()
        self._put_values(values, m, N, K, kind, out, stream, name)

    def _put_values(self, values, m, N, K, kind, out, stream, name) -> None:
        n, k = torch.arange(N), torch.arange(K)
        n_group = at(m.n_table, WORD, N).long() if m.n_table else n // m.n_run
        k_group = at(m.k_table, WORD, K).long() if m.k_table else k // m.k_run
        scale_at = (placed(n_group, m.scale_places) * m.scale_n)[:, None] + k_group * m.scale_k
        dtype = BYTE if m.scale_type == E8M0 else FLOATS[m.scale_type]
        scales = at(m.scales, dtype, int(scale_at.max()) + 1)[scale_at]
        scales = scales.view(torch.float8_e8m0fnu).float() if m.scale_type == E8M0 else scales.float()
        points = (placed(n_group, m.zero_places) * m.zero_n)[:, None] + k_group * m.zero_k
        zero: Any = [0, m.zero][m.zeros_kind] if m.zeros_kind < 2 else None
        if m.zeros_kind == 2:
            bit = points * m.zero_bits
            words = at(m.zeros, WORD, int(bit.max()) // 32 + 1).long() + m.zero_word
            zero = ((words[bit // 32] >> (bit % 32) & 2**m.zero_bits - 1) + m.zero_add) & m.zero_mask
        elif m.zeros_kind == 3:
            zero = at(m.zeros, WORD, int(points.max()) + 1)[points]
        made = values - zero
        made = (made / scales if m.divide else made * scales) * m.factor
        made = made * at(m.factors, torch.float32, K) if m.factors else made
        assert stream == STREAM
        at(out, FLOATS[kind], N, K).copy_(made)
        self.called.append(name)
