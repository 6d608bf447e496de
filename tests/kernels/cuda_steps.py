"""Routines between the products of a decoder layer, as in csrc/cuda/step/step.h, on memory of the CPU."""

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.kernels.cuda_by_hand import STREAM, Hand, at

LONG = torch.int64
KINDS = [silu, gelu, lambda gate: gelu(gate, approximate="tanh")]


class HandOfSteps(Hand):
    """Norms, heads, gates, attention and routing, in float64 with one rounding."""

    def add_norm(self, x, added, weight, total, y, sizes, eps, bf16, stream) -> None:
        rows, size = sizes
        T = self._dtype(bf16, stream, x, added, weight)
        assert (size % 8, bool(added)) == (0, bool(total))
        taken = at(x, T, rows, size)
        if added:
            taken = at(total, T, rows, size).copy_(taken + at(added, T, rows, size))
        at(y, T, rows, size).copy_(normed(taken, at(weight, T, size), eps))

    def place_heads(
        self, heads, turns, slots, norms, q, cache, places, sizes, eps, pairs, bf16, stream
    ) -> None:
        tokens, queries, kv, size = sizes
        T = self._dtype(bf16, stream, heads, *turns, *norms, *cache)
        assert (size % 16, size <= 512, type(pairs)) == (0, True, bool)
        parts = at(heads, T, tokens, queries + 2 * kv, size).split([queries, kv, kv], 1)
        cos, sin = (at(each, torch.float32, tokens, size // 2) for each in turns)
        own = [
            normed(part, at(norm, T, size), eps).to(T) if norm else part
            for part, norm in zip(parts, norms, strict=False)
        ]
        at(q, T, tokens, queries, size).copy_(turned(own[0], cos, sin, pairs))
        keys, values = (at(each, T, places, kv, size) for each in cache)
        to = at(slots, LONG, tokens)
        keys[to], values[to] = turned(own[1], cos, sin, pairs).to(T), parts[2]

    def gate_pairs(self, both, y, sizes, gate, bf16, stream) -> None:
        rows, columns = sizes
        T = self._dtype(bf16, stream, both)
        assert columns % 8 == 0
        at(y, T, rows, columns).copy_(gated(at(both, T, rows, 2 * columns).double(), gate))

    def attend_pages(
        self, q, cache, positions, table, sinks, y, pages, sizes, limits, scale, bf16, stream
    ) -> None:
        there, page_size, width = pages
        S, heads, kv, k_size, v_size, *pitches = sizes
        T = self._dtype(bf16, stream, q, *cache)
        keys, values = (
            at(each, T, there, page_size, kv, pitch)[..., :size]
            for each, pitch, size in zip(cache, pitches, (k_size, v_size), strict=True)
        )
        for s, position in enumerate(at(positions, LONG, S).tolist()):
            first = max(
                position - (limits[0] or inf) + 1, position // (limits[1] or inf) * (limits[1] or 0), 0
            )
            own = at(table, LONG, S, width)[s]
            k, v = (held[own].flatten(0, 1)[int(first) : position + 1] for held in (keys, values))
            wide = at(q, T, S, heads, k_size)[s], k, v, at(sinks, torch.float32, heads) if sinks else None
            at(y, T, S, heads, v_size)[s] = attended(*wide, scale).to(T)

    def route_tokens(self, x, weight, bias, ids, weights, sizes, choice, bf16, stream) -> None:
        tokens, size, experts, top = sizes
        over_chosen, renormalized, rounded = choice
        T = self._dtype(bf16, stream, x, weight)
        assert (size % 8, experts <= 1024, top <= min(experts, 32)) == (0, True, True)
        logits = at(x, T, tokens, size).double() @ at(weight, T, experts, size).double().T
        logits = (logits + at(bias, T, experts) if bias else logits).to(T).double()
        scores, order = (logits if over_chosen else logits.softmax(1)).sort(
            dim=1, descending=True, stable=True
        )
        chosen = scores[:, :top].softmax(1) if over_chosen else scores[:, :top]
        chosen = chosen / chosen.sum(1, keepdim=True) if renormalized else chosen
        at(ids, LONG, tokens, top).copy_(order[:, :top])
        at(weights, torch.float32, tokens, top).copy_(chosen.to(T if rounded else torch.float32))

    def _dtype(self, bf16, stream, *pointers) -> torch.dtype:
        assert (type(bf16), stream, [each % 16 for each in pointers]) == (bool, STREAM, [0] * len(pointers))
        return torch.bfloat16 if bf16 else torch.float16


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows (..., H) over the root of their mean square, times a weight, in float64."""
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Heads (T, heads, D) turned by cos and sin (T, D / 2), in float64."""
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    both = a.double() * c - b.double() * s, b.double() * c + a.double() * s
    return torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)


def gated(both: Tensor, gate: tuple[int, float, float]) -> Tensor:
    """Gate and up (..., 2 I), by the number of the activation, alpha and limit."""
    kind, alpha, limit = gate
    own, up = both.chunk(2, -1)
    if kind < len(KINDS):
        return KINDS[kind](own) * up
    own, up = own.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * own * torch.sigmoid(alpha * own)


def attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """One token (heads, Dk) over keys (n, kv, Dk) and values (n, kv, Dv): (heads, Dv), in float64."""
    group = q.shape[0] // k.shape[1]
    scores = torch.einsum("hd,nhd->hn", q.double(), k.double().repeat_interleave(group, 1)) * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    weights = scores.softmax(1)[:, : k.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, v.double().repeat_interleave(group, 1))
