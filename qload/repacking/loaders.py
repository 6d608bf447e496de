"""Loaders that repack the weights of another loader for a kernel.

Codes and scales of equal layers are deferred: moved from their file straight to the repacked weight. A layer
is first loaded without these tensors. If an earlier layer of its kind has shown the moves, the tensors are
moved from the file; else the layer is loaded again with all tensors. In a stream, threads make the moves
before the layer's turn.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from qload import devices
from qload.detect import KernelTarget
from qload.errors import ArgumentError, CastError, RepackError, checked
from qload.formats import Marlin24Weight
from qload.kernel_formats import (
    Exl2KernelWeight,
    ExllamaWeight,
    GPTQMarlinWeight,
    PanelsWeight,
    StripsWeight,
    repack_cache,
    strips,
)
from qload.kernel_formats.panels import CODE_BITS
from qload.kernel_formats.repack import (
    convert,
    find_writer,
    repack,
    skippable_tensor,
)
from qload.kernel_formats.repack_cache import Move, RepackCache
from qload.kernels.chips import compute_capability
from qload.kernels.cuda.dispatch import known
from qload.layouts import marlin
from qload.loader import (
    FormatLoader,
    LayerDescription,
    LoadPlan,
    Part,
    Rectangle,
    Split,
    TensorSource,
    WeightsLoader,
    WrappedSource,
)
from qload.loader.base import LoadedStep, WrappingLoader
from qload.loader.layer_values import is_finite
from qload.loader.source import FileElements, Index, source_without_values
from qload.spec import Role, Weight
from qload.weights.prefetch import FileMoveRequest, NativeJob, NativeReader

CODES = "qweight"
MIN_CODE_BYTES = 1 << 20  # smaller layers gain nothing


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor of a layer: the slices of its load, and their range of the file."""

    slices: Rectangle
    elements: FileElements

    def begin(self, move: Move) -> "TensorMove":
        """Allocate the target of a move, on this thread: memory of other threads would not be reused."""
        target = torch.empty(move.shape, dtype=self.elements.dtype, device="cpu")
        return TensorMove(self.elements, move, devices.in_large_pages(target))


@dataclass(frozen=True)
class TensorMove:
    """Move of a tensor from its file to new memory."""

    elements: FileElements
    move: Move
    target: Tensor

    @property
    def request(self) -> FileMoveRequest:
        """The move, for native threads."""
        return FileMoveRequest(self.elements.place, self.target, self.move.bits, self.move.digits)

    def run(self) -> Tensor | None:
        """Move the tensor on this thread; None after a failure."""
        return self.target if self.elements.move(self.target, self.move.bits, self.move.digits) else None


class DeferredTensors:
    """Deferred tensors of a layer by field, as part of a `LoadPlan`."""

    def __init__(
        self, kinds: "DeferredKinds", kind: Any, layout: str, tensors: Mapping[str, DeferredTensor]
    ) -> None:
        self.kinds, self.kind, self.layout, self.tensors = kinds, kind, layout, tensors
        self._moves: dict[str, TensorMove] = {}  # begun, as predicted
        self._job: NativeJob | None = None
        self._failed: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.elements.nbytes for each in self.tensors.values())

    def is_read(self, rectangle: Rectangle) -> bool:
        """Return True for slices that the load reads as usual."""
        return all(rectangle != each.slices for each in self.tensors.values())

    def begin(self, reader: NativeReader) -> None:
        """Begin the moves of an earlier layer of the kind, if there was one."""
        moves = None if self._moves else self.kinds.moves(self.kind)
        if moves is not None:
            self._moves = {name: each.begin(moves[name]) for name, each in self.tensors.items()}
            self._job = reader.begin([each.request for each in self._moves.values()])

    def load(self, source: TensorSource, read: Callable[[TensorSource], Weight]) -> Weight | None:
        """Load the repacked layer; None: it has to be read with all tensors."""

        def placeholder(name: str, index: Index, role: Role) -> Tensor | None:
            if _field(name) not in self.tensors:
                return None
            info = source.info(name)
            return torch.zeros((), dtype=info.dtype, device="cpu").expand(info.shape)[index]

        light = WrappedSource(source, placeholder, ledger="later")
        weight = read(light)
        moves = {name: partial(self._move, name) for name in self.tensors}
        repacked = self.kinds.cache.repack(weight, self.layout, moves)
        if repacked is not None and source.nonfinite == "error" and not _has_finite_scales(repacked):
            repacked = None  # the load of all tensors names the wrong one
        if repacked is None:
            self.kinds.drop(self.kind, self._failed)
            self._find_moved()  # wait: no thread writes to the targets any more
        else:
            light.commit()
        return repacked

    def _move(self, name: str, _: Tensor, move: Move) -> Tensor | None:
        if name in self._find_moved() and self._moves[name].move == move:
            return self._moves[name].target
        moved = self.tensors[name].begin(move).run()
        if moved is None:
            self._failed = name
        return moved

    def _find_moved(self) -> frozenset[str]:
        """Fields of the tensors that native threads have moved, after the end of all moves."""
        moved = [] if self._job is None else self._job.moved
        return frozenset(name for name, done in zip(self._moves, moved, strict=False) if done)


