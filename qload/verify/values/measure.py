"""One pass over a checkpoint: all bytes of every tensor, and statistics of some outputs of each layer.

A group is a run of codes with one scale. A quantizer that takes a group's scale from its largest weight gives
this weight the first or the last code. So most groups *reach an end*, and fewer do if their rows come from
other groups than the quantizer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from qload.errors import QloadError
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import FormatLoader, LayerDescription, Part
from qload.loader.sharding import granule
from qload.loader.source import Index, TensorSource, WrappedSource
from qload.spec import Codes, Role, TensorSpec, Weight
from qload.storage import TensorInfo, WeightStorage
from qload.verify.blocks import pieces
from qload.verify.values.contents import (
    MAX_SMALL_BYTES,
    Contents,
    ContentsAccumulator,
    Numbers,
    NumbersAccumulator,
    small_contents,
    small_numbers,
)
from qload.weights import Weights

DRAWN_CODES = 1 << 18  # of a layer
SHUFFLES = 3
ZERO_SCALE = 2.0**-120  # a scale below is zero, or the least exponent
TABLE_BITS = 4  # of codes with a table between about -1 and 1
CACHED_SHAPES = 64  # cached indices of groups in order
MAX_CODES = 1 << 22  # of a layer that cannot be split; a larger one is skipped


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of some outputs of a layer.

    Attributes
    ----------
    outputs, whole
        Number of measured outputs; True if these are all.
    bits
        Bits of a code.
    groups, inner
        Number of groups with a scale, and number of groups of an output.
    deviation
        Standard deviation of the weights.
    evenness
        Standard deviation of the codes relative to uniformly distributed codes: 1 for noise, less for
        quantized weights, because most are small; 1 without zero points.
    reach, shuffled, even
        Share of groups that reach an end of the codes' range; the same share for rows in random groups, and
        for groups of equal size if the stored sizes differ. None if it has no meaning.
    offset
        Mean of code minus zero point, the code of a weight of 0; None without zero points and offsets.
    error
        Standard error of `offset` over inputs and outputs.
    zero, spread
        Mean and standard deviation of the zero points.
    correlation
        Correlation of a group's mean code with its zero point; None if either is constant, and for offsets.
    lost
        Share of groups with a zero scale and different codes.
    low
        Least scale, after dequantization of quantized scales.
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
    low: float = field(kw_only=True)


def measure_codes(weights: TensorSource, loader: FormatLoader, layer: LayerDescription) -> Statistics | None:
    """Measure outputs in the middle of the layer; None for a layer without codes.

    Errors of its loader reach the caller.
    """
    if layer.format.weight_type.plain or 0 in layer.sizes.values():
        return None
    block = granule(layer, "N") or layer.N
    width = layer.K * layer.sizes.get("E", 1)
    count = min(layer.N, max(1, DRAWN_CODES // max(1, width) // block) * block)
    if count * width > MAX_CODES:
        return None
    first = (layer.N - count) // 2 // block * block
    weight = loader.load(weights, [Part(layer.prefix, first, first + count)], None)
    indexed = any(spec.fact and spec.role is Role.INDEX for spec in layer.specs)
    return _statistics(weight, whole=count == layer.N, indexed=indexed)


def _statistics(weight: Weight, *, whole: bool, indexed: bool) -> Statistics:
    codes = weight.codes()
    has_own = weight.stored() is not None or type(weight).dequantize is not Weight.dequantize
    means = (weight if has_own else codes).dequantize().double()
    plain = codes.plain()
    N, K = plain.shape
    scales = codes.scales.expand(N, -1) if codes.n_group is None else codes.scales
    measured: dict[str, float | None] = {}
    if scales.shape[1] < K:  # not a scale for every code
        measured = {
            **_reach(codes, plain, indexed=indexed),
            **_zero_points(codes, plain),
            **_lost(codes, plain),
        }
    return Statistics(
        outputs=N,
        whole=whole,
        bits=codes.bits,
        groups=codes.scales.numel() if codes.n_group is None else scales.numel(),
        inner=scales.shape[1],
        deviation=float(means.std()) if means.numel() > 1 else 0.0,
        evenness=_evenness(plain, codes.bits) if "offset" in measured else 1.0,
        low=float(codes.scales.min()),
        **measured,  # type: ignore[arg-type]
    )


def _evenness(plain: Tensor, bits: int) -> float:
    even = ((4**bits - 1) / 12) ** 0.5
    return float(plain.float().std()) / even if plain.numel() > 1 else 0.0


def _index(codes: Codes, K: int) -> tuple[Tensor, int]:
    """Return the group of each input, and the number of groups."""
    if codes.k_group is None:
        return torch.zeros(K, dtype=torch.int64), 1
    return codes.k_group.long(), codes.scales.shape[1]


def _reach(codes: Codes, plain: Tensor, *, indexed: bool) -> dict[str, float | None]:
    """Return shares of groups that reach an end; empty if no other grouping and no table exists."""
    N, K = plain.shape
    inner, groups = _index(codes, K)
    rows = codes.scales.shape[0]
    outer = _in_order(N, N) if codes.n_group is None else codes.n_group
    even = _even(outer, inner, rows if codes.n_group is not None else 1, groups)
    if even is None and not indexed and (codes.lookup is None or codes.bits > TABLE_BITS):
        return {}
    ends, scaled = _ends(codes, plain).float(), codes.scales.expand(max(rows, int(outer[-1]) + 1), -1) != 0

    def share(outer: Tensor, inner: Tensor) -> float:
        some = torch.zeros(N, groups).index_add_(1, inner, ends)
        hit = torch.zeros(scaled.shape[0], groups).index_add_(0, outer, some) > 0
        return float(hit[scaled].float().mean()) if bool(scaled.any()) else 1.0

    if codes.n_group is None:
        scaled = scaled & _differing(inner, groups, plain)
    shares: dict[str, float | None] = {"reach": share(outer, inner)}
    if indexed and groups > 1:
        draw = torch.Generator().manual_seed(0)
        mixed = [share(outer, inner[torch.randperm(K, generator=draw)]) for _ in range(SHUFFLES)]
        shares["shuffled"] = sum(mixed) / SHUFFLES
    if even is not None:
        shares["even"] = share(*even)
    return shares


def _even(outer: Tensor, inner: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor] | None:
    """Return as many groups of equal size, for groups in order of different sizes; otherwise None."""
    indices = []
    for index, count in ((outer, rows), (inner, groups)):
        even = _in_order(len(index), count) if count > 1 and len(index) % count == 0 else index
        indices.append(even)
    if torch.equal(outer, indices[0]) and torch.equal(inner, indices[1]):
        return None
    ordered = all(bool((index.diff() >= 0).all()) for index in (outer, inner))
    return (indices[0], indices[1]) if ordered else None


@lru_cache(CACHED_SHAPES)
def _in_order(length: int, count: int) -> Tensor:
    """Return the group of each row, for so many groups of equal size."""
    return torch.arange(length) * count // length


def _ends(codes: Codes, plain: Tensor) -> Tensor:
    """Return a mask of codes at an end of their range."""
    if codes.lookup is None:
        ends: Tensor = (plain == 0) | (plain == 2**codes.bits - 1)
        return ends
    size = codes.lookup.abs()
    ends = size == size[size.isfinite()].max()
    return ends[plain.long()]


def _zero_points(codes: Codes, plain: Tensor) -> dict[str, float | None]:
    no_zeros = codes.zeros is None and codes.offsets is None
    if no_zeros or codes.lookup is not None or codes.n_group is not None:
        return {}
    index, groups = _index(codes, plain.shape[1])
    zeros = torch.zeros(len(plain), groups) if codes.zeros is None else codes.zeros.expand(len(plain), groups)
    rows = torch.bincount(index, minlength=groups).clamp_(min=1)
    means = torch.zeros(len(plain), groups).index_add_(1, index, plain.float()) / rows
    if codes.offsets is None and not zeros.is_floating_point():
        zeros = zeros.float()
        # At an end of its range a zero point is clipped, and does not follow its codes.
        inside = (zeros > 0) & (zeros < 2**codes.bits - 1)
    else:
        if codes.offsets is not None:
            zeros = zeros + (codes.offsets / codes.scales).expand(len(plain), groups)
        # A group of weights near one value, far from 0, has a zero point beyond all codes.
        inside = zeros.abs() < 2**codes.bits
        zeros = torch.where(inside, zeros, 0)  # infinite where a scale is 0
    if 2 * int(inside.sum()) < inside.numel():
        return {}
    error = _error(plain - zeros[:, index], inside[:, index])
    means, zeros = means[inside], zeros[inside]
    spread = float(zeros.std()) if zeros.numel() > 1 else 0.0
    varied = codes.offsets is None and spread > 0 and float(means.std()) > 0
    return {
        "offset": float((means - zeros).mean()),
        "error": error,
        "zero": float(zeros.mean()),
        "spread": spread,
        "correlation": float(torch.corrcoef(torch.stack([means, zeros]))[0, 1]) if varied else None,
    }


def _error(apart: Tensor, inside: Tensor) -> float:
    """Return the standard error of a mean over inputs and outputs with means of their own."""
    squares = 0.0
    for axis in (0, 1):
        count = inside.sum(axis)
        means = (apart * inside).sum(axis)[count > 0] / count[count > 0]
        squares += float(means.var()) / len(means) if len(means) > 1 else 0.0
    return float(squares**0.5)


def _lost(codes: Codes, plain: Tensor) -> dict[str, float | None]:
    zero = codes.scales.abs() < ZERO_SCALE
    if codes.divide or not bool(zero.any()):
        return {}
    index, groups = _index(codes, plain.shape[1])
    values = plain if codes.lookup is None else codes.lookup[plain.long()]  # floats have two codes for zero
    differing = _differing(index, groups, values, codes.n_group)
    return {"lost": float((zero.expand(len(differing), groups) & differing).float().mean())}


def _differing(index: Tensor, groups: int, plain: Tensor, outer: Tensor | None = None) -> Tensor:
    """Return a mask of groups with different codes, (N, G); groups of padding and dead outputs have one code.

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


