"""Comparison of a layer or tensor between two checkpoints: by codes, by values, after rounding."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from qload.devices import CodesInWords, LazyCodes
from qload.diagnosis.dequantized import meant
from qload.diff.report import LayerDiff, Outcome
from qload.errors import QloadError
from qload.layouts import Packing
from qload.layouts.packing import PackedCodes
from qload.loader import LayerDescription
from qload.loader.cuts import granule
from qload.spec import Codes, Weight
from qload.storage import WeightStorage
from qload.verify.blocks import MAX_ELEMENTS, pieces
from qload.verify.comparison import ROUNDED_DTYPES, equal_bits
from qload.verify.diagnose_diff import SideBySide, find_misplaced, find_misreading


def lie_in_words(weight: Weight) -> bool:
    """Whether a weight's codes alone say what it means, and lie in words, which many of are little memory."""
    if weight.plain or type(weight).dequantize is not Weight.dequantize or weight.input_factors is not None:
        return False
    return isinstance(weight.codes().codes, CodesInWords)


def equal_codes(one: Weight, other: Weight) -> bool:
    """Whether both dequantize to the same bits, told by their operands; of two weights that lie in words.

    False says nothing: operands that differ, such as groups of another size, may mean the same.
    """
    ours, theirs = one.codes(), other.codes()
    return _same_scales(ours, theirs) and _same_words(ours.codes, theirs.codes)


def same_weight(one: Weight, other: Weight) -> bool:
    """Whether two weights of one type are the same: in shape, config, inputs and the bytes of each tensor.

    Configs that differ are of no account where the values do not.
    """
    ours, theirs = one.fields(), other.fields()
    if type(one) is not type(other) or one.shape != other.shape or one.activations != other.activations:
        return False
    if ours.keys() != theirs.keys() or not all(_same(ours[name], theirs[name]) for name in ours):
        return False
    return bool(one.config == other.config) or _same(meant(one), meant(other))


def _same_scales(ours: Codes, theirs: Codes) -> bool:
    """All but the codes."""
    said = [(each.bits, each.divide, each.factor) for each in (ours, theirs)]
    if said[0] != said[1] or not _same(ours.scales, theirs.scales):
        return False
    pairs = [
        (getattr(ours, name), getattr(theirs, name)) for name in ("zeros", "k_group", "n_group", "lookup")
    ]
    return all(here is there is None or _same(here, there) for here, there in pairs)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Two tensors of one dtype and shape, in equal bits."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return equal_bits(one, other)


def _same_words(ours: Tensor | LazyCodes, theirs: Tensor | LazyCodes) -> bool:
    """Codes in words beside those in others, which are brought into the order of the first."""
    if not isinstance(ours, PackedCodes) or not isinstance(theirs, PackedCodes) or ours.order is not None:
        return False
    held = theirs.T if ours.turned else theirs  # as the words of ours hold them, rows for rows
    if held.packing == ours.packing and not held.turned and held.order is None:
        return equal_bits(held.words, ours.words)
    return isinstance(ours.packing, Packing) and equal_bits(ours.packing.pack(held), ours.words)


@dataclass
class ValueDiff:
    """Two tensors in runs of outputs.

    `bits`: whether all were equal so far, bit by bit. `first`: the place of the first that is not equal after
    rounding, with both values; `run`: the outputs that it is among.
    """

    bits: bool = True
    differing: int = 0
    total: int = 0
    first: tuple[tuple[int, ...], float, float] | None = None
    run: tuple[int, int] = (0, 0)

    @property
    def outcome(self) -> Outcome:
        """In a word."""
        return "bits" if self.bits else "differs" if self.differing else "rounded"

    def add(self, start: int, got: Tensor, want: Tensor, dtype: torch.dtype | None) -> None:
        """One more run, the first output of which is `start`; `dtype`: what both are rounded to."""
        self.total += got.numel()
        if got.dtype == want.dtype and equal_bits(got, want):
            return
        self.bits = False
        if dtype is not None:
            got, want = got.to(dtype), want.to(dtype)
        if got.dtype == want.dtype and equal_bits(got, want):
            return
        apart = (got != want) & ~(got.isnan() & want.isnan())
        count = int(apart.sum())
        self.differing += count
        if count and self.first is None:
            place = torch.nonzero(apart)[0].tolist()
            self.first = (_moved(place, start), float(got[tuple(place)]), float(want[tuple(place)]))
            self.run = (start, start + (got.shape[0] if got.ndim else 1))


def rounds_to(one: Weight, other: Weight, dtype: torch.dtype | None) -> bool:
    """Whether one of both is plain, of the narrow `dtype`, and what the other means rounds to its very bits.

    False says nothing: two plain weights are not asked, nor those whose inputs have factors.
    """
    plain, coded = (one, other) if one.plain else (other, one)
    if not plain.plain or coded.plain or coded.input_factors is not None:
        return False
    want = plain.fields()["weight"]
    return want.dtype == dtype and equal_bits(coded.dequantize(want.dtype), want)


def rounding(*dtypes: torch.dtype | None) -> torch.dtype | None:
    """The narrowest of the float types of plain values, which all are rounded to; None: there is none."""
    narrow = [dtype for dtype in dtypes if dtype in ROUNDED_DTYPES]
    return min(narrow, key=lambda dtype: torch.finfo(dtype).bits) if narrow else None


def _moved(place: list[int], start: int) -> tuple[int, ...]:
    return (place[0] + start, *place[1:]) if place else ()


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
    wide = CODES if all(map(lie_in_words, pair.load((0, min(block, ours.N))))) else MAX_ELEMENTS
    short = 0 if wide == CODES else min(block, ours.N)
    for run in (*runs((0, short), ours.K, block, wide), *runs((short, ours.N), ours.K, block, wide)):
        if wide == CODES and equal_codes(*pair.load(run)):
            found.total += (run[1] - run[0]) * ours.K
            continue
        for part in runs(run, ours.K, block, MAX_ELEMENTS):
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
    assert pair.checkpoint.weights is not None
    assert pair.reference.weights is not None
    here, there = pair.checkpoint.weights.storage, pair.reference.weights.storage
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
    cause = find_misreading(pair, found.run, plain * HALF) or find_misplaced(
        pair.load(found.run)[0], found.run, pair.reference, pair.other, others
    )
    return f"{_first(found)}; {cause}" if cause else _first(found)


def _first(found: ValueDiff) -> str:
    if found.first is None:
        return ""
    place, got, want = found.first
    where = ", ".join(map(str, place))
    return f"first at ({where}): {got:g}, of the other {want:g}; {found.differing} of {found.total} differ"
