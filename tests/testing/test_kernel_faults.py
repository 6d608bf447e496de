"""Each known fault by hand: what it makes of words, scales and groups, and of a product."""

import math

import pytest
import torch
from torch import Tensor

from qload.formats import CTNVFP4Weight, GPTQConfig, GPTQWeight, NVFP4Config, UnquantizedWeight
from qload.layouts import Stored
from qload.spec import Weight
from qload.testing.kernel_faults import KERNEL_FAULTS

FAULTS = {fault.name: fault for fault in KERNEL_FAULTS}
WORDS = [[0x76543210], [0x01020304]]  # of 16 inputs, and of two groups of zero points


def words(rows: list[list[int]], repeats: int) -> Tensor:
    wide = torch.tensor(rows).repeat(1, repeats)
    return torch.where(wide >= 2**31, wide - 2**32, wide).int()


def gptq(groups: list[int] | None = None, zeros: list[list[int]] = WORDS) -> GPTQWeight:
    """Return 8 outputs of 16 inputs in two groups of 8."""
    index = torch.arange(16, dtype=torch.int32) // 8 if groups is None else torch.tensor(groups).int()
    scales = torch.stack([torch.arange(1, 9), torch.arange(11, 19)]).half()
    return GPTQWeight(
        config=GPTQConfig(4, 8, Stored()),
        qweight=words(WORDS, 8),
        qzeros=words(zeros, 1),
        scales=scales,
        g_idx=index,
    )


