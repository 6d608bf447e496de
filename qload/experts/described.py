"""The experts of a layer by headers and facts: what they are, that they are alike, all the world's cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

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

Matrices = tuple[LayerDescription, LayerDescription, LayerDescription]  # gate, up and down
Shares = tuple[list[Share], list[Share]]  # this rank's of gate and up, and of down


@dataclass(frozen=True)
class Described:
    """What all experts of a layer have in common, and which tensors they are made of.

    `layers`: gate, up and down of the first expert; `everyone`: those of all experts; `biased`: which of
    them have a bias. `facts`: names of the facts of the experts that are here. `elsewhere`: of all tensors of
    the others.
    """

    layers: Matrices
    everyone: Sequence[LayerDescription]
    biased: tuple[bool, bool, bool]
    facts: Sequence[str]
    elsewhere: Sequence[str]


def described(
    source: ExpertSource,
    loader: WeightsLoader,
    names: ExpertNames,
    local: LocalExperts,
    device: torch.device,
) -> Described:
    """Every expert described and compared with the first, on every rank alike; no weight is read.

    MissingTensorError for a missing one, MismatchError for one that is not as the first.
    """
    firsts: Matrices | None = None
    everyone = list[LayerDescription]()
    expected, facts, elsewhere = (False, False, False), list[str](), list[str]()
    for expert in range(names.count):
        gate, up, down = names.of(expert)
        layers = loader.describe(source, gate), loader.describe(source, up), loader.describe(source, down)
        biased = tuple(source.has_tensor(bias_name(layer.prefix)) for layer in layers)
        if firsts is None:
            firsts, expected = layers, (biased[0], biased[1], biased[2])
            _check_sizes(*layers)
        check_parts(layers[:2])
        everyone += layers
        for first, other in zip(firsts, layers, strict=True):
            check_alike(first, other)
            _check_made(loader, first, other, device)
        check_biases(source, firsts, layers, expected, biased)
        if local.start <= expert < local.stop:
            facts += (layer.names.full(fact) for layer in layers for fact in layer.facts)
        else:
            elsewhere += _tensors(layers, biased)
    assert firsts is not None  # names are of one expert at least
    return Described(firsts, everyone, expected, facts, elsewhere)


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
    loader: WeightsLoader, first: LayerDescription, other: LayerDescription, device: torch.device
) -> None:
    """What a loader makes of an expert is what it makes of the first, or MismatchError."""
    a, b = loader.made(first, device), loader.made(other, device)
    if a != b:
        a, b = a or first.format.weight_type.format, b or other.format.weight_type.format
        what = "experts of one layer differ in the format that they are loaded in"
        raise MismatchError(other.prefix, what, f"{a} as {first.prefix}", b)


def _tensors(layers: Sequence[LayerDescription], biased: Sequence[bool]) -> list[str]:
    found = [layer.names.full(spec.name) for layer in layers for spec in layer.specs]
    return found + [bias_name(layer.prefix) for layer, has in zip(layers, biased, strict=True) if has]
