"""The experts of a layer by headers and facts: what they are, that they are alike, all the world's cuts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qload.errors import MismatchError, ShapeError
from qload.experts.alike import check_alike
from qload.experts.biases import bias_name, check_biases
from qload.experts.local import LocalExperts
from qload.experts.names import ExpertNames
from qload.experts.source import ExpertSource
from qload.loader import LayerDescription, Part, Split, WeightsLoader
from qload.loader.cuts import Share
from qload.loader.description import check_alike as check_parts
from qload.loader.formats import shares_of

Shares = tuple[list[Share], list[Share]]  # this rank's of gate and up, and of down


@dataclass
class Described:
    """What all experts of a layer have in common, and which tensors they are made of.

    `layers`: gate, up and down of the first expert; `biased`: which of them have a bias. `facts`: names of
    the facts of the experts that are here. `elsewhere`: of all tensors of the others.
    """

    layers: tuple[LayerDescription, LayerDescription, LayerDescription]
    biased: tuple[bool, bool, bool]
    facts: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def described(
    source: ExpertSource, loader: WeightsLoader, names: ExpertNames, local: LocalExperts, device: torch.device
) -> Described:
    """Every expert described and compared with the first, on every rank alike; no weight is read.

    MissingTensorError for a missing one, MismatchError for one that is not as the first.
    """
    found: Described | None = None
    for expert in range(names.count):
        gate, up, down = prefixes = names.of(expert)
        layers = loader.describe(source, gate), loader.describe(source, up), loader.describe(source, down)
        check_parts(layers[:2])
        biased = tuple(source.has_tensor(bias_name(prefix)) for prefix in prefixes)
        if found is None:
            _check_sizes(*layers)
            found = Described(layers, biased)  # type: ignore[arg-type]
        for first, other in zip(found.layers, layers, strict=True):
            check_alike(first, other)
        _check_made(loader, found.layers, layers, device)
        check_biases(source, found.layers, layers, found.biased, biased)
        if local.start <= expert < local.stop:
            found.facts += (layer.names.full(fact) for layer in layers for fact in layer.facts)
        else:
            found.elsewhere += _tensors(layers, biased)
    assert found is not None  # names are of one expert at least
    return found


def check_cuts(source: ExpertSource, found: Described, split: bool) -> Shares:
    """This rank's shares of gate and up, and of down; every cut of every rank is checked, of all experts.

    They are alike in all that a cut depends on, so that the first stands for them.
    """
    gate, up, down = found.layers
    return (
        shares_of(
            source, {gate.prefix: gate, up.prefix: up}, parts_of(gate.prefix, up.prefix), columns(split)
        ),
        shares_of(source, {down.prefix: down}, parts_of(down.prefix), rows(split)),
    )


def parts_of(*prefixes: str) -> list[Part]:
    """The layers under some prefixes, whole."""
    return [Part(prefix) for prefix in prefixes]


def columns(split: bool) -> Split | None:
    """How gate and up are cut, if they are."""
    return "N" if split else None


def rows(split: bool) -> Split | None:
    """How down is cut, if it is."""
    return "K" if split else None


def _check_sizes(gate: LayerDescription, up: LayerDescription, down: LayerDescription) -> None:
    """Gate and up make what down takes, and down makes what they take, or MismatchError."""
    if "K" not in gate.sizes or "K" not in down.sizes:
        vector = gate if "K" not in gate.sizes else down
        raise ShapeError(vector.names.full("weight"), "(N, K), a matrix of an expert", (vector.N,))
    for layer, expected, other in (
        (up, (gate.N, gate.K), f"(N, K) of {gate.prefix}"),
        (down, (gate.K, gate.N), f"(K, N) of {gate.prefix}"),
    ):
        got = (layer.N, layer.K)
        if got != expected:
            raise MismatchError(
                layer.prefix, "matrices of one expert do not fit", f"{expected}, {other}", str(got)
            )


def _check_made(
    loader: WeightsLoader,
    first: Sequence[LayerDescription],
    layers: Sequence[LayerDescription],
    device: torch.device,
) -> None:
    """What a loader makes of an expert is what it makes of the first, or MismatchError."""
    for one, other in zip(first, layers, strict=True):
        a, b = loader.made(one, device), loader.made(other, device)
        if a != b:
            a, b = a or one.format.weight_type.format, b or other.format.weight_type.format
            raise MismatchError(
                other.prefix, "experts of one layer differ in format", f"{a} as {one.prefix}", b
            )


def _tensors(layers: Sequence[LayerDescription], biased: Sequence[bool]) -> list[str]:
    found = [layer.names.full(spec.name) for layer in layers for spec in layer.specs]
    return found + [bias_name(layer.prefix) for layer, has in zip(layers, biased, strict=True) if has]
