"""Attention of a decoder layer over a paged cache: of heads with rotary embedding, or latent.

Multi-head latent attention of DeepSeek V2 and V3: keys and values expanded from one vector per token.

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
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from qload.errors import ArgumentError, ShapeError
from qload.kernels.cuda.decoder_ops import attend_pages, place_heads
from qload.loader import Heads
from qload.methods import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from qload.methods.checkpoint_linear import LinearFactory
from qload.models.config import CAUSAL, LatentConfig, Mask, TextConfig
from qload.models.indexer import Indexer
from qload.models.kv_cache import PagedCache, Step, pad_heads, unpad_heads, visible_keys
from qload.models.norm import Norm, load_tensor
from qload.models.rope import Rope, RopeConfig, rotate_halves, yarn_mscale
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

    A token at position p attends to the keys 0 to p, of these the last `window`, or those of its own `chunk`.
    ShapeError for tensors of incompatible shapes.

    Parameters
    ----------
    q, k, v
        (S, Q, heads, Dk), (S, L, kv_heads, Dk), (S, L, kv_heads, Dv); `heads` a multiple of `kv_heads`.
        Consecutive query heads share a head of keys.
    positions
        (S, Q) or (S * Q,), of the queries.
    scale
        Factor of the scores.
    window, chunk
        None: no such limit.
    sinks
        (heads,): one more softmax column of each head, which is dropped.
    """
    bias = mask_bias(positions.reshape(q.shape[:2]), k.shape[1], q.dtype, window, chunk)
    return attend_with_bias(q, k, v, bias, scale=scale, sinks=sinks)


