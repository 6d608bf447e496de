"""A loader that quantizes the plain layers which another loader reads."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

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
    WeightsLoader,
)
from qload.parallel import ALONE, ProcessGroup
from qload.quantize.policy import Policy, is_router
from qload.quantize.quantizers import Quantizer
from qload.spec import Layer, Role, Weight, named
from qload.storage import TensorInfo
from qload.storage.protocol import missing


def cut(
    layers: Mapping[str, Weight], group: ProcessGroup, parts: Sequence[Part], split: Split | None
) -> Weight:
    """A share of typed weights, by their own declaration."""
    first, *others = layers.values()
    for other in others:
        if (type(other), other.config) != (type(first), first.config):
            raise MismatchError(
                other.layer.name,
                "parts of a fused layer are quantized in two ways",
                f"{first.config} as {first.layer.name}",
                str(other.config),
            )
    own = [
        (name.__eq__, FormatLoader(ConfiguredFormat(type(made), made.config)))
        for name, made in layers.items()
    ]
    return ModuleLoader(own, own[0][1]).load(InMemorySource(layers, group), parts, split)


class InMemorySource:
    """Typed weights in memory as a source of tensors, so that they are cut as stored ones are."""

    def __init__(self, layers: Mapping[str, Weight], group: ProcessGroup) -> None:
        self.process_group = group
        self.tensors: dict[str, Tensor] = {
            named(prefix, spec.suffix): weight.fields()[spec.name]
            for prefix, weight in layers.items()
            for spec in weight.tensors(weight.config)
            if spec.name in weight.fields()
        }

    def has_tensor(self, name: str) -> bool:
        """Whether a typed weight holds it."""
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape."""
        tensor = self._find(name)
        return TensorInfo(tensor.dtype, tuple(tensor.shape))

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """A copy of those elements."""
        return self._find(name)[index].clone(memory_format=torch.contiguous_format)

    def take(self, names: Iterable[str]) -> None:
        """The ledger counts what was stored, which the inner loader has entered."""

    def note(self, text: str) -> None:
        """What was just made has nothing to disagree with."""

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """The error for a name that is not there."""
        return missing(name, self.tensors)

    def _find(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.missing(name)
        return self.tensors[name]


Statistics = Literal["whole", "share"]
RUN = 1 << 26  # elements that are quantized at once, where that does not matter
TILE = 256  # no format has larger tiles of outputs


class QuantizingLoader(WeightsLoader):
    """Loads with another loader and quantizes what is plain; what is quantized already is not touched.

    ArgumentError for an `inner` that is no loader of the checkpoint's own types, and the like.

    Parameters
    ----------
    inner
        Reads the layers. Vectors, and layers in any other format it knows, stay as it loads them.
    quantizer
        What a plain layer is quantized by, such as `Fp8Quantizer()`.
    policy
        Which plain layers are quantized; None: all but routers, and those that the checkpoint's config leaves
        out, both of which no policy overrules.
    statistics
        "whole": every rank reads the layer and quantizes it before it is cut, so that every world size gives
        the same model, and what cannot be quantized or cut is refused by all ranks alike. "share": each
        rank reads and quantizes its share alone, which is cheaper; cut by inputs, or with scales of more
        than one output, it is another model at another world size. What cannot be quantized is then refused
        only by the ranks that read it: whoever asks for it has to stop the others.
    dtype
        Of the activations; None: that of the plain weight.

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
            expected = "a loader of the checkpoint's own types, as loader_from_config makes without a target"
            raise ArgumentError("inner", expected, repr(given))
        if dtype is not None and dtype not in FLOATS:
            raise ArgumentError("dtype", f"None or one of {', '.join(map(str, FLOATS))}", str(dtype))
        check_type("quantizer", quantizer, Quantizer)
        check_type("policy", policy, Policy | None)
        if statistics not in ("whole", "share"):
            raise ArgumentError("statistics", "'whole' or 'share'", repr(statistics))
        self.inner: FormatLoader = inner
        self.quantizer: Quantizer = quantizer
        self.policy: Policy | None = policy
        self.statistics: Statistics = statistics
        self.dtype: torch.dtype | None = dtype
        self.config_tensors: tuple[str, ...] = inner.config_tensors
        self.formats = inner.formats

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        return self.inner.shape(weights, prefix)

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """The layer under `prefix` of `weights` as it is stored."""
        return self.inner.describe(weights, prefix)

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values."""
        return self.inner.settle(weights, layer)

    def left_out(self, prefix: str) -> str | None:
        """Why the checkpoint's config, or the policy, leaves out the layer `prefix`."""
        said = self.inner.left_out(prefix)
        if said is None and is_router(prefix):
            return "a router, which no quantization while loading touches"
        if said is None and self.policy is not None and not self.policy.quantizes(prefix):
            return "the policy of what is quantized while loading"
        return said

    def made(self, layer: LayerDescription, device: torch.device) -> str | None:
        """The quantizer's format, of plain matrices that it is asked for; None of all others."""
        return self.quantizer.format if _is_plain(layer) and self._is_chosen(layer.prefix) else None

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """As the inner loader, plain matrices quantized."""
        layers = {part.prefix: self.inner.describe(weights, part.prefix) for part in parts}
        if not self._are_quantized(layers):
            return self.inner.load(weights, parts, split)
        if self.statistics == "share":
            return self._share(weights, parts, split)
        return cut(
            {prefix: self._whole(weights, prefix) for prefix in layers}, weights.process_group, parts, split
        )

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """The load of `parts` of `weights` along `split`; it reads what the inner loader would."""
        reads: Sequence[Rectangle] = ()
        with suppress(QloadError):  # the load itself says what is wrong
            reads = self.inner.plan(weights, parts, None if self.statistics == "whole" else split).reads
        return LoadPlan(reads, lambda source: self.load(source, parts, split))

    def _are_quantized(self, layers: Mapping[str, LayerDescription]) -> bool:
        """Whether the parts of a layer are to be quantized, all of them or none."""
        if not all(_is_plain(layer) for layer in layers.values()):
            return False
        chosen = [prefix for prefix in layers if self._is_chosen(prefix)]
        left = [prefix for prefix in layers if prefix not in chosen]
        if chosen and left:
            raise MismatchError(
                ", ".join(layers),
                "fused of layers that are not all quantized or all left out",
                "one choice for all parts",
                f"{left[0]} left out, {chosen[0]} not",
            )
        return not left

    def _is_chosen(self, prefix: str) -> bool:
        if is_router(prefix):
            return False
        inner = self.inner.chosen(prefix) if isinstance(self.inner, ModuleLoader) else self.inner
        if inner.exclusions.entry(prefix) is not None:
            return False
        return self.policy is None or self.policy.quantizes(prefix)

    def _share(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """This rank's share of each part, quantized alone, and joined as any other fused layer."""
        plain = self.inner.load(weights, parts, split)
        pieces = torch.split(_matrix(plain), list(plain.layer.parts))
        regions = {
            _region(part, rows, split, weights.process_group): rows
            for part, rows in zip(parts, pieces, strict=True)
        }
        return self._joined(plain, regions)

    def _whole(self, weights: TensorSource, prefix: str) -> Weight:
        """A layer quantized, in runs of outputs where they may be quantized one by one."""
        plain = self.inner.load(weights, [Part(prefix)], None)
        matrix = _matrix(plain)
        N, K = matrix.shape
        rows = max(RUN // max(K, 1) // TILE, 1) * TILE if self.quantizer.per_share else N
        if rows >= N:
            return self._quantized(matrix, plain.layer, prefix)
        return self._joined(
            plain, {f"{prefix}[{n}:{min(n + rows, N)}]": matrix[n : n + rows] for n in range(0, N, rows)}
        )

    def _joined(self, plain: Weight, pieces: Mapping[str, Tensor]) -> Weight:
        """Pieces of a plain layer, each quantized alone, as one weight of that layer."""
        made = {
            name: self._quantized(rows, replace(plain.layer, parts=(rows.shape[0],)), name)
            for name, rows in pieces.items()
        }
        return replace(cut(made, ALONE, [Part(name) for name in made], None), layer=plain.layer)

    def _quantized(self, matrix: Tensor, layer: Layer, name: str) -> Weight:
        return self.quantizer.quantize(matrix, replace(layer, name=name), self.dtype or matrix.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.quantizer!r}, statistics={self.statistics!r})"


def _is_plain(layer: LayerDescription) -> bool:
    return layer.format.weight_type is UnquantizedWeight and "K" in layer.sizes


def _matrix(plain: Weight) -> Tensor:
    if not isinstance(plain, UnquantizedWeight):
        raise TypeError(f"{plain.layer.name}: {plain.format} where a plain weight was described")
    return plain.weight


def _region(part: Part, here: Tensor, split: Split | None, group: ProcessGroup) -> str:
    """What a rank reads of a part, in the layer's own places: `q[64:128]`, `q[0:128, 32:64]`."""
    rank, (n, k) = group.rank(), here.shape
    if group.size() == 1 or split is None:
        return part.prefix if part.stop is None else f"{part.prefix}[{part.start}:{part.stop}]"
    start = part.start + (rank * n if split == "N" else 0)
    inputs = f", {rank * k}:{rank * k + k}" if split == "K" else ""
    return f"{part.prefix}[{start}:{start + n}{inputs}]"