def nvfp4() -> CTNVFP4Weight:
    return CTNVFP4Weight(
        config=NVFP4Config(),
        weight_packed=torch.full((8, 8), 0x21, dtype=torch.uint8),
        weight_scale=torch.arange(1, 9).float()[:, None].to(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor([4.0]),
    )


def test_faults_of_codes() -> None:
    expected = {
        "nibbles-swapped": [[0x67452301], [0x10203040]],
        "awq-order": [[0x75316420], [0x00001234]],
        "nibbles-reversed": [[0x01234567], [0x40302010]],
        "big-endian": [[0x10325476], [0x04030201]],
        "sign-bit": [[0xFEDCBA98], [0x898A8B8C]],
        "word-late": [WORDS[1], WORDS[0]],
    }
    for name, rows in expected.items():
        assert torch.equal(FAULTS[name].packed(gptq()).qweight, words(rows, 8)), name  # type: ignore[union-attr]
    assert FAULTS["nibbles-swapped"].packed(nvfp4()).weight_packed.unique().tolist() == [0x12]  # type: ignore[union-attr]


def test_faults_of_zero_points() -> None:
    expected = {
        "zero-plus-one": [[0x87654321], [0x12131415]],
        "zero-minus-one": [[0x6543210F], [0xF0F1F2F3]],
        "zeros-middle": [[0x77777777], [0x77777777]],
        "zeros-of-next-group": [WORDS[1], WORDS[0]],
        "zeros-swapped": [[0x67452301], [0x10203040]],
    }
    for name, rows in expected.items():
        assert torch.equal(FAULTS[name].packed(gptq()).qzeros, words(rows, 1)), name  # type: ignore[union-attr]


def test_faults_of_scales() -> None:
    first, second = torch.arange(1.0, 9), torch.arange(11.0, 19)
    expected = {
        "scales-late": [second, first],
        "scales-early": [second, first],
        "scales-of-next-output": [first.roll(-1), second.roll(-1)],
        "first-scale": [first, first],
        "scales-squared": [first**2, second**2],
        "scales-inverted": [1 / first, 1 / second],
        "scales-of-another-type": [row.half().view(torch.bfloat16).float() for row in (first, second)],
        "scales-doubled": [2 * first, 2 * second],
    }
    for name, rows in expected.items():
        assert torch.equal(FAULTS[name].packed(gptq()).scales.float(), torch.stack(rows)), name  # type: ignore[union-attr]
    bfloats = gptq().holding({"scales": torch.stack([first, second]).bfloat16()})
    other = FAULTS["scales-of-another-type"].packed(bfloats).scales  # type: ignore[union-attr]
    assert torch.equal(other, torch.stack([first, second]).bfloat16().view(torch.float16))
    three = torch.tensor([[1.0], [2], [3]]).half().repeat(1, 8)
    wide = gptq([at // 8 for at in range(16)]).holding(
        {"scales": three, "qzeros": words(WORDS + WORDS[:1], 1)}
    )
    late, early = (FAULTS[f"scales-{name}"].change(wide).scales[:, 0] for name in ("late", "early"))  # type: ignore[misc,union-attr]
    assert (late.tolist(), early.tolist()) == ([3, 1, 2], [2, 3, 1])
    lost = FAULTS["second-scale-lost"].packed(nvfp4())
    assert lost.weight_global_scale.tolist() == [1]  # type: ignore[union-attr]
    assert FAULTS["second-scale-lost"].packed(gptq()) is None


def test_faults_of_groups() -> None:
    mixed = [1, 0] * 8
    expected = {
        "act-order-ignored": [0] * 8 + [1] * 8,
        "groups-reversed": [0, 1] * 8,
        "groups-halved": None,  # of groups in order alone
    }
    for name, index in expected.items():
        faulty = FAULTS[name].packed(gptq(mixed))
        assert (faulty and faulty.g_idx.tolist()) == index, name  # type: ignore[attr-defined]
    halved = FAULTS["groups-halved"].packed(gptq())
    assert halved.g_idx.tolist() == ([0] * 4 + [1] * 4) * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("weight", "applicable"),
    [
        (UnquantizedWeight(weight=torch.ones(4, 4)), set()),
        (
            nvfp4(),
            {"nibbles-swapped", "scales-of-next-output", "second-scale-lost"},
        ),
        (
            gptq(zeros=[[0x77777777], [0x77777777]]),
            {fault.name for fault in KERNEL_FAULTS if fault.change}
            - {
                "zeros-middle",
                "zeros-of-next-group",
                "zeros-swapped",
                "second-scale-lost",
                "act-order-ignored",
            },
        ),
    ],
    ids=["unquantized", "nvfp4", "gptq"],
)
def test_faults_that_change_no_number_do_not_apply(weight: Weight, applicable: set[str]) -> None:
    changes = [fault for fault in KERNEL_FAULTS if fault.change is not None]

    assert {fault.name for fault in changes if fault.packed(weight) is not None} == applicable


def test_faults_of_products() -> None:
    """The product multiplies input i by 2**i, so that shifts of inputs and of outputs differ."""
    x = torch.arange(1.0, 9)[None].repeat(18, 1)
    scale = 2.0 ** torch.arange(8)
    y, shifted = (x * scale)[0].tolist(), x[0].roll(1) * scale
    expected = {
        "gate-and-up": y[4:] + y[:4],
        "outputs-interleaved": [y[0], y[4], y[1], y[5], y[2], y[6], y[3], y[7]],
        "outputs-late": [y[7], *y[:7]],
        "outputs-left-out": y[:4] + [0] * 4,
        "outputs-not-written": y[:4] + [math.nan] * 4,
        "tokens-left-out": y,
        "share-of-rank-0": y[:4] + y[:4],
        "inputs-late": shifted.tolist(),
        "inputs-left-out": y[:4] + [0] * 4,
        "inputs-reversed": (x[0].flip(0) * scale).tolist(),
        "result-doubled": [2 * value for value in y],
    }
    assert set(expected) == {fault.name for fault in KERNEL_FAULTS if fault.around is not None}
    for name, row in expected.items():
        rows = FAULTS[name].gemm(lambda x: x * scale, 8)(x.clone())
        torch.testing.assert_close(rows[15], torch.tensor(row), rtol=0, atol=0, equal_nan=True, msg=name)
        last = torch.zeros(8) if name == "tokens-left-out" else rows[15]
        torch.testing.assert_close(rows[16:], last.expand(2, 8), rtol=0, atol=0, equal_nan=True, msg=name)
    odd = torch.arange(5.0)[None]
    names = ("outputs-interleaved", "gate-and-up", "share-of-rank-0")
    faults = [FAULTS[name].gemm(lambda x: x, 5)(odd.clone())[0] for name in names]
    assert [each.tolist() for each in faults] == [[0, 1, 2, 3, 4], [3, 4, 0, 1, 2], [0, 1, 0, 1, 4]]
