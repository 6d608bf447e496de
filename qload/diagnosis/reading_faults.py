"""Faults in how codes, scales, zero points and groups are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qload.layouts import fp4, marlin
from qload.layouts.packing import Order
from qload.layouts.swizzle import GROUPS, OUTPUTS, plain_scales, tiled
from qload.spec import Codes, Weight

WORD_BITS = 32
EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight codes in a word
NIBBLES_SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # the two codes of a byte, the high one first
REVERSED = (7, 6, 5, 4, 3, 2, 1, 0)
FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
HALF_TYPE_PAIRS = ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16))


@dataclass(frozen=True)
class ReadingFault:
    """Fault of a program in reading codes.

    Attributes
    ----------
    fault
        Id of its class.
    words
        Description, as in "read with zero points one lower".
    read
        Returns the codes as the program reads them.
    """

    fault: str
    words: str
    read: Callable[[], Codes]


def faults_in_files(weight: Weight) -> Iterator[ReadingFault]:
    """Yield the faults of files; they are visible even next to the unquantized weight."""
    codes = weight.codes()
    yield from _zero_points_off_by_one(codes)
    yield from _scales_of_neighbouring_group(codes)
    yield from _permuted_codes(codes, word_order(weight))


def faults_in_programs(codes: Codes, order: tuple[int, ...] | None) -> Iterator[ReadingFault]:
    """Yield the faults of kernels, packers and loaders, the likeliest first.

    `order` is that of the codes in a word, if it is not 0, 1, 2, ...
    """
    yield from _zero_points_off_by_one(codes)
    yield from _ignored_act_order(codes)  # of two groups, an exchange is a neighbouring group's scale as well
    yield from _scales_of_neighbouring_group(codes)
    yield from _wrong_groups(codes)
    yield from _permuted_codes(codes, order)
    if codes.bits == WORD_BITS // len(REVERSED):
        reversal = _as_stored(torch.tensor(REVERSED), order)
        yield from _permutations(codes, "code-order", "codes of a word reversed", reversal)
    yield from _other_zero_points(codes)
    yield from _changed_code_values(codes)
    yield from _other_scales(codes)


def word_order(weight: Weight) -> tuple[int, ...] | None:
    """Return the code at each place of a word, from the low bits up; None if they are in order."""
    return EVEN_FIRST if weight.format == "awq" else None


def _with_scales(codes: Codes, fault: str, words: str, change: Callable[[Tensor], Tensor]) -> ReadingFault:
    return ReadingFault(fault, words, lambda: replace(codes, scales=change(codes.scales)))


def _with_zeros(codes: Codes, fault: str, words: str, change: Callable[[Tensor], Tensor]) -> ReadingFault:
    zeros = codes.zeros
    assert zeros is not None
    return ReadingFault(fault, words, lambda: replace(codes, zeros=change(zeros)))


def _neighbours(size: int) -> Iterator[tuple[str, int]]:
    """Yield "before" and "after", with the step of a roll that puts this neighbour in an entry's place."""
    if size > 1:
        yield "before", 1
        yield "after", -1


def _roll(tensor: Tensor, axis: int, step: int) -> Tensor:
    return tensor.roll(step, axis)


