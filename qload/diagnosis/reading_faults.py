"""Faults in how codes, scales, zero points and groups are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qload.layouts import fp4, marlin
from qload.spec import Codes, Weight


@dataclass(frozen=True)
class Misreading:
    """One mistake.

    Attributes
    ----------
    fault
        The id of its class.
    words
        What is read, as in "read with zero points one lower".
    made
        The codes as they are then.
    """

    fault: str
    words: str
    made: Callable[[], Codes]


def with_scales(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    """The same with other scales, made of its own (Gn, Gk)."""
    return Misreading(fault, words, lambda: replace(codes, scales=made(codes.scales)))


def with_zeros(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    """The same with other zero points, made of its own (Gn, Gk); those have to be there."""
    zeros = codes.zeros
    assert zeros is not None
    return Misreading(fault, words, lambda: replace(codes, zeros=made(zeros)))


def neighbours(size: int) -> Iterator[tuple[str, int]]:
    """Which of several is taken instead of each, and by how much a tensor is rolled for it."""
    if size > 1:
        yield "before", 1
        yield "after", -1


def rolled(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Rolled by `step` along `axis`."""
    return tensor.roll(step, axis)


def clamped(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Rolled by `step` along `axis`, with the first or last one kept where nothing comes after it."""
    size = tensor.shape[axis]
    return tensor.index_select(axis, (torch.arange(size, device=tensor.device) - step).clamp(0, size - 1))


def zero_points_off_by_one(codes: Codes) -> Iterator[Misreading]:
    """In the other convention: stored as they are, or minus one."""
    if codes.zeros is not None:
        yield with_zeros(
            codes, "zero-points-one-lower", "zero points one lower", lambda zeros: zeros.int() - 1
        )
        yield with_zeros(
            codes, "zero-points-one-higher", "zero points one higher", lambda zeros: zeros.int() + 1
        )


def other_zero_point_faults(codes: Codes) -> Iterator[Misreading]:
    """All other mistakes in zero points."""
    if codes.zeros is None:
        return
    wrap, middle = 2**codes.bits, 2 ** (codes.bits - 1)
    changes: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("zero-points-one-lower", "zero points one lower, wrapped", lambda z: (z.int() - 1) % wrap),
        ("zero-points-one-higher", "zero points one higher, wrapped", lambda z: (z.int() + 1) % wrap),
        ("zero-points-wrapped", "zero points of 0 that are not wrapped", lambda z: z.int() + wrap * (z == 0)),
        ("zero-points-wrapped", "zero points wrapped", lambda z: z.int() % wrap),
        ("zero-points-missing", "no zero points", torch.zeros_like),
        ("zero-points-twice", "zero points subtracted twice", lambda z: 2 * z.int()),
        ("zero-points-added", "zero points added", lambda z: -z.int()),
        ("zero-points-ignored", f"{middle} for every zero point", lambda z: torch.full_like(z, middle)),
        (
            "zero-points-ignored",
            f"{middle - 1} for every zero point",
            lambda z: torch.full_like(z, middle - 1),
        ),
    )
    yield from (with_zeros(codes, *change) for change in changes)
    for axis, one in ((1, "group"), (0, "output")):
        for which, step in neighbours(codes.zeros.shape[axis]):
            fault, words = f"zero-points-of-another-{one}", f"zero points of the {one} {which}"
            yield with_zeros(codes, fault, words, partial(rolled, axis=axis, step=step))
            yield with_zeros(codes, fault, words, partial(clamped, axis=axis, step=step))


def act_order_ignored(codes: Codes) -> Iterator[Misreading]:
    """The codes of a layer with act order, with groups as if there were none."""
    if codes.k_group is None or codes.scales.shape[1] < 2 or bool((codes.k_group.diff() >= 0).all()):
        return
    size, inputs = _runs(codes)
    yield _grouped(codes, "act-order-ignored", "groups in order", inputs // size)


def wrong_groups(codes: Codes) -> Iterator[Misreading]:
    """The codes with groups of other sizes, or in the reverse order."""
    if codes.k_group is None or codes.scales.shape[1] < 2:
        return
    count, (size, inputs) = codes.scales.shape[1], _runs(codes)
    sorted_ = bool((codes.k_group.diff() >= 0).all())
    if sorted_ and not bool((codes.k_group == inputs // size).all()):
        return
    for half, words in ((size // 2, "half"), (size * 2, "twice")):
        if half:
            fault, said = "group-size", f"groups {words} as large"
            yield _grouped(codes, fault, said, (inputs // half).clamp(max=count - 1))
            yield _grouped(codes, fault, said, inputs // half % count)
    yield _grouped(codes, "groups-reversed", "groups in the reverse order", count - 1 - codes.k_group)


def act_order_permutations(codes: Codes) -> Iterator[tuple[str, str, Tensor]]:
    """Which inputs lie where those of a layer with act order should: (fault, words, (K,) int64).

    A kernel holds rows sorted by their groups, and permutes inputs alike; it may do so not at all, or by the
    inverse.
    """
    if codes.k_group is None or bool((codes.k_group.diff() >= 0).all()):
        return
    order = codes.k_group.long().argsort(stable=True)
    yield "act-order-ignored", "rows sorted by their groups, inputs in order", order
    yield "act-order-inverse", "act order's permutation undone twice", order[order]
    yield "act-order-inverse", "inputs sorted by act order, rows in order", order.argsort()
    yield (
        "act-order-inverse",
        "act order's permutation in the wrong direction",
        order.argsort()[order.argsort()],
    )


def _runs(codes: Codes) -> tuple[int, torch.Tensor]:
    """How many inputs a group has, if all have as many, and each input's place (K,)."""
    K = codes.codes.shape[1]
    return -(-K // codes.scales.shape[1]), torch.arange(K, device=codes.scales.device)


def _grouped(codes: Codes, fault: str, words: str, k_group: Tensor) -> Misreading:
    return Misreading(fault, words, lambda: replace(codes, k_group=k_group))


EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight codes in a word
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # the two codes of a byte, the high one first
REVERSED = (7, 6, 5, 4, 3, 2, 1, 0)
WORD = 32  # bits
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def permuted_codes(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The codes of each word in another order; `stored`: in which they lie, where that is not 0, 1, 2, ..."""
    if codes.bits == WORD // len(EVEN_FIRST):
        even, order = torch.tensor(EVEN_FIRST), "code-order"
        yield from _permuted(codes, order, "even codes first", even)
        yield from _permuted(codes, order, "even codes first undone", even.argsort())
        yield from _permuted(
            codes, order, "codes of a byte swapped", _as_stored(torch.tensor(SWAPPED), stored)
        )
    if codes.bits in (2, 4, 8):
        way = torch.arange(WORD // codes.bits).reshape(4, -1).flip(0).flatten()
        yield from _permuted(
            codes, "byte-order", "bytes of a word reversed (big-endian)", _as_stored(way, stored)
        )


def reversed_codes(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The first code of a word in its high bits."""
    if codes.bits == WORD // len(REVERSED):
        yield from _permuted(
            codes, "code-order", "codes of a word reversed", _as_stored(torch.tensor(REVERSED), stored)
        )


def changed_code_values(codes: Codes) -> Iterator[Misreading]:
    """The same bits, which stand for other numbers."""
    half = 2 ** (codes.bits - 1)
    yield _with(codes, "code-sign", "the sign bit of codes inverted", lambda plain: plain ^ half)
    yield _with(codes, "code-sign", "the sign bit of codes lost", lambda plain: plain & (half - 1))
    if codes.lookup is None:
        yield _with(codes, "code-sign", "codes of two's complement", lambda plain: plain - 2 * (plain & half))
        return
    for words, table in _tables(codes):
        if not torch.equal(table.nan_to_num(), codes.lookup.float().nan_to_num()):
            yield Misreading("float-type", words, partial(replace, codes, lookup=table))


def _tables(codes: Codes) -> Iterator[tuple[str, Tensor]]:
    assert codes.lookup is not None
    device = codes.lookup.device
    if codes.bits == 8:
        every = torch.arange(256, device=device).to(torch.uint8)
        for dtype in EIGHT_BITS:
            yield f"codes of {str(dtype).removeprefix('torch.')}", every.view(dtype).float()
    elif codes.bits == 4:
        integers = torch.arange(16, device=device).float()
        yield "codes of e2m1", fp4.values(device)
        yield "codes of four-bit integers of two's complement", (integers + 8) % 16 - 8
        yield "codes of four-bit integers with a zero point of 8", integers - 8


def _with(codes: Codes, fault: str, words: str, made: Callable[[Tensor], Tensor]) -> Misreading:
    return Misreading(fault, words, lambda: replace(codes, codes=made(codes.plain().int())))


def _as_stored(way: Tensor, stored: tuple[int, ...] | None) -> Tensor:
    """An exchange of places in a word, its own inverse, as an exchange of the codes that lie there."""
    if stored is None or len(stored) != way.numel():
        return way
    lying = torch.tensor(stored)
    return lying[way][lying.argsort()]


def _permuted(codes: Codes, fault: str, words: str, way: Tensor) -> Iterator[Misreading]:
    """Along K or N; where there are zero points for each output, with them too, and they alone."""
    zeros = codes.zeros if codes.zeros is not None and codes.zeros.shape[0] == codes.codes.shape[0] else None
    turned = None if zeros is None else _turn(zeros, way, 0)
    moved = turned is not None and zeros is not None and not zeros.equal(turned)
    for axis, letter in ((1, "K"), (0, "N")):
        if codes.codes.shape[axis] % way.numel() == 0:
            yield Misreading(fault, f"{words} along {letter}", _turned(codes, way, axis, codes.zeros))
            if moved:
                both = f"{words} along {letter} and in zero points"
                yield Misreading(fault, both, _turned(codes, way, axis, turned))
    if moved:
        yield Misreading("zero-point-order", f"{words} in zero points", lambda: replace(codes, zeros=turned))


def _turned(codes: Codes, way: Tensor, axis: int, zeros: Tensor | None) -> Callable[[], Codes]:
    def made() -> Codes:
        turned = _turn(codes.plain(), way, axis)
        assert turned is not None
        return replace(codes, codes=turned, zeros=zeros)

    return made


def _turn(tensor: Tensor, way: Tensor, axis: int) -> Tensor | None:
    """Each run of as many elements as `way` has, in its order; None where they do not fill runs."""
    size, count = tensor.shape[axis], way.numel()
    if size % count:
        return None
    index = (torch.arange(0, size, count)[:, None] + way).flatten()
    return tensor.index_select(axis, index.to(tensor.device))


HALVES = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))


def scales_of_another_group(codes: Codes) -> Iterator[Misreading]:
    """One group too far."""
    for which, step in neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield with_scales(codes, "scales-of-another-group", words, partial(rolled, axis=1, step=step))


def other_scale_faults(codes: Codes) -> Iterator[Misreading]:
    """All other mistakes in scales."""
    for which, step in neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield with_scales(codes, "scales-of-another-group", words, partial(clamped, axis=1, step=step))
    for which, step in neighbours(codes.scales.shape[0]):
        words = (
            f"scales of the output {which}"
            if codes.n_group is None
            else f"scales of the row of blocks {which}"
        )
        for made in (rolled, clamped):
            yield with_scales(codes, "scales-of-another-output", words, partial(made, axis=0, step=step))
    for axis, what in ((1, "groups"), (0, "outputs")):
        if codes.scales.shape[axis] > 1:
            first = partial(_first, axis=axis)
            yield with_scales(codes, "scales-of-the-first", f"the first scale for all {what}", first)
    yield with_scales(codes, "scales-missing", "no scales", torch.ones_like)
    yield with_scales(codes, "scales-twice", "scales applied twice", torch.square)
    yield with_scales(codes, "scales-inverted", "scales inverted", torch.reciprocal)
    yield from _of_another_shape(codes)
    yield from _of_another_type(codes)


def _first(scales: Tensor, axis: int) -> Tensor:
    return scales.narrow(axis, 0, 1).expand_as(scales)


def _of_another_shape(codes: Codes) -> Iterator[Misreading]:
    """Transposed, or in the order of Marlin's kernels, which permute scales within 64 outputs or 32."""
    rows, columns = codes.scales.shape
    if rows > 1 and columns > 1:
        yield with_scales(
            codes, "scales-transposed", "scales transposed", lambda scales: scales.T.reshape(rows, columns)
        )
    if rows != codes.codes.shape[0]:
        return
    for order, width, what in (
        (marlin.SCALES_GROUPED, 64, "of groups"),
        (marlin.SCALES_PER_COLUMN, 32, "of whole columns"),
    ):
        if rows % width == 0:
            words = f"scales in Marlin's order {what}"
            yield with_scales(codes, "scale-order", words, partial(_ordered, order.apply))
            yield with_scales(codes, "scale-order", f"{words}, undone", partial(_ordered, order.undo))


def _ordered(done: Callable[[Tensor], Tensor], scales: Tensor) -> Tensor:
    """(N, G), moved as (G, N)."""
    return done(scales.T.contiguous()).T


def _of_another_type(codes: Codes) -> Iterator[Misreading]:
    for own, other in HALVES:
        narrow = codes.scales.to(own)
        if bool((narrow.float() == codes.scales.float()).all()):
            names = (str(dtype).removeprefix("torch.") for dtype in (own, other))
            made = partial(_read_as, own, other)
            yield with_scales(codes, "scale-type", "{} scales read as {}".format(*names), made)


def _read_as(own: torch.dtype, other: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(own).contiguous().view(other).float()


def in_files(weight: Weight) -> Iterator[Misreading]:
    """The mistakes that files are known to hold: even beside what they were quantized from they stand out."""
    codes = weight.codes()
    yield from zero_points_off_by_one(codes)
    yield from scales_of_another_group(codes)
    yield from permuted_codes(codes, stored_order(weight))


def in_programs(codes: Codes, stored: tuple[int, ...] | None) -> Iterator[Misreading]:
    """The mistakes that kernels, packers and loaders are known to make, the likeliest first.

    `stored`: in which order the codes of a word lie, where that is not 0, 1, 2, ...
    """
    yield from zero_points_off_by_one(codes)
    yield from act_order_ignored(codes)  # of two groups, those that are wrong have one another's scales too
    yield from scales_of_another_group(codes)
    yield from wrong_groups(codes)
    yield from permuted_codes(codes, stored)
    yield from reversed_codes(codes, stored)
    yield from other_zero_point_faults(codes)
    yield from changed_code_values(codes)
    yield from other_scale_faults(codes)


def stored_order(weight: Weight) -> tuple[int, ...] | None:
    """Which code lies in each place of a word, the lowest first, where they do not lie in order."""
    return EVEN_FIRST if weight.format == "awq" else None
