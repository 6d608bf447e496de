"""`WeightsLoader`, the interface of loaders: parts of layers to a typed weight, and the typed loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, Literal, Protocol

from qload.errors import ArgumentError, DivideError, MismatchError, checked
from qload.lazy_torch import Tensor, torch
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.loader.source import Rectangle, TensorSource
from qload.spec import Weight

Split = Literal["N", "K"]
Blocks = int | Iterable[int]


@dataclass(frozen=True)
class Part:
    """Outputs of a stored layer, as one part of a load.

    Attributes
    ----------
    prefix
        Prefix of the layer's tensors.
    start, stop
        Outputs [start, stop); `stop` None: to the end.
    copies
        Ranks in a row with the same share: world // copies ranks divide the outputs.
    short
        True if the last share may be short, as of a vocabulary that the ranks do not divide.
    """

    prefix: str
    start: int = 0
    stop: int | None = None
    copies: int = 1
    short: bool = False


class DeferredReads(Protocol):
    """Tensors of a load that its plan reads itself, straight to their place in the repacked weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors."""

    def begin(self, reader: Any) -> None:
        """Begin the reads in threads of a `qload.weights.prefetch.NativeReader`, if their place is known."""

    def load(self, source: TensorSource, read: Callable[[TensorSource], Weight]) -> Weight | None:
        """Load the repacked weight; None: the load has to read all tensors."""


@dataclass(frozen=True)
class LoadPlan:
    """Steps of a load, planned from headers and facts before its tensors are read.

    Attributes
    ----------
    read
        Read the typed weight, as stored, from a source with the planned tensors.
    find_reads
        List the slices that `read` will ask for, as far as known: for read-ahead.
    repack
        Convert that weight to the loader's layout; None: it stays as stored.
    deferred
        Tensors outside of `reads`, and the faster load with them; None without such tensors.
    """

    read: Callable[..., Weight]
    find_reads: Callable[[], Sequence[Rectangle]] = tuple
    repack: Callable[[TensorSource, Weight], Weight] | None = None
    deferred: DeferredReads | None = None

    @cached_property
    def reads(self) -> Sequence[Rectangle]:
        """Slices that `read` will ask for, as far as known."""
        return self.find_reads()

    def finish(self, source: TensorSource) -> Weight:
        """Run the steps: the loaded weight."""
        weight = None if self.deferred is None else self.deferred.load(source, self.read)
        if weight is not None:
            return weight
        weight = self.read(source)
        return weight if self.repack is None else self.repack(source, weight)


TYPED_LOADS = frozenset(
    (
        "get_weights",
        "get_weights_col",
        "get_weights_row",
        "get_multi_weights_col",
        "get_weights_col_packed",
    )
)


class LoadedStep(Protocol):
    """Conversion of loaded weights, after their load by an inner loader."""

    def __call__(
        self, source: TensorSource, weight: Weight, parts: Sequence[Part], split: Split | None
    ) -> Weight:
        """Convert a weight of some `parts` of a `source` along `split`."""

    def convert_stack(
        self, weight: Weight, converted: Weight, stored: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> bool:
        """Convert tensors (E, ...) of layers like `weight` straight to `rows` of a stack; False if unknown.

        `converted`: a layer of the stack. After False the rows are undefined.
        """


class WeightsLoader(ABC):
    """Interface of loaders: `load` turns named tensors into a typed weight.

    A subclass implements `load` and `shape`; the typed loads follow, with a check of the result's shape.
    `describe`, `left_out` and `made` are for lists of layers before any load. A loader calls no typed load of
    `weights`, so that a wrapped loader does not replace its wrapper.

    Attributes
    ----------
    config_tensors
        Names of tensors with settings and without weights.
    formats
        Possible formats of the layers.
    """

    config_tensors: tuple[str, ...] = ()
    formats: tuple[ConfiguredFormat, ...] = ()
    own_loads: ClassVar[frozenset[str]] = frozenset()  # typed loads that a subclass overrides
    _has_exact_shapes: ClassVar[bool] = False  # whether `load` returns the requested shape by construction

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.own_loads = cls.own_loads | TYPED_LOADS.intersection(vars(cls))
        if "load" in vars(cls) and "_has_exact_shapes" not in vars(cls):
            cls._has_exact_shapes = False
        if "load" in vars(cls) and "plan" not in vars(cls):  # one step: a load of its own
            cls.plan = WeightsLoader.plan  # type: ignore[method-assign]

    @abstractmethod
    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """Load the `parts` of `weights`, joined along N.

        `split`: "N" for this rank's outputs of each part, "K" for its inputs, None for all of them.
        """

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """Plan the load of `parts` of `weights` along `split`; here one step, without read-ahead."""

        def read(source: TensorSource) -> Weight:
            if self._has_exact_shapes:
                return self.load(source, parts, split)
            self._check_inputs(source, parts)
            weight = self.load(source, parts, split)
            self._check_shape(source, parts, split, weight)
            return weight

        return LoadPlan(read)

    @abstractmethod
    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer that `weights` has under `prefix`, from headers alone."""

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe the stored layer `prefix` of `weights` by headers and facts.

        ArgumentError for a loader without descriptions.
        """
        raise ArgumentError("loader", f"one with describe(), to list {prefix}", type(self).__name__)

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values, as `FormatLoader` does."""
        return layer

    def steps(self) -> tuple[WeightsLoader, LoadedStep] | None:
        """Loader of the stored weights, and the step for each of them; None for a load in one step."""
        return None

    def names_alike(self, first: str, other: str) -> bool:
        """Return whether equal tensors under the prefixes `first` and `other` have one description."""
        return False

    def left_out(self, prefix: str) -> str | None:
        """Reason for which the config excludes the layer `prefix`, with entry and key; None for others."""
        return None

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """Format of `layer` after a load to `device`, by its type; None: its stored format."""
        return None

    @checked
    def get_weights(self, weights: TensorSource, prefix: str) -> Weight:
        """Load the whole layer `prefix` of `weights`, the same on every rank."""
        return self.plan(weights, [Part(prefix)], None).finish(weights)

    @checked
    def get_weights_col(self, weights: TensorSource, prefix: str) -> Weight:
        """Load this rank's outputs of the layer `prefix` of `weights`."""
        return self.plan(weights, [Part(prefix)], "N").finish(weights)

    @checked
    def get_weights_row(self, weights: TensorSource, prefix: str) -> Weight:
        """Load this rank's inputs of the layer `prefix` of `weights`."""
        return self.plan(weights, [Part(prefix)], "K").finish(weights)

    @checked
    def get_multi_weights_col(self, weights: TensorSource, prefixes: Sequence[str], dim: int = 0) -> Weight:
        """Load this rank's outputs of the layers `prefixes` of `weights`, joined along N.

        `dim`: 0 or -2; ArgumentError for another, and for no prefixes.
        """
        check_join(prefixes, dim)
        return self.plan(weights, [Part(prefix) for prefix in prefixes], "N").finish(weights)

    @checked
    def get_weights_col_packed(self, weights: TensorSource, prefix: str, block_sizes: Blocks) -> Weight:
        """Load this rank's outputs of each block of the fused layer (qkv, gate_up) `prefix` of `weights`.

        `block_sizes`: number of equal blocks, or their sizes, or their proportions.
        """
        return self.plan(weights, block_parts(self, weights, prefix, block_sizes), "N").finish(weights)

    def _check_inputs(self, source: TensorSource, parts: Sequence[Part]) -> None:
        """MismatchError for parts with different numbers of inputs, which no weight joins."""
        first, *others = (self.shape(source, part.prefix)[1] for part in parts)
        for part, inputs in zip(parts[1:], others, strict=True):
            if inputs != first:
                raise MismatchError(
                    part.prefix, "parts of a fused layer differ in K", str(first), str(inputs)
                )

    def _check_shape(
        self, source: TensorSource, parts: Sequence[Part], split: Split | None, weight: Weight
    ) -> None:
        """MismatchError for a weight of another shape than the parts and the split ask for."""
        N, K, world = 0, 0, source.process_group.size()
        for part in parts:
            outputs, K = self.shape(source, part.prefix)
            width = (outputs if part.stop is None else part.stop) - part.start
            ranks = world // part.copies if split == "N" else 1
            if part.short and ranks > 1:
                return  # the size of the blocks is the format's
            N += width // ranks
        expected = N, K // world if split == "K" else K
        if tuple(weight.shape) != expected:
            raise MismatchError(
                ", ".join(part.prefix for part in parts),
                f"{type(self).__name__}.load returned a weight of another shape than its parts and split",
                f"(N, K) = {expected}",
                f"(N, K) = {tuple(weight.shape)}",
                "remedy   let `load` heed start, stop and copies of each part, and split and rank",
            )


