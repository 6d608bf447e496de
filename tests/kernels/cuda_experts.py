"""Routines of experts, as in csrc/cuda/experts/experts.h and many.h, on memory of the CPU."""

import torch
from torch import Tensor

from qload.kernels.cuda.byte_strips import scales_of
from qload.layouts import marlin, strips
from tests.kernels.cuda_by_hand import STREAM, WORD, at, numbers, scaled_numbers
from tests.kernels.cuda_quantize import HandOfInputs
from tests.kernels.cuda_steps import HandOfSteps, gated

WIDE = torch.float32
ALL, WHOLE, LAST = range(3)
HEAD = 4


class HandOfExperts(HandOfSteps, HandOfInputs):
    """Pairs by expert, products, gates and sums; `launches`: name, early start and division of each."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(capability)
        self.launches: list[tuple[str, bool, tuple[int, ...]]] = []

    def sort_by_expert(self, ids, map, wide, order, places, items, sizes, stream) -> None:
        pairs, total, experts, tokens, most = sizes
        own = self._experts([ids, map], wide, [pairs, total, experts])
        assert (tokens % 4, stream, bool(order)) == (0, STREAM, bool(places))
        by_expert = [(own == e).nonzero().flatten() for e in range(experts)]
        if order:
            whole = torch.cat(by_expert)
            at(order, WORD, pairs).fill_(-1)[: len(whole)] = whole.to(WORD)
            at(places, WORD, pairs).fill_(-1)[whole] = torch.arange(len(whole), dtype=WORD)
        rows, first = [], 0
        for e, each in enumerate(by_expert):
            rows += [
                (e, first + i, part)
                for i, part in zip(range(0, len(each), tokens), each.split(tokens), strict=False)
            ]
            first += len(each)
        assert len(rows) <= most
        table = at(items, WORD, most + 1, HEAD + tokens).fill_(-1)
        for row, (e, start, part) in enumerate(rows):
            table[row, :HEAD] = torch.tensor([e, start, len(part), len(rows)])
            table[row, HEAD : HEAD + len(part)] = part.to(WORD)
        self.launches.append(("sort", False, (tokens,)))

    def experts(
        self,
        choice,
        wide,
        items,
        x,
        weights,
        scales,
        zeros,
        bias,
        factors,
        y,
        counts,
        sizes,
        code,
        group,
        bf16,
        division,
        gate,
        row_factors,
        known,
        early,
        stream,
    ) -> None:
        pairs, *_, most = counts
        sharing, pitch, width, K, N, outputs = sizes
        turn, columns, _ = division
        T, is_gated = self._dtype(bf16, stream, x, weights, scales, zeros), gate[0] >= 0
        assert (turn in (8, 16), K % 128, N % 64, outputs <= N) == (True, 0, 0, True)
        assert (width % 8, width <= K, x % 16, type(row_factors)) == (0, True, 0, bool)
        assert (columns, outputs, outputs % 128) == (2, N, 0) or not is_gated
        own = self._experts(choice, wide, counts[:3])
        if items:
            table = at(items, WORD, most + 1, HEAD + turn)
            here = [int(pair) for row in table if row[2] > 0 for pair in row[HEAD : HEAD + row[2]]]
        else:
            here = [pair for pair in range(most) if own[pair] >= 0]
        rows = -(-pairs // sharing)
        inputs = torch.nn.functional.pad(at(x, T, rows, width), (0, K - width)).double()
        matrix = self._matrix(T, counts[2], K, N, outputs, code, group, weights, scales, zeros, bias)
        put = at(y, T if is_gated else WIDE, pairs, pitch)
        each = at(factors, WIDE, rows if row_factors else pairs).double() if factors else None
        for pair in here:
            w, added = matrix(int(own[pair]))
            row = pair // sharing
            factor = 1 if each is None else each[row if row_factors else pair]
            sums = inputs[row] @ w * factor + added
            made = gated(sums, gate) if is_gated else sums
            put[pair, : len(made)] = made.to(put.dtype)
        self.launches.append(("known" if known else "unknown", early, tuple(division)))

    def gather_rows(self, choice, wide, x, perm, factors, to, counts, sizes, bf16, early, stream) -> None:
        rows, sharing, inputs, K = sizes
        T = self._dtype(bf16, stream, to)
        own, put = self._experts(choice, wide, counts), at(to, T, rows, K).zero_()
        taken = at(x, T, -(-counts[0] // sharing) if sharing else rows, inputs)
        for row, pair in self._rows(choice[2], rows, counts[0], own):
            order = at(perm, WORD, counts[2], K)[own[pair]].long() if perm else torch.arange(K)
            put[row] = torch.nn.functional.pad(taken[pair // sharing if sharing else row], (0, K))[order]
            if factors:
                put[row] = (put[row].double() * at(factors, WIDE, counts[0])[pair].double()).to(T)
        self.launches.append(("gather", early, ()))

    def spread_values(self, choice, wide, values, to, counts, rows, early, stream) -> None:
        own, put = self._experts(choice, wide, counts), at(to, WIDE, 2, rows).fill_(1)
        assert stream == STREAM
        for row, pair in self._rows(choice[2], rows, counts[0], own):
            for i, each in enumerate(values):
                if each:
                    put[i, row] = at(each, WIDE, counts[2])[own[pair]]
        self.launches.append(("spread", early, ()))

    def gate_rows(self, choice, wide, x, y, counts, sizes, bf16, in_fp32, gate, early, stream) -> None:
        rows, columns, pitch = sizes
        T = self._dtype(bf16, stream)
        own, put = self._experts(choice, wide, counts), at(y, T, rows, pitch).zero_()
        sums = at(x, WIDE if in_fp32 else T, counts[0], 2 * columns).double()
        for row, _ in self._rows(choice[2], rows, counts[0], own):
            put[row, :columns] = gated(sums[row], gate).to(T)
        self.launches.append(("gate", early, ()))

    def combine_choices(
        self, choice, wide, x, weights, y, counts, sizes, bf16, in_fp32, early, stream
    ) -> None:
        tokens, top, columns = sizes
        T = self._dtype(bf16, stream)
        ids, own = (
            at(choice[0], torch.int64 if wide else WORD, counts[0]),
            self._experts(choice, wide, counts),
        )
        sums = at(x, WIDE if in_fp32 else T, counts[0], columns).double()
        total = torch.zeros(tokens, columns, dtype=torch.float64)
        for pair in range(counts[0]):
            if own[pair] >= 0:
                row = int(at(choice[2], WORD, counts[0])[pair]) if choice[2] else pair
                total[pair // top] += sums[row] * (
                    at(weights, WIDE, counts[0])[pair].double() if weights else 1
                )
            elif not 0 <= ids[pair] < counts[1]:
                total[pair // top] = torch.nan
        at(y, T, tokens, columns).copy_(total)
        self.launches.append(("combine", early, ()))

    def many_experts(
        self,
        x,
        weights,
        scales,
        zeros,
        bias,
        factors,
        y,
        items,
        sizes,
        counts,
        code,
        group,
        bf16,
        division,
        early,
        stream,
    ) -> None:
        M, K, N, inputs, outputs = sizes
        experts, most = counts
        tokens, columns, pairs, turns = division
        T = self._dtype(bf16, stream, x, weights, scales, zeros)
        assert (tokens % 16, columns % 64, K % 128, N % 64, inputs % 8) == (0, 0, 0, 0, 0)
        assert (inputs <= K, outputs <= N, type(pairs), tokens <= M) == (True, True, bool, True)
        if turns == LAST:
            name, _, before = self.launches[-1]
            assert (name, before[1], before[3]) == ("many", 2 * columns, WHOLE)
        else:
            read = torch.nn.functional.pad(at(x, T, M, inputs), (0, K - inputs)).double()
            read = read * at(factors, WIDE, M, 1).double() if factors else read
            matrix = self._matrix(T, experts, K, N, outputs, code, group, weights, scales, zeros, bias)
            put = at(y, T, M - tokens, outputs)
            for expert, first, count, *_ in at(items, WORD, most + 1, HEAD + tokens)[:-1].tolist():
                if count > 0:
                    w, added = matrix(expert)
                    put[first : first + count] = (read[first : first + count] @ w + added).to(T)
        self.launches.append(("many", early, tuple(division)))

    def _experts(self, choice, wide, counts) -> Tensor:
        """Of each pair the place of its expert here, -1: elsewhere."""
        pairs, total, experts = counts
        ids = at(choice[0], torch.int64 if wide else WORD, pairs).long()
        places = at(choice[1], WORD, total).long() if choice[1] else torch.arange(total)
        assert type(wide) is bool
        assert int(places.max()) < experts
        inside = (ids >= 0) & (ids < total)
        return torch.where(inside, places[ids.clamp(0, total - 1)], -1)

    @staticmethod
    def _rows(order: int, rows: int, pairs: int, own: Tensor) -> list[tuple[int, int]]:
        """Rows that a pair of a local expert has, and that pair."""
        found = at(order, WORD, pairs).tolist() if order else range(pairs)
        return [
            (row, pair) for row, pair in zip(range(rows), found, strict=False) if pair >= 0 and own[pair] >= 0
        ]

    @staticmethod
    def _matrix(T, experts, K, N, outputs, code, group, weights, scales, zeros, bias):
        """The weight (K, outputs) and the bias of an expert, in float64."""
        G, bits = 1 if group >= K else K // group, code & 0xFF
        order = marlin.SCALES_PER_COLUMN if group >= K else marlin.SCALES_GROUPED

        def of(e: int) -> tuple[Tensor, Tensor | float]:
            codes = strips.rows(bits).unpack(at(weights, WORD, experts, N // 64, K * bits * 2)[e]).double()
            added = at(bias, T, experts, outputs)[e].double() if bias else 0.0
            if code > 0xFF:
                dtype, shape = scales_of(code, K, N, group if zeros or group < K else 0)
                own = scales + e * torch.Size(shape).numel() * dtype.itemsize
                if zeros:
                    return scaled_numbers(codes, code, own, zeros + 4 * e * N, group)[:, :outputs], added
                return numbers(codes, code, own, group)[:, :outputs], added
            plain = order.undo(at(scales, T, experts, G, N)[e]).double()
            points = torch.full((G, N), 2.0 ** (bits - 1), dtype=torch.float64)
            if zeros:
                points = marlin.zeros(bits).unpack(at(zeros, WORD, experts, G, N * bits // 32)[e]).double()
            run = torch.arange(K) // (K // G)
            w = plain[run] * (codes - points[run])
            return w[:, :outputs], added

        return of
