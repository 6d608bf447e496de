"""A loader that quantizes the plain layers which another loader reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from qload.errors import ArgumentError, MismatchError
from qload.formats import UnquantizedWeight
from qload.loader import FormatLoader, ModuleLoader, Part, Split, Studied, TensorSource, WeightsLoader
from qload.parallel import ALONE
from qload.quantize.made import cut
from qload.quantize.policy import Policy
from qload.spec import Layer, Weight, named

Statistics = Literal["whole", "share"]


class Quantizer(Protocol):
    """Turns one plain layer, or one part of a fused one, into a typed weight.

    per_share
        Outputs are quantized one by one: a share of them, quantized alone, is that share of the quantized
        whole, and `quantize` refuses what the format could not cut. Then only the share is read.
    """

    @property
    def format(self) -> str:
        """The name of the format it makes."""

    @property
    def per_share(self) -> bool:
        """Whether a share of outputs may be quantized alone; see above."""

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Weight:
        """A float (N, K) as a typed weight that has this layer, which has one part.

        `dtype` is that of the activations, for a format that keeps scales in it. What cannot be
        quantized is refused with a QloadError that names `layer.name`: see `check_finite`. The typed
        weight's own config declares no tensor that the weight does not hold, unless it is optional.
        """


class QuantizingLoader(WeightsLoader):
    """Loads with another loader and quantizes what is plain; what is quantized already is not touched.

    inner
        Reads the layers. Vectors, and layers in any other format it knows, stay as it loads them.
    policy
        Which plain layers are quantized; None: all but those that the checkpoint's config leaves out, which
        no policy overrules.
    statistics
        "whole": the layer is quantized before it is cut, so that every world size gives the same model;
        a cut that the format refuses is refused. "share": only what this rank reads is quantized, which is
        cheaper for a cut of inputs, and another model at another world size.
    dtype
        Of the activations; None: that of the plain weight.
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
        if statistics not in ("whole", "share"):
            raise ArgumentError("statistics", "'whole' or 'share'", repr(statistics))
        self.inner, self.quantizer, self.policy = inner, quantizer, policy
        self.statistics, self.dtype = statistics, dtype
        self.config_tensors = inner.config_tensors

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        return self.inner.shape(weights, prefix)

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """As the inner loader, plain matrices quantized."""
        layers = {part.prefix: self.inner.study(weights, part.prefix) for part in parts}
        if not self._are_quantized(layers):
            return self.inner.load(weights, parts, split)
        alone = split == "N" and self.quantizer.per_share
        if self.statistics == "share" or alone:
            return self._share(weights, parts, split)
        whole = {
            prefix: self._quantized(self.inner.load(weights, [Part(prefix)], None), prefix)
            for prefix in layers
        }
        return cut(whole, weights.process_group, parts, split)

    def _are_quantized(self, layers: Mapping[str, Studied]) -> bool:
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
        inner = self.inner.chosen(prefix) if isinstance(self.inner, ModuleLoader) else self.inner
        if inner.exclusions.entry(prefix) is not None:
            return False
        return self.policy is None or self.policy.quantizes(prefix)

    def _share(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """This rank's share of each part, quantized alone, and joined as any other fused layer."""
        plain = self.inner.load(weights, parts, split)
        made = {}
        for part, rows in zip(parts, torch.split(_matrix(plain), list(plain.layer.parts)), strict=True):
            name = part.prefix if part.stop is None else f"{part.prefix}[{part.start}:{part.stop}]"
            layer = replace(plain.layer, parts=(rows.shape[0],), name=name)
            made[name] = self.quantizer.quantize(rows, layer, self.dtype or rows.dtype)
        return replace(cut(made, ALONE, [Part(name) for name in made], None), layer=plain.layer)

    def _quantized(self, plain: Weight, prefix: str) -> Weight:
        matrix = _matrix(plain)
        return self.quantizer.quantize(matrix, replace(plain.layer, name=prefix), self.dtype or matrix.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.quantizer!r}, statistics={self.statistics!r})"


def check_finite(weight: Tensor, name: str) -> None:
    """No NaN and no infinity, or MismatchError: neither has a scale."""
    wrong = (~torch.isfinite(weight)).nonzero()
    if wrong.numel():
        n, k = wrong[0].tolist()
        raise MismatchError(
            named(name, "weight"),
            "cannot be quantized",
            "finite values",
            f"{weight[n, k]:g} at ({n}, {k}) ({wrong.shape[0]} in all)",
        )


def _is_plain(layer: Studied) -> bool:
    return layer.room.weight is UnquantizedWeight and "K" in layer.sizes


def _matrix(plain: Weight) -> Tensor:
    if not isinstance(plain, UnquantizedWeight):
        raise TypeError(f"{plain.layer.name}: {plain.format} where a plain weight was studied")
    return plain.weight