class DeferredKinds:
    """Kinds of layers by headers: the first of a kind is read whole, the next ones with deferred tensors.

    `cache`: recipes of the repacked layers.
    """

    def __init__(self, cache: RepackCache) -> None:
        self.cache = cache
        self._fields: dict[Any, tuple[str, ...]] = {}  # deferred fields of a kind
        self._moves: dict[Any, Mapping[str, Move]] = {}

    def find_kind(self, weights: TensorSource, prefix: str, plan: LoadPlan) -> Any:
        """Kind of the layer `prefix`, by the headers of its reads; None without deferred tensors."""
        codes = weights.headers(prefix, (CODES,)).get(CODES)
        if codes is None or not MIN_CODE_BYTES <= codes.nbytes <= repack_cache.MAX_CODE_BYTES:
            return None
        rectangles = {_field(rectangle.name): rectangle for rectangle in plan.reads}
        if len(rectangles) != len(plan.reads) or CODES not in rectangles:
            return None
        infos = {field: weights.info(rectangle.name) for field, rectangle in rectangles.items()}
        return tuple((field, info.stored_dtype, info.shape) for field, info in infos.items())

    def plan(
        self, weights: TensorSource, reads: Sequence[Rectangle], kind: Any, layout: str
    ) -> DeferredTensors | None:
        """Defer tensors of a load; None for the first layer of a kind, and without deferred fields."""
        rectangles = {_field(rectangle.name): rectangle for rectangle in reads}
        codes = weights.file_elements(*rectangles[CODES])
        if codes is None:
            return None
        if kind not in self._fields:
            if len(self._fields) < repack_cache.MAX_KINDS:
                self._fields[kind] = repack_cache.MOVED_TENSORS
            return None
        tensors = {CODES: DeferredTensor(rectangles[CODES], codes)} if self._fields[kind] else {}
        for field in self._fields[kind][1:]:
            elements = weights.file_elements(*rectangles[field]) if field in rectangles else None
            if elements is not None:
                tensors[field] = DeferredTensor(rectangles[field], elements)
        return DeferredTensors(self, kind, layout, tensors) if tensors else None

    def record(self, kind: Any, moves: Mapping[str, Move] | None) -> None:
        """Record the moves of a layer that was read whole; None: moves alone cannot repack it."""
        if moves is not None and kind in self._fields:
            self._moves[kind] = moves

    def drop(self, kind: Any, failed: str | None) -> None:
        """Stop deferring a kind; after a failure of another field than the codes, that field alone."""
        fields = self._fields[kind] if failed not in (None, CODES) else ()
        self._fields[kind] = tuple(name for name in fields if name != failed)

    def moves(self, kind: Any) -> Mapping[str, Move] | None:
        """Predicted moves of the next layer of a kind; None without a prediction."""
        return self._moves.get(kind) if self._fields[kind] else None


def _has_finite_scales(weight: Weight) -> bool:
    fields = weight.fields()
    scales = (spec for spec in type(weight).tensors(weight.config) if spec.has_scales)
    return all(is_finite(fields[spec.name], spec) for spec in scales if spec.name in fields)


