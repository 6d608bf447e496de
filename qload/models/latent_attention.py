"""Multi-head latent attention of DeepSeek V2 and V3: keys and values expanded from one vector per token.

    q              = q_proj(x), or q_b_proj(norm(q_a_proj(x)))       per head: (not rotated, rotated)
    compressed, r  = kv_a_proj_with_mqa(x)                           r: rotated part of the key of all heads
    key, value     = kv_b_proj(norm(compressed))                     per head: (key, not rotated; value)

`q_a_proj` and `kv_a_proj_with_mqa` are replicated, quantized as stored; the others are split by whole heads,
and `o_proj` by its inputs. The cache stores the expanded keys and values. Source: `modeling_deepseek_v2.py`
and `modeling_deepseek_v3.py` of transformers 5.23.0.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.loader import Heads
from qload.methods import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from qload.methods.checkpoint_linear import LinearFactory
from qload.models.attention import attend_cached
from qload.models.config import LatentConfig, TextConfig
from qload.models.kv_cache import PagedCache, Step
from qload.models.norm import Norm
from qload.models.rope import Rope, RopeConfig, rotate_halves, yarn_mscale
from qload.models.stored_layers import check_biases, check_matrix
from qload.weights import Weights

NORM_EPS = 1e-6  # of the norms of compressed vectors, independent of `rms_norm_eps`


class LatentAttention(nn.Module):
    """Latent attention of one layer: x (T, H) -> (T, H), the same on every rank.

    Parameters
    ----------
    queries
        x (T, H) -> queries of this rank's heads (T, heads * key size).
    compress, norm, expand
        x (T, H) -> (T, kv_rank + rope size); the norm of the first; (T, kv_rank) -> keys and values of this
        rank's heads.
    out
        Output projection: this rank's share of its inputs.
    rope
        Rotary embedding.
    sizes
        Sizes of heads and of compressed vectors.
    scale
        Factor of the scores.
    """

    def __init__(
        self,
        queries: nn.Module,
        compress: nn.Module,
        norm: Norm,
        expand: nn.Module,
        out: nn.Module,
        rope: Rope,
        sizes: LatentConfig,
        scale: float,
    ) -> None:
        super().__init__()
        self.queries, self.o_proj, self.rope = queries, out, rope
        self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj = compress, norm, expand
        self.sizes: LatentConfig = sizes
        self.scale: float = scale

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        rope: Rope,
        make: LinearFactory | None = None,
    ) -> "LatentAttention":
        """Load the attention under `prefix`, for this rank's heads; ShapeError for other sizes."""
        sizes = config.latent
        if sizes is None:
            raise ArgumentError("config", "one of latent attention", config.type)
        compress, expand, out = (f"{prefix}.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
        check_matrix(weights, compress, [sizes.kv_rank + sizes.rope_size], config.hidden)
        check_matrix(weights, expand, [config.heads * (sizes.nope_size + sizes.value_size)], sizes.kv_rank)
        check_matrix(weights, out, [config.hidden], config.heads * sizes.value_size)
        for name in (compress, expand, out):
            check_biases(weights, name, config.biases)
        heads = Heads(queries=config.heads)
        return cls(
            _load_queries(weights, prefix, config, sizes, make),
            ReplicatedLinear.load(weights, compress, make=make),
            Norm.load(weights, f"{prefix}.kv_a_layernorm", sizes.kv_rank, NORM_EPS),
            ColumnParallelLinear.load(weights, expand, heads=heads, make=make),
            RowParallelLinear.load(weights, out, make=make),
            rope,
            sizes,
            score_scale(config.rope, sizes.key_size),
        )

    def forward(self, x: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor:
        """Attend from the tokens x (T, H) of a `step` to their sequences in `layer` of the `cache`."""
        q = self.queries(x).view(x.shape[0], -1, self.sizes.key_size)
        k, v = self._keys_and_values(x)
        q, k = self._rotate(q, step), self._rotate(k, step)
        cache.write(layer, step.slots, k, v)
        y = attend_cached(q, self.sizes.value_size, step, cache, layer, scale=self.scale)
        return self.o_proj(y)  # type: ignore[no-any-return]

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (T, heads, key size), not rotated yet, and values (T, heads, value size), of x (T, H)."""
        sizes = self.sizes
        compressed, shared = self.kv_a_proj_with_mqa(x).split([sizes.kv_rank, sizes.rope_size], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed))
        both = expanded.view(x.shape[0], -1, sizes.nope_size + sizes.value_size)
        k, v = both.split([sizes.nope_size, sizes.value_size], -1)
        return torch.cat([k, shared[:, None].expand(-1, k.shape[1], -1)], -1), v

    def _rotate(self, heads: Tensor, step: Step) -> Tensor:
        """Rotate the last part of queries or keys (T, heads, key size), in halves."""
        sizes = self.sizes
        plain, rotary = torch.split(heads, [sizes.nope_size, sizes.rope_size], -1)
        rotary = pairs_as_halves(rotary) if sizes.interleaved else rotary
        cos, sin = step.kept(self.rope, lambda: self.rope(step.positions))
        return torch.cat([plain, rotate_halves(rotary, cos, sin)], -1)


def _load_queries(
    weights: Weights, prefix: str, config: TextConfig, sizes: LatentConfig, make: LinearFactory | None
) -> nn.Module:
    """Load the query projection: `q_proj`, or through a compressed vector, which is replicated."""
    N, heads = config.heads * sizes.key_size, Heads(queries=config.heads)
    if sizes.q_rank is None:
        name = f"{prefix}.q_proj"
        check_matrix(weights, name, [N], config.hidden)
        return ColumnParallelLinear.load(weights, name, heads=heads, make=make)
    compress, expand = f"{prefix}.q_a_proj", f"{prefix}.q_b_proj"
    check_matrix(weights, compress, [sizes.q_rank], config.hidden)
    check_biases(weights, compress, config.biases)
    check_matrix(weights, expand, [N], sizes.q_rank)
    parts = {
        "q_a_proj": ReplicatedLinear.load(weights, compress, make=make),
        "q_a_layernorm": Norm.load(weights, f"{prefix}.q_a_layernorm", sizes.q_rank, NORM_EPS),
        "q_b_proj": ColumnParallelLinear.load(weights, expand, heads=heads, make=make),
    }
    return nn.Sequential(OrderedDict(parts))


def pairs_as_halves(heads: Tensor) -> Tensor:
    """Reorder `heads` (..., D) from pairs to halves: elements 0, 2, 4, ... and then 1, 3, 5, ...

    Products of queries and keys stay the same if both are reordered.
    """
    return torch.cat([heads[..., 0::2], heads[..., 1::2]], -1)


def score_scale(rope: RopeConfig, head_size: int) -> float:
    """Return the factor of attention scores: 1 / sqrt(`head_size`), for both parts of an unpadded head.

    With YaRN, times the square of `yarn_mscale` of its `factor` and `mscale_all_dim`.
    """
    growth = yarn_mscale(rope.factor, rope.mscale_all_dim or 0.0) if rope.type == "yarn" else 1.0
    return math.pow(head_size, -0.5) * growth * growth
