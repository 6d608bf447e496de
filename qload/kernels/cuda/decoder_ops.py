"""Operators between the products of a decoder layer: sums and norms, heads, gates, routing.

Each function here returns None where there is no kernel for its tensors, and whoever called it does the same
in plain torch. Kernels compute in float32 and round once.
"""

from typing import Any

import torch
from torch import Tensor

from qload.devices.cuda import runs_on
from qload.errors import ArgumentError
from qload.experts import GatedActivation, Routing
from qload.kernels.cuda.dispatch import ACTIVATIONS
from qload.kernels.cuda.experts_launches import GATES
from qload.kernels.cuda.launch import ALIGNED
from qload.kernels.cuda.module import check_operands, native, operator, pointer, stream
from qload.native import is_on, load

RUN = 8  # numbers that are read together
MAX_NORM_SIZE, MAX_PLACED_HEAD_SIZE = 1 << 15, 512  # numbers of a row of a norm, and of a head
LONG, WIDE = (torch.int64,), (torch.float32,)


def takes(*tensors: Tensor) -> bool:
    """Return whether the module takes these tensors: 16 bits, on one CUDA device, without gradients."""
    first = tensors[0]
    if not first.is_cuda or first.dtype not in ACTIVATIONS:
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    module = load("cuda").found
    if module is None or not is_on() or not runs_on(module, first.device):
        return False
    return all(each.device == first.device and each.dtype == first.dtype for each in tensors)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x (..., H) over the root of its mean square plus `eps`, times `weight` (H,); None: no kernel."""
    if not (takes(x, weight) and _is_normed(x)):
        return None
    y: Tensor = torch.ops.qload.rms_norm(x.contiguous(), weight, eps)
    return y


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """x + `added` (..., H), and its norm; None: no kernel."""
    if not (takes(x, added, weight) and _is_normed(x) and added.shape == x.shape):
        return None
    total, y = torch.ops.qload.add_rms_norm(x.contiguous(), added.contiguous(), weight, eps)
    return total, y


def _is_normed(x: Tensor) -> bool:
    return 0 < x.shape[-1] <= MAX_NORM_SIZE and x.shape[-1] % RUN == 0


def place_heads(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    pairs: bool,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor | None:
    """Turned queries (T, queries, D); turned keys, and values, are written to a cache; None: no kernel.

    Parameters
    ----------
    heads
        (T, queries + 2 kv, D): queries, keys, values.
    cos, sin, slots
        (T, D / 2) float32; (T,) int64, places of the cache: page * page size + place in the page.
    cache
        Keys and values of a layer, each (pages, page size, kv, D).
    pairs
        Whether numbers 2 j and 2 j + 1 turn together, and not j and j + D / 2.
    norms, eps
        (D,), of queries and of keys: the weights of norms that heads go through before they are turned.
    """
    keys, values = cache
    D = heads.shape[-1]
    if not takes(heads, keys, values, *(norms or ())) or D % (2 * RUN) or not 0 < D <= MAX_PLACED_HEAD_SIZE:
        return None
    if not keys.shape[-1] == values.shape[-1] == D:
        return None
    q: Tensor = torch.ops.qload.place_heads(
        heads.contiguous(), cos, sin, slots, keys, values, *(norms or (None, None)), eps, pairs
    )
    return q


def gated(both: Tensor, activation: GatedActivation) -> Tensor | None:
    """Gate and up, side by side (..., 2 I), as one (..., I); None: no kernel."""
    if not takes(both) or both.shape[-1] % (2 * RUN):
        return None
    alpha, limit = activation.alpha or 0.0, activation.limit or 0.0
    y: Tensor = torch.ops.qload.gate_pairs(both.contiguous(), activation.kind, alpha, limit)
    return y


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy at an aligned address."""
    return tensor.clone() if pointer(tensor) % ALIGNED else tensor


def check_cache(like: Tensor, keys: Tensor, values: Tensor, kv: int) -> None:
    """Keys and values (pages, page size, `kv`, numbers) as kernels read them, or ArgumentError."""
    for name, held in (("keys", keys), ("values", values)):
        check_operands(like, (name, held, (like.dtype,), (*keys.shape[:2], kv, held.shape[-1])))
        if pointer(held) % ALIGNED:
            raise ArgumentError(name, f"memory from a multiple of {ALIGNED} bytes on", "another place")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x, None, weight, eps)[1]


def _add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normed(x, added, weight, eps)