def attend_cached(
    q: Tensor,
    value_size: int,
    step: Step,
    cache: PagedCache,
    layer: int,
    *,
    scale: float,
    mask: Mask = CAUSAL,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`attend` of the T new tokens of a `step` over a `layer` of the `cache`: (T, heads * Dv).

    `q`: (T, heads, Dk). Keys and values of the new tokens are already in the cache. `value_size`: Dv, without
    padding. `bias`: additive mask of the scores (S, 1, Q, L), in place of `mask`.
    """
    if step.new == 1 and bias is None:
        cells, limits = (cache.keys[layer], cache.values[layer]), {"window": mask.window, "chunk": mask.chunk}
        y = attend_pages(
            q, cells, step.positions, step.pages, v_size=value_size, scale=scale, sinks=sinks, **limits
        )
        if y is not None:
            return y.flatten(1)
    keys, values = cache.read(layer, step.pages)
    rows = pad_heads(q, keys.shape[-1]).reshape(step.sequences, step.new, q.shape[1], -1)
    positions, count = step.positions.view(step.sequences, step.new), keys.shape[1]
    if bias is None:
        bias = step.kept(
            (count, q.dtype, mask.window, mask.chunk),
            lambda: mask_bias(positions, count, q.dtype, mask.window, mask.chunk),
        )
    y = attend_with_bias(rows, keys, values, bias, scale=scale, sinks=sinks)
    return unpad_heads(y, value_size).reshape(q.shape[0], -1)


def mask_bias(
    positions: Tensor, keys: int, dtype: torch.dtype, window: int | None, chunk: int | None
) -> Tensor:
    """Additive mask of scores (S, 1, Q, keys) of tokens at `positions` (S, Q): 0 if visible, else -inf."""
    hidden = ~visible_keys(positions, keys, window, chunk)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None]


def attend_with_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """`attend` with an additive mask of the scores, `bias` (S, 1, Q, L), in place of positions."""
    S, Q, heads, D = q.shape
    kv = k.shape[2]
    if (k.shape[0], k.shape[3]) != (S, D) or heads % kv:
        raise ShapeError("attention: k", f"({S}, L, a divisor of {heads}, {D})", tuple(k.shape))
    if v.shape[:3] != k.shape[:3]:
        raise ShapeError("attention: v", f"({S}, {k.shape[1]}, {kv}, Dv)", tuple(v.shape))
    group = heads // kv
    rows = q.view(S, Q, kv, group, -1).permute(0, 2, 3, 1, 4).reshape(S, kv, group * Q, -1)
    bias = bias if Q == 1 or group == 1 else bias.repeat(1, 1, group, 1)
    bias = bias.expand(S, 1, group * Q, -1)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if sinks is None:
        y = scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scale)
    else:
        columns = sinks.view(kv, group, 1).expand(kv, group, Q).reshape(kv, -1)
        y = _attend_with_sinks(rows, k, v, bias, columns, scale)
    return y.view(S, kv, group, Q, -1).permute(0, 3, 1, 2, 4).reshape(S, Q, heads, -1)


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attention with a sink column in the softmax, computed in float32: (S, kv, R, Dv), in the dtype of q.

    `q`: (S, kv, R, Dk); `k`, `v`: (S, kv, L, D); `bias`: (S, 1, R, L); `sinks`: (kv, R), the score of the
    sink of each row.
    """
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale + bias
    column = sinks.float().expand(*scores.shape[:-1])[..., None]
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


class Attention(nn.Module):
    """Attention of one layer over this rank's heads: x (T, H) -> (T, H).

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the attention.
    config, layer
        Config of the model, and the number of this layer, which has its own mask.
    rope
        Rotary embedding.
    make
        Creates the linear modules; None: those of the weights.
    reduce_results
        Whether the output is summed over the ranks; False: it is this rank's summand.

    Attributes
    ----------
    heads
        Numbers of this rank's query heads, and of its key and value heads.
    sinks
        (queries,), of this rank's heads; None: no sinks.
    """

    sinks: Tensor | None

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        layer: int,
        rope: Rope,
        make: LinearFactory | None = None,
        *,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.rope, self.config, self.mask = rope, config, config.masks[layer]
        group, D, heads = weights.process_group, config.head_dim, Heads(config.heads, config.kv_heads)
        names = stored_parts(weights, prefix, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        sizes = [count * D for count in (config.heads, config.kv_heads, config.kv_heads)]
        check_matrix(weights, names, sizes, config.hidden)
        check_matrix(weights, f"{prefix}.o_proj", [config.hidden], config.heads * D)
        check_biases(weights, names, config.biases)
        check_biases(weights, f"{prefix}.o_proj", config.biases)
        self.qkv_proj = QKVParallelLinear.load(weights, names, heads, head_size=D, make=make)
        self.o_proj = RowParallelLinear.load(
            weights, f"{prefix}.o_proj", make=make, reduce_results=reduce_results
        )
        self.q_norm: Norm
        self.k_norm: Norm
        if config.head_norm == "before rope":
            self.q_norm, self.k_norm = (Norm.load(weights, f"{prefix}.{n}_norm", D, config.eps) for n in "qk")
        queries, keys = config.heads // group.size(), max(1, config.kv_heads // group.size())
        self.heads: tuple[int, int] = (queries, keys)
        sinks = None
        if config.sinks:
            start = group.rank() * queries
            sinks = load_tensor(weights, f"{prefix}.sinks", (config.heads,))[start : start + queries].clone()
        self.register_buffer("sinks", sinks)

    def forward(self, x: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor:
        """Attend from the tokens x (T, H) of a `step` to their sequences in `layer` of the `cache`."""
        D, (queries, keys) = self.config.head_dim, self.heads
        heads = self.qkv_proj(x).view(x.shape[0], -1, D)
        q = self._place_fused(heads, step, cache, layer)
        if q is None:
            both, v = torch.split(heads, [queries + keys, keys], 1)
            q, k = torch.split(self._embed_positions(both, step), [queries, keys], 1)
            cache.write(layer, step.slots, k, v)
        y = attend_cached(q, D, step, cache, layer, scale=D**-0.5, mask=self.mask, sinks=self.sinks)
        return self.o_proj(y)  # type: ignore[no-any-return]

    def _place_fused(self, heads: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor | None:
        """Normalize and rotate `heads` (T, all, D), write keys and values, and return queries, in one kernel.

        None, and nothing is written, if no kernel supports this layer.
        """
        if not self.mask.rotary or self.config.head_norm == "after rope":
            return None
        if self.rope.config.dim != self.config.head_dim:
            return None
        norms = None
        if self.config.head_norm == "before rope":
            norms = (self.q_norm.weight, self.k_norm.weight)
        cos, sin = self._cos_and_sin(step)
        cells, pairs = (cache.keys[layer], cache.values[layer]), self.rope.config.pairs
        return place_heads(heads, cos, sin, step.slots, cells, pairs=pairs, norms=norms, eps=self.config.eps)

    def _cos_and_sin(self, step: Step) -> tuple[Tensor, Tensor]:
        """Cos and sin of the positions of a `step`, shared by all layers."""
        cos_and_sin: tuple[Tensor, Tensor] = step.kept(self.rope, lambda: self.rope(step.positions))
        return cos_and_sin

    def _embed_positions(self, both: Tensor, step: Step) -> Tensor:
        """Normalize and rotate queries and keys (T, heads, D), or scale queries by the temperature."""
        config, sizes = self.config, [*self.heads]
        if config.head_norm == "before rope":
            q, k = torch.split(both, sizes, 1)
            both = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        if self.mask.rotary:
            both = self.rope.turn(both, *self._cos_and_sin(step))
            after_rope = config.head_norm == "after rope"
            return rms_norm(both, (config.head_dim,), None, config.eps) if after_rope else both
        if config.temperature is None:
            return both
        q, k = torch.split(both, sizes, 1)
        return torch.cat([(q * query_scales(step.positions, *config.temperature)).to(q.dtype), k], 1)


def query_scales(positions: Tensor, floor: float, scale: float) -> Tensor:
    """Llama 4's attention temperature for layers without rope: (T, 1, 1), float32, 1 below `floor`."""
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
    return scales[:, None, None]


NORM_EPS = 1e-6  # of the norms of compressed vectors, independent of `rms_norm_eps`


class LatentAttention(nn.Module):
    """Latent attention of one layer: x (T, H) -> (T, H).

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the attention; ShapeError for other sizes.
    config
        Config of the model; its `latent` has the sizes of heads and of compressed vectors.
    rope
        Rotary embedding of a part of each head.
    make
        Creates the linear modules; None: those of the weights.
    reduce_results
        Whether the output is summed over the ranks; False: it is this rank's summand.

    Attributes
    ----------
    scale
        Factor of the scores.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        rope: Rope,
        make: LinearFactory | None = None,
        *,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        sizes = config.latent
        if sizes is None:
            raise ArgumentError("config", "one of latent attention", config.type)
        self.sizes, self.rope, self.scale = sizes, rope, score_scale(config.rope, sizes.key_size)
        compress, expand, out = (f"{prefix}.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
        check_matrix(weights, compress, [sizes.kv_rank + sizes.rope_size], config.hidden)
        check_matrix(weights, expand, [config.heads * (sizes.nope_size + sizes.value_size)], sizes.kv_rank)
        check_matrix(weights, out, [config.hidden], config.heads * sizes.value_size)
        for name in (compress, expand, out):
            check_biases(weights, name, config.biases)
        heads = Heads(queries=config.heads)
        self.queries = _load_queries(weights, prefix, config, sizes, make)
        self.kv_a_proj_with_mqa = ReplicatedLinear.load(weights, compress, make=make)
        self.kv_a_layernorm = Norm.load(weights, f"{prefix}.kv_a_layernorm", sizes.kv_rank, NORM_EPS)
        self.kv_b_proj = ColumnParallelLinear.load(weights, expand, heads=heads, make=make)
        self.o_proj = RowParallelLinear.load(weights, out, make=make, reduce_results=reduce_results)
        self.indexer: Indexer | None = None
        if config.indexer is not None and sizes.q_rank is not None:
            name = f"{prefix}.indexer"
            self.indexer = Indexer(weights, name, config.indexer, config.hidden, sizes.q_rank, rope, make)

    def forward(self, x: Tensor, step: Step, cache: PagedCache, layer: int) -> Tensor:
        """Attend from the tokens x (T, H) of a `step` to their sequences in `layer` of the `cache`."""
        bias: Tensor | None = None
        if self.indexer is None:
            queries = self.queries(x)
        else:
            q_a_proj, q_a_layernorm, q_b_proj = self.queries.children()
            compressed = q_a_layernorm(q_a_proj(x))
            queries = q_b_proj(compressed)
            bias = self.indexer(x, compressed, step, cache, layer)
        q = queries.view(x.shape[0], -1, self.sizes.key_size)
        k, v = self._keys_and_values(x)
        q, k = self._rotate(q, step), self._rotate(k, step)
        cache.write(layer, step.slots, k, v)
        y = attend_cached(q, self.sizes.value_size, step, cache, layer, scale=self.scale, bias=bias)
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
