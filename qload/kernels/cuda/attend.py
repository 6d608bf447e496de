"""`qload::attend_pages`: attention of one new token of each sequence over the pages of a cache."""

from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.cuda.calls import ACTIVATIONS
from qload.kernels.cuda.module import check_operands, native, operator, pointer, stream
from qload.kernels.cuda.step import LONG, RUN, WIDE, aligned, check_cache, takes

MOST, MOST_OF_GRID = 256, 65535  # numbers of a head; sequences, and heads
MOST_KEYS = 1 << 30  # of a sequence


def attend_pages(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    positions: Tensor,
    pages: Tensor,
    *,
    v_size: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Attention of one token of each of S sequences: (S, heads, `v_size`), in q's dtype; None: no kernel.

    Only keys that a token sees are read. No result depends on how many pages there are besides.

    Parameters
    ----------
    q
        (S, heads, Dk).
    cache
        Keys (pages, page size, kv, Dk or more) and values (pages, page size, kv, `v_size` or more).
    positions, pages
        (S,) and (S, P), int64: of the tokens, and the pages of each sequence in the order of its tokens.
    scale
        What products of queries and keys are multiplied by.
    window, chunk
        A token sees as many keys at most, and only its own chunk; None: no such limit.
    sinks
        (heads,): of each head one more column of its softmax, which is dropped.
    """
    keys, values = cache
    sizes = q.shape[-1], v_size, keys.shape[-1], values.shape[-1]
    if not takes(q, keys, values) or any(size % RUN or not size for size in sizes):
        return None
    if (
        max(sizes[:2]) > MOST
        or max(q.shape[:2]) > MOST_OF_GRID
        or pages.shape[1] * keys.shape[1] >= MOST_KEYS
    ):
        return None
    column = None if sinks is None else sinks.float().contiguous()
    limits = window or 0, chunk or 0
    y: Tensor = torch.ops.qload.attend_pages(
        q.contiguous(), keys, values, positions, pages.contiguous(), column, v_size, scale, *limits
    )
    return y


def _attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    pages: Tensor,
    sinks: Tensor | None,
    v_size: int,
    scale: float,
    window: int,
    chunk: int,
) -> Tensor:
    (S, heads, k_size), (there, page_size, kv, k_pitch), v_pitch = q.shape, keys.shape, values.shape[-1]
    check_operands(q, ("q", q, ACTIVATIONS, (S, heads, k_size)), ("positions", positions, LONG, (S,)))
    check_operands(q, ("pages", pages, LONG, (S, pages.shape[-1])), ("sinks", sinks, WIDE, (heads,)))
    check_cache(q, keys, values, kv)
    if heads % kv or k_size > k_pitch or v_size > v_pitch:
        sizes = f"{heads} heads of {k_size} and {v_size}"
        raise ArgumentError("q", f"a multiple of {kv} heads, at most {k_pitch} and {v_pitch} numbers", sizes)
    y, read = q.new_empty(S, heads, v_size), aligned(q)
    with torch.cuda.device(q.device):
        native().attend_pages(
            pointer(read), [pointer(keys), pointer(values)], *map(pointer, (positions, pages, sinks, y)),
            [there, page_size, pages.shape[1]], [S, heads, kv, k_size, v_size, k_pitch, v_pitch],
            [window, chunk], scale, q.dtype == torch.bfloat16, stream(q),
        )  # fmt: skip
    return y


def _fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], rest[5])


operator(
    "attend_pages",
    "(Tensor q, Tensor keys, Tensor values, Tensor positions, Tensor pages, Tensor? sinks, SymInt v_size, "
    "float scale, int window, int chunk) -> Tensor",
    _attend_pages,
    _fake,
)