def _field(name: str) -> str:
    return name.rpartition(".")[2]


READ_AS_STORED = {"marlin": (Marlin24Weight,)}  # formats with a kernel for their stored order, by layout
CPU = torch.device("cpu")
WholeLayer = Callable[[str], Weight | None]  # layout -> the layer of a share

# Layouts by chip, the fastest kernel first. `FastestLoader` takes the first that can represent a weight.
FASTEST_LAYOUTS = {
    "CPU": ("panels", "marlin"),
    "Ampere": ("strips", "marlin", "exllama"),
    "CUDA": ("marlin", "exllama"),
}


class RepackingLoader(WrappingLoader):
    """Loads with another loader, whole or a share, then repacks; plain layers stay plain.

    The whole layer decides exclusions and refusals, equally on every rank.

    Parameters
    ----------
    inner
        Reads the layers.
    layout
        Layout of the result, of those of `repack`.
    strict
        True: RepackError for a weight that the layout cannot represent. False: the weight stays as loaded,
        with a note in the ledger.
    options
        Options of `repack`, for the weights with such options.

    Examples
    --------
    >>> import torch
    >>> from qload import AWQWeightsLoader, MemoryStorage, RepackingLoader, Weights
    >>> words, scales = torch.zeros(64, 8, dtype=torch.int32), torch.ones(2, 64).half()
    >>> tensors = {"up.qweight": words, "up.qzeros": words[:2], "up.scales": scales}
    >>> loader = RepackingLoader(AWQWeightsLoader(group_size=32), "exllama")
    >>> Weights(MemoryStorage(tensors), loader=loader).get_weights("up").format
    'exllama'
    """

    @checked
    def __init__(self, inner: WeightsLoader, layout: str, *, strict: bool = True, **options: Any) -> None:
        super().__init__(inner)
        self.layout: str = layout
        self.strict: bool = strict
        self.options: dict[str, Any] = options
        self._cache = RepackCache()
        self._deferred = DeferredKinds(self._cache)

    def names_alike(self, first: str, other: str) -> bool:
        """Return whether the inner loader treats the layers `first` and `other` alike."""
        return self.inner.names_alike(first, other)

    def _layouts(self, device: torch.device) -> tuple[str, ...]:
        """Layouts to try for a weight on `device`, in order."""
        return (self.layout,)

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """Kernel format of `layer` after a load to `device`; None: it stays as stored."""
        weight_type = layer.format.weight_type
        if weight_type.plain or issubclass(weight_type, READ_AS_STORED.get(self.layout, ())):
            return None
        bits = getattr(layer.format.config, "bits", None)
        for layout in self._layouts(device):
            target = self._repacked_type(layer, layout)
            if target is not None and self._has_kernel(target, bits, device):
                return target.format
        target = self._repacked_type(layer, self.layout)
        return None if target is None else target.format

    def _has_kernel(self, target: type[Weight], bits: int | None, device: torch.device) -> bool:
        """Return whether there is a kernel for a type with codes of so many bits."""
        return True

    def _repacked_type(self, layer: LayerDescription, layout: str) -> type[Weight] | None:
        """Type of the repacked weight; None for an unsupported layout, or without a required dtype."""
        stored = layer.format
        writer = find_writer(stored.weight_type, layout, stored.config)
        lacks_dtype = writer and "dtype" in writer.options and self.options.get("dtype") is None
        return None if writer is None or lacks_dtype else writer.weight_type

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """Load `parts` of `weights` along `split`, repacked; RepackError for a weight beyond the layout."""
        return RepackingLoader.plan(self, weights, parts, split).finish(weights)

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """Plan the load of `parts` of `weights` along `split`: the inner loader's plan, and the repack."""
        inner = self.inner.plan(weights, parts, split)
        repack = partial(self._repack_loaded, parts=parts, split=split)
        if inner.repack is not None or inner.deferred is not None:  # of a loader that repacks too
            return LoadPlan(inner.finish, inner.find_reads, repack)
        is_whole = split is None or weights.process_group.size() == 1
        kind = self._deferred.find_kind(weights, parts[0].prefix, inner) if is_whole else None
        if kind is None:
            return LoadPlan(inner.read, inner.find_reads, repack)
        repack = partial(repack, kind=kind)
        deferred = self._deferred.plan(weights, inner.reads, kind, self._layouts(CPU)[0])
        if deferred is None:
            return LoadPlan(inner.read, inner.find_reads, repack)
        reads = [rectangle for rectangle in inner.reads if deferred.is_read(rectangle)]
        return LoadPlan(inner.read, lambda: reads, repack, deferred)

    def _repack_loaded(
        self,
        source: TensorSource,
        weight: Weight,
        parts: Sequence[Part],
        split: Split | None,
        kind: Any = None,
    ) -> Weight:
        """Repack a loaded weight; a weight beyond the layout is an error, or stays with a note.

        `kind`: of a layer whose tensors may be deferred in later loads.
        """
        if weight.plain or isinstance(weight, READ_AS_STORED.get(self.layout, ())):
            return weight
        is_share = split is not None and source.process_group.size() > 1
        whole = partial(self._load_whole, source, parts, weight) if is_share else None
        try:
            repacked = self._repack(weight, whole)
        except (RepackError, CastError) as error:
            reason = error.reason if isinstance(error, RepackError) else str(error)
            if self.strict:
                raise RepackError(f"{weight.layer.name}: {weight.format}", self.layout, reason) from error
            source.note(f"{weight.layer.name}: stays {weight.format}: {reason}")
            return weight
        if self._cache.has_unproven:
            if source.at_end is None:
                self._cache.drop_unproven(prove=True)
            else:  # the threads of a stream have work meanwhile
                source.at_end(partial(self._cache.drop_unproven, prove=False))
        if kind is not None:
            self._deferred.record(kind, self._cache.moves(weight, self._layouts(CPU)[0]))
        return repacked

    def steps(self) -> tuple[WeightsLoader, LoadedStep] | None:
        """The inner loader, and the repack of each loaded weight; None for a subclass with its own load."""
        if type(self).plan is not RepackingLoader.plan or not self.inner._has_exact_shapes:
            return None
        return self.inner, RepackStep(self)

    def repacked(self, weight: Weight) -> Weight:
        """Repack a whole `weight` of the inner loader.

        RepackError or CastError for a weight beyond the layout, whether `strict` or not.
        """
        if weight.plain or isinstance(weight, READ_AS_STORED.get(self.layout, ())):
            return weight
        return self._repack(weight, None)

    def with_config(self, **changes: Any) -> Self:
        """The same loader with a changed config of the inner loader, as `FormatLoader.with_config`.

        `changes`: by the config's fields; ArgumentError for an inner loader without a config.
        """
        if not isinstance(self.inner, FormatLoader | RepackingLoader):
            raise ArgumentError("changes", "none, as the inner loader has no config", ", ".join(changes))
        twin = copy(self)
        twin.inner = self.inner.with_config(**changes)
        twin.formats = twin.inner.formats
        return twin

    def _repack(self, weight: Weight, whole: WholeLayer | None) -> Weight:
        """Repack to the first layout that can represent a weight; else raise for the loader's own layout."""
        refusal: RepackError | None = None
        device = weight.device
        for layout in self._layouts(device):
            writer = find_writer(type(weight), layout, weight.config)
            if layout == "exllama" and layout != self.layout:  # its kernels are for few bits on few chips
                bits = getattr(weight.config, "bits", None)
                if writer is None or not self._has_kernel(writer.weight_type, bits, device):
                    continue
            accepted = () if writer is None else writer.options
            given = {option: value for option, value in self.options.items() if option in accepted}
            try:
                if "dtype" in accepted and given.get("dtype") is None:
                    reason = "its scales need the dtype of the activations, and the target says none"
                    raise RepackError(weight.format, layout, reason)
                layer = whole(layout) if writer is not None and whole is not None else None
                if given or not self.inner._has_exact_shapes:
                    return repack(weight, layout, whole=layer, **given)
                if layer is not None:
                    return convert(weight, layout, layer, loaded=True)
                repacked = self._cache.repack(weight, layout)
                if repacked is None:
                    repacked = convert(weight, layout, loaded=True)
                    self._cache.record(weight, layout, repacked)
                return repacked
            except RepackError as error:
                if layout == self.layout or refusal is None:
                    refusal = error
        assert refusal is not None
        try:
            raise refusal
        finally:
            del refusal  # its traceback has this frame, and the frames above have loaded weights

    def _load_whole(
        self, source: TensorSource, parts: Sequence[Part], share: Weight, layout: str
    ) -> Weight | None:
        """Load the layer of a share, without its codes if they decide nothing."""
        skipped = skippable_tensor(share, layout) if isinstance(self.inner, FormatLoader) else ""
        return self.inner.load(source_without_values(source, skipped), parts, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.layout})"


