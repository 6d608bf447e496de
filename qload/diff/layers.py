"""A layer of one checkpoint beside the one that stands for it in another."""

from collections.abc import Iterator, Mapping
from math import lcm

import torch

from qload.diagnosis.dequantized import meant
from qload.diff.codes import equal_codes, lie_in_words
from qload.diff.report import LayerDiff
from qload.diff.values import ValueDiff, rounding, rounds_to
from qload.errors import QloadError
from qload.loader import LayerDescription
from qload.loader.cuts import granule
from qload.storage import WeightStorage
from qload.verify.causes import SideBySide, misreading
from qload.verify.chunks import OUTPUTS
from qload.verify.comparison import equal_bits
from qload.verify.elsewhere import found_elsewhere
from qload.verify.values.pieces import pieces

CODES = 1 << 24  # elements of a run whose codes are compared as they lie in words
HALF = 0.5  # of a plain layer: nearer than another reading comes by chance


def layer_diff(pair: SideBySide, others: Mapping[str, LayerDescription]) -> LayerDiff:
    """What both mean, run by run; `others`: all layers of the second checkpoint, where it may be instead."""
    ours, theirs = pair.layer, pair.other
    if (ours.N, ours.K) != (theirs.N, theirs.K):
        shapes = f"(N, K) is ({ours.N}, {ours.K}), of the other ({theirs.N}, {theirs.K})"
        return LayerDiff(ours.prefix, theirs.prefix, "shape", shapes)
    try:
        if _is_copy(pair):
            return LayerDiff(ours.prefix, theirs.prefix, "bits", total=ours.N * ours.K)
        found = _compared(pair)
        detail = _detail(pair, found, others)
    except QloadError as error:
        return LayerDiff(ours.prefix, theirs.prefix, "refused", str(error))
    return LayerDiff(ours.prefix, theirs.prefix, found.outcome, detail, found.differing, found.total)


def _compared(pair: SideBySide) -> ValueDiff:
    """All outputs: codes where both have some, in wide runs, and values where these differ.

    Where there are values alone the first run is short: what it shows to be rounded is compared rounded.
    """
    ours, theirs = pair.layer, pair.other
    found, dtype = ValueDiff(), rounding(_plain_dtype(ours), _plain_dtype(theirs))
    block = lcm(*(granule(layer, "N") or layer.N for layer in (ours, theirs)))
    wide = CODES if all(map(lie_in_words, pair.load((0, min(block, ours.N))))) else OUTPUTS
    short = 0 if wide == CODES else min(block, ours.N)
    for run in (*runs((0, short), ours.K, block, wide), *runs((short, ours.N), ours.K, block, wide)):
        if wide == CODES and equal_codes(*pair.load(run)):
            found.total += (run[1] - run[0]) * ours.K
            continue
        for part in runs(run, ours.K, block, OUTPUTS):
            one, other = pair.load(part)
            if not found.bits and rounds_to(one, other, dtype):
                found.total += (part[1] - part[0]) * ours.K
                continue
            found.add(part[0], meant(one), meant(other), dtype)
    return found


def runs(outputs: tuple[int, int], K: int, block: int, elements: int) -> Iterator[tuple[int, int]]:
    """Outputs in runs of about so many elements, that end where blocks do or the outputs."""
    step = max(1, elements // max(1, K) // block) * block
    for start in range(outputs[0], outputs[1], step):
        yield start, min(start + step, outputs[1])


def tensor_diff(here: WeightStorage, name: str, there: WeightStorage, other: str) -> LayerDiff:
    """A tensor of no layer, such as a bias, beside another, piece by piece."""
    one, two = here.info(name), there.info(other)
    if one.shape != two.shape:
        return LayerDiff(name, other, "shape", f"shape is {one.shape}, of the other {two.shape}")
    found, at, dtype = ValueDiff(), 0, rounding(one.dtype, two.dtype)
    step = 1 << 18  # elements
    for got, want in zip(_flat(here, name, step), _flat(there, other, step), strict=True):
        found.add(at, got, want, dtype)
        at += len(got)
    return LayerDiff(name, other, found.outcome, _first(found), found.differing, found.total)


def _flat(storage: WeightStorage, name: str, step: int) -> Iterator[torch.Tensor]:
    """All elements in order, `step` at a time whatever their dtype; floats of 8 bits as float32."""
    held: list[torch.Tensor] = []
    count = 0
    for piece in pieces(storage, name):
        held.append(piece.float() if piece.dtype.is_floating_point and piece.dtype.itemsize == 1 else piece)
        count += len(piece)
        if count >= step:
            joined = torch.cat(held)
            whole = count // step * step
            yield from torch.split(joined[:whole], step)
            held, count = [joined[whole:]], count - whole
    if count:
        yield torch.cat(held)


def _plain_dtype(layer: LayerDescription) -> torch.dtype | None:
    return layer.dtypes["weight"] if layer.format.weight_type.plain else None


def _is_copy(pair: SideBySide) -> bool:
    """Whether both are stored alike, in equal bytes."""
    ours, theirs = pair.layer, pair.other
    if ours.format != theirs.format or ours.sizes != theirs.sizes or ours.dtypes != theirs.dtypes:
        return False
    assert pair.subject.weights is not None
    assert pair.reference.weights is not None
    here, there = pair.subject.weights.storage, pair.reference.weights.storage
    names = [(ours.names.full(spec.name), theirs.names.full(spec.name)) for spec in ours.specs]
    return all(
        here.info(name).shape == there.info(other).shape
        and all(equal_bits(*both) for both in zip(pieces(here, name), pieces(there, other), strict=True))
        for name, other in names
    )


def _detail(pair: SideBySide, found: ValueDiff, others: Mapping[str, LayerDescription]) -> str:
    """Where it differs first, and the mistake without which it does not."""
    if found.first is None:
        return ""
    plain = pair.other.format.weight_type.plain and not pair.layer.format.weight_type.plain
    cause = misreading(pair, found.run, plain * HALF) or found_elsewhere(
        pair.load(found.run)[0], found.run, pair.reference, pair.other, others
    )
    return f"{_first(found)}; {cause}" if cause else _first(found)


def _first(found: ValueDiff) -> str:
    if found.first is None:
        return ""
    place, got, want = found.first
    where = ", ".join(map(str, place))
    return f"first at ({where}): {got:g}, of the other {want:g}; {found.differing} of {found.total} differ"
