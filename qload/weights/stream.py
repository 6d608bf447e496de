"""Streams of loads: threads read the next loads while the current one is checked and repacked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from qload import devices
from qload.errors import ArgumentError, QloadError, check_fields
from qload.lazy_torch import Tensor, torch
from qload.loader import Blocks, Heads, LoadPlan, Split, TensorSource, WrappedSource
from qload.loader.base import DeferredReads
from qload.loader.source import Index
from qload.native.modules import one_thread
from qload.spec import Role, Weight
from qload.storage import FillingStorage, WeightStorage
from qload.weights.casts import by_role
from qload.weights.prefetch import Prefetch, Prefetcher

WINDOW_BYTES = 128 << 20  # read ahead at most, apart from the first load
MAX_PLANNED_LOADS = 64
MAX_FACTS, MAX_FACT_BYTES = 16, 1 << 20  # facts on a device, kept for the next layers

L = TypeVar("L", bound="str | Load")


@dataclass(frozen=True)
class Load:
    """Request for one of the typed loads, for `Weights.stream`.

    ArgumentError for several layers along "K" or in blocks, and for heads or blocks along another split.

    Attributes
    ----------
    prefixes
        A prefix, or several prefixes of layers to join along N.
    split
        None: the whole layer on every rank, as `get_weights`; "N": this rank's outputs, as `get_weights_col`
        and `get_multi_weights_col`; "K": its inputs, as `get_weights_row`.
    heads
        Attention heads, shared in whole heads; only along "N".
    block_sizes
        Blocks of one fused layer, as in `get_weights_col_packed`; only along "N".

    Examples
    --------
    >>> import torch
    >>> from qload import Load, MemoryStorage, Weights, loader_from_config
    >>> storage = MemoryStorage({"up.weight": torch.ones(4, 2), "down.weight": torch.ones(2, 4)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> for load, weight in weights.stream([Load("up", "N"), Load("down", "K")]):
    ...     load.prefixes, weight.shape
    (('up',), (4, 2))
    (('down',), (2, 4))
    """

    prefixes: Sequence[str] | str
    split: Split | None = None
    heads: Heads | None = None
    block_sizes: Blocks | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        prefixes = (self.prefixes,) if isinstance(self.prefixes, str) else tuple(self.prefixes)
        object.__setattr__(self, "prefixes", prefixes)
        if not prefixes or (len(prefixes) > 1 and (self.split == "K" or self.block_sizes is not None)):
            raise ArgumentError("prefixes", 'one or more; one alone along "K" or in blocks', repr(prefixes))
        has_blocks = self.heads is not None or self.block_sizes is not None
        if (has_blocks and self.split != "N") or (self.heads is not None and self.block_sizes is not None):
            expected = 'heads or block_sizes, one of them, along "N" alone'
            raise ArgumentError("split", expected, repr(self.split))


class StreamedWeights(TensorSource, Protocol):
    """Attributes of `Weights` for a stream."""

    storage: WeightStorage
    dtype: torch.dtype | None

    @property
    def device(self) -> torch.device:
        """Device of the loaded tensors."""

    def _stored(self, name: str) -> str: ...


def stream_loads(
    weights: StreamedWeights,
    plan: Callable[[L], LoadPlan],
    loads: Iterator[L],
) -> Iterator[tuple[L, Weight]]:
    """Yield each load with its weight, in order, with read-ahead of the following loads."""
    begun: deque[BegunLoad[L]] = deque()
    facts = PlacedFacts(weights)
    with ExitStack() as stack:
        storage, prefetcher = weights.storage, None
        if isinstance(storage, FillingStorage) and weights.device.type != "meta":
            prefetcher = stack.enter_context(Prefetcher(storage, weights.device))
        has_more, ahead = True, 0  # bytes
        while has_more or begun:
            while has_more and len(begun) < MAX_PLANNED_LOADS and (not begun or ahead < WINDOW_BYTES):
                for load in islice(loads, 1):
                    begun.append(_begin(weights, plan, load, prefetcher))
                    ahead += begun[-1].nbytes
                    break
                else:
                    has_more = False
            if begun:
                ahead -= begun[0].nbytes
                is_moving = (
                    prefetcher is not None
                    and prefetcher.native is not None
                    and any(each.deferred for each in begun)
                )
                with one_thread() if is_moving else nullcontext():  # native threads have the other cores
                    finished = _finish(weights, begun.popleft(), facts, stack)
                if prefetcher is not None and prefetcher.native is not None:
                    for each in begun:
                        if each.deferred is not None:
                            each.deferred.begin(prefetcher.native)
                yield finished


@dataclass(frozen=True)
class BegunLoad(Generic[L]):
    """A load with reads in progress, or the error of its plan."""

    load: L
    plan: LoadPlan | QloadError
    prefetch: Prefetch | None = None

    @property
    def deferred(self) -> DeferredReads | None:
        """Tensors that the plan reads itself."""
        return None if isinstance(self.plan, QloadError) else self.plan.deferred

    @property
    def nbytes(self) -> int:
        """Bytes of all reads in progress."""
        deferred = self.deferred
        return (deferred.nbytes if deferred else 0) + (self.prefetch.nbytes if self.prefetch else 0)


def _begin(
    weights: StreamedWeights, plan: Callable[[L], LoadPlan], load: L, prefetcher: Prefetcher | None
) -> BegunLoad[L]:
    try:
        planned = plan(load)
        if prefetcher is None:
            return BegunLoad(load, planned)
        reads = [(weights._stored(name), index) for name, index in planned.reads]
        return BegunLoad(load, planned, prefetcher.begin(reads, weights.storage))
    except QloadError as error:  # raised at the load's turn
        return BegunLoad(load, error)


def _finish(
    weights: StreamedWeights, begun: BegunLoad[L], facts: PlacedFacts, stack: ExitStack
) -> tuple[L, Weight]:
    if isinstance(begun.plan, QloadError):
        raise begun.plan
    if begun.prefetch is None:
        return begun.load, begun.plan.finish(weights)
    try:
        return begun.load, begun.plan.finish(PrefetchedSource(weights, begun.prefetch, facts, stack))
    finally:
        begun.prefetch.close()


class PrefetchedSource(WrappedSource):
    """`Weights` with the prefetched tensors of a load."""

    def __init__(
        self, inner: StreamedWeights, prefetch: Prefetch, facts: PlacedFacts, stack: ExitStack
    ) -> None:
        def prefetched(name: str, index: Index, role: Role) -> Tensor | None:
            stored = inner._stored(name)
            tensor = prefetch.take(stored, index)
            if tensor is None:
                return None
            return by_role(stored, tensor.to(inner.device), inner.dtype, role)

        super().__init__(inner, prefetched)
        self.at_end, self._facts = stack.callback, facts

    def read_fact(self, name: str, role: Role) -> Tensor:
        """Read a fact like the inner source."""
        return self.inner.read_fact(name, role)

    def place(self, fact: Tensor) -> Tensor:
        """Copy a fact to the device, from an equal fact there if possible."""
        return self._facts.place(fact)


class PlacedFacts:
    """Facts on a CUDA device, common to most layers of a model: each is copied from the host once."""

    def __init__(self, inner: StreamedWeights) -> None:
        self.inner = inner
        # Last fact of a kind, on the host and on the device.
        self._last: dict[Any, tuple[Tensor, Tensor]] = {}

    def place(self, fact: Tensor) -> Tensor:
        """Copy a fact to the device, in memory of its own."""
        device = self.inner.device
        if device.type != "cuda" or fact.nbytes > MAX_FACT_BYTES:
            return self.inner.place(fact)
        kind = fact.dtype, fact.shape, devices.stream_on(device)
        last = self._last.get(kind)
        if last is None or not _is_equal(last[0], fact):
            if len(self._last) >= MAX_FACTS:
                self._last.clear()
            last = self._last[kind] = fact, self.inner.place(fact)
        return last[1].clone()


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Compare two facts of one shape; facts of equal layers mostly share their memory."""
    is_same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return is_same or torch.equal(one, other)