class RepackStep(LoadedStep):
    """Repack by a loader of weights that its inner loader has loaded."""

    def __init__(self, loader: RepackingLoader) -> None:
        self.loader = loader

    def __call__(
        self, source: TensorSource, weight: Weight, parts: Sequence[Part], split: Split | None
    ) -> Weight:
        """Repack a weight; a weight beyond the layout is an error, or stays with a note."""
        return self.loader._repack_loaded(source, weight, parts, split)

    def convert_stack(
        self, weight: Weight, converted: Weight, stored: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> bool:
        """Repack by the recipe of an earlier layer, if moves alone repack these."""
        layout = self.loader._layouts(weight.device)[0]
        return self.loader._cache.repack_stack(weight, layout, converted, stored, rows)


class GPTQMarlinWeightsLoader(RepackingLoader):
    """Wraps a loader and repacks for Marlin's kernel; 2:4 sparse layers have a kernel of their own.

    The parameters `inner`, `strict` and `options` are those of `RepackingLoader`.
    """

    @checked
    def __init__(self, inner: WeightsLoader, *, strict: bool = True, **options: Any) -> None:
        super().__init__(inner, "marlin", strict=strict, **options)


class FastestLoader(GPTQMarlinWeightsLoader):
    """Repacks for the fastest kernel of the weight's device, by `FASTEST_LAYOUTS`."""

    _assumed_chip: tuple[int | None] | None = None  # capability times 10; None: that of the weight's device

    def for_chip(self, capability: int | None) -> Self:
        """The same loader for a chip of a `capability`, times 10, on any device; None: for no CUDA device."""
        twin = copy(self)
        twin._assumed_chip = (capability,)
        return twin

    def _capability(self, device: torch.device) -> int | None:
        return compute_capability(device) if self._assumed_chip is None else self._assumed_chip[0]

    def _layouts(self, device: torch.device) -> tuple[str, ...]:
        """Layouts to try for a weight on `device`, the fastest kernel first."""
        capability = self._capability(device)
        if capability is None:
            return FASTEST_LAYOUTS["CPU"]
        return FASTEST_LAYOUTS["Ampere" if strips.are_faster(capability) else "CUDA"]

    def _has_kernel(self, target: type[Weight], bits: int | None, device: torch.device) -> bool:
        if target is PanelsWeight:
            return bits in CODE_BITS
        if target is StripsWeight:
            return bits in strips.CODE_BITS
        if target is GPTQMarlinWeight:
            return bits in marlin.BITS
        if target is ExllamaWeight:
            capability = self._capability(device)
            if bits is None or capability is None:
                return False
            return known("exllama", bits, divmod(capability, 10))
        return target is not Exl2KernelWeight


def for_target(inner: WeightsLoader, target: KernelTarget) -> WeightsLoader:
    """The loader of what a kernel reads, over `inner`: "auto" is the fastest that says yes there."""
    asked: dict[str, Any] = {"dtype": target.dtype, "exponent_bias": target.exponent_bias}
    if target.kernel == "auto":
        return FastestLoader(inner, strict=False, **asked)
    if target.kernel == "marlin":
        return GPTQMarlinWeightsLoader(inner, **asked)
    return RepackingLoader(inner, target.kernel, zeros=target.zeros)
