"""Layer by layer on the same inputs: what a checkpoint's weights make of them, and a reference's.

A layer is told where it is no closer to the reference than zeros are, or where it is an outlier beside its
siblings: the layers of one name in other blocks that are stored alike. Its square is then more than `SPIKE`
times the mean of theirs, as a block of weights is beside its layer in `qload.verify.comparison`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.diagnosis.dequantized import meant
from qload.methods import ParallelExperts
from qload.methods.layers import LinearBase
from qload.verify.comparison import SPIKE, Distance
from qload.verify.logits.opened import Watched
from qload.verify.logits.prompt import logits_of
from qload.verify.logits.watched import WatchedExperts, linears_of
from qload.verify.report import Finding

OUTPUT = "against-output"


@dataclass(frozen=True)
class Beside:
    """One layer, or one part of a fused one, beside the reference's.

    Attributes
    ----------
    name, stored
        Of the layer, and how it is stored: format and config.
    path
        Of the module that has it, in the model.
    relative
        The error of its outputs, as a share of the reference's; 1 is as far as zeros are.
    """

    name: str
    stored: str
    path: str
    relative: float

    def numbers(self) -> dict[str, Any]:
        """What a program is told."""
        return {"prefix": self.name, "relative": self.relative}

    @property
    def kind(self) -> tuple[str, str]:
        """What it has in common with its siblings."""
        return self.name.rpartition(".")[2], self.stored


def beside(own: Watched, other: Watched, ids: Sequence[int], device: str) -> tuple[list[Beside], Tensor]:
    """All layers on the inputs that the reference gives to its own, in order; and the reference's logits."""
    sums: dict[tuple[str, str, str], Distance] = {}

    def compared(path: str, ours: nn.Module, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        got = ours(*inputs)
        for name, stored, at in _parts(ours, y.shape[-1]):
            one, two = got[..., at].double(), y[..., at].double()
            sums.setdefault((name, stored, path), Distance()).add(one, two, one != two)

    hooks = []
    for path, module in other.model.named_modules():
        if isinstance(module, LinearBase | ParallelExperts):
            ours = own.model.get_submodule(path)
            hooks.append(module.register_forward_hook(partial(compared, path, ours)))
    logits = logits_of(other.model, ids, other.dtype, device)
    for hook in hooks:
        hook.remove()
    return [
        Beside(*named, found.relative if not found.exact else 0.0) for named, found in sums.items()
    ], logits


def _parts(layer: nn.Module, width: int) -> Iterator[tuple[str, str, slice]]:
    """The name of each part of a layer, how it is stored, and its outputs among `width`."""
    for experts in _experts(layer):
        stored = ", ".join(f"{s.format} {s.config}" for s in (experts.gate_up, experts.down))
        yield experts.gate_up.layer.name, stored, slice(0, width)
    start = 0
    for linear in linears_of(layer):
        weight = linear.meaning
        names, parts = weight.layer.name.split(", "), weight.layer.parts
        alike = len(names) == len(parts)
        for name, size in zip(names, parts, strict=True) if alike else ((weight.layer.name, sum(parts)),):
            yield name, f"{weight.format} {weight.config}", slice(start, min(start + size, width))
            start += size


def outliers(layers: Sequence[Beside], own: Watched, other: Watched) -> Iterator[Finding]:
    """The first layer that is wrong beside its reference, and where its weight differs most."""
    for layer in layers:
        siblings = [each.relative**2 for each in layers if each.kind == layer.kind and each is not layer]
        usual = sum(siblings) / len(siblings) if siblings else torch.inf
        if layer.relative >= 1:
            said = "no closer to the reference's than zeros are"
        elif layer.relative**2 > SPIKE * usual:
            said = f"the {len(siblings)} layers like it {usual**0.5:.3g} on average"
        else:
            continue
        message = f"{layer.name}: its outputs have a relative error of {layer.relative:.3g}, {said}"
        yield Finding(OUTPUT, "error", layer.name, None, f"{message}{_farthest(layer, own, other)}")
        return


def _farthest(layer: Beside, own: Watched, other: Watched) -> str:
    """Where the weights differ most, in a line; nothing where they are not of one shape."""
    found: tuple[float, str, tuple[int, int], float, float] | None = None
    for name, ours, theirs in _matrices(layer, own, other):
        if ours.shape != theirs.shape:
            return ""
        apart = (ours - theirs).abs().nan_to_num(torch.inf)
        n, k = divmod(int(apart.argmax()), ours.shape[1])
        if found is None or float(apart[n, k]) > found[0]:
            found = float(apart[n, k]), name, (n, k), float(ours[n, k]), float(theirs[n, k])
    if found is None:
        return ""
    _, name, place, got, want = found
    return f"\nits weight differs most at (n, k) = {place} of {name}: {got:g}, the reference has {want:g}"


def _matrices(layer: Beside, own: Watched, other: Watched) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What the weights of a layer do to inputs here and in the reference, by the name of each."""
    ours, theirs = (each.model.get_submodule(layer.path) for each in (own, other))
    stacks = [_experts(each) for each in (ours, theirs)]
    for here, there in zip(*stacks, strict=False):
        for place in range(here.shape[0]):
            for one, two in zip(here.expert(place), there.expert(place), strict=True):
                yield one.layer.name, meant(one), meant(two)
    if not any(stacks):
        wholes = (
            torch.cat([meant(linear.meaning) for linear in linears_of(each)]) for each in (ours, theirs)
        )
        one, two = wholes
        at = next(rows for name, _, rows in _parts(ours, one.shape[0]) if name == layer.name)
        yield layer.name, one[at], two[at]


def _experts(layer: nn.Module) -> list[Any]:
    """The experts that a layer holds, as they were loaded: one or none."""
    return [module.meaning for module in layer.modules() if isinstance(module, WatchedExperts)]