MAX_CACHED = 64  # small tensors in memory at once


class Measurable(Protocol):
    """Part of a checkpoint that the measurement reads; a protocol, because checkpoints import this module."""

    @property
    def weights(self) -> Weights:
        """Tensors of the files."""

    @property
    def loader(self) -> FormatLoader:
        """Loader of the layers."""

    @property
    def readable_names(self) -> Sequence[str]:
        """Names of tensors to measure."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Tensor name -> declaration."""

    def role(self, name: str) -> Role:
        """Return the role of a tensor."""

    def described(self) -> Iterable[LayerDescription]:
        """Yield the layers to measure."""


@dataclass(frozen=True)
class Values:
    """Measurements: contents and numbers by tensor name, statistics of codes by prefix."""

    contents: Mapping[str, Contents]
    numbers: Mapping[str, Numbers]
    statistics: Mapping[str, Statistics]

    @classmethod
    def joined(cls, parts: Iterable[Values]) -> Values:
        """Join the measurements of several parts."""
        contents: dict[str, Contents] = {}
        numbers: dict[str, Numbers] = {}
        codes: dict[str, Statistics] = {}
        for part in parts:
            contents.update(part.contents)
            numbers.update(part.numbers)
            codes.update(part.statistics)
        return cls(contents, numbers, codes)


