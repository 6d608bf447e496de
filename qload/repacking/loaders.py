"""Loaders that repack what another loader loads: the conversion belongs to the kernel that asks for it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Self

import torch

from qload.detect import KernelTarget
from qload.errors import ArgumentError, CastError, RepackError, checked
from qload.formats import Marlin24Weight
from qload.kernel_formats import ExllamaWeight, GPTQMarlinWeight, PanelsWeight, strips
from qload.kernel_formats.panels import CODE_BITS
from qload.kernel_formats.repack import (
    find_repacked_type,
    options,
    repack,
    repack_as_loaded,
    skippable_tensor,
)
from qload.kernel_formats.repack_cache import RepackCache
from qload.kernels.chips import compute_capability
from qload.kernels.cuda.choice import known
from qload.layouts import marlin
from qload.loader import FormatLoader, LayerDescription, LoadPlan, Part, Split, TensorSource, WeightsLoader
from qload.repacking.header_only import HeaderOnlySource
from qload.repacking.late_tensors import ExpectedLayers
from qload.spec import Weight

READ_AS_STORED = {"marlin": (Marlin24Weight,)}  # what a kernel of the same family reads as it is
CPU = torch.device("cpu")
Whole = Callable[[str], Weight | None]  # for a layout, the layer that a share is of


class RepackingLoader(WeightsLoader):
    """Loads with another loader, whole or a share, then repacks; plain layers stay plain.

    What is left out or refused is decided for the whole layer, on every rank alike.

    Parameters
    ----------
    inner
        The loader that reads the layers.
    layout
        The layout to repack to, one of those of `repack`.
    strict
        A weight that the layout cannot say is a RepackError; otherwise it stays as it was loaded, and the
        reason goes into the ledger's notes.
    options
        Those of `repack`, for the weights that take them.

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
        self.inner: WeightsLoader = inner
        self.layout: str = layout
        self.strict: bool = strict
        self.options: dict[str, Any] = options
        self._alike, self._expected = RepackCache(), ExpectedLayers()
        self.config_tensors: tuple[str, ...] = inner.config_tensors
        self.formats = inner.formats

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        return self.inner.shape(weights, prefix)

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """The layer under `prefix` of `weights` as it is stored, which the inner loader tells."""
        return self.inner.describe(weights, prefix)

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values, in the inner loader."""
        return self.inner.settle(weights, layer)

    def left_out(self, prefix: str) -> str | None:
        """Why the config leaves out the layer `prefix`, which the inner loader tells."""
        return self.inner.left_out(prefix)

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """The kernel format that `layer` is repacked to; None: it stays as it is, or cannot be repacked."""
        weight_type = layer.format.weight_type
        if weight_type.plain or issubclass(weight_type, READ_AS_STORED.get(self.layout, ())):
            return None
        return self._made_in(self.layout, layer)

    def _made_in(self, layout: str, layer: LayerDescription) -> str | None:
        weight_type = layer.format.weight_type
        target = find_repacked_type(weight_type, layout)
        lacking = "dtype" in options(weight_type, layout) and self.options.get("dtype") is None
        return None if target is None or lacking else target.format

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """As the inner loader, repacked; RepackError where the layout cannot say the weight."""
        return self._plan(weights, parts, split).finish(weights)

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """The load of `parts` of `weights` along `split`, in the two steps of the inner loader."""
        if type(self).load is not RepackingLoader.load:  # a subclass that loads otherwise
            return super().plan(weights, parts, split)
        return self._plan(weights, parts, split)

    def _plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        inner = self.inner.plan(weights, parts, split)
        alone = not split or weights.process_group.size() == 1
        late = self._expected.late(weights, inner.reads) if alone else None

        def finish(source: TensorSource) -> Weight:
            layout = self._layout_on(CPU)
            made = None if late is None else late.make(source, inner, self._alike, layout)
            if made is not None:
                return made
            weight = inner.finish(source)
            made = self._finished(source, parts, split, weight)
            if self._alike.has_unproven:
                later = getattr(source, "at_the_end", None)  # of a stream, whose threads have work meanwhile
                if later is None:
                    self._alike.drop_unproven(prove=True)
                else:
                    later(partial(self._alike.drop_unproven, prove=False))
            if alone:
                self._expected.shown(weights, inner.reads, self._alike.moves(weight, layout))
            return made

        if late is None:
            return LoadPlan(inner.reads, finish)
        return LoadPlan([read for read in inner.reads if late.is_read(read)], finish, [late])

    def _layout_on(self, device: torch.device) -> str:
        """What is tried first where a weight lies."""
        return self.layout

    def _finished(
        self, weights: TensorSource, parts: Sequence[Part], split: Split | None, weight: Weight
    ) -> Weight:
        """What the inner loader has read, repacked."""
        if weight.plain or isinstance(weight, READ_AS_STORED.get(self.layout, ())):
            return weight
        whole = partial(self._whole, weights, parts, weight) if split else lambda layout: None
        try:
            return self._repacked(weight, whole)
        except (RepackError, CastError) as error:
            reason = error.reason if isinstance(error, RepackError) else str(error)
            if self.strict:
                raise RepackError(f"{weight.layer.name}: {weight.format}", self.layout, reason) from error
            weights.note(f"{weight.layer.name}: stays {weight.format}: {reason}")
            return weight

    def repacked(self, weight: Weight) -> Weight:
        """A whole `weight` that the inner loader has read, as this one hands it out.

        RepackError or CastError with the reason where the layout cannot say it, however strict this is.
        """
        if weight.plain or isinstance(weight, READ_AS_STORED.get(self.layout, ())):
            return weight
        return self._repacked(weight, lambda layout: None)

    def with_config(self, **changes: Any) -> Self:
        """The same loader, the config of what it loads changed, as `FormatLoader.with_config`.

        `changes`: by the config's fields; ArgumentError where the inner loader has no config to change.
        """
        if not isinstance(self.inner, FormatLoader | RepackingLoader):
            raise ArgumentError("changes", "none, as the inner loader has no config", ", ".join(changes))
        twin = copy(self)
        twin.inner = self.inner.with_config(**changes)
        twin.formats = twin.inner.formats
        return twin

    def _repacked(self, weight: Weight, whole: Whole) -> Weight:
        """In the loader's layout; RepackError or CastError with the reason why not."""
        return self._in_layout(self.layout, weight, whole)

    def _in_layout(self, layout: str, weight: Weight, whole: Whole) -> Weight:
        taken = options(type(weight), layout)
        asked = {option: value for option, value in self.options.items() if option in taken}
        if "dtype" in taken and asked.get("dtype") is None:
            reason = "its scales need the dtype of the activations, and the target says none"
            raise RepackError(weight.format, layout, reason)
        layer = None if find_repacked_type(type(weight), layout) is None else whole(layout)
        if asked or type(self.inner).load is not FormatLoader.load:
            return repack(weight, layout, whole=layer, **asked)
        again = self._alike.repack(weight, layout) if layer is None else None
        if again is None:
            again = repack_as_loaded(weight, layout, layer)
            if layer is None:
                self._alike.record(weight, layout, again)
        return again

    def _whole(
        self, weights: TensorSource, parts: Sequence[Part], share: Weight, layout: str
    ) -> Weight | None:
        """The layer that a share is of, read but for its codes, where the codes decide nothing."""
        if weights.process_group.size() == 1:
            return None
        skipped = skippable_tensor(share, layout) if isinstance(self.inner, FormatLoader) else ""
        return self.inner.load(HeaderOnlySource(weights, skipped), parts, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.layout})"


