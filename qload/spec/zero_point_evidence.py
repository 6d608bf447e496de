"""Evidence for the way in which a checkpoint stores zero points.

The format `gptq` stores a zero point minus one. Programs wrap a zero point of 0 in three ways:

    whole words   0x11111111 is subtracted from a word, and the next field gets one less (gptqmodel, autoawq)
    fields        each field wraps by itself (text-generation-inference)
    ones          -1 is OR-ed into the word: higher fields are ones, and their zero points lost (auto-gptq)

The first two differ by one in the field after a wrapped one. Weights of a column are centred on zero, so that
in the right reading the mean code of a group is near its zero point. Where readings differ, that distance is
compared with the distance in other columns with the same zero point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from qload.errors import MismatchError, QloadError
from qload.layouts import Stored, StoredMinusOne, StoredMinusOnePerField, ZeroPoints, gptq
from qload.lazy_torch import Tensor, torch
from qload.spec.weight import Config, LayerClaims, LayerValues, has_middle_zeros

# Evidence for a reading: all readings are equal, the codes, the name of the quantizer, other layers of the
# checkpoint, none; "lost": zero points are lost, and no reading is right.
Evidence = Literal["alike", "codes", "writer", "others", "none", "lost"]

WHOLE, FIELDS = StoredMinusOne(), StoredMinusOnePerField()
MIN_PAIRS = 3  # pairs of group and column needed for a decision
STANDARD_ERRORS = 3.0  # standard errors on either side of the middle between two readings
MIN_LOST_FIELDS = 3  # lost fields of a layer that prove an OR of ones
MAX_CODE_BYTES = 1 << 25  # bytes of codes, read per layer
CHUNK_CODES = 1 << 22  # codes unpacked at once
FIRST_COLUMNS = 64  # columns of the first comparison
MAX_COMPARED_COLUMNS = 512  # columns with one reading, sampled for comparison
MEAN_BITS, MEAN_GROUPS, MAX_SPREAD = 4, 64, 0.92  # as in rule zero-point-mean
MIN_WRONG_OFFSET = 0.58  # codes: smallest offset in a wrong convention
MAX_SOUND_OFFSET = 0.44  # codes: largest offset of a sound layer
MIN_STANDARD_ERRORS = 4.0  # standard errors beyond MIN_WRONG_OFFSET
SAMPLED_ROWS, SAMPLED_CODES = 256, 1 << 13


@dataclass(frozen=True)
class _Offsets:
    """Mean distance of codes from zero points in both readings, over pairs (group, column) where they differ.

    `count`: pairs. `by_word` and `fields`: mean distances. `variance`: that of one pair.
    """

    count: int = 0
    by_word: float = 0.0
    fields: float = 0.0
    variance: float = 0.0

    def __add__(self, other: _Offsets) -> _Offsets:
        count = self.count + other.count
        if not count:
            return self
        a, b = self.count / count, other.count / count
        mean = (getattr(self, key) * a + getattr(other, key) * b for key in ("by_word", "fields", "variance"))
        return _Offsets(count, *mean)

    @property
    def reading(self) -> ZeroPoints | None:
        """Convention supported by the codes; None if they support neither."""
        if self.count < MIN_PAIRS:
            return None
        margin = 2 * STANDARD_ERRORS * (self.variance / self.count) ** 0.5
        apart = abs(self.fields) - abs(self.by_word)
        return WHOLE if apart > margin else FIELDS if -apart > margin else None


def _wraps(words: Tensor, bits: int) -> bool:
    """Return whether some field of `qzeros` is all ones; without one all readings are equal."""
    if bits == 3:
        return bool((gptq.columns(3).unpack(words) == 7).any())
    ones = words
    for shift in (1, 2, 4)[: bits.bit_length() - 1]:
        ones = ones & (ones >> shift)
    low = sum(1 << at for at in range(0, 32, bits))
    return bool((ones & (low - (low >> 31 << 32))).any())


def _count_lost(values: LayerValues, words: Tensor, bits: int) -> int:
    """Count the zero points lost by an OR of ones; 0 without proof.

    Proof: in each word all bits above a field of ones are ones, and in other groups these columns have zero
    points far from 0 with codes near them.
    """
    ones, above = _fields_of_ones(words, bits)
    if bool((ones & ~above).any()):
        return 0
    lost = ones & _after_first(ones, bits)
    count = int(lost.sum())
    if count < MIN_LOST_FIELDS:
        return 0
    points = FIELDS.read(words, gptq.columns(bits)).double()
    sound = ~_in_words(ones, bits)
    usual = (points * sound).sum(0) / sound.sum(0).clamp(min=1)
    known = lost & sound.any(0) & (usual >= 2**bits / 8)
    if int(known.sum()) * 2 < count:
        return 0
    columns = _where_readable(values, bits, known.any(0)).nonzero().flatten()
    means, enough = _mean_codes(values, bits, columns, words.shape[0])
    if means is None:
        return 0
    at = known[:, columns] & enough
    apart = (means - usual[columns])[at]
    return count if at.any() and abs(float(apart.mean())) < 2**bits / 8 else 0


def _fields_of_ones(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Find fields of ones, and fields from which on all bits of the word are ones: two masks (G, N).

    A field of 3 bits that crosses words is in neither mask.
    """
    G, W = words.shape
    if bits == 3:
        ones, above = (
            torch.zeros(G, W // 3, 32, dtype=torch.bool),
            torch.zeros(G, W // 3, 32, dtype=torch.bool),
        )
        for word, begin, first in ((0, 0, 0), (1, 1, 11), (2, 2, 22)):
            for i in range(10):
                shifted = words[:, word::3] >> (begin + 3 * i)
                ones[..., first + i], above[..., first + i] = (shifted & 7) == 7, shifted == -1
        return ones.flatten(1), above.flatten(1)
    shifted = torch.stack([words >> at for at in range(0, 32, bits)], -1)  # int32: shifts extend the sign
    return ((shifted & (2**bits - 1)) == 2**bits - 1).flatten(1), (shifted == -1).flatten(1)


def _runs(bits: int) -> list[tuple[int, int]]:
    """(first field, number of fields) of each word in a run of words without a crossing code at its end."""
    return [(0, 11), (11, 11), (22, 10)] if bits == 3 else [(0, 32 // bits)]


def _after_first(ones: Tensor, bits: int) -> Tensor:
    """Mark the fields above a field of ones in the same word: (G, N)."""
    runs = ones.reshape(len(ones), -1, 32 if bits == 3 else 32 // bits)
    return torch.cat(
        [runs[..., a : a + n].cumsum(-1) > runs[..., a : a + n].int() for a, n in _runs(bits)], -1
    ).flatten(1)


def _in_words(ones: Tensor, bits: int) -> Tensor:
    """Mark the fields of words with a field of ones: (G, N)."""
    runs = ones.reshape(len(ones), -1, 32 if bits == 3 else 32 // bits)
    parts = [runs[..., a : a + n].any(-1, keepdim=True).expand(*runs.shape[:2], n) for a, n in _runs(bits)]
    return torch.cat(parts, -1).flatten(1)


def _offsets(values: LayerValues, words: Tensor, bits: int) -> _Offsets:
    """Measure both readings of a layer against its codes; no pairs if the codes cannot be read.

    A few columns are compared first, and more of them while the result is ambiguous.
    """
    packing = gptq.columns(bits)
    by_word, fields = WHOLE.read(words, packing), FIELDS.read(words, packing)
    top = 2**bits - 1
    low = int(bits > 2)  # a group at an end of the codes is not centred
    inner = (by_word > low) & (by_word < top) & (fields > low) & (fields < top)
    differ = _where_readable(values, bits, (by_word != fields) & inner)
    touched = differ.any(0).nonzero().flatten()
    others = _where_readable(values, bits, ~(by_word != fields).any(0)).nonzero().flatten()
    offsets, count = _Offsets(), FIRST_COLUMNS
    while len(touched):
        columns = torch.cat([_spread(touched, count), _spread(others, min(count, MAX_COMPARED_COLUMNS))])
        marks = differ[:, columns]
        readings = by_word[:, columns], fields[:, columns]
        offsets = _compared(values, bits, *readings, marks, inner[:, columns], columns)
        if offsets.reading is not None or count >= len(touched):
            break
        count *= 8
    return offsets


def _spread(columns: Tensor, count: int) -> Tensor:
    """Choose at most `count` columns, evenly spread."""
    return columns[:: -(-len(columns) // count)] if len(columns) else columns


def _compared(
    values: LayerValues,
    bits: int,
    by_word: Tensor,
    fields: Tensor,
    differ: Tensor,
    inner: Tensor,
    columns: Tensor,
) -> _Offsets:
    """Measure both readings (G, n) of zero points against the codes of some columns."""
    means, enough_rows = _mean_codes(values, bits, columns, len(by_word))
    if means is None:
        return _Offsets()
    by_word, fields, equal = by_word.double(), fields.double(), by_word == fields
    differ, sound = differ & enough_rows, enough_rows & equal & inner
    if not bool(differ.any()) or not bool(sound.any()):
        return _Offsets()
    usual, variance = _usual(means - by_word, by_word, sound, 2**bits - 1)
    a = (means - by_word - usual[by_word.long()])[differ]
    b = (means - fields - usual[fields.long()])[differ]
    spread = float(torch.minimum(a.abs(), b.abs()).square().mean())
    return _Offsets(a.numel(), float(a.mean()), float(b.mean()), max(variance, spread))


def _where_readable(values: LayerValues, bits: int, marks: Tensor) -> Tensor:
    """Clear the marks (..., n) of columns without readable codes."""
    codes, zeros = values.readable("qweight"), values.readable("qzeros")
    if codes is None or zeros is None:
        return torch.zeros_like(marks)
    at = torch.arange(marks.shape[-1]) + zeros[1][0] * 32 // bits
    return marks & (at >= codes[1][0]) & (at < codes[1][1])


def _usual(offset: Tensor, zeros: Tensor, sound: Tensor, top: int) -> tuple[Tensor, float]:
    """Mean distance of codes from each zero point where readings agree, and the variance about it."""
    kinds = zeros[sound].long()
    counts = torch.zeros(top + 1, dtype=torch.float64).index_add_(
        0, kinds, torch.ones(len(kinds), dtype=torch.float64)
    )
    sums = torch.zeros(top + 1, dtype=torch.float64).index_add_(0, kinds, offset[sound])
    overall = offset[sound].mean()
    usual = torch.where(counts >= 16, sums / counts.clamp(min=1), overall)
    rest = offset[sound] - usual[kinds]
    return usual, float(rest.square().mean()) if len(rest) > 1 else 1.0


def _mean_codes(values: LayerValues, bits: int, columns: Tensor, groups: int) -> tuple[Tensor | None, Tensor]:
    """Mean codes (groups, columns), and a mask of those with at least half of their rows read."""
    bounds = values.readable("qweight")
    origin = values.readable("qzeros")
    nothing = torch.zeros(groups, len(columns), dtype=torch.bool)
    if bounds is None or origin is None:
        return None, nothing
    (r0, r1), (c0, c1) = bounds
    first = origin[1][0] * 32 // bits - c0  # first column of the zero points, counted from that of the codes
    places = columns + first
    if not len(places):
        return None, nothing
    unit = 3 if bits == 3 else 1  # words that end where a code does
    run = unit * 32 // bits
    width = max(1, c1 - c0)
    rows = max(unit, min(r1 - r0, MAX_CODE_BYTES // (4 * width)) // unit * unit)
    stop = min(r1, r0 + rows)
    of_rows = values.group_of_rows(r0 // unit * run, stop // unit * run) - origin[0][0]
    sums = torch.zeros(groups, len(columns), dtype=torch.float64)
    counts = torch.zeros(groups, dtype=torch.float64)
    chunk = max(unit, CHUNK_CODES // max(1, len(columns)) // run * unit)
    for start in range(r0, stop, chunk):
        end = min(stop, start + chunk)
        words = values.read("qweight", (slice(start, end), slice(c0, c1)))[:, places]
        codes = _codes(words, bits).double()
        at = of_rows[(start - r0) // unit * run : (end - r0) // unit * run]
        known = (at >= 0) & (at < groups)
        sums.index_add_(0, at[known], codes[known])
        counts.index_add_(0, at[known], torch.ones(int(known.sum()), dtype=torch.float64))
    enough = counts * 2 >= values.rows_of_a_group
    return sums / counts.clamp(min=1)[:, None], enough[:, None].expand(-1, len(columns))


def _codes(rows: Tensor, bits: int) -> Tensor:
    """Unpack words (R, N) along K to codes (K, N)."""
    if bits == 3:
        return gptq.rows(3).unpack(rows.contiguous())
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (rows[:, None] >> shifts[:, None]) & (2**bits - 1)
    return codes.flatten(0, 1)


def _fields_at(words: Tensor, columns: Tensor, bits: int) -> Tensor:
    """Unpack the fields of some `columns` (n,) from words (G, W) that are packed along N: (G, n)."""
    if bits == 3:
        return gptq.columns(3).unpack(words)[:, columns]
    fields: Tensor = (words[:, columns * bits // 32] >> (columns * bits % 32).int()) & (2**bits - 1)
    return fields


def _mean_offset(values: LayerValues, words: Tensor, bits: int, zeros: ZeroPoints) -> float | None:
    """Mean distance of codes from zero points, if it proves the other convention; else None.

    Zero points of the other convention are one higher for `Stored`, and one lower for those stored minus one.
    """
    if bits > MEAN_BITS:
        return None
    bounds, origin = values.readable("qweight"), values.readable("qzeros")
    if bounds is None or origin is None or origin != ((0, words.shape[0]), (0, words.shape[1])):
        return None
    (r0, r1), (c0, c1) = bounds
    unit = 3 if bits == 3 else 1
    run = unit * 32 // bits
    if words.shape[1] * 32 // bits < c1 or r1 - r0 < unit:
        return None
    blocks = min(4, (r1 - r0) // unit)
    length = max(1, min((r1 - r0) // unit // blocks, SAMPLED_ROWS // blocks // run)) * unit
    starts = [r0 + (r1 - r0 - length) // unit * at // max(1, blocks - 1) * unit for at in range(blocks)]
    sampled = len(starts) * length // unit * run
    step = min((c1 - c0) * sampled // SAMPLED_CODES, (c1 - c0) // MEAN_GROUPS)
    columns = torch.arange(c0, c1, max(1, step))
    if len(columns) < 2:
        return None
    points = _fields_at(words, columns, bits).float() + (0 if isinstance(zeros, Stored) else 1)
    of_inputs, of_outputs, groups = [], torch.zeros(len(columns)), set[int]()
    total = squares = 0.0
    for start in dict.fromkeys(starts):  # one after another, to save memory
        rows = values.read("qweight", (slice(start, start + length), slice(c0, c1)))[:, columns - c0]
        codes = _codes(rows, bits).float()
        total, squares = total + float(codes.sum()), squares + float(codes.square().sum())
        group = values.group_of_rows(start // unit * run, (start + length) // unit * run)
        codes -= points[group]
        of_inputs.append(codes.mean(1))
        of_outputs += codes.sum(0)
        groups |= set(group.tolist())
    inputs, outputs = torch.cat(of_inputs), of_outputs / sum(map(len, of_inputs))
    count = len(inputs) * len(columns)
    if len(groups) * len(columns) < MEAN_GROUPS:
        return None
    even = ((4.0**bits - 1) / 12) ** 0.5
    if max(0.0, squares / count - (total / count) ** 2) ** 0.5 / even > MAX_SPREAD:
        return None
    offset = float(inputs.mean())
    error = (float(inputs.var()) / len(inputs) + float(outputs.var()) / len(outputs)) ** 0.5
    side = -1.0 if isinstance(zeros, Stored) else 1.0
    wrong = (
        -side * offset > MIN_WRONG_OFFSET + MIN_STANDARD_ERRORS * error
        and abs(offset + side) < MAX_SOUND_OFFSET
    )
    return offset if wrong else None


def readings_agree(words: Tensor, bits: int, zeros: ZeroPoints, claims: LayerClaims) -> bool:
    """Return whether all readings of zero points (E, G, W) of several layers agree, and with the config.

    A config that claims `sym` needs every zero point in the middle.
    """
    rows = words.flatten(0, 1)
    if claims.sym:
        return has_middle_zeros(rows, bits, zeros)
    return not isinstance(zeros, StoredMinusOne) or not _wraps(rows, bits)


def settle(values: LayerValues, bits: int, zeros: ZeroPoints) -> tuple[dict[str, Any], QloadError | None]:
    """Decide the convention of zero points: with its evidence, and the error if it contradicts the config."""
    symmetric = bool(values.claims.sym)
    bounds = values.readable("qzeros")
    if bounds is None:
        return {}, None
    words = values.read("qzeros", tuple(slice(*pair) for pair in bounds))
    if not words.numel():
        return {}, None
    evidence: Evidence = "alike"
    error: QloadError | None = None
    looked_at = symmetric or values.compare_codes
    if looked_at and has_middle_zeros(words, bits, zeros):  # whatever the mean of weights
        return {"zeros": zeros, "evidence": evidence}, None
    if symmetric:
        error = _asymmetric(values, words, bits, zeros)
    if error is None and isinstance(zeros, StoredMinusOne) and _wraps(words, bits):
        zeros, evidence = _reading(values, words, bits)
        error = _lost_error(values, words, bits) if evidence == "lost" else None
    if values.compare_codes and not symmetric and evidence == "alike":
        error = _one_off(values, words, bits, zeros)
    return {"zeros": zeros, "evidence": evidence, "asymmetric": symmetric and error is None}, error


def _reading(values: LayerValues, words: Tensor, bits: int) -> tuple[ZeroPoints, Evidence]:
    """Choose a reading with its evidence; without evidence, the reading of gptqmodel."""
    if _count_lost(values, words, bits):
        return WHOLE, "lost"
    packing = gptq.columns(bits)
    if torch.equal(WHOLE.read(words, packing), FIELDS.read(words, packing)):
        return WHOLE, "alike"
    offsets = _offsets(values, words, bits)
    if offsets.reading is not None:
        return offsets.reading, "codes"
    if values.claims.writer.lower().startswith("gptqmodel"):
        return WHOLE, "writer"
    together = _of_all_layers(values)
    return (WHOLE, "none") if together is None else (together, "others")


def _of_all_layers(values: LayerValues) -> ZeroPoints | None:
    """Reading supported by the codes of all layers together, as one program wrote them; None if neither."""
    if "reading" not in values.shared:
        total = _Offsets()
        for config, other in values.layers("qzeros"):
            bits, bounds = getattr(config, "bits", 0), other.readable("qzeros")
            if bounds is None or not isinstance(getattr(config, "zeros", None), StoredMinusOne):
                continue
            words = other.read("qzeros", tuple(slice(*pair) for pair in bounds))
            if _wraps(words, bits):
                total += _offsets(other, words, bits)
        values.shared["reading"] = total.reading
    reading: ZeroPoints | None = values.shared["reading"]
    return reading


def _asymmetric(values: LayerValues, words: Tensor, bits: int, zeros: ZeroPoints) -> QloadError | None:
    """Error of a layer with the claim `sym` and all zero points one off the middle."""
    packing, middle = gptq.columns(bits), 2 ** (bits - 1)
    side = 1 if isinstance(zeros, Stored) else -1
    points = zeros.read(words, packing)
    if not bool((points == middle - side).all()):  # a finding of `verify`, no error of loads
        return None
    name = values.names.full("qzeros")
    return MismatchError(
        name,
        "zero points are one off",
        f"{middle} in every group, as {values.claims.says('sym')}",
        f"{middle - side} in every group, read as {zeros.name}",
        _remedy(values, zeros),
    )


def _one_off(values: LayerValues, words: Tensor, bits: int, zeros: ZeroPoints) -> QloadError | None:
    """Error of a layer with codes near the zero points of the other convention.

    Layers outside of the blocks of a model, such as its head, are not centred and are skipped.
    """
    if not any(map(str.isdecimal, values.names.full("qzeros").split("."))):
        return None
    offset = _mean_offset(values, words, bits, zeros)
    if offset is None:
        return None
    return MismatchError(
        values.names.full("qzeros"),
        "zero points are one off",
        f"a mean distance of codes from zero points within {MIN_WRONG_OFFSET:.2f}",
        f"{offset:+.2f}, with zero points read as {zeros.name}",
        _remedy(values, zeros),
    )


def _remedy(values: LayerValues, zeros: ZeroPoints) -> str:
    other = "minus one" if isinstance(zeros, Stored) else "as they are"
    key = values.claims.convention or "checkpoint_format"
    right = "gptq" if isinstance(zeros, Stored) else "gptq_v2"
    change = f"set {key} to {right}" if key == "checkpoint_format" else f"correct {key}"
    return f"remedy   {change} in the config, if the tensors of all layers store zero points {other}"


def _lost_error(values: LayerValues, words: Tensor, bits: int) -> QloadError:
    count = _count_lost(values, words, bits)
    return MismatchError(
        values.names.full("qzeros"),
        "zero points are lost",
        "a field of its own for each zero point minus one",
        f"{count} fields of ones above another: an OR of -1 overwrote them",
        "remedy   quantize again with a program that wraps each zero point by itself, or read lost zero "
        "points as 0 by with_config(zeros=StoredMinusOnePerField())",
    )


DOUBTFUL = (
    "programs wrap zero points of 0, stored minus one, in several ways, and neither codes nor config show "
    "which: qload subtracts 1 from whole words, as gptqmodel does"
)
ASYMMETRIC = (
    "the config says sym is true, and zero points are not all in the middle of the codes: they are read as "
    "they are stored; set sym to false, or quantize again"
)


class EvidencedZeroPoints(Config):
    """Base of configs whose convention of zero points is decided by values, with evidence.

    `zeros`: the convention; `evidence`: that for it; `asymmetric`: zero points contradict the claim `sym`.
    """

    bits: int
    zeros: ZeroPoints
    evidence: Evidence | None
    asymmetric: bool

    by_values: ClassVar[bool] = True
    deciding_field: ClassVar[str] = "qzeros"

    def settled(self, values: LayerValues) -> tuple[dict[str, Any], QloadError | None]:
        """Decide the convention of zero points by `values`; with the error if they contradict the config."""
        return settle(values, self.bits, self.zeros)

    def decides_alike(self, claims: LayerClaims, stacked: Tensor) -> bool:
        """Return whether all readings of `stacked` zero points (E, G, N * bits / 32) agree, as in this layer.

        `claims`: a config that claims `sym` needs every zero point in the middle.
        """
        if self.evidence != "alike" or self.asymmetric or not stacked.numel():
            return False
        return readings_agree(stacked, self.bits, self.zeros, claims)

    def like(self, other: Config) -> Self:
        """The config with the other's way to wrap zero points, if that changes no zero point here."""
        if self.evidence != "alike" or not isinstance(other, type(self)) or other.zeros == self.zeros:
            return self
        wrapping = WHOLE, FIELDS
        fits = other.evidence not in (None, "alike") and {self.zeros, other.zeros} <= {*wrapping}
        config: Any = self  # a frozen dataclass
        read_alike: Self = replace(config, zeros=other.zeros, evidence="others") if fits else self
        return read_alike
