"""Attention of new tokens over gathered keys and values: torch's own, masked by positions; sinks."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qload.errors import ShapeError
from qload.kernels.cuda.attend import attend_pages
from qload.models.cache import PagedCache
from qload.models.masks import seen
from qload.models.padding import padded, unpadded
from qload.models.step import Step


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