class GPTQMarlinWeightsLoader(RepackingLoader):
    """Wraps a loader and repacks what it loads for Marlin's kernel; 2:4 sparse layers have their own.

    The parameters `inner`, `strict` and `options` are those of `RepackingLoader`.
    """

    @checked
    def __init__(self, inner: WeightsLoader, *, strict: bool = True, **options: Any) -> None:
        super().__init__(inner, "marlin", strict=strict, **options)


class FastestLoader(GPTQMarlinWeightsLoader):
    """Repacks for the fastest kernel where a weight lies: strips on Hopper, panels where there is no CUDA
    device, else Marlin's order.

    What none of these can say goes to ExLlama's order, where the device has kernels for it: 2 and 3 bits,
    groups of any size.
    """

    _asked: tuple[int | None] | None = None  # the chip that is asked about; None: that where a weight lies

    def for_chip(self, capability: int | None) -> Self:
        """The same loader, which repacks for a chip of a `capability`, times 10, wherever weights are put.

        None: for no CUDA device.
        """
        twin = copy(self)
        twin._asked = (capability,)
        return twin

    def _chip(self, device: torch.device) -> int | None:
        return compute_capability(device) if self._asked is None else self._asked[0]

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """The kernel format that `layer` is repacked to on `device`; None: it stays as it is."""
        told, capability = super().made(layer, device), self._chip(device)
        bits = getattr(layer.format.config, "bits", None)
        if told == GPTQMarlinWeight.format and capability is None and bits in CODE_BITS:
            return PanelsWeight.format
        if told == GPTQMarlinWeight.format and bits not in marlin.BITS:
            shuffled = _shuffles(layer.format.weight_type, bits, capability)
            return ExllamaWeight.format if shuffled else told
        if told is None or not strips.are_faster(capability):
            return told
        return self._made_in("strips", layer) or told

    def _layout_on(self, device: torch.device) -> str:
        """What is tried first where a weight lies."""
        capability = self._chip(device)
        return "panels" if capability is None else "strips" if strips.are_faster(capability) else self.layout

    def _repacked(self, weight: Weight, whole: Whole) -> Weight:
        capability, first = self._chip(weight.device), self._layout_on(weight.device)
        if first != self.layout:
            try:
                return self._in_layout(first, weight, whole)
            except RepackError:  # Marlin's order can say more, or why not
                pass
        try:
            return super()._repacked(weight, whole)
        except RepackError:
            if not _shuffles(type(weight), getattr(weight.config, "bits", None), capability):
                raise
            with suppress(RepackError):  # what Marlin's order refused is the reason then
                return self._in_layout("exllama", weight, whole)
            raise


def _shuffles(weight_type: type[Weight], bits: int | None, capability: int | None) -> bool:
    """Whether a CUDA device has kernels for weights of so many bits in ExLlama's order."""
    if capability is None or bits is None or find_repacked_type(weight_type, "exllama") is not ExllamaWeight:
        return False
    return known("exllama", bits, divmod(capability, 10))


def for_target(inner: WeightsLoader, target: KernelTarget) -> WeightsLoader:
    """The loader of what a kernel reads, over `inner`: "auto" is the fastest that says yes there."""
    asked: dict[str, Any] = {"dtype": target.dtype, "exponent_bias": target.exponent_bias}
    if target.kernel == "auto":
        return FastestLoader(inner, strict=False, **asked)
    if target.kernel == "marlin":
        return GPTQMarlinWeightsLoader(inner, **asked)
    return RepackingLoader(inner, target.kernel, zeros=target.zeros)
