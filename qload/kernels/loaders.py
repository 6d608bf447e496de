"""Loaders that repack what another loader loads: the conversion belongs to the kernel that asks for it."""

from collections.abc import Sequence

from qload.errors import ArgumentError, RepackError
from qload.formats import Marlin24Weight, UnquantizedWeight
from qload.kernels.repack import repack
from qload.loader import Part, Split, TensorSource, WeightsLoader
from qload.spec import Weight

TARGETS = ("auto", "marlin", "exllama")


class RepackingLoader(WeightsLoader):
    """Loads with another loader, whole or a share, then repacks; plain layers stay plain.

    `strict`: a weight that the layout cannot say is a RepackError; otherwise it stays as it was loaded, and
    the reason goes into the ledger's notes.
    """

    untouched: tuple[type[Weight], ...] = (UnquantizedWeight,)

    def __init__(self, inner: WeightsLoader, layout: str, *, strict: bool = True) -> None:
        self.inner, self.layout, self.strict = inner, layout, strict
        self.config_tensors = inner.config_tensors

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        return self.inner.shape(weights, prefix)

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        """As the inner loader, repacked."""
        weight = self.inner.load(weights, parts, split)
        if isinstance(weight, self.untouched):
            return weight
        try:
            return repack(weight, self.layout)
        except RepackError as error:
            if self.strict:
                raise RepackError(
                    f"{weight.layer.name}: {weight.format}", error.layout, error.reason
                ) from error
            weights.note(f"{weight.layer.name}: stays {weight.format}: {error.reason}")
            return weight

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.layout})"


class GPTQMarlinWeightsLoader(RepackingLoader):
    """Wraps a loader of GPTQ, AWQ or Marlin layers and repacks them for Marlin's kernel.

    A 2:4 sparse layer has a kernel of its own and stays as it is stored.
    """

    untouched = (UnquantizedWeight, Marlin24Weight)

    def __init__(self, inner: WeightsLoader, *, strict: bool = True) -> None:
        super().__init__(inner, "marlin", strict=strict)


def for_target(inner: WeightsLoader, target: str) -> WeightsLoader:
    """The loader of what a kernel reads: "auto" is Marlin's wherever it says yes."""
    if target not in TARGETS:
        raise ArgumentError("target", f"None or one of {', '.join(TARGETS)}", repr(target))
    if target == "exllama":
        return RepackingLoader(inner, "exllama")
    return GPTQMarlinWeightsLoader(inner, strict=target == "marlin")
