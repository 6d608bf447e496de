"""What the codes of a layer are like beside their scales and zero points, of some of its outputs.

A group is a run of codes that share a scale. A quantizer that takes a group's scale from its largest weight
gives that weight the first or the last code; so most groups *reach an end*, and fewer do where rows are put
into other groups than they were quantized in.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qload.loader import FormatLoader, LayerDescription, Part
from qload.loader.cuts import granule
from qload.spec import Codes, Role, Weight
from qload.weights import Weights

DRAWN = 1 << 18  # codes of a layer that are looked at
SHUFFLES = 3
NOTHING = 2.0**-120  # a scale below is zero, or the least that an exponent can be
NIBBLE = 4  # bits of codes that are looked up in a table which ends in 1 and -1, or nearly so
SHAPES = 64  # of layers, whose groups in order are kept
MOST = 1 << 22  # codes that are looked at where a layer is cut nowhere else; of more, none


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of `outputs` outputs of a layer, or of all (`whole`).

    Attributes
    ----------
    outputs, whole
        How many were looked at, and whether these are all.
    bits
        Of a code.
    groups, inner
        How many groups have a scale, and how many of them an output has.
    deviation
        The standard deviation of the weights.
    evenness
        The standard deviation of the codes over that of codes of which each value is as frequent: 1 of
        noise, less of quantized weights, of which most are small; 1 where there are no zero points.
    reach
        The share of groups that reach an end of the codes' range; `shuffled`: the same, were rows in any
        groups; `even`: were the groups of one size, where they are not and could be. None where it says
        nothing.
    offset
        The mean of code minus zero point; None where there are none.
    error
        The standard error of `offset`, were the inputs and outputs drawn from more like them.
    zero, spread
        The mean and the standard deviation of the zero points.
    correlation
        Of a group's mean code with its zero point; None where either is always the same.
    lost
        The share of groups whose scale is zero and whose codes differ.
    low
        The least scale, as a reader resolves it.
    """

    outputs: int
    whole: bool
    bits: int
    groups: int
    inner: int
    deviation: float
    evenness: float
    reach: float | None = None
    shuffled: float | None = None
    even: float | None = None
    offset: float | None = None
    error: float = 0.0
    zero: float | None = None
    spread: float = 0.0
    correlation: float | None = None
    lost: float = 0.0
    low: float = 0.0


