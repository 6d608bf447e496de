"""Attention of DeepSeek V2 and V3: keys and values of all heads follow from one short vector of a token.

    q              = q_proj(x), or q_b_proj(norm(q_a_proj(x)))       a head: (not rotated, rotated)
    compressed, r  = kv_a_proj_with_mqa(x)                           r: the rotated part of every head's key
    a head         = kv_b_proj(norm(compressed))                     (key, not rotated; value)

`q_a_proj` and `kv_a_proj_with_mqa` are whole on every rank, quantized as they are stored; the others are cut
in whole heads, and the last one, `o_proj`, by its inputs. Keys and values are cached, and not the vector.
Source: `modeling_deepseek_v2.py` and `modeling_deepseek_v3.py` of transformers 5.23.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.loader import Heads
from qload.methods import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from qload.methods.loaded import LinearFactory
from qload.models.attention import attend_cached
from qload.models.config import LatentConfig, TextConfig
from qload.models.kv_cache import PagedCache, Step
from qload.models.norm import Norm
from qload.models.rope import Rope, rotate_halves, softmax_scale
from qload.models.stored_layers import check_biases, check_matrix
from qload.weights import Weights

EPS = 1e-6  # of the norms of compressed vectors, whatever `rms_norm_eps` is


@dataclass(frozen=True)
class LatentFacts:
    """What latent attention does that no tensor tells.

    `heads`: this rank's; `sizes`: of heads and of compressed vectors; `scale`: what scores are multiplied by.
    """

    heads: int
    sizes: LatentConfig
    scale: float


class LatentAttention(nn.Module):
    """Attention of one layer: x (T, H) -> (T, H), the same on every rank.

    Parameters
    ----------
    queries
        x (T, H) -> queries of this rank's heads (T, heads * key size).
    compress, norm, expand
        x (T, H) -> (T, kv_rank + rope size); the norm of the first; (T, kv_rank) -> keys and values of this
        rank's heads.
    out
        The matrix of the outputs: this rank's share of its inputs.
    rope
        What turns the heads.
    facts
        What no tensor tells.
    """

    def __init__(
        self,
        queries: nn.Module,
        compress: nn.Module,
        norm: Norm,
        expand: nn.Module,
        out: nn.Module,
        rope: Rope,
        facts: LatentFacts,
    ) -> None:
        super().__init__()
        self.queries, self.o_proj, self.rope = queries, out, rope
        self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj = compress, norm, expand
        self.facts: LatentFacts = facts

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        rope: Rope,
        make: LinearFactory | None = None,
    ) -> "LatentAttention":
        """The attention under `prefix`, for this rank's heads; ShapeError for matrices of other sizes."""
        sizes = config.latent
        if sizes is None:
            raise ArgumentError("config", "one of latent attention", config.type)
        compressed = sizes.kv_rank + sizes.rope_size
        names = {name: f"{prefix}.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
        check_matrix(weights, names["kv_a_proj_with_mqa"], [compressed], config.hidden)
        expanded = config.heads * (sizes.nope_size + sizes.value_size)
        check_matrix(weights, names["kv_b_proj"], [expanded], sizes.kv_rank)
        check_matrix(weights, names["o_proj"], [config.hidden], config.heads * sizes.value_size)
        for name in names.values():
            check_biases(weights, name, config.biases)
        heads = Heads(queries=config.heads)
        queries = Queries.load(weights, prefix, config, sizes, make)
        facts = LatentFacts(config.heads // weights.process_group.size(), sizes, scale_of(config, sizes))
        return cls(
            queries,
            ReplicatedLinear.load(weights, names["kv_a_proj_with_mqa"], make=make),
            Norm.load(weights, f"{prefix}.kv_a_layernorm", sizes.kv_rank, EPS),
            ColumnParallelLinear.load(weights, names["kv_b_proj"], heads=heads, make=make),
            RowParallelLinear.load(weights, names["o_proj"], make=make),
            rope,
            facts,
        )

    def forward(self, x: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor:
        """The tokens x (T, H) of a `step` among all of their sequences, whose `layer` is in `cache`."""
        facts = self.facts
        q = self.queries(x).view(x.shape[0], facts.heads, facts.sizes.key_size)
        k, v = self._keys_and_values(x)
        q, k = self._turned(q, step), self._turned(k, step)
        y = attend_cached(q, k, v, step, cache, layer, scale=facts.scale)
        return self.o_proj(y)  # type: ignore[no-any-return]

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (T, heads, key size), not turned yet, and values (T, heads, value size), of x (T, H)."""
        sizes, heads = self.facts.sizes, self.facts.heads
        compressed, shared = self.kv_a_proj_with_mqa(x).split([sizes.kv_rank, sizes.rope_size], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(x.shape[0], heads, -1)
        own, v = both.split([sizes.nope_size, sizes.value_size], -1)
        return torch.cat([own, shared[:, None].expand(-1, heads, -1)], -1), v

    def _turned(self, heads: Tensor, step: Step) -> Tensor:
        """Queries or keys (T, heads, key size) with their last part turned, in halves."""
        sizes = self.facts.sizes
        own, turned = torch.split(heads, [sizes.nope_size, sizes.rope_size], -1)
        turned = pairs_as_halves(turned) if sizes.interleaved else turned
        cos, sin = step.kept(self.rope, lambda: self.rope(step.positions))
        return torch.cat([own, rotate_halves(turned, cos, sin)], -1)


class Queries(nn.Module):
    """x (T, H) -> queries, by way of a compressed vector that all ranks have whole.

    Parameters
    ----------
    compress, norm, expand
        x (T, H) -> (T, q_rank); its norm; (T, q_rank) -> queries of this rank's heads.
    """

    def __init__(self, compress: nn.Module, norm: Norm, expand: nn.Module) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = compress, norm, expand

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        sizes: LatentConfig,
        make: LinearFactory | None = None,
    ) -> nn.Module:
        """What makes queries of the attention under `prefix`: of `q_rank` None `q_proj` alone."""
        N, heads = config.heads * sizes.key_size, Heads(queries=config.heads)
        if sizes.q_rank is None:
            name = f"{prefix}.q_proj"
            check_matrix(weights, name, [N], config.hidden)
            return ColumnParallelLinear.load(weights, name, heads=heads, make=make)
        name = f"{prefix}.q_a_proj"
        check_matrix(weights, name, [sizes.q_rank], config.hidden)
        check_biases(weights, name, config.biases)
        check_matrix(weights, f"{prefix}.q_b_proj", [N], sizes.q_rank)
        return cls(
            ReplicatedLinear.load(weights, name, make=make),
            Norm.load(weights, f"{prefix}.q_a_layernorm", sizes.q_rank, EPS),
            ColumnParallelLinear.load(weights, f"{prefix}.q_b_proj", heads=heads, make=make),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Queries of this rank's heads, of the tokens x (T, H)."""
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # type: ignore[no-any-return]


def pairs_as_halves(heads: Tensor) -> Tensor:
    """`heads` (..., D), stored in pairs, in halves: numbers 0, 2, 4, ... and then 1, 3, 5, ...

    Of queries and keys alike, so that their products stay what they were.
    """
    return torch.cat([heads[..., 0::2], heads[..., 1::2]], -1)


def scale_of(config: TextConfig, sizes: LatentConfig) -> float:
    """What scores are multiplied by; without yarn, 1 / sqrt of a key's size."""
    rope = config.rope
    if rope.type != "yarn":
        return softmax_scale(sizes.key_size)
    return softmax_scale(sizes.key_size, rope.factor, rope.mscale_all_dim)
