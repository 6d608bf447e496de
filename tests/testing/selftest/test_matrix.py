"""Planted faults are caught by the checks of qload, and some are let through by tolerances in wide use."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import Weight
from qload.errors import ArgumentError
from qload.testing.kernel_faults import KERNEL_FAULTS
from qload.testing.selftest import KillRow, kill_matrix, matrix
from qload.testing.selftest.matrix import GROUP, ORACLES, SAMPLE_WEIGHTS, K, adapter_of

WIDE = [name for name in ORACLES if any(character.isdigit() for character in name)]


class Plain:
    """A kernel that is right."""

    format = "gptq-zeros"

    def pack(self, weight: Weight) -> Tensor:
        return weight.dequantize()

    def gemm(self, x: Tensor, buffers: Tensor) -> Tensor:
        return (x.float() @ buffers.T).to(x.dtype)


class Doubling(Plain):
    """A kernel that is wrong."""

    def gemm(self, x: Tensor, buffers: Tensor) -> Tensor:
        return 2 * super().gemm(x, buffers)


def test_samples_differ_in_zero_points_and_in_the_order_of_groups() -> None:
    symmetric, plain, mixed = (SAMPLE_WEIGHTS[name]() for name in ("gptq", "gptq-zeros", "gptq-act-order"))

    for weight in (symmetric, plain, mixed):
        assert weight.codes().k_group.bincount().tolist() == [GROUP] * (K // GROUP)
    in_order = torch.arange(K) // GROUP
    assert [torch.equal(each.codes().k_group.long(), in_order) for each in (symmetric, plain, mixed)] == [
        True,
        True,
        False,
    ]
    assert symmetric.codes().zeros.unique().tolist() == [8]
    assert plain.codes().zeros.unique().tolist() == [2, 4, 6, 8]
    assert torch.equal(plain.qweight, symmetric.qweight)


@pytest.fixture(scope="module")
def rows() -> list[KillRow]:
    return list(kill_matrix(Plain()))


@pytest.mark.slow
def test_every_fault_is_caught_and_most_are_named(rows: list[KillRow]) -> None:
    assert len(rows) > 25
    assert [row.fault for row in rows if not row.caught] == []
    assert sum(row.named is None for row in rows) <= len(rows) // 10


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", WIDE)
def test_a_tolerance_in_wide_use_lets_faults_through(tolerance: str, rows: list[KillRow]) -> None:
    through = [row.fault for row in rows if not row.noticed[tolerance]]

    assert through
    assert len(through) < len(rows)


def test_a_row_says_who_noticed_and_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [each for each in KERNEL_FAULTS if each.name in ("scales-doubled", "second-scale-lost")]
    monkeypatch.setattr(matrix, "KERNEL_FAULTS", chosen)

    (row,) = kill_matrix(Plain())  # as GPTQ has no second scale

    assert (row.fault, row.named, row.caught) == ("scales-doubled", "factor", True)
    blind = {"cosine > .99", "rtol .2 atol .2"}  # to a direction that stays; to results below 0.2
    assert row.noticed == {name: name not in blind for name in ORACLES}


@pytest.mark.parametrize(
    ("noticed", "refused", "end", "shown"),
    [
        (True, "", "caught", "caught"),
        (False, "", "let through", "let through"),
        (False, "ValueError: no", "refused (ValueError: no)", "let through"),
    ],
)
def test_a_row_of_the_report_has_a_column_for_each_check(
    noticed: bool, refused: str, end: str, shown: str
) -> None:
    row = KillRow("gptq", "factor", "scales doubled", dict.fromkeys(ORACLES, noticed), "a class", refused)

    first = {"subject": "gptq", "fault": "factor", "words": "scales doubled", "end": end}
    assert row.row() == {**first, **dict.fromkeys(ORACLES, shown), "named": "a class"}
    assert row.caught == (end != "let through")


class Symmetric(Plain):
    """A kernel whose packing looks at zero points."""

    format = "gptq"

    def pack(self, weight: Weight) -> Tensor:
        zeros = weight.codes().zeros
        if zeros is None or bool((zeros != 8).any()):
            raise NotImplementedError("symmetric weights only\nand no others")
        return super().pack(weight)


def test_a_weight_that_the_kernel_refuses_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [each for each in KERNEL_FAULTS if each.name in ("zero-plus-one", "scales-doubled")]
    monkeypatch.setattr(matrix, "KERNEL_FAULTS", chosen)

    zeros, scales = kill_matrix(Symmetric())

    assert zeros.refused == "NotImplementedError: symmetric weights only"
    assert zeros.caught
    assert (scales.refused, scales.named) == ("", "factor")


@pytest.mark.usefixtures("seen_texts")
def test_a_kernel_that_is_wrong_before_is_told_so() -> None:
    wrong = r"expected correct before a fault is planted\n  got      [\w, -]+: .*every number 2 times"
    with pytest.raises(ArgumentError, match=wrong):
        next(kill_matrix(Doubling()))


@pytest.mark.usefixtures("seen_texts")
def test_an_adapter_without_a_method_is_told_which() -> None:
    with pytest.raises(ArgumentError, match="gemm"):
        adapter_of(type("Half", (), {"format": "gptq", "pack": None}))
    assert adapter_of(Plain).format == "gptq-zeros"


@pytest.mark.usefixtures("seen_texts")
def test_a_format_without_a_subject_is_refused() -> None:
    unknown: Any = type("Unknown", (Plain,), {"format": "unheard-of"})()

    with pytest.raises(ArgumentError, match="gptq-act-order"):
        next(kill_matrix(unknown, torch.bfloat16))