def statistics(weights: Weights, loader: FormatLoader, layer: LayerDescription) -> Statistics | None:
    """Of outputs in the middle of the layer; None of a layer that is not of codes.

    What its reader raises, as an UnreadableError or another of qload's, this raises too.
    """
    if layer.format.weight_type.plain or 0 in layer.sizes.values():
        return None
    block = granule(layer, "N") or layer.N
    width = layer.K * layer.sizes.get("E", 1)
    count = min(layer.N, max(1, DRAWN // max(1, width) // block) * block)
    if count * width > MOST:
        return None
    first = (layer.N - count) // 2 // block * block
    weight = loader.load(weights, [Part(layer.prefix, first, first + count)], None)
    indexed = any(spec.fact and spec.role is Role.INDEX for spec in layer.specs)
    return _of(weight, whole=count == layer.N, indexed=indexed)


def _of(weight: Weight, *, whole: bool, indexed: bool) -> Statistics:
    codes = weight.codes()
    own = weight.stored() is not None or type(weight).dequantize is not Weight.dequantize
    means = (weight if own else codes).dequantize().double()
    plain = codes.plain()
    N, K = plain.shape
    scales = codes.scales.expand(N, -1) if codes.n_group is None else codes.scales
    told: dict[str, float | None] = {}
    if scales.shape[1] < K:  # and not a scale for every code
        told = {**_reach(codes, plain, indexed=indexed), **_zero_points(codes, plain), **_lost(codes, plain)}
    return Statistics(
        outputs=N,
        whole=whole,
        bits=codes.bits,
        groups=codes.scales.numel() if codes.n_group is None else scales.numel(),
        inner=scales.shape[1],
        deviation=float(means.std()) if means.numel() > 1 else 0.0,
        evenness=_evenness(plain, codes.bits) if "offset" in told else 1.0,
        low=float(codes.scales.min()),
        **told,  # type: ignore[arg-type]
    )


def _evenness(plain: Tensor, bits: int) -> float:
    even = ((4**bits - 1) / 12) ** 0.5
    return float(plain.float().std()) / even if plain.numel() > 1 else 0.0


def _index(codes: Codes, K: int) -> tuple[Tensor, int]:
    """The group of each input, and how many there are."""
    if codes.k_group is None:
        return torch.zeros(K, dtype=torch.int64), 1
    return codes.k_group.long(), codes.scales.shape[1]


def _reach(codes: Codes, plain: Tensor, *, indexed: bool) -> dict[str, float | None]:
    """Shares of groups; nothing where these can be no others, and no table says what an end is."""
    N, K = plain.shape
    inner, groups = _index(codes, K)
    rows = codes.scales.shape[0]
    outer = _in_order(N, N) if codes.n_group is None else codes.n_group
    even = _even(outer, inner, rows if codes.n_group is not None else 1, groups)
    if even is None and not indexed and (codes.lookup is None or codes.bits > NIBBLE):
        return {}
    ends, scaled = _ends(codes, plain).float(), codes.scales.expand(max(rows, int(outer[-1]) + 1), -1) != 0

    def share(outer: Tensor, inner: Tensor) -> float:
        some = torch.zeros(N, groups).index_add_(1, inner, ends)
        hit = torch.zeros(scaled.shape[0], groups).index_add_(0, outer, some) > 0
        return float(hit[scaled].float().mean()) if bool(scaled.any()) else 1.0

    if codes.n_group is None:
        scaled = scaled & _differing(inner, groups, plain)
    found: dict[str, float | None] = {"reach": share(outer, inner)}
    if indexed and groups > 1:
        draw = torch.Generator().manual_seed(0)
        mixed = [share(outer, inner[torch.randperm(K, generator=draw)]) for _ in range(SHUFFLES)]
        found["shuffled"] = sum(mixed) / SHUFFLES
    if even is not None:
        found["even"] = share(*even)
    return found


def _even(outer: Tensor, inner: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor] | None:
    """As many groups of equal size, where they lie in order and are not of one size now."""
    found = []
    for index, count in ((outer, rows), (inner, groups)):
        even = _in_order(len(index), count) if count > 1 and len(index) % count == 0 else index
        found.append(even)
    if torch.equal(outer, found[0]) and torch.equal(inner, found[1]):
        return None
    ordered = all(bool((index.diff() >= 0).all()) for index in (outer, inner))
    return (found[0], found[1]) if ordered else None


@lru_cache(SHAPES)
def _in_order(length: int, count: int) -> Tensor:
    """The group of each, of so many groups of equal size."""
    return torch.arange(length) * count // length


def _ends(codes: Codes, plain: Tensor) -> Tensor:
    """Which codes are at an end of their range."""
    if codes.lookup is None:
        ends: Tensor = (plain == 0) | (plain == 2**codes.bits - 1)
        return ends
    size = codes.lookup.abs()
    ends = size == size[size.isfinite()].max()
    return ends[plain.long()]


def _zero_points(codes: Codes, plain: Tensor) -> dict[str, float | None]:
    if codes.zeros is None or codes.lookup is not None or codes.n_group is not None:
        return {}
    index, groups = _index(codes, plain.shape[1])
    zeros = codes.zeros.expand(len(plain), groups).float()
    rows = torch.bincount(index, minlength=groups).clamp_(min=1)
    means = torch.zeros(len(plain), groups).index_add_(1, index, plain.float()) / rows
    inside = (zeros > 0) & (
        zeros < 2**codes.bits - 1
    )  # at an end a zero point is cut off, and follows nothing
    if 2 * int(inside.sum()) < inside.numel():
        return {}
    error = _error(plain - zeros[:, index], inside[:, index])
    means, zeros = means[inside], zeros[inside]
    spread = float(zeros.std()) if zeros.numel() > 1 else 0.0
    varied = spread > 0 and float(means.std()) > 0
    return {
        "offset": float((means - zeros).mean()),
        "error": error,
        "zero": float(zeros.mean()),
        "spread": spread,
        "correlation": float(torch.corrcoef(torch.stack([means, zeros]))[0, 1]) if varied else None,
    }


def _error(apart: Tensor, inside: Tensor) -> float:
    """The standard error of a mean over inputs and outputs, each of which may have a mean of its own."""
    squares = 0.0
    for axis in (0, 1):
        count = inside.sum(axis)
        means = (apart * inside).sum(axis)[count > 0] / count[count > 0]
        squares += float(means.var()) / len(means) if len(means) > 1 else 0.0
    return float(squares**0.5)


def _lost(codes: Codes, plain: Tensor) -> dict[str, float | None]:
    nothing = codes.scales.abs() < NOTHING
    if codes.divide or not bool(nothing.any()):
        return {}
    index, groups = _index(codes, plain.shape[1])
    meant = plain if codes.lookup is None else codes.lookup[plain.long()]  # floats have two codes for zero
    differing = _differing(index, groups, meant, codes.n_group)
    return {"lost": float((nothing.expand(len(differing), groups) & differing).float().mean())}


def _differing(index: Tensor, groups: int, plain: Tensor, outer: Tensor | None = None) -> Tensor:
    """Mark the groups with different codes, (N, G): groups of padding and of dead outputs have one code.

    `outer`: the block of each output, for groups of several outputs; then (blocks, G).
    """
    where = index[None].expand(len(plain), -1)
    low = torch.full((len(plain), groups), torch.inf).scatter_reduce_(1, where, plain.float(), "amin")
    high = torch.full((len(plain), groups), -torch.inf).scatter_reduce_(1, where, plain.float(), "amax")
    if outer is not None:
        blocks, where = int(outer.max()) + 1, outer[:, None].expand_as(low)
        low = torch.full((blocks, groups), torch.inf).scatter_reduce_(0, where, low, "amin")
        high = torch.full((blocks, groups), -torch.inf).scatter_reduce_(0, where, high, "amax")
    return high > low
