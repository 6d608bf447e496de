"""Comparison of an expected weight with the weight that was read back: tolerance, and location of errors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qload.diagnosis.reading_faults import stored_order
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
    first
        Which output of its layer the first one is.
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
    first: int = 0

    @property
    def matrix(self) -> Codes | None:
        """The codes where they lie as the weight does, (N, K), which blocks that span outputs do not."""
        fits = self.codes is not None and tuple(self.codes.codes.shape) == tuple(self.expected.shape)
        return self.codes if fits else None

    def applied(self, values: Tensor) -> Tensor:
        """A reading of the codes, as numbers that compare with `expected`."""
        values = values.reshape(self.expected.shape)
        if self.factors is not None:
            values = values * self.factors
        return values if self.bias is None else values + self.bias.float()[:, None]


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
    start = rank * size
    lies = case.codes is not None and tuple(case.codes.codes.shape) == tuple(layer.shape)
    codes = cut(case.codes, axis, start, start + size) if lies and case.codes is not None else None
    factors = None if case.factors is None else case.factors[start : start + size] if axis else case.factors
    shares = torch.split(everything, size, axis)
    return replace(case, codes=codes, factors=factors, parts=(), shares=shares)


def outputs_of(case: Case, first: int) -> Case:
    """A case of a whole layer's codes, for as many of its outputs as it expects, from `first` on."""
    size, K = case.expected.shape
    codes = case.codes
    if codes is not None:
        fits = codes.codes.shape[1] == K and codes.codes.shape[0] >= first + size
        codes = cut(codes, 0, first, first + size) if fits else None
    return replace(case, codes=codes, parts=())


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


# How far two roundings to a type can bring two numbers apart, as a part of the larger one: half a unit in the
# last place each of bfloat16's 8 bits and float16's 11, and a few of float32.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-9, torch.float32: 2.0**-18}
HALVES = (torch.bfloat16, torch.float16)
CANCELLED = 2.0**-4  # of that, of a typical number: what is left of two larger ones that cancel


FITS = 2.0**-9  # of what a fault predicts, which may have been rounded on the way, as float16 rounds


@dataclass(frozen=True)
class Closeness:
    """Compares numbers of one weight.

    Attributes
    ----------
    relative
        How far apart two numbers may be, as a part of the larger one.
    absolute
        And of any size.
    """

    relative: float
    absolute: float

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        """Where the two are one number; NaN is none, and one infinity is itself."""
        apart = (one - other).abs()
        largest = torch.maximum(one.abs(), other.abs())
        return (one == other) | (largest.isfinite() & (apart <= self.relative * largest + self.absolute))

    def of_fits(self, expected: Tensor, got: Tensor) -> "Closeness":
        """For what a fault predicts: wider than float32 rounds, and as small as what came out is."""
        small = min(_typical(expected), _typical(got))
        relative = max(self.relative, FITS)
        return Closeness(relative, CANCELLED * relative * small)


def closeness_of(expected: Tensor, got: Tensor) -> Closeness:
    """As the type of `got` rounds; of float32, as a 16-bit type does that all of it could be stored in."""
    finite = got[got.isfinite()]
    held = [dtype for dtype in HALVES if torch.equal(finite.to(dtype).to(finite.dtype), finite)]
    if got.dtype in HALVES:
        held = [got.dtype]
    relative = min((ROUNDING[dtype] for dtype in held), default=ROUNDING[torch.float32])
    return Closeness(relative, CANCELLED * relative * _typical(expected))


def _typical(values: Tensor) -> float:
    """The root of the mean square of those that are finite."""
    sound = values[values.isfinite()].double()
    return float(sound.square().mean().sqrt()) if sound.numel() else 0.0


Range = tuple[int, int]  # the first, and one past the last


@dataclass(frozen=True)
class Where:
    """How many numbers are wrong, of how many, and between which bounds; None where that is not known."""

    wrong: int
    total: int
    n: Range | None = None
    k: Range | None = None
    group: Range | None = None
    rank: Range | None = None
    expert: Range | None = None
    outputs: int = 0  # how many have something wrong
    inputs: int = 0

    def bounds(self) -> dict[str, Range]:
        """Those that are known, by what they count."""
        named = {
            "experts": self.expert,
            "ranks": self.rank,
            "outputs": self.n,
            "inputs": self.k,
            "groups": self.group,
        }
        return {name: bound for name, bound in named.items() if bound is not None}


def where_of(case: Case, wrong: Tensor) -> Where:
    """The bounds of what is wrong, bool (N, K); experts and ranks lie one after another along N or K."""
    rows, columns = (torch.nonzero(wrong.any(axis)).flatten() for axis in (1, 0))
    count, total = int(wrong.sum()), wrong.numel()
    if not count:
        return Where(0, total)
    group = None
    codes = case.matrix
    if codes is not None and codes.k_group is not None and codes.scales.shape[1] > 1:
        group = _range(codes.k_group[columns])
    expert = None
    N = wrong.shape[0]
    if case.experts > 1:
        N //= case.experts
        expert, rows = _range(rows // N), rows % N
    rank = None if case.rank is None else (case.rank, case.rank + 1)
    if rank is None and case.world > 1 and N % case.world == 0:
        rank = _range(rows // (N // case.world))
    counts = len({*rows.tolist()}), int(columns.numel())
    return Where(count, total, _range(rows + case.first), _range(columns), group, rank, expert, *counts)


def _range(places: Tensor) -> Range:
    return int(places.min()), int(places.max()) + 1
