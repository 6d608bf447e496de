"""GPTQ: integer codes, one scale and zero point per group of inputs.

On disk, for a layer of K inputs and N outputs in G groups, b bits:

    qweight  int32             (K*b/32, N)  codes, packed along K, first row in the low bits
    qzeros   int32             (G, N*b/32)  zero points, packed along N, in the convention of `zeros`
    scales   fp16, bf16, fp32  (G, N)
    g_idx    int32             (K,)         the group of each row; any order (act order)

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),   g = g_idx[k]

Without act order tools may omit `g_idx` or write zeros: the groups are in order then, and a cut of K inside
a group is refused. The shapes of zero points and scales give the bits. Source: gptqmodel 7.7.0,
auto-gptq 0.7.1 and auto-round 0.16.1, bit-equal to all.

The format `gptq` stores a zero point minus one. Programs wrap a zero point of 0 in three ways:

    whole words   0x11111111 is subtracted from a word, and the next field gets one less (gptqmodel, autoawq)
    fields        each field wraps by itself (text-generation-inference)
    ones          -1 is OR-ed into the word: higher fields are ones, and their zero points lost (auto-gptq)

The first two differ by one in the field after a wrapped one. Weights of a column are centred on zero, so that
in the right reading the mean code of a group is near its zero point. Where readings differ, that distance is
compared with the distance in other columns with the same zero point.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.errors import AmbiguousIndexError, MismatchError, QloadError, ShapeError
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOne, StoredMinusOnePerField, ZeroPoints, gptq
from qload.spec import LayerValues, Role, TensorSpec

DOUBTFUL = (
    "programs wrap zero points of 0, stored minus one, in several ways, and neither codes nor config show "
    "which: qload subtracts 1 from whole words, as gptqmodel does"
)
ASYMMETRIC = (
    "the config says sym is true, and zero points are not all in the middle of the codes: they are read as "
    "they are stored; set sym to false, or quantize again"
)
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

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64, torch.int16)


@dataclass(frozen=True)
class GPTQConfig(spec.Grouped, spec.Config):
    """Config of all GPTQ layers of a checkpoint.

    Attributes
    ----------
    bits
        Bits of a code: 2, 3, 4 or 8.
    group_size
        Inputs that share a scale; -1: one group.
    zeros
        Convention of stored zero points; `Stored()` for gptq_v2.
    positional
        Whether the groups of the whole layer are in order; a cut between two groups then cuts the scales too.
        `g_idx` decides, when a layer is loaded or constructed.
    desc_act
        Claim of the config that inputs are in act order; `g_idx` decides.
    indexed
        Whether a stored `g_idx` gives the groups; False: groups are in order; None: by the layer.
    evidence
        Evidence for `zeros`, one of `Evidence`; None: the values were not examined.
    asymmetric
        Whether some zero point is not in the middle of the codes, against the `sym` of the config.
    claimed_bits
        Bits claimed by the config, if the shapes of the layer contradict them.
    """

    name: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    zeros: ZeroPoints = STORED_MINUS_ONE
    positional: bool = False
    desc_act: bool | None = field(default=None, compare=False)  # only a claim
    indexed: bool | None = field(default=True, compare=False)  # storage, not meaning
    claimed_bits: int | None = field(default=None, compare=False)  # only a claim
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    asymmetric: bool = field(default=False, compare=False, repr=False)

    by_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> "GPTQConfig":
        """Read bits from shapes, and the order of groups from `g_idx`.

        ShapeError if the number of groups contradicts the group size; AmbiguousIndexError for an index of
        zeros with several groups, unless the config denies act order.
        """
        config = self._with_stored_bits(headers)
        sizes = headers.sizes(GPTQWeight.tensors(replace(config, positional=False)))
        K, G, N = sizes["K"], sizes["G"], sizes["N"]
        group, groups = config.rows_of_a_group(K), config.groups(K)
        if groups != G:
            raise ShapeError(
                headers.names.full("scales"),
                f"({groups}, {N}) = (K/{group}^, N)",
                headers.shapes["scales"],
                headers.names.file("scales"),
                f"for K = {K} and a group size of {self.group_size} in the config",
            )
        g_idx = None if config.indexed is False else headers.facts.get("g_idx")
        if g_idx is None or (G > 1 and not g_idx.any() and config.desc_act is False):
            return replace(config, positional=G > 1, indexed=False)
        if G > 1 and not g_idx.any():
            raise AmbiguousIndexError(
                headers.names.full("g_idx"),
                "all zero, with two readings",
                f"the group of each row, 0 to {G - 1}",
                f"0 for all {K} rows",
                "remedy   write the groups out: zeros mean 'in order' only where desc_act is false",
            )
        in_order = bool((g_idx == config.in_order(K, g_idx.device)).all())
        return replace(config, positional=G > 1 and in_order, indexed=True)

    def settled(self, values: LayerValues) -> tuple[dict[str, Any], QloadError | None]:
        """Decide the convention of zero points by `values`; with the error if they contradict the config."""
        return _settle(values, self.bits, self.zeros)

    def like(self, other: spec.Config) -> "GPTQConfig":
        """The config with the other's way to wrap zero points, if that changes no zero point here."""
        if self.evidence != "alike" or not isinstance(other, GPTQConfig) or other.zeros == self.zeros:
            return self
        wrapping = WHOLE, FIELDS
        fits = other.evidence not in (None, "alike") and {self.zeros, other.zeros} <= {*wrapping}
        return replace(self, zeros=other.zeros, evidence="others") if fits else self

    @property
    def doubt(self) -> str:
        """Warning about zero points of 0 without evidence for their reading."""
        return DOUBTFUL if self.evidence == "none" else ""

    @property
    def denied(self) -> str:
        """Note on zero points off the middle under a config with `sym`."""
        return ASYMMETRIC if self.asymmetric else ""

    def _with_stored_bits(self, headers: spec.LayerHeaders) -> "GPTQConfig":
        """Return the config with the bits of all shapes, if these agree on others than claimed."""
        codes, zeros, scales = (headers.shapes.get(name, ()) for name in ("qweight", "qzeros", "scales"))
        if len(codes) != 2 or len(zeros) != 2 or len(scales) != 2 or not all((*zeros, *scales)):
            return self
        bits, rest = divmod(32 * zeros[1], scales[1])
        if rest or bits == self.bits or bits not in BITS or codes[0] * 32 % bits:
            return self
        K, g_idx = codes[0] * 32 // bits, headers.facts.get("g_idx")
        agree = codes[1] == scales[1] and zeros[0] == scales[0] == self.groups(K)
        if not agree or (g_idx is not None and len(g_idx) != K):
            return self
        return replace(self, bits=bits, claimed_bits=self.bits)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Notes on claimed bits and act order that shapes and `g_idx` contradict."""
        notes = []
        if self.claimed_bits is not None:
            notes.append(f"bits is {self.claimed_bits}, the shapes are of {self.bits} bits and are believed")
        if not self.indexed:
            state = "all zero, and desc_act is false" if "g_idx" in headers.facts else "not stored"
            return (*notes, f"g_idx is {state}: the groups are in order")
        act_order = not self.positional and bool(headers.facts["g_idx"].any())
        if self.desc_act is not None and self.desc_act != act_order:
            order = "in act order" if act_order else "in order"
            notes.append(f"desc_act is {str(self.desc_act).lower()}, g_idx is {order} and is believed")
        return tuple(notes)


@dataclass(frozen=True, eq=False, repr=False)
class GPTQWeight(spec.Weight):
    """A GPTQ layer, or a share of one.

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), g = g_idx[k], or k / group_size without an index.
    Source: gptqmodel, auto-gptq and auto-round, bit-equal to their files.

    Attributes
    ----------
    qweight
        Codes, packed along K, first row in the low bits: (K * bits / 32, N), int32.
    qzeros
        Zero points, packed along N, in the convention of `config.zeros`: (G, N * bits / 32), int32.
    scales
        (G, N), fp16, bf16 or fp32.
    g_idx
        The group of each input, in any order: (K,), int32, int64 or int16; None: the groups are in order.

    Examples
    --------
    >>> import torch
    >>> from qload import GPTQConfig, GPTQWeight
    >>> weight = GPTQWeight(
    ...     config=GPTQConfig(bits=4, group_size=32),
    ...     qweight=torch.full((4, 8), 0x76543210, dtype=torch.int32),  # the codes 0 to 7
    ...     qzeros=torch.zeros(1, 1, dtype=torch.int32),  # 0 on disk is a zero point of 1
    ...     scales=torch.full((1, 8), 0.5).half(),
    ...     g_idx=torch.zeros(32, dtype=torch.int32),
    ... )
    >>> weight.shape, weight.dequantize()[0, :8]
    ((8, 32), tensor([-0.5000,  0.0000,  0.5000,  1.0000,  1.5000,  2.0000,  2.5000,  3.0000]))
    """

    config: GPTQConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None = None

    format: ClassVar[str] = "gptq"
    example: ClassVar[GPTQConfig] = GPTQConfig(bits=4, group_size=128, positional=True)

    @classmethod
    def tensors(cls, config: GPTQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups in order are cut with K, if every cut falls between two of them.

        Without an index every cut has to.
        """
        b, stored = config.bits, config.indexed is not False
        groups = f"K/{config.group_size}^{'|G' * stored}" if config.positional else "G"
        index = TensorSpec("g_idx", INDICES, "K", Role.INDEX, fact=True, index_of="G" if stored else None)
        return (
            TensorSpec("qweight", (torch.int32,), f"K*{b}/32 N", Role.WORD),
            TensorSpec("qzeros", (torch.int32,), f"{groups} N*{b}/32", Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
            replace(index, optional=config.indexed is not True, spent=not stored),
        )

    def groups_of_inputs(self) -> Tensor:
        """Group of each input (K,), from `g_idx` or in order."""
        if self.g_idx is None or not self.config.indexed:
            return self.config.in_order(self.layer.K, self.device)
        return self.g_idx

    def stored(self) -> StoredCodes:
        """Describe the stored order for kernels."""
        bits, size, groups = self.config.bits, self.config.group_size, self.scales.shape[0]
        in_runs = self.config.positional or groups == 1
        return StoredCodes(
            codes=gptq.rows(bits).packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=self.config.zeros.rule(bits),
            run=size if self.config.positional and size > 0 else max(self.layer.K, 1),
            k_group=None if in_runs else self.groups_of_inputs().to(torch.int32).contiguous(),
        )

    def codes(self) -> spec.Codes:
        """Return codes, zero points and scales in plain order, grouped by `g_idx`."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=gptq.rows(bits).packed(self.qweight).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=self.groups_of_inputs().long(),
        )


@dataclass(frozen=True)
class _Offsets:
    """Mean distance of codes from zero points in both readings, over pairs (group, column) where they differ.

    `count`: pairs. `by_word` and `fields`: mean distances. `variance`: that of one pair.
    """

    count: int = 0
    by_word: float = 0.0
    fields: float = 0.0
    variance: float = 0.0

    def __add__(self, other: "_Offsets") -> "_Offsets":
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


def _settle(values: LayerValues, bits: int, zeros: ZeroPoints) -> tuple[dict[str, Any], QloadError | None]:
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
    if looked_at and bool((words == _row(bits, zeros, words.shape[1])).all()):  # whatever the mean of weights
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


@lru_cache(64)
def _row(bits: int, zeros: ZeroPoints, width: int) -> Tensor:
    """A row of words with all zero points in the middle."""
    return zeros.write(torch.full((1, width * 32 // bits), 2 ** (bits - 1)), gptq.columns(bits))


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
