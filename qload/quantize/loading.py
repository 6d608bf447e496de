"""Loader that quantizes the plain layers of another loader."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from qload.dtypes import STORED, TORCH
from qload.errors import ArgumentError, MismatchError, MissingTensorError, QloadError, check_type
from qload.formats import UnquantizedWeight
from qload.formats.unquantized import FLOATS
from qload.loader import (
    ConfiguredFormat,
    FormatLoader,
    LayerDescription,
    LoadPlan,
    ModuleLoader,
    Part,
    Rectangle,
    Split,
    TensorSource,
)
from qload.loader.base import WrappingLoader
from qload.parallel import ALONE, ProcessGroup
from qload.quantize.policy import Policy, is_router
from qload.quantize.quantizers import Quantizer
from qload.spec import Layer, Role, Weight, named
from qload.storage import TensorInfo
from qload.storage.protocol import missing

Statistics = Literal["whole", "share"]
BLOCK_ELEMENTS = 1 << 26  # quantized at once, if outputs are quantized one by one
TILE_OUTPUTS = 256  # a multiple of the tile of every format


def cut_weights(
    layers: Mapping[str, Weight], group: ProcessGroup, parts: Sequence[Part], split: Split | None
) -> Weight:
    """Cut typed weights into the share of a rank, by their own declarations."""
    first, *others = layers.values()
    for other in others:
        if (type(other), other.config) != (type(first), first.config):
            raise MismatchError(
                other.layer.name,
                "parts of a fused layer are quantized in two ways",
                f"{first.config} as {first.layer.name}",
                str(other.config),
            )
    loaders = [
        (name.__eq__, FormatLoader(ConfiguredFormat(type(weight), weight.config)))
        for name, weight in layers.items()
    ]
    return ModuleLoader(loaders, loaders[0][1]).load(InMemorySource(layers, group), parts, split)


class InMemorySource(TensorSource):
    """Source with the tensors of typed weights, so that loaders cut them like stored ones."""

    def __init__(self, layers: Mapping[str, Weight], group: ProcessGroup) -> None:
        self.process_group = group
        self.tensors: dict[str, Tensor] = {
            named(prefix, spec.suffix): weight.fields()[spec.name]
            for prefix, weight in layers.items()
            for spec in weight.tensors(weight.config)
            if spec.name in weight.fields()
        }

    def has_tensor(self, name: str) -> bool:
        """Return whether there is a tensor with this name."""
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape."""
        tensor = self._find(name)
        return TensorInfo(STORED[tensor.dtype], tuple(tensor.shape))

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """Return a contiguous copy of a slice."""
        return self._find(name)[index].clone(memory_format=torch.contiguous_format)

    def take(self, names: Iterable[str]) -> None:
        """Do nothing: the ledger has the stored tensors already."""

    def note(self, text: str) -> None:
        """Do nothing: notes are about stored tensors."""

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """Return the error for a name without a tensor."""
        return missing(name, self.tensors)

    def _find(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.missing(name)
        return self.tensors[name]


class QuantizingLoader(WrappingLoader):
    """Loader that quantizes the plain layers of another loader; quantized layers stay unchanged.

    ArgumentError for an `inner` that repacks or is no loader, and for other wrong arguments.

    Parameters
    ----------
    inner
        Reads the layers. Vectors, and layers in any other format, are returned as it loads them.
    quantizer
        Quantizes plain layers, for example `Fp8Quantizer()`.
    policy
        Selects the plain layers to quantize; None: all. Routers, and layers that the checkpoint's config
        excludes, always stay plain.
    statistics
        "whole": every rank reads the layer and quantizes it before the cut. So every number of ranks gives
        the same model, and all ranks refuse a layer alike. "share": each rank reads and quantizes its share
        alone, with less work; cut along the inputs, or with scales of several outputs, the model depends on
        the number of ranks. A layer may then be refused on some ranks only, and the caller has to stop the
        others.
    dtype
        Dtype of the activations; None: that of the plain weight.

    Examples
    --------
    >>> import torch
    >>> from qload import Fp8Quantizer, MemoryStorage, QuantizingLoader, Weights, loader_from_config
    >>> storage = MemoryStorage({"up.weight": torch.ones(4, 8), "norm.weight": torch.ones(8)})
    >>> weights = Weights(storage, loader=QuantizingLoader(loader_from_config(None), Fp8Quantizer()))
    >>> weights.get_weights("up").format, weights.get_weights("norm").format
    ('fp8', 'unquantized')
    """

    def __init__(
        self,
        inner: FormatLoader,
        quantizer: Quantizer,
        *,
        policy: Policy | None = None,
        statistics: Statistics = "whole",
        dtype: torch.dtype | None = None,
    ) -> None:
        given: object = inner
        if not isinstance(given, FormatLoader):
            expected = "a loader of the checkpoint's own types, such as loader_from_config without a target"
            raise ArgumentError("inner", expected, repr(given))
        if dtype is not None and dtype not in map(TORCH.__getitem__, FLOATS):
            raise ArgumentError("dtype", f"None or one of {', '.join(map(str, FLOATS))}", str(dtype))
        check_type("quantizer", quantizer, Quantizer)
        check_type("policy", policy, Policy | None)
        if statistics not in ("whole", "share"):
            raise ArgumentError("statistics", "'whole' or 'share'", repr(statistics))
        super().__init__(inner)
        self.inner: FormatLoader = inner
        self.quantizer: Quantizer = quantizer
        self.policy: Policy | None = policy
        self.statistics: Statistics = statistics
        self.dtype: torch.dtype | None = dtype

    def left_out(self, prefix: str) -> str | None:
        """Return why the checkpoint's config or the policy excludes the layer `prefix`, or None."""
        reason = super().left_out(prefix)
        if reason is None and is_router(prefix):
            return "a router, which is never quantized while loading"
        if reason is None and self.policy is not None and not self.policy.quantizes(prefix):
            return "the policy for quantization while loading"
        return reason

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """Return the quantizer's format for plain matrices that it quantizes; None for all other layers."""
        return self.quantizer.format if _is_plain(layer) and self._is_chosen(layer.prefix) else None

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """Load `parts` of `weights` along `split` with the inner loader, and quantize plain matrices."""
        layers = {part.prefix: self.inner.describe(weights, part.prefix) for part in parts}
        if not self._quantizes_all(layers):
            return self.inner.load(weights, parts, split)
        if self.statistics == "share":
            return self._quantize_share(weights, parts, split)
        quantized = {prefix: self._quantize_layer(weights, prefix) for prefix in layers}
        return cut_weights(quantized, weights.process_group, parts, split)

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """Plan the load of `parts` of `weights` along `split`, with the reads of the inner loader."""
        reads: Sequence[Rectangle] = ()
        with suppress(QloadError):  # the load raises the error
            reads = self.inner.plan(weights, parts, None if self.statistics == "whole" else split).reads
        return LoadPlan(lambda source: self.load(source, parts, split), lambda: reads)

    def _quantizes_all(self, layers: Mapping[str, LayerDescription]) -> bool:
        """Return whether all parts of a layer are quantized, or none; MismatchError if some are."""
        if not all(_is_plain(layer) for layer in layers.values()):
            return False
        chosen = [prefix for prefix in layers if self._is_chosen(prefix)]
        excluded = [prefix for prefix in layers if prefix not in chosen]
        if chosen and excluded:
            raise MismatchError(
                ", ".join(layers),
                "some parts of the fused layer are quantized and others are not",
                "one choice for all parts",
                f"{excluded[0]} left out, {chosen[0]} not",
            )
        return not excluded

    def _is_chosen(self, prefix: str) -> bool:
        if is_router(prefix):
            return False
        inner = self.inner.chosen(prefix) if isinstance(self.inner, ModuleLoader) else self.inner
        if inner.exclusions.entry(prefix) is not None:
            return False
        return self.policy is None or self.policy.quantizes(prefix)

    def _quantize_share(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """Quantize this rank's share of each part alone, and fuse them."""
        plain = self.inner.load(weights, parts, split)
        blocks = torch.split(_matrix(plain), list(plain.layer.parts))
        return self._quantize_blocks(
            plain,
            {
                _region(part, rows, split, weights.process_group): rows
                for part, rows in zip(parts, blocks, strict=True)
            },
        )

    def _quantize_layer(self, weights: TensorSource, prefix: str) -> Weight:
        """Quantize a whole layer, in blocks of outputs if these are quantized one by one."""
        plain = self.inner.load(weights, [Part(prefix)], None)
        matrix = _matrix(plain)
        N, K = matrix.shape
        rows = max(BLOCK_ELEMENTS // max(K, 1) // TILE_OUTPUTS, 1) * TILE_OUTPUTS
        if not self.quantizer.per_share or rows >= N:
            return self._quantize(matrix, plain.layer, prefix)
        return self._quantize_blocks(
            plain, {f"{prefix}[{n}:{min(n + rows, N)}]": matrix[n : n + rows] for n in range(0, N, rows)}
        )

    def _quantize_blocks(self, plain: Weight, blocks: Mapping[str, Tensor]) -> Weight:
        """Quantize blocks of a plain layer alone, and join them into one weight of that layer."""
        quantized = {
            name: self._quantize(rows, replace(plain.layer, parts=(rows.shape[0],)), name)
            for name, rows in blocks.items()
        }
        joined = cut_weights(quantized, ALONE, [Part(name) for name in quantized], None)
        return replace(joined, layer=plain.layer)

    def _quantize(self, matrix: Tensor, layer: Layer, name: str) -> Weight:
        return self.quantizer.quantize(matrix, replace(layer, name=name), self.dtype or matrix.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.quantizer!r}, statistics={self.statistics!r})"


def _is_plain(layer: LayerDescription) -> bool:
    return layer.format.weight_type is UnquantizedWeight and "K" in layer.sizes


def _matrix(plain: Weight) -> Tensor:
    if not isinstance(plain, UnquantizedWeight):
        raise TypeError(f"{plain.layer.name}: loaded as {plain.format}, but described as plain")
    return plain.weight


def _region(part: Part, block: Tensor, split: Split | None, group: ProcessGroup) -> str:
    """Return the rows and columns of a part that a rank reads: `q[64:128]`, `q[0:128, 32:64]`."""
    rank, (n, k) = group.rank(), block.shape
    if group.size() == 1 or split is None:
        return part.prefix if part.stop is None else f"{part.prefix}[{part.start}:{part.stop}]"
    start = part.start + (rank * n if split == "N" else 0)
    inputs = f", {rank * k}:{rank * k + k}" if split == "K" else ""
    return f"{part.prefix}[{start}:{start + n}{inputs}]"
