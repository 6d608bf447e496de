"""Attention of a decoder layer: queries, keys and values of whole heads of a rank, and the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from qload.kernels.cuda.step import place_heads
from qload.loader import Heads
from qload.methods import QKVParallelLinear, RowParallelLinear
from qload.methods.loaded import LinearFactory
from qload.models.attention import attend_written
from qload.models.cache import PagedCache
from qload.models.config import TextConfig
from qload.models.masks import Mask
from qload.models.names import stored_parts
from qload.models.norm import Norm, vector
from qload.models.rope import Rope
from qload.models.shapes import check_biases, check_matrix
from qload.models.step import Step
from qload.weights import Weights


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
