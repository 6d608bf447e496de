"""Tokens times rows of codes, of every kind of code, run and zero point, by each instruction set.

Few tokens, whose codes become floats in registers, and more, for which rows are spelled out.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.devices.operands import Meaning
from qload.kernels import cpu
from qload.kernels.cpu import CodeRows
from qload.testing import assert_same_bits
from tests.native.memory import ISAS, placed

BYTES = torch.arange(256, dtype=torch.uint8)
KINDS: dict[str, tuple[int, Tensor | None]] = {  # bits, and what codes stand for
    "numbers of 4 bits": (4, None),
    "any 16 floats": (4, torch.linspace(-1, 1, 16) ** 3),
    "numbers of 8 bits": (8, None),
    "signed": (8, BYTES.view(torch.int8).float()),
    "e4m3": (8, BYTES.view(torch.float8_e4m3fn).float()),
    "e4m3 without infinities": (8, BYTES.view(torch.float8_e4m3fnuz).float()),
    "e5m2": (8, BYTES.view(torch.float8_e5m2).float()),
    "any 256 floats": (8, torch.linspace(-1, 1, 256) ** 3),
}
EACH = pytest.mark.parametrize("kind", KINDS)
MOST_FEW = 16  # tokens of which no row is spelled out where there are products of pairs
PAIRED = "avx512_bf16", "avx512_amx"
RUNS = [  # and inputs
    *[(8, 264), (16, 256), (24, 264), (32, 288), (40, 200), (64, 320), (128, 1280), (256, 520)],
    (4224, 4224),  # more than lie near at once
]


def drawn(
    kind: str, N: int, K: int, run: int, zeros: bool = False, divide: bool = False, factor: float = 1.0
) -> CodeRows:
    """Random codes whose values are finite, of every value where there are enough of them."""
    bits, lookup = KINDS[kind]
    make = torch.Generator().manual_seed(K)
    values = torch.arange(2.0**bits) if lookup is None else lookup
    finite = values.isfinite().nonzero().flatten()
    codes = finite[(torch.arange(N * K) % len(finite))[torch.randperm(N * K, generator=make)]]
    codes = codes.to(torch.uint8).view(N, K)
    groups = -(-K // run)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return CodeRows(
        bytes=codes.contiguous(),
        bits=bits,
        high_first=False,
        meaning=Meaning(
            scales=torch.rand(N, groups, generator=make) + 0.5,
            zeros=torch.randint(0, 16, (N, groups), generator=make).float() if zeros else None,
            lookup=lookup,
            n_group=None,
            k_group=None,
            run=run,
            divide=divide,
            factor=factor,
        ),
    )


def dense(rows: CodeRows, K: int) -> Tensor:
    """What the codes mean, float32, by plain torch."""
    codes, meaning = rows.bytes, rows.meaning
    if rows.bits == 4:
        halves = torch.stack((codes & 15, codes >> 4), -1)
        codes = (halves.flip(-1) if rows.high_first else halves).flatten(1)
    group = torch.arange(K) // meaning.run
    values = codes.float() if meaning.lookup is None else meaning.lookup[codes.long()]
    if meaning.zeros is not None:
        values = values - meaning.zeros[:, group]
    scale = meaning.scales[:, group]
    return (values / scale if meaning.divide else values * scale) * meaning.factor


def held(rows: CodeRows, w: Tensor, dtype: torch.dtype, isa: str, M: int = 1) -> Tensor:
    """The weight that M tokens meet.

    Few meet it rounded where values are no bfloat16, and lie in tables of pairs; more where there are pairs,
    but for values of a byte that tiles take without their scales.
    """
    values, run = rows.meaning.lookup, rows.meaning.run
    exact = values is None or not bool((values.view(torch.int32) & 0xFFFF).any())  # those of no number too
    one_run = run >= w.shape[1]
    if isa not in PAIRED or dtype != torch.bfloat16:
        return w
    if M > MOST_FEW:
        kept = isa == "avx512_amx" and rows.bits == 8 and exact and (one_run or run % 32 == 0)
    else:
        kept = rows.bits == 8 or rows.meaning.zeros is not None or exact or not (one_run or run % 64 == 0)
    return w if kept else w.bfloat16().float()


def multiply(x: Tensor, rows: CodeRows, isa: str, threads: int = 1) -> Tensor:
    with native.using(isa, threads):
        return cpu.multiply_rows(x, rows, None)


def assert_close(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Each weight is off by three roundings of float32 at most, sums by K of them, y by its own."""
    K, unit = x.shape[1], torch.finfo(torch.float32).eps / 2
    share = (K + 3) * unit / (1 - (K + 3) * unit)
    sums = x.double() @ w.double().T
    rounding = torch.finfo(y.dtype).eps / 2 * (1 + share)
    bound = share * (x.double().abs() @ w.double().abs().T) + rounding * sums.abs()
    assert bool(((y.double() - sums).abs() <= bound).all())