class WrappingLoader(WeightsLoader):
    """Base of loaders around an `inner` loader: it describes the stored layers, they change its weights."""

    def __init__(self, inner: WeightsLoader) -> None:
        self.inner = inner
        self.config_tensors, self.formats = inner.config_tensors, inner.formats

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer that `weights` has under `prefix`, from headers alone."""
        return self.inner.shape(weights, prefix)

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe the stored layer `prefix` of `weights` with the inner loader."""
        return self.inner.describe(weights, prefix)

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values, with the inner loader."""
        return self.inner.settle(weights, layer)

    def left_out(self, prefix: str) -> str | None:
        """Reason for which the inner loader's config excludes the layer `prefix`; None for others."""
        return self.inner.left_out(prefix)


def block_parts(loader: WeightsLoader, weights: TensorSource, prefix: str, block_sizes: Blocks) -> list[Part]:
    """The blocks of a fused layer as parts."""
    edges = [0]
    for size in split_blocks(prefix, "N", loader.shape(weights, prefix)[0], block_sizes):
        edges.append(edges[-1] + size)
    return [Part(prefix, start, stop) for start, stop in pairwise(edges)]


def check_join(prefixes: Sequence[str], dim: int) -> None:
    """Raise ArgumentError for a join along another dimension than N, and for no prefixes."""
    if dim not in (0, -2):
        raise ArgumentError("dim", "0: the parts of a fused layer join along N", str(dim))
    if isinstance(prefixes, str) or not prefixes:
        raise ArgumentError("prefixes", "one or more prefixes", repr(prefixes))


def split_blocks(tensor: str, dim: int | str, total: int, blocks: Blocks) -> list[int]:
    """Sizes of blocks with sum `total`, from their number, their proportions or their sizes."""
    argument: Any = blocks
    try:
        given, is_number = list(argument), False
    except TypeError:  # a number of any integer type, or no blocks at all
        given, is_number = [argument], True
    sizes = [_natural(size) for size in given]
    if not sizes or not all(sizes):
        raise ArgumentError(
            f"{tensor}: block_sizes",
            "a count, or one or more sizes or proportions: whole numbers, at least 1",
            f"{argument if is_number else given!r:.80}",
        )
    if total % sum(sizes):
        ratio = " : ".join(map(str, sizes))
        parts = f"{sizes[0]} equal blocks" if is_number else f"blocks in proportion {ratio}"
        raise DivideError(tensor, dim, total, parts)
    if is_number:
        return [total // sizes[0]] * sizes[0]
    return [total // sum(sizes) * size for size in sizes]


def _natural(value: Any) -> int:
    """A whole number of at least 1, or 0 for a fraction, a text or a boolean."""
    try:
        return 0 if isinstance(value, bool) else max(0, index(value))
    except TypeError:
        return 0
