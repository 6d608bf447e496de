"""One kind of layer at a time, repacked as a load for a chip does, but for its codes; and what reads that."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch

from qload.errors import CastError, QloadError
from qload.kernel_formats import strips
from qload.kernels import dtypes
from qload.loader import LayerDescription
from qload.plan.explained import ExplainedLayer
from qload.plan.first_share import FirstShare, first_share
from qload.plan.kernels import DEQUANTIZED, kernels_for, without_kernel
from qload.plan.sharing import Sharing
from qload.repacking.loaders import FastestLoader
from qload.spec import Weight
from qload.weights import Weights

LAYOUTS = {
    "strips": "strips",
    "panels": "panels",
    "marlin": "gptq_marlin",
    "exllama": "exllama",
}  # -> formats
HERE = torch.device("cpu")


@dataclass(frozen=True)
class Question:
    """What is asked of every layer: of which chip, None: no CUDA device; ranks, activations, tokens."""

    capability: int | None
    tp: int
    dtype: torch.dtype
    tokens: tuple[int, ...]

    @property
    def chip(self) -> tuple[int, int] | None:
        """The capability in two numbers."""
        return None if self.capability is None else divmod(self.capability, 10)


class AskedKinds:
    """Answers by kinds of layers: those that are described alike and are shared alike."""

    def __init__(self, weights: Weights, question: Question) -> None:
        self.weights, self.question = weights, question
        self._known: dict[tuple[int, Hashable], ExplainedLayer] = {}
        self._kept: list[object] = []  # so that no two layers have one id

    def of(self, prefix: str, layer: LayerDescription | QloadError | None, how: Sharing) -> ExplainedLayer:
        """The layer under `prefix`, shared as `how` says; None: it is not stored."""
        if not isinstance(layer, LayerDescription):
            return ExplainedLayer(prefix, None, (), error=str(layer or self.weights.missing(prefix)))
        kind = id(layer.cuts), how.question
        known = self._known.get(kind)
        if known is None:
            self._kept.append(layer.cuts)
            known = self._told(layer, how)
            if not known.error:  # which names its own layer
                self._known[kind] = known
        return replace(known, prefix=prefix)

    def _told(self, layer: LayerDescription, how: Sharing) -> ExplainedLayer:
        kind, question = layer.format.weight_type, self.question
        shape = (layer.N, layer.K) if "K" in layer.sizes else (layer.N,)
        bits = getattr(layer.format.config, "bits", None)
        stored = ExplainedLayer(layer.prefix, kind.format, shape, kernel_format=kind.format, bits=bits)
        try:
            share = first_share(self.weights, layer, how, self.question.tp)
            if kind.plain or FastestLoader(share.loader).made(layer, HERE) is None:
                return replace(
                    stored,
                    choices=without_kernel(
                        kind, layer.format.activations, question.tokens, question.dtype, question.chip
                    ),
                )
            return self._chosen(stored, share)
        except QloadError as error:
            return replace(stored, error=str(error))

    def _chosen(self, stored: ExplainedLayer, share: FirstShare) -> ExplainedLayer:
        """The kernel format that the fastest loader makes, and the kernels that read it."""
        question = self.question
        loader = FastestLoader(share.loader, strict=False, dtype=None).for_chip(question.capability)
        made = share.load(loader)
        formats = dict(self._formats(share, made.format))
        try:
            fitted = dtypes.for_activations(made, question.dtype)
        except CastError as error:
            return replace(stored, kernel_format=made.format, formats=formats, error=str(error))
        choices = kernels_for(fitted, question.dtype, question.chip, question.tokens)
        slow = question.chip is not None and any(each.kernel == DEQUANTIZED for each in choices)
        changes = tuple(self._changes(made)) if slow else ()
        shape = made.shape
        return replace(
            stored, shape=shape, kernel_format=made.format, formats=formats, choices=choices, changes=changes
        )

    def _formats(self, share: FirstShare, taken: str) -> Iterator[tuple[str, str]]:
        """Of each kernel format that is not taken, why not."""
        for layout, name in LAYOUTS.items():
            if name == taken:
                continue
            reason = share.why_not(layout)
            if reason is not None:
                yield name, reason
                continue
            if layout == "panels" and self.question.capability is not None:
                yield name, "is read by CPUs alone"
            elif layout == "strips" and not strips.gains(self.question.capability):
                yield name, f"gains nothing on other chips than those of capability {strips.CAPABILITY}"
            else:
                yield name, f"could hold it too, and {taken} is preferred here"

    def _changes(self, made: Weight) -> Iterator[str]:
        """What else of the activations would give a kernel of ours."""
        question = self.question
        for dtype in dtypes.DTYPES:
            if dtype != question.dtype:
                try:
                    fitted = dtypes.for_activations(made, dtype)
                except CastError:
                    continue
                found = kernels_for(fitted, dtype, question.chip, question.tokens)
                if all(each.kernel != DEQUANTIZED for each in found):
                    kernels = ", ".join(dict.fromkeys(each.kernel for each in found))
                    yield f"activations of {str(dtype).removeprefix('torch.')}: {kernels}"