def measure(checkpoint: Measurable) -> Values:
    """Measure all tensors and layers of a checkpoint, or of a part."""
    storage = checkpoint.weights.storage
    contents, numbers, codes = {}, {}, {}
    cached: dict[str, Tensor] = {}
    for name in checkpoint.readable_names:
        spec, role = checkpoint.specs.get(name), checkpoint.role(name)
        if len(cached) < MAX_CACHED and 0 < storage.info(name).nbytes <= MAX_SMALL_BYTES:
            cached[name] = storage.read(name)
        contents[name], floats = _measure_tensor(storage, name, spec, role, cached.get(name))
        if floats is not None:
            numbers[name] = floats
    weights = with_cached(checkpoint.weights, cached)
    for layer in checkpoint.described():
        try:
            statistics = measure_codes(weights, checkpoint.loader, layer)
        except QloadError:
            continue  # the rules of layers report it
        if statistics is not None:
            codes[layer.prefix] = statistics
    return Values(contents, numbers, codes)


def _measure_tensor(
    storage: WeightStorage, name: str, spec: TensorSpec | None, role: Role, cached: Tensor | None
) -> tuple[Contents, Numbers | None]:
    info, exponents = storage.info(name), spec is not None and spec.is_exponents
    scale = role is Role.SCALE
    floats = holds_floats(info, spec, role) or (scale and (exponents or info.dtype.is_floating_point))
    if cached is None and 0 < info.nbytes <= MAX_SMALL_BYTES:
        cached = storage.read(name)
    if cached is not None:
        flat = cached.reshape(-1)
        options = {"exponents": scale and exponents, "fully": scale}
        return small_contents(flat), small_numbers(flat, **options) if floats else None
    contents = ContentsAccumulator()
    numbers = NumbersAccumulator(exponents=scale and exponents, fully=scale) if floats else None
    for piece in pieces(storage, name):
        contents.add(piece)
        if numbers is not None:
            numbers.add(piece)
    return contents.finish(), None if numbers is None else numbers.finish()


def holds_floats(info: TensorInfo, spec: TensorSpec | None, role: Role) -> bool:
    """Return whether a tensor other than a scale has floats; codes with an integer dtype are bits."""
    if role is Role.WORD:
        return spec is not None and all(dtype.is_floating_point for dtype in spec.dtypes)
    return role is Role.FLOAT and info.stored_dtype in FLOATS


def with_cached(weights: Weights, cached: Mapping[str, Tensor]) -> WrappedSource:
    """Return a source of these weights with some tensors in memory; callers must not write to these."""

    def read(name: str, index: Index, _: Role) -> Tensor | None:
        tensor = cached.get(name)
        return tensor if tensor is None or not index else tensor[index].contiguous()

    return WrappedSource(weights, read)