@ISAS
@EACH
@pytest.mark.parametrize(("run", "K"), RUNS)
def test_runs_of_any_length(isa: str, kind: str, run: int, K: int) -> None:
    rows = drawn(kind, 19, K, run)
    w = dense(rows, K)
    some = torch.arange(0, K, max(1, K // 96))
    for size in (4, 17):
        read = torch.cat([multiply(x, rows, isa) for x in torch.split(torch.eye(K)[some], size)])
        assert_same_bits(read, w[:, some].T + 0.0)
    for M in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        assert_close(multiply(x, rows, isa), x, w)


@ISAS
@EACH
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("divide", "factor"), [(False, 0.3), (True, 1.0), (True, 0.3)])
def test_zero_points_divisors_and_factors(
    isa: str, kind: str, zeros: bool, divide: bool, factor: float
) -> None:
    for run, K in ((32, 160), (64, 200), (256, 256)):
        rows = drawn(kind, 5, K, run, zeros, divide, factor)
        w = dense(rows, K)
        for M in (1, 4, 20):
            x = torch.eye(K)[5 : 5 + M]
            assert_same_bits(multiply(x, rows, isa), w[:, 5 : 5 + M].T + 0.0)
            x = w.repeat(4, 1)[:M]
            assert_close(multiply(x, rows, isa), x, w)
            x = torch.eye(K, dtype=torch.bfloat16)[K - M :]
            assert_same_bits(multiply(x, rows, isa), (w[:, K - M :].T + 0.0).bfloat16())


@ISAS
@EACH
def test_inputs_of_every_type_and_places_of_every_code(isa: str, kind: str) -> None:
    rows = drawn(kind, 33, 258, 258)
    wide = torch.zeros(33, rows.bytes.shape[1] + 7, dtype=torch.uint8)
    wide[:, 3:-4] = rows.bytes
    moved = CodeRows(wide[:, 3:-4], rows.bits, rows.high_first, rows.meaning)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = (torch.randn(3, 258, generator=torch.Generator().manual_seed(1)) / 256).to(dtype)
        y = multiply(x, rows, isa)
        assert_close(y, x, held(rows, dense(rows, 258), dtype, isa))
        for threads in (1, 2, 5):
            assert_same_bits(multiply(x, moved, isa, threads), y)


@ISAS
@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_meet_runs_of_any_length(isa: str, kind: str, dtype: torch.dtype) -> None:
    for run, K in ((8, 264), (16, 256), (40, 200), (64, 320), (128, 640), (4224, 4224)):
        rows = drawn(kind, 18, K, run)
        w, some = dense(rows, K), torch.arange(0, K, max(1, K // 96))
        for size in (3, 8, 20):
            read = torch.cat(
                [multiply(x, rows, isa) for x in torch.split(torch.eye(K, dtype=dtype)[some], size)]
            )
            assert_same_bits(read, (w[:, some].T + 0.0).to(dtype))
        for M in (1, 4, 7, 8, 9, 13, 16, 17, 40):
            x = (torch.randn(M, K, generator=torch.Generator().manual_seed(M)) / 256).to(dtype)
            assert_close(multiply(x, rows, isa), x, held(rows, w, dtype, isa, M))


@ISAS
@pytest.mark.parametrize(("divide", "factor"), [(False, 0.3), (True, 1.0), (True, 0.3)])
def test_values_in_bfloat16_are_scaled_and_rounded_once(isa: str, divide: bool, factor: float) -> None:
    for run, K in ((64, 200), (192, 448), (256, 576), (100, 100)):
        rows = drawn("any 16 floats", 5, K, run, False, divide, factor)
        w = dense(rows, K)
        for M in (1, 3, 16):
            x = torch.eye(K, dtype=torch.bfloat16)[K - 17 : K - 17 + M]
            assert_same_bits(multiply(x, rows, isa), (w[:, K - 17 : K - 17 + M].T + 0.0).bfloat16())
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()
            assert_close(multiply(x, rows, isa), x, held(rows, w, torch.bfloat16, isa))


@ISAS
def test_values_too_small_for_products_of_pairs_are_none_of_zero(isa: str) -> None:
    for bits in (4, 8):
        lookup = torch.full((2**bits,), 2.0**-130)
        meaning = Meaning(torch.full((4, 1), 2.0**20), None, lookup, None, None, 64, False, 1.0)
        rows = CodeRows(torch.ones(4, 64 * bits // 8, dtype=torch.uint8), bits, False, meaning)

        y = multiply(torch.ones(1, 64, dtype=torch.bfloat16), rows, isa)

        assert_same_bits(y, torch.full((1, 4), 2.0**-104).bfloat16())


@ISAS
def test_the_first_of_two_codes_may_lie_in_the_high_half(isa: str) -> None:
    drawings = [
        drawn(kind, 16, 136, run) for kind in ("any 16 floats", "numbers of 4 bits") for run in (8, 16)
    ]

    for each in [*drawings, *(CodeRows(rows.bytes, 4, True, rows.meaning) for rows in drawings)]:
        for dtype in (torch.float32, torch.bfloat16):
            for end in (13, 29):
                x = torch.eye(136, dtype=dtype)[9:end]
                assert_same_bits(multiply(x, each, isa), (dense(each, 136)[:, 9:end].T + 0.0).to(dtype))


@ISAS
@pytest.mark.parametrize("kind", ["e4m3", "e4m3 without infinities", "e5m2"])
def test_codes_that_are_no_number_are_none(isa: str, kind: str) -> None:
    rows = drawn(kind, 18, 320, 320)
    lookup: Any = KINDS[kind][1]
    for code in (~lookup.isfinite()).nonzero().flatten().tolist():
        for at in (0, 77, 319):
            codes = rows.bytes.clone()
            codes[7, at] = code
            x = torch.ones(2 if at else 20, 320)
            y = multiply(x, CodeRows(codes, 8, False, rows.meaning), isa)
            wrong = y[:, 7]
            assert bool(wrong.isnan().all()) if lookup[code].isnan() else bool((wrong == lookup[code]).all())
            rest = [n for n in range(18) if n != 7]
            assert_same_bits(y[:, rest], multiply(x, rows, isa)[:, rest])


@ISAS
def test_nothing_is_read_behind_the_last_code(isa: str) -> None:
    for kind in ("any 16 floats", "e4m3"):
        for run, M in ((8 if KINDS[kind][0] == 4 else 72, 1), (16, 20)):
            rows = drawn(kind, 1, 72, run)
            for offset in range(3):
                here = CodeRows(placed(rows.bytes, offset), rows.bits, False, rows.meaning)
                x = torch.ones(M, 72)
                assert_same_bits(multiply(x, here, isa), multiply(x, rows, isa))


@ISAS
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_value_is_spelled_out_behind_the_last_code(isa: str, bits: int, dtype: torch.dtype) -> None:
    """Where rows are spelled out: an input of 0 times an infinite weight would be NaN."""
    lookup = torch.full((2**bits,), 1.0)
    lookup[0] = -1
    meaning = Meaning(torch.full((4, 1), torch.inf), None, lookup, None, None, 72, False, 1.0)
    rows = CodeRows(torch.full((4, 72 * bits // 8), 0x11, dtype=torch.uint8), bits, False, meaning)
    for M in (20, 40):
        y = multiply(torch.ones(M, 72, dtype=dtype), rows, isa)

        assert_same_bits(y, torch.full((M, 4), torch.inf, dtype=dtype))