def _normed(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    check_operands(x, ("x", x, ACTIVATIONS, tuple(x.shape)), ("weight", weight, (x.dtype,), (size,)))
    check_operands(x, ("added", added, (x.dtype,), tuple(x.shape)))
    if not _is_normed(x):
        raise ArgumentError("x", f"rows of a multiple of {RUN}, at most {MAX_NORM_SIZE}", str(tuple(x.shape)))
    y, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
    read = aligned(x), None if added is None else aligned(added), aligned(weight)
    written = None if added is None else total, y
    with torch.cuda.device(x.device):
        sizes = [x.numel() // size, size]
        native().add_norm(*map(pointer, (*read, *written)), sizes, eps, _bfloat16(x), stream(x))
    return total, y


def _place_heads(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pairs: bool,
) -> Tensor:
    (T, count, D), kv, kind = heads.shape, keys.shape[2], (heads.dtype,)
    turns = (T, D // 2)
    check_operands(heads, ("heads", heads, ACTIVATIONS, (T, count, D)), ("slots", slots, LONG, (T,)))
    check_operands(heads, ("cos", cos, WIDE, turns), ("sin", sin, WIDE, turns))
    check_operands(heads, ("q_norm", q_norm, kind, (D,)), ("k_norm", k_norm, kind, (D,)))
    check_cache(heads, keys, values, kv)
    q = heads.new_empty(T, count - 2 * kv, D)
    read = [aligned(each) for each in (heads, cos, sin)]
    norms = [None if each is None else aligned(each) for each in (q_norm, k_norm)]
    at, *turns_at = map(pointer, read)
    sizes, cache = [T, q.shape[1], kv, D], [pointer(keys), pointer(values)]
    with torch.cuda.device(heads.device):
        native().place_heads(
            at, turns_at, pointer(slots), [*map(pointer, norms)], pointer(q), cache,
            keys.shape[0] * keys.shape[1], sizes, eps, pairs, _bfloat16(heads), stream(heads),
        )  # fmt: skip
    return q


def _gate_pairs(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    columns = both.shape[-1] // 2
    check_operands(both, ("both", both, ACTIVATIONS, (*both.shape[:-1], 2 * columns)))
    y, read = _fake_gate(both), aligned(both)
    with torch.cuda.device(both.device):
        sizes = [y.numel() // max(1, columns), columns]
        gate = GATES[activation], alpha, limit
        native().gate_pairs(pointer(read), pointer(y), sizes, gate, _bfloat16(both), stream(both))
    return y


def _bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _fake_norm(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_add_norm(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _fake_heads(heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    return heads.new_empty(heads.shape[0], heads.shape[1] - 2 * keys.shape[2], heads.shape[2])


def _fake_gate(both: Tensor, *rest: Any) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


operator("rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _fake_norm)
operator(
    "add_rms_norm",
    "(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm,
    _fake_add_norm,
)
operator(
    "place_heads",
    "(Tensor heads, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor? q_norm, Tensor? k_norm, float eps, bool pairs) -> Tensor",
    _place_heads,
    _fake_heads,
)
operator(
    "gate_pairs",
    "(Tensor both, str activation, float alpha, float limit) -> Tensor",
    _gate_pairs,
    _fake_gate,
)


MAX_HEAD_SIZE, MAX_GRID = 256, 65535  # numbers of a head; sequences, and heads
MAX_KEYS = 1 << 30  # of a sequence


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
        max(sizes[:2]) > MAX_HEAD_SIZE
        or max(q.shape[:2]) > MAX_GRID
        or pages.shape[1] * keys.shape[1] >= MAX_KEYS
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


def _fake_attend(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], rest[5])


operator(
    "attend_pages",
    "(Tensor q, Tensor keys, Tensor values, Tensor positions, Tensor pages, Tensor? sinks, SymInt v_size, "
    "float scale, int window, int chunk) -> Tensor",
    _attend_pages,
    _fake_attend,
)


MAX_ROUTED_TOKENS = 64  # more of them cost less by a product of whole tiles
MAX_ROUTED_EXPERTS, MAX_CHOSEN = 1024, 32
OVER_CHOSEN = {"softmax_top_k": False, "top_k_softmax": True}


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor] | None:
    """Choose the experts of the tokens x (T, H): ids (T, k), int64, and weights (T, k); None: no kernel.

    As `routing.route` of `routing.logits`, but weights are float32. Of equal scores the lower id is first.
    """
    if not takes(x, weight, *([] if bias is None else [bias])) or routing.method not in OVER_CHOSEN:
        return None
    if x.ndim != 2 or x.shape[0] > MAX_ROUTED_TOKENS or _unroutable(weight, routing.top_k):
        return None
    over_chosen = OVER_CHOSEN[routing.method]
    rounded = routing.rounded or over_chosen
    ids, weights = torch.ops.qload.route_tokens(
        x.contiguous(), weight, bias, routing.top_k, over_chosen, routing.renormalized, rounded
    )
    return ids, weights


def _unroutable(weight: Tensor, top: int) -> bool:
    """Return whether no kernel reads a router's weight (E, H) or chooses so many experts."""
    experts, size = weight.shape
    return (
        experts > MAX_ROUTED_EXPERTS
        or not 1 <= top <= min(experts, MAX_CHOSEN)
        or not size
        or size % RUN != 0
    )


def _route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top: int,
    over_chosen: bool,
    renormalized: bool,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    (tokens, size), experts = x.shape, weight.shape[0]
    check_operands(x, ("x", x, ACTIVATIONS, (tokens, size)), ("weight", weight, (x.dtype,), (experts, size)))
    check_operands(x, ("bias", bias, (x.dtype,), (experts,)))
    if _unroutable(weight, top):
        limits = f"(E, H) of at most {MAX_ROUTED_EXPERTS} experts, at least top_k of at most {MAX_CHOSEN}"
        got = f"({experts}, {size}), top_k {top}"
        raise ArgumentError("weight", f"{limits}, and H a multiple of {RUN}", got)
    ids, weights = _fake_route(x, weight, bias, top)
    read = aligned(x), aligned(weight), bias
    with torch.cuda.device(x.device):
        native().route_tokens(
            *map(pointer, (*read, ids, weights)), [tokens, size, experts, top],
            [over_chosen, renormalized, rounded], _bfloat16(x), stream(x),
        )  # fmt: skip
    return ids, weights


def _fake_route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], top
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


operator(
    "route_tokens",
    "(Tensor x, Tensor weight, Tensor? bias, int top_k, bool over_chosen, bool renormalized, bool rounded) "
    "-> (Tensor, Tensor)",
    _route_tokens,
    _fake_route,
)
