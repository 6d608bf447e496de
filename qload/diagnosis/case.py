"""A weight as it is meant beside what came out, and what each known fault would have made of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.diagnosis.misreadings import stored_order
from qload.spec import Codes, Weight


@dataclass(frozen=True)
class Candidate:
    """A fault that may be the one.

    Attributes
    ----------
    fault, words
        The id of its class, and which of that it is.
    predicted
        The weight (N, K) float32 that one has by it; NaN where it says nothing.
    """

    fault: str
    words: str
    predicted: Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One weight.

    Attributes
    ----------
    expected, got
        (N, K) float32.
    codes
        What `expected` is made of, in the same shape; None where that is not known.
    stored
        In which order the codes of a word lie, where that is not 0, 1, 2, ...
    factors
        (K,) what inputs are multiplied by, which `expected` includes; or None.
    parts
        How many outputs each part of a fused layer has.
    scalars
        Scales of the whole tensor, by name.
    bias
        (N,), which a read-back would show at every input; or None.
    shares
        What each rank should have, (N, K) like `expected`, where `rank` has one of several.
    rank, world, experts
        Whose share this is; of how many ranks, or experts, this is all shares, one after another.
    """

    expected: Tensor
    got: Tensor
    codes: Codes | None = None
    stored: tuple[int, ...] | None = None
    factors: Tensor | None = None
    parts: tuple[int, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    bias: Tensor | None = None
    shares: tuple[Tensor, ...] = ()
    rank: int | None = None
    world: int = 1
    experts: int = 1

    def applied(self, values: Tensor) -> Tensor:
        """A reading of the codes, as numbers that compare with `expected`."""
        values = values.reshape(self.expected.shape)
        return values if self.factors is None else values * self.factors


def case_of(expected: Tensor, got: Tensor, layer: Weight | None, rank: int | None, world: int | None) -> Case:
    """What can be known of a weight (N, K), or of a `rank`'s share of `layer`."""
    case = Case(expected, got, rank=rank, world=world or 1)
    if layer is None:
        return case
    factors = layer.input_factors
    codes = None if layer.format == "unquantized" else layer.codes()
    if codes is not None:
        codes = replace(codes, codes=codes.plain())
    scalars = tuple(
        (name, float(held))
        for name, held in layer.fields().items()
        if held.numel() == 1 and held.is_floating_point()
    )
    case = replace(
        case,
        codes=codes,
        stored=stored_order(layer),
        factors=None if factors is None else factors.float(),
        parts=layer.layer.parts,
        scalars=scalars,
    )
    whole = layer.shape
    if rank is None or world is None or whole == tuple(expected.shape):
        return case
    return _of_a_share(case, layer, rank, world)


def _of_a_share(case: Case, layer: Weight, rank: int, world: int) -> Case:
    """`layer` is whole, and cut into equal shares along the axis that is longer than expected."""
    axis = 0 if layer.shape[0] != case.expected.shape[0] else 1
    size = case.expected.shape[axis]
    everything = layer.dequantize()
    if case.factors is not None:
        everything = everything * case.factors
    if everything.shape[1 - axis] != case.expected.shape[1 - axis] or everything.shape[axis] != size * world:
        return replace(case, codes=None, factors=None, parts=())
    assert case.codes is not None or layer.plain
    start = rank * size
    codes = None if case.codes is None else cut(case.codes, axis, start, start + size)
    factors = None if case.factors is None else case.factors[start : start + size] if axis else case.factors
    shares = torch.split(everything, size, axis)
    return replace(case, codes=codes, factors=factors, parts=(), shares=shares)


def cut(codes: Codes, axis: int, start: int, stop: int) -> Codes:
    """Some outputs (axis 0) or inputs (axis 1) of codes that are spelled out."""
    plain = codes.plain().narrow(axis, start, stop - start)
    if axis == 1:
        k_group = None if codes.k_group is None else codes.k_group[start:stop]
        return replace(codes, codes=plain, k_group=k_group)
    if codes.n_group is not None:
        return replace(codes, codes=plain, n_group=codes.n_group[start:stop])
    if codes.scales.shape[0] == 1:
        return replace(codes, codes=plain)
    zeros = codes.zeros
    if zeros is not None and zeros.shape[0] > 1:
        zeros = zeros[start:stop]
    return replace(codes, codes=plain, scales=codes.scales[start:stop], zeros=zeros)