def _shift(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Move by `step` along `axis`, and repeat the entry at the edge."""
    size = tensor.shape[axis]
    return tensor.index_select(axis, (torch.arange(size, device=tensor.device) - step).clamp(0, size - 1))


def _zero_points_off_by_one(codes: Codes) -> Iterator[ReadingFault]:
    """Yield zero points in the other convention: stored as they are, or minus one."""
    if codes.zeros is not None:
        yield _with_zeros(
            codes, "zero-points-one-lower", "zero points one lower", lambda zeros: zeros.int() - 1
        )
        yield _with_zeros(
            codes, "zero-points-one-higher", "zero points one higher", lambda zeros: zeros.int() + 1
        )


def _other_zero_points(codes: Codes) -> Iterator[ReadingFault]:
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
        *(
            (
                "zero-points-ignored",
                f"{value} for every zero point",
                partial(torch.full_like, fill_value=value),
            )
            for value in (middle, middle - 1)
        ),
    )
    yield from (_with_zeros(codes, *change) for change in changes)
    for axis, unit in ((1, "group"), (0, "output")):
        for which, step in _neighbours(codes.zeros.shape[axis]):
            for move in (_roll, _shift):
                fault, words = f"zero-points-of-another-{unit}", f"zero points of the {unit} {which}"
                yield _with_zeros(codes, fault, words, partial(move, axis=axis, step=step))


def _ignored_act_order(codes: Codes) -> Iterator[ReadingFault]:
    """Yield the groups of a layer in act order, as if they were in order."""
    if codes.k_group is None or codes.scales.shape[1] < 2 or bool((codes.k_group.diff() >= 0).all()):
        return
    size, inputs = _group_size_and_inputs(codes)
    in_order = partial(replace, codes, k_group=inputs // size)
    yield ReadingFault("act-order-ignored", "groups in order", in_order)


def _wrong_groups(codes: Codes) -> Iterator[ReadingFault]:
    """Yield groups of other sizes, and groups in the reverse order."""
    if codes.k_group is None or codes.scales.shape[1] < 2:
        return
    count, (size, inputs) = codes.scales.shape[1], _group_size_and_inputs(codes)
    in_order = bool((codes.k_group.diff() >= 0).all())
    if in_order and not bool((codes.k_group == inputs // size).all()):
        return
    for other, words in ((size // 2, "half"), (size * 2, "twice")):
        if other:
            for k_group in ((inputs // other).clamp(max=count - 1), inputs // other % count):
                regrouped = partial(replace, codes, k_group=k_group)
                yield ReadingFault("group-size", f"groups {words} as large", regrouped)
    backwards = partial(replace, codes, k_group=count - 1 - codes.k_group)
    yield ReadingFault("groups-reversed", "groups in the reverse order", backwards)


def act_order_permutations(codes: Codes) -> Iterator[tuple[str, str, Tensor]]:
    """Yield wrong permutations of the inputs of a layer in act order: fault, description, (K,) int64.

    Kernels sort rows by group and permute inputs alike. A faulty kernel does not permute inputs, or permutes
    them by the inverse.
    """
    if codes.k_group is None or bool((codes.k_group.diff() >= 0).all()):
        return
    order = codes.k_group.long().argsort(stable=True)
    inverse = order.argsort()
    yield "act-order-ignored", "rows sorted by their groups, inputs in order", order
    yield "act-order-inverse", "act order's permutation undone twice", order[order]
    yield "act-order-inverse", "inputs sorted by act order, rows in order", inverse
    yield "act-order-inverse", "act order's permutation in the wrong direction", inverse[inverse]


def _group_size_and_inputs(codes: Codes) -> tuple[int, Tensor]:
    """Return the group size, if all groups have one, and the indices of the inputs (K,)."""
    K = codes.codes.shape[1]
    return -(-K // codes.scales.shape[1]), torch.arange(K, device=codes.scales.device)


def _permuted_codes(codes: Codes, order: tuple[int, ...] | None) -> Iterator[ReadingFault]:
    """Yield other orders of the codes in a word, and of its bytes."""
    if codes.bits == WORD_BITS // len(EVEN_FIRST):
        even, swapped = torch.tensor(EVEN_FIRST), _as_stored(torch.tensor(NIBBLES_SWAPPED), order)
        yield from _permutations(codes, "code-order", "even codes first", even)
        yield from _permutations(codes, "code-order", "even codes first undone", even.argsort())
        yield from _permutations(codes, "code-order", "codes of a byte swapped", swapped)
    if codes.bits in (2, 4, 8):
        reversal = _as_stored(torch.arange(WORD_BITS // codes.bits).reshape(4, -1).flip(0).flatten(), order)
        yield from _permutations(codes, "byte-order", "bytes of a word reversed (big-endian)", reversal)


def _changed_code_values(codes: Codes) -> Iterator[ReadingFault]:
    """Yield other meanings of the same bits: signs, and tables of other float types."""
    sign = 2 ** (codes.bits - 1)
    yield _with_codes(codes, "code-sign", "the sign bit of codes inverted", lambda plain: plain ^ sign)
    yield _with_codes(codes, "code-sign", "the sign bit of codes lost", lambda plain: plain & (sign - 1))
    if codes.lookup is None:
        yield _with_codes(
            codes, "code-sign", "codes of two's complement", lambda plain: plain - 2 * (plain & sign)
        )
        return
    for words, table in _other_tables(codes.bits, codes.lookup.device):
        if not torch.equal(table.nan_to_num(), codes.lookup.float().nan_to_num()):
            yield ReadingFault("float-type", words, partial(replace, codes, lookup=table))


def _other_tables(bits: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    if bits == 8:
        all_codes = torch.arange(256, device=device).to(torch.uint8)
        for dtype in FLOAT8_TYPES:
            yield f"codes of {str(dtype).removeprefix('torch.')}", all_codes.view(dtype).float()
    elif bits == 4:
        integers = torch.arange(16, device=device).float()
        yield "codes of e2m1", fp4.values(device)
        yield "codes of four-bit integers of two's complement", (integers + 8) % 16 - 8
        yield "codes of four-bit integers with a zero point of 8", integers - 8


def _with_codes(codes: Codes, fault: str, words: str, change: Callable[[Tensor], Tensor]) -> ReadingFault:
    return ReadingFault(fault, words, lambda: replace(codes, codes=change(codes.plain().int())))


def _as_stored(exchange: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Turn an exchange of places in a word, its own inverse, into one of the codes at these places."""
    if order is None or len(order) != exchange.numel():
        return exchange
    codes_by_place = torch.tensor(order)
    return codes_by_place[exchange][codes_by_place.argsort()]


def _permutations(codes: Codes, fault: str, words: str, order: Tensor) -> Iterator[ReadingFault]:
    """Yield permutations along K or N, and of zero points per output, alone or together with the codes."""
    zeros, permuted, changes_zeros = codes.zeros, codes.zeros, False
    if zeros is not None and zeros.shape[0] == codes.codes.shape[0] and zeros.shape[0] % order.numel() == 0:
        permuted = _permute(zeros, order, 0)
        changes_zeros = not zeros.equal(permuted)
    for axis, letter in ((1, "K"), (0, "N")):
        if codes.codes.shape[axis] % order.numel() == 0:
            permute = partial(_with_permuted, codes, order, axis)
            yield ReadingFault(fault, f"{words} along {letter}", partial(permute, zeros))
            if changes_zeros:
                both = f"{words} along {letter} and in zero points"
                yield ReadingFault(fault, both, partial(permute, permuted))
    if changes_zeros:
        alone = partial(replace, codes, zeros=permuted)
        yield ReadingFault("zero-point-order", f"{words} in zero points", alone)


def _with_permuted(codes: Codes, order: Tensor, axis: int, zeros: Tensor | None) -> Codes:
    return replace(codes, codes=_permute(codes.plain(), order, axis), zeros=zeros)


def _permute(tensor: Tensor, order: Tensor, axis: int) -> Tensor:
    """Permute each run of as many entries as `order` has; the axis has whole runs."""
    starts = torch.arange(0, tensor.shape[axis], order.numel())
    return tensor.index_select(axis, (starts[:, None] + order).flatten().to(tensor.device))


def _scales_of_neighbouring_group(codes: Codes) -> Iterator[ReadingFault]:
    for which, step in _neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield _with_scales(codes, "scales-of-another-group", words, partial(_roll, axis=1, step=step))


def _other_scales(codes: Codes) -> Iterator[ReadingFault]:
    for which, step in _neighbours(codes.scales.shape[1]):
        words = f"scales of the group {which}"
        yield _with_scales(codes, "scales-of-another-group", words, partial(_shift, axis=1, step=step))
    row = "output" if codes.n_group is None else "row of blocks"
    for which, step in _neighbours(codes.scales.shape[0]):
        for move in (_roll, _shift):
            words, change = f"scales of the {row} {which}", partial(move, axis=0, step=step)
            yield _with_scales(codes, "scales-of-another-output", words, change)
    for axis, units in ((1, "groups"), (0, "outputs")):
        if codes.scales.shape[axis] > 1:
            first = partial(_first_of_all, axis=axis)
            yield _with_scales(codes, "scales-of-the-first", f"the first scale for all {units}", first)
    yield _with_scales(codes, "scales-missing", "no scales", torch.ones_like)
    yield _with_scales(codes, "scales-twice", "scales applied twice", torch.square)
    yield _with_scales(codes, "scales-inverted", "scales inverted", torch.reciprocal)
    yield from _reordered_scales(codes)
    for stored, read in HALF_TYPE_PAIRS:
        if bool((codes.scales.to(stored).float() == codes.scales.float()).all()):
            words = f"{stored} scales read as {read}".replace("torch.", "")
            yield _with_scales(codes, "scale-type", words, partial(_reinterpret, stored, read))


def _first_of_all(scales: Tensor, axis: int) -> Tensor:
    return scales.narrow(axis, 0, 1).expand_as(scales)


def _reordered_scales(codes: Codes) -> Iterator[ReadingFault]:
    """Yield transposed scales, and scales in the order of Marlin's kernels, within 64 or 32 outputs."""
    rows, columns = codes.scales.shape
    if rows > 1 and columns > 1:
        yield _with_scales(
            codes, "scales-transposed", "scales transposed", lambda s: s.T.reshape(rows, columns)
        )
    if rows != codes.codes.shape[0]:
        return
    if rows % OUTPUTS == 0 and columns % GROUPS == 0:
        for change in (_swizzle, _unswizzle):
            words = "scales in the order of 128 x 4 blocks (swizzled)"
            yield _with_scales(codes, "scale-order", words, change)
    if rows % 64 == 0:
        for first, second, words in (
            (marlin.SCALES_GROUPED, marlin.SCALES_PER_COLUMN, "of groups read as those of whole columns"),
            (marlin.SCALES_PER_COLUMN, marlin.SCALES_GROUPED, "of whole columns read as those of groups"),
        ):
            both = partial(_in_orders, first, second)
            yield _with_scales(codes, "scale-order", f"scales in Marlin's order {words}", both)
    for order, width, units in (
        (marlin.SCALES_GROUPED, 64, "of groups"),
        (marlin.SCALES_PER_COLUMN, 32, "of whole columns"),
    ):
        if rows % width == 0:
            words = f"scales in Marlin's order {units}"
            yield _with_scales(codes, "scale-order", words, partial(_in_order, order))


def _swizzle(scales: Tensor) -> Tensor:
    """Put scales (N, G) into the order of `qload.layouts.swizzle`, and read them in plain order."""
    return tiled(scales).reshape(scales.shape)


def _unswizzle(scales: Tensor) -> Tensor:
    plain: Tensor = plain_scales(scales.contiguous(), *scales.shape)
    return plain


def _in_orders(first: Order, second: Order, scales: Tensor) -> Tensor:
    return _in_order(second, _in_order(first, scales))


def _in_order(order: Order, scales: Tensor) -> Tensor:
    """Reorder scales (N, G) as (G, N), by an order that is its own inverse."""
    return order.apply(scales.T.contiguous()).T


def _reinterpret(stored: torch.dtype, read: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(stored).contiguous().view(read).float()
