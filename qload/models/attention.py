"""Attention of new tokens over gathered keys and values: torch's own, masked by positions; sinks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from qload.errors import ShapeError
from qload.kernels.cuda.attend import attend_pages
from qload.kernels.cuda.step import place_heads
from qload.loader import Heads
from qload.methods import QKVParallelLinear, RowParallelLinear
from qload.methods.loaded import LinearFactory
from qload.models.config import Mask, TextConfig
from qload.models.kv_cache import PagedCache, Step, padded, unpadded
from qload.models.norm import Norm, vector
from qload.models.rope import Rope
from qload.models.stored_layers import check_biases, check_matrix, stored_parts
from qload.weights import Weights


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of Q new tokens of S sequences over L keys each: (S, Q, heads, Dv), in the dtype of q.

    A token at position p sees the keys 0 to p, of these the last `window`, or those of its own `chunk`.
    ShapeError for tensors that do not fit each other.

    Parameters
    ----------
    q, k, v
        (S, Q, heads, Dk), (S, L, kv_heads, Dk), (S, L, kv_heads, Dv); `heads` a multiple of `kv_heads`, and
        each head of keys is that of as many neighbours among the queries.
    positions
        (S, Q) or (S * Q,), of the queries.
    scale
        What products of queries and keys are multiplied by.
    window, chunk
        None: no such limit.
    sinks
        (heads,): of each head one more column of its softmax, which is dropped.
    """
    hidden = hiding(positions.reshape(q.shape[:2]), k.shape[1], q.dtype, window, chunk)
    return attend_hidden(q, k, v, hidden, scale=scale, sinks=sinks)


def attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    cache: PagedCache,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` of the T new tokens of a `step` among all of their sequences: (T, heads * Dv).

    `q` (T, heads, Dk); `k` (T, kv_heads, Dk) and `v` (T, kv_heads, Dv), which go to `layer` of the `cache`.
    Heads of a cache that are wider than these end in zeros, which no result sees.
    """
    cache.write(layer, step.slots, k, v)
    limits = {"window": window, "chunk": chunk}
    return attend_written(q, v.shape[-1], step, cache, layer, scale=scale, sinks=sinks, **limits)


def attend_written(
    q: Tensor,
    size: int,
    step: Step,
    cache: PagedCache,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same where keys and values are in the `cache` already; values have `size` numbers."""
    if step.new == 1:
        limits = {"window": window, "chunk": chunk}
        held = cache.keys[layer], cache.values[layer]
        made = attend_pages(
            q, held, step.positions, step.pages, v_size=size, scale=scale, sinks=sinks, **limits
        )
        if made is not None:
            return made.flatten(1)
    keys, values = cache.read(layer, step.pages)
    rows = padded(q, keys.shape[-1]).reshape(step.sequences, step.new, q.shape[1], -1)
    positions, seen_keys = step.positions.view(step.sequences, step.new), keys.shape[1]
    hidden = step.kept(  # made once for all layers of one mask
        (seen_keys, q.dtype, window, chunk), lambda: hiding(positions, seen_keys, q.dtype, window, chunk)
    )
    y = attend_hidden(rows, keys, values, hidden, scale=scale, sinks=sinks)
    return unpadded(y, size).reshape(q.shape[0], -1)


def seen(positions: Tensor, keys: int, window: int | None = None, chunk: int | None = None) -> Tensor:
    """Whether a token at each of `positions` (...) sees the key at 0, 1, ... `keys` - 1: bool (..., keys)."""
    at, own = torch.arange(keys, device=positions.device), positions.unsqueeze(-1)
    found = at <= own
    if window is not None:
        found &= at > own - window
    if chunk is not None:
        found &= at // chunk == own // chunk
    return found


def hiding(
    positions: Tensor, keys: int, dtype: torch.dtype, window: int | None = None, chunk: int | None = None
) -> Tensor:
    """What is added to scores (S, 1, Q, keys): -inf where a token at `positions` (S, Q) sees no key, or 0."""
    unseen = ~seen(positions, keys, window, chunk)
    added = torch.zeros(unseen.shape, dtype=dtype, device=positions.device)
    return added.masked_fill_(unseen, float("-inf"))[:, None]


def attend_hidden(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """`attend`, with what is added to the scores in the place of positions: `hidden` (S, 1, Q, L)."""
    S, Q, heads, D = q.shape
    kv = k.shape[2]
    if (k.shape[0], k.shape[3]) != (S, D) or heads % kv:
        raise ShapeError("attention: k", f"({S}, L, a divisor of {heads}, {D})", tuple(k.shape))
    if v.shape[:3] != k.shape[:3]:
        raise ShapeError("attention: v", f"({S}, {k.shape[1]}, {kv}, Dv)", tuple(v.shape))
    group = heads // kv
    rows = q.view(S, Q, kv, group, -1).permute(0, 2, 3, 1, 4).reshape(S, kv, group * Q, -1)
    added = hidden if Q == 1 or group == 1 else hidden.repeat(1, 1, group, 1)
    added = added.expand(S, 1, group * Q, -1)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if sinks is None:
        y = scaled_dot_product_attention(rows, k, v, attn_mask=added, scale=scale)
    else:
        y = with_sinks(
            rows, k, v, added, sinks.view(kv, group, 1).expand(kv, group, Q).reshape(kv, -1), scale
        )
    return y.view(S, kv, group, Q, -1).permute(0, 3, 1, 2, 4).reshape(S, Q, heads, -1)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, added: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """A softmax of its own, in float32: (S, kv, R, Dv), in the dtype of q.

    `q`: (S, kv, R, Dk); `k`, `v`: (S, kv, L, D); `added`: (S, 1, R, L); `sinks`: (kv, R), a further score of
    each row whose weight goes to nothing.
    """
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale + added
    column = sinks.float().expand(*scores.shape[:-1])[..., None]
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


@dataclass(frozen=True)
class HeadFacts:
    """What attention does that no tensor tells.

    `queries`, `keys`: this rank's heads; `size`: D; `norm`: where heads are normalized; `eps`: of that norm;
    `temperature`: floor and scale of Llama 4's, on layers without rope.
    """

    queries: int
    keys: int
    size: int
    mask: Mask
    norm: str
    eps: float
    temperature: tuple[float, float] | None


class Attention(nn.Module):
    """Attention of one layer: x (T, H) -> (T, H), the same on every rank.

    Parameters
    ----------
    qkv, out
        This rank's matrices: of queries, keys and values of its heads, and of what these heads make.
    rope
        What turns the heads.
    facts
        What no tensor tells.
    head_norms
        Those of queries and of keys, where they have weights.
    sinks
        (queries,), of this rank's heads.
    """

    sinks: Tensor | None

    def __init__(
        self,
        qkv: nn.Module,
        out: nn.Module,
        rope: Rope,
        facts: HeadFacts,
        head_norms: tuple[Norm, Norm] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj, self.rope = qkv, out, rope
        self.facts: HeadFacts = facts
        self.q_norm: Norm | None
        self.k_norm: Norm | None
        self.q_norm, self.k_norm = head_norms or (None, None)
        self.register_buffer("sinks", sinks)

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        layer: int,
        rope: Rope,
        make: LinearFactory | None = None,
    ) -> "Attention":
        """The attention under `prefix`, of decoder layer `layer`, for this rank's heads."""
        ranks, D, heads = weights.process_group.size(), config.head_dim, Heads(config.heads, config.kv_heads)
        names = stored_parts(weights, prefix, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        sizes = [count * D for count in (config.heads, config.kv_heads, config.kv_heads)]
        check_matrix(weights, names, sizes, config.hidden)
        check_matrix(weights, f"{prefix}.o_proj", [config.hidden], config.heads * D)
        check_biases(weights, names, config.biases)
        check_biases(weights, f"{prefix}.o_proj", config.biases)
        qkv = QKVParallelLinear.load(weights, names, heads, head_size=D, make=make)
        out = RowParallelLinear.load(weights, f"{prefix}.o_proj", make=make)
        norms = None
        if config.head_norm == "before rope":
            q_norm, k_norm = (Norm.load(weights, f"{prefix}.{n}_norm", D, config.eps) for n in "qk")
            norms = (q_norm, k_norm)
        sinks = _sinks(weights, f"{prefix}.sinks", config.heads) if config.sinks else None
        mask = config.masks[layer]
        counts = (config.heads // ranks, max(1, config.kv_heads // ranks))
        facts = HeadFacts(*counts, D, mask, config.head_norm, config.eps, config.temperature)
        return cls(qkv, out, rope, facts, norms, sinks)

    def forward(self, x: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor:
        """The tokens x (T, H) of a `step` among all of their sequences, whose `layer` is in `cache`."""
        facts = self.facts
        heads = self.qkv_proj(x).view(x.shape[0], -1, facts.size)
        q = self._placed(heads, step, cache, layer)
        if q is None:
            both, v = torch.split(heads, [facts.queries + facts.keys, facts.keys], 1)
            q, k = torch.split(self._positioned(both, step), [facts.queries, facts.keys], 1)
            cache.write(layer, step.slots, k, v)
        y = attend_written(
            q,
            facts.size,
            step,
            cache,
            layer,
            scale=facts.size**-0.5,
            window=facts.mask.window,
            chunk=facts.mask.chunk,
            sinks=self.sinks,
        )
        return self.o_proj(y)  # type: ignore[no-any-return]

    def _placed(self, heads: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor | None:
        """Queries of `heads` (T, all, D), as `_positioned` has them, keys and values written; or None."""
        facts = self.facts
        if not facts.mask.turned or facts.norm == "after rope":
            return None
        norms = (
            None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        )
        cos, sin = self._turns(step)
        held, pairs = (cache.keys[layer], cache.values[layer]), self.rope.config.pairs
        return place_heads(heads, cos, sin, step.slots, held, pairs=pairs, norms=norms, eps=facts.eps)

    def _turns(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cos and sin of the positions of a `step`, made once for all layers."""
        found: tuple[Tensor, Tensor] = step.kept(self.rope, lambda: self.rope(step.positions))
        return found

    def _positioned(self, both: Tensor, step: Step) -> Tensor:
        """Queries and keys (T, heads, D), normalized and turned as this layer does."""
        facts = self.facts
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(both, [facts.queries, facts.keys], 1)
            both = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        if facts.mask.turned:
            both = self.rope.turn(both, *self._turns(step))
            return rms_norm(both, (facts.size,), None, facts.eps) if facts.norm == "after rope" else both
        if facts.temperature is None:
            return both
        q, k = torch.split(both, [facts.queries, facts.keys], 1)
        return torch.cat([(q * temperatures(step.positions, *facts.temperature)).to(q.dtype), k], 1)


def temperatures(positions: Tensor, floor: float, scale: float) -> Tensor:
    """What Llama 4 multiplies queries by on layers without rope: (T, 1, 1), float32, 1 below `floor`."""
    grown = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
    return grown[:, None, None]


def _sinks(weights: Weights, name: str, heads: int) -> Tensor:
    """This rank's sinks; every rank looks at the shape of all."""
    group, share = weights.process_group, heads // weights.process_group.size()
    start = group.rank() * share
    return vector(weights, name, heads)[start : start + share].clone()
