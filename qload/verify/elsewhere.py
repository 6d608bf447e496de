"""Whether a layer holds what the reference stores elsewhere: under another name, or transposed."""

from collections.abc import Iterator, Mapping
from math import isfinite

import torch
from torch import Tensor

from qload.diagnosis.dequantized import meant
from qload.errors import QloadError
from qload.loader import LayerDescription, Part
from qload.spec import Weight
from qload.verify.chunks import outputs
from qload.verify.comparison import differ
from qload.verify.subject import Subject

MANY = 256  # layers of the reference that one of ours is compared with
CLOSE = 0.5  # of the distance to its own reference: random layers are as far from each other as from zeros


def found_elsewhere(
    weight: Weight,
    run: tuple[int, int],
    reference: Subject,
    own: LayerDescription,
    layers: Mapping[str, LayerDescription],
) -> str | None:
    """Where in the reference the outputs `run` of a layer are, in words; None where they are nowhere.

    `weight`: ours, these outputs alone. `own`: the layer of the reference that they should equal.
    """
    got = meant(weight)
    base = _distance(got, _load(reference, own, run))
    for other in _candidates(own, layers):
        theirs = _load(reference, other, run)
        if theirs is not None and _fits(got, theirs, base):
            return f"it is the reference's {other.prefix}"
    if own.N == own.K and _fits(got, _transposed(reference, own, run), base):
        return "it is the reference transposed"
    return None


def _candidates(own: LayerDescription, layers: Mapping[str, LayerDescription]) -> Iterator[LayerDescription]:
    """Those of the same shape: first of the same block, then of the same name in other blocks."""
    block, _, name = own.prefix.rpartition(".")
    alike = [
        other
        for other in layers.values()
        if other.prefix != own.prefix and other.sizes == own.sizes and (other.N, other.K) == (own.N, own.K)
    ]

    def distance(other: LayerDescription) -> tuple[bool, bool, str]:
        parent, _, last = other.prefix.rpartition(".")
        return parent != block, last != name, other.prefix

    yield from sorted(alike, key=distance)[:MANY]


def _load(reference: Subject, layer: LayerDescription, run: tuple[int, int]) -> Weight | None:
    assert reference.weights is not None
    try:
        return reference.loader.load(reference.weights, [Part(layer.prefix, *run)], None)
    except QloadError:
        return None  # it has a finding of its own, or its runs begin elsewhere


def _fits(got: Tensor, theirs: Weight | Tensor | None, base: float) -> bool:
    if theirs is None:
        return False
    if isinstance(theirs, Weight) and not differ(got, meant(theirs), theirs).any():
        return True
    return isfinite(base) and _distance(got, theirs) < CLOSE * base  # of a NaN every number is nearer


def _distance(got: Tensor, theirs: Weight | Tensor | None) -> float:
    if theirs is None:
        return float("inf")
    want = meant(theirs) if isinstance(theirs, Weight) else theirs
    if want.shape != got.shape:
        return float("inf")
    far = float((got - want).square().sum(dtype=torch.float64))
    return far if far == far else float("inf")


def _transposed(reference: Subject, layer: LayerDescription, run: tuple[int, int]) -> Tensor | None:
    """The inputs `run` of all outputs, as if they were the outputs of all inputs."""
    assert reference.weights is not None
    try:
        pieces = [
            meant(piece)[:, run[0] : run[1]].T
            for _, piece in outputs(reference.weights, reference.loader, layer)
        ]
    except QloadError:
        return None
    return torch.cat(pieces, 1)
