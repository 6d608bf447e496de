"""Each fault as a formula of codes, zero points, scales and groups, and the sentence that names it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from qload import Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight, Weight
from qload.diagnosis import diagnose
from qload.layouts import Stored

N, K, GROUPS = 64, 128, 4
SIZE = K // GROUPS
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]
BYTES = [6, 7, 4, 5, 2, 3, 0, 1]
REVERSED = [7, 6, 5, 4, 3, 2, 1, 0]


@dataclass(frozen=True)
class Operands:
    """Codes (N, K), zero points and scales (N, G), and the group of each input."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def unpacked(words: Tensor) -> Tensor:
    """Return the four-bit codes of words along the last axis, from the low bits up."""
    return (words[..., None] >> 4 * torch.arange(8) & 15).flatten(-2)


def gptq(
    *, act_order: bool = False, stored: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[GPTQWeight, Operands]:
    """Return a random weight with its operands; `stored`: zero points of gptq_v2, `dtype`: of scales."""
    random = torch.Generator().manual_seed(3)
    qweight, qzeros = (
        torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)
        for shape in ((K // 8, N), (GROUPS, N // 8))
    )
    if not stored:
        qzeros &= 0x77777777  # no zero point wraps
    scales = (0.01 + 0.02 * torch.rand(GROUPS, N, generator=random)).to(dtype)
    groups = torch.arange(K) // SIZE
    if act_order:
        groups = groups[torch.randperm(K, generator=random)]
    config = GPTQConfig(4, SIZE, Stored()) if stored else GPTQConfig(4, SIZE)
    weight = GPTQWeight(config=config, qweight=qweight, qzeros=qzeros, scales=scales, g_idx=groups.int())
    zeros = unpacked(qzeros).T + (not stored)
    return weight, Operands(unpacked(qweight.T), zeros, scales.T.float(), groups)


PLAIN, V2, PERMUTED = gptq(), gptq(stored=True), gptq(act_order=True)
BFLOAT = gptq(dtype=torch.bfloat16)
ORDER = PERMUTED[1].groups.argsort(stable=True)


def zeros(change: Callable[[Tensor], Tensor]) -> Callable[[Operands], Tensor]:
    return lambda w: replace(w, zeros=change(w.zeros)).weight()


def scales(change: Callable[[Tensor], Tensor]) -> Callable[[Operands], Tensor]:
    return lambda w: replace(w, scales=change(w.scales)).weight()


def codes(change: Callable[[Tensor], Tensor]) -> Callable[[Operands], Tensor]:
    return lambda w: replace(w, codes=change(w.codes)).weight()


def groups(change: Callable[[Tensor], Tensor]) -> Callable[[Operands], Tensor]:
    return lambda w: replace(w, groups=change(torch.arange(K))).weight()


def whole(change: Callable[[Tensor], Tensor]) -> Callable[[Operands], Tensor]:
    return lambda w: change(w.weight())


def repeated(tensor: Tensor, axis: int, step: int) -> Tensor:
    """Shift by one entry, and repeat the one at the edge."""
    size = tensor.shape[axis]
    return tensor.index_select(axis, (torch.arange(size) - step).clamp(0, size - 1))


def in_words(tensor: Tensor, order: list[int], axis: int) -> Tensor:
    """Permute each eight entries of an axis."""
    at = torch.arange(tensor.shape[axis])
    return tensor.index_select(axis, at // 8 * 8 + torch.tensor(order)[at % 8])


def reinterpreted(stored: torch.dtype, read: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda values: values.to(stored).view(read).float()


GROUPED = [i + 8 * j for i in range(8) for j in range(8)]  # Marlin's orders of scales
COLUMNS = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def reordered(order: list[int]) -> Callable[[Tensor], Tensor]:
    at = torch.arange(N)
    return lambda values: values[at // len(order) * len(order) + torch.tensor(order)[at % len(order)]]


def tiles(weight: Tensor, size: int) -> Tensor:
    result = weight.clone()
    for n in range(0, N, size):
        for k in range(0, K, size):
            result[n : n + size, k : k + size] = weight[n : n + size, k : k + size].T
    return result


def moved(
    operand: Callable[[Callable[[Tensor], Tensor]], Callable[[Operands], Tensor]],
    move: Callable[[Tensor, int, int], Tensor],
    axis: int,
    step: int,
) -> Callable[[Operands], Tensor]:
    return operand(lambda values: move(values, axis, step))


def rolled(values: Tensor, axis: int, step: int) -> Tensor:
    return values.roll(step, axis)


# Fault, the beginning of the sentence, and the formula; of PLAIN, V2, PERMUTED or BFLOAT.
Row = tuple[str, str, Callable[[Operands], Tensor]]
OF_PLAIN: list[Row] = [
    ("zero-points-one-lower", "zero points one lower (v1 read as v2)", zeros(lambda z: z - 1)),
    ("zero-points-one-higher", "zero points one higher (v2 read as v1)", zeros(lambda z: z + 1)),
    ("zero-points-missing", "no zero points", zeros(torch.zeros_like)),
    ("zero-points-twice", "zero points subtracted twice", zeros(lambda z: 2 * z)),
    ("zero-points-added", "zero points added", zeros(lambda z: -z)),
    ("zero-points-ignored", "8 for every zero point (read as symmetric)", zeros(lambda z: 0 * z + 8)),
    ("zero-points-ignored", "7 for every zero point (read as symmetric)", zeros(lambda z: 0 * z + 7)),
    *(
        (f"{kind}-of-another-{unit}", f"{words} of the {unit} {which}", moved(change, move, axis, step))
        for kind, words, change in (("zero-points", "zero points", zeros), ("scales", "scales", scales))
        for unit, axis in (("group", 1), ("output", 0))
        for which, step in (("before", 1), ("after", -1))
        for move in (repeated, rolled)
    ),
    ("group-size", "groups half as large", groups(lambda k: (k // (SIZE // 2)).clamp(max=3))),
    ("group-size", "groups half as large", groups(lambda k: k // (SIZE // 2) % 4)),
    ("group-size", "groups twice as large", groups(lambda k: k // (2 * SIZE))),
    ("groups-reversed", "groups in the reverse order", groups(lambda k: 3 - k // SIZE)),
    *(
        (fault, f"{words} along {letter}", codes(partial(in_words, order=order, axis=axis)))
        for fault, words, order in (
            ("code-order", "even codes first", EVEN_FIRST),
            ("code-order", "even codes first undone", [0, 4, 1, 5, 2, 6, 3, 7]),
            ("code-order", "codes of a byte swapped", SWAPPED),
            ("code-order", "codes of a word reversed", REVERSED),
            ("byte-order", "bytes of a word reversed (big-endian)", BYTES),
        )
        for letter, axis in (("K", 1), ("N", 0))
    ),
    (
        "code-order",
        "even codes first along N and in zero points",
        lambda w: replace(
            w, codes=in_words(w.codes, EVEN_FIRST, 0), zeros=in_words(w.zeros, EVEN_FIRST, 0)
        ).weight(),
    ),
    ("zero-point-order", "codes of a byte swapped in zero points", zeros(lambda z: in_words(z, SWAPPED, 0))),
    ("code-sign", "the sign bit of codes inverted", codes(lambda q: q ^ 8)),
    ("code-sign", "the sign bit of codes lost", codes(lambda q: q & 7)),
    ("code-sign", "codes of two's complement", codes(lambda q: torch.where(q > 7, q - 16, q))),
    ("scales-of-the-first", "the first scale for all groups", scales(lambda s: s[:, :1].expand_as(s))),
    ("scales-of-the-first", "the first scale for all outputs", scales(lambda s: s[:1].expand_as(s))),
    ("scales-missing", "no scales", scales(torch.ones_like)),
    ("scales-twice", "scales applied twice", scales(lambda s: s * s)),
    ("scales-inverted", "scales inverted", scales(lambda s: 1 / s)),
    ("scales-transposed", "scales transposed", scales(lambda s: s.T.reshape(s.shape))),
    ("scale-order", "scales in Marlin's order of groups", scales(reordered(GROUPED))),
    ("scale-order", "scales in Marlin's order of whole columns", scales(reordered(COLUMNS))),
    ("scale-type", "float16 scales read as bfloat16", scales(reinterpreted(torch.float16, torch.bfloat16))),
    (
        "parts-exchanged",
        "the halves of its outputs in the order 2, 1 (gate and up are exchanged)",
        whole(lambda w: w.roll(N // 2, 0)),
    ),
    (
        "parts-interleaved",
        "outputs of 2 parts interleaved",
        whole(lambda w: w.reshape(2, N // 2, K).transpose(0, 1).reshape(N, K)),
    ),
    ("parts-interleaved", "outputs of 2 parts taken apart", whole(lambda w: torch.cat([w[::2], w[1::2]]))),
    ("transposed", "tiles of 8 x 8 transposed", whole(lambda w: tiles(w, 8))),
    ("transposed", "tiles of 16 x 16 transposed", whole(lambda w: tiles(w, 16))),
    ("outputs-shifted", "outputs one back", whole(lambda w: w.roll(-1, 0))),
    ("outputs-shifted", "outputs one on", whole(lambda w: w.roll(1, 0))),
    ("inputs-shifted", "inputs one back", whole(lambda w: w.roll(-1, 1))),
    ("inputs-shifted", "inputs one on", whole(lambda w: w.roll(1, 1))),
    ("outputs-reversed", "outputs in the reverse order", whole(lambda w: w.flip(0))),
    ("outputs-reversed", "inputs in the reverse order", whole(lambda w: w.flip(1))),
    ("factor", "every number 0.25 times what it should be", whole(lambda w: w / 4)),
    *(
        ("codes-shifted", f"codes {step} {where} along {letter}", moved(codes, rolled, axis, sign * step))
        for step, letter, axis in ((8, "K", 1), (1, "N", 0), (2, "K", 1), (1, "K", 1), (8, "N", 0))
        for where, sign in (("back", -1), ("on", 1))
    ),
]
OF_V2: list[Row] = [
    (
        "zero-points-one-lower",
        "zero points one lower, wrapped (v1 read as v2)",
        zeros(lambda z: (z - 1) % 16),
    ),
    (
        "zero-points-one-higher",
        "zero points one higher, wrapped (v2 read as v1)",
        zeros(lambda z: (z + 1) % 16),
    ),
    (
        "zero-points-wrapped",
        "zero points of 0 that are not wrapped",
        zeros(lambda z: torch.where(z == 0, 16, z)),
    ),
]
OF_PERMUTED: list[Row] = [
    ("act-order-ignored", "groups in order", groups(lambda k: k // SIZE)),
    ("act-order-ignored", "rows sorted by their groups, inputs in order", whole(lambda w: w[:, ORDER])),
    ("act-order-inverse", "act order's permutation undone twice", whole(lambda w: w[:, ORDER][:, ORDER])),
    (
        "act-order-inverse",
        "inputs sorted by act order, rows in order",
        whole(lambda w: w[:, ORDER.argsort()]),
    ),
    (
        "act-order-inverse",
        "act order's permutation in the wrong direction",
        whole(lambda w: w[:, ORDER.argsort()][:, ORDER.argsort()]),
    ),
]
OF_BFLOAT: list[Row] = [
    ("scale-type", "bfloat16 scales read as float16", scales(reinterpreted(torch.bfloat16, torch.float16))),
]
TABLES = (PLAIN, OF_PLAIN), (V2, OF_V2), (PERMUTED, OF_PERMUTED), (BFLOAT, OF_BFLOAT)
ROWS = [
    pytest.param(weight, operands, *row, id=f"{at} {row[1]}")
    for (weight, operands), rows in TABLES
    for at, row in enumerate(rows)
]


@pytest.mark.parametrize(("weight", "operands", "fault", "words", "formula"), ROWS)
def test_the_formula_is_named(
    weight: Weight, operands: Operands, fault: str, words: str, formula: Callable[[Operands], Tensor]
) -> None:
    expected, got = operands.weight(), formula(operands)

    found = diagnose(expected, got, weight)

    assert (found.fault, found.sentence.partition(": explains")[0]) == (fault, words)
    assert (found.total, found.share > 0.9) == (N * K, True)


def test_the_operands_are_those_of_the_weight() -> None:
    for weight, operands in (PLAIN, V2, PERMUTED):
        assert torch.equal(weight.dequantize(), operands.weight())


@pytest.mark.parametrize(
    "dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=lambda each: str(each)[6:]
)
def test_codes_of_another_float_type_are_named(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    stored = torch.randn(N, K, generator=random).to(torch.float8_e4m3fn)
    scale = 0.01 + torch.rand(N, 1, generator=random)
    weight = Fp8Weight(config=Fp8Config("channel"), weight=stored, weight_scale=scale)

    found = diagnose(stored.float() * scale, stored.view(dtype).float() * scale, weight)

    assert (found.fault, found.sentence.partition(": ")[0]) == ("float-type", f"codes of {str(dtype)[6:]}")
