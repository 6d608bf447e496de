"""Each suite notices each known fault in a sound subject of its own, and nothing in one that has none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from qload.cli.testing import selftest
from qload.conformance import ConformanceCase, cases, seeded_faults
from qload.conformance.linear_checks import load_shares
from qload.conformance.seeded_faults import (
    SUITES,
    SuitesRow,
    try_experts,
    try_faults,
    try_kernel,
    try_loader,
    try_packer,
)
from qload.spec import Weight
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest import kill_matrix
from qload.testing.selftest.emulated_kernels import (
    AWQ,
    GPTQ,
    NVFP4,
    CTPack,
    EmulatedKernel,
    Fp8,
    emulated_weight,
)
from qload.testing.selftest.matrix import SAMPLE_WEIGHTS
from tests.paths import ROOT

PAGE = ROOT / "docs" / "conformance" / "faults.md"
BY_NAME = {fault.name: fault for fault in KERNEL_FAULTS}
SOUND = KernelFault("none", "nothing", (), change=lambda weight: weight)
COMMON = ("gptq.v1.w4.g128.k256n128", "awq.w4.g128.k256n128", "fp8.block.w8.k256n128")
CASES = {case.id: case for format in ("gptq", "awq", "fp8") for case in cases(format, "smoke")}


@pytest.mark.parametrize("case", [CASES[name] for name in COMMON], ids=str)
def test_a_subject_without_a_fault_passes_every_suite(case: ConformanceCase, tmp_path: Path) -> None:
    for noticed in (
        try_kernel(SOUND, case),
        try_experts(SOUND, case),
        try_packer(SOUND, case),
        try_loader(SOUND, case, tmp_path),
    ):
        assert noticed.failed == ()
        assert noticed.ran


def test_a_fault_of_words_can_be_in_every_subject(tmp_path: Path) -> None:
    (row,) = try_faults(tmp_path, (BY_NAME["zeros-of-next-group"],))

    assert row.case == "gptq.v1.w4.g128.asym.k256n128"  # of zero points that are alike it changes nothing
    assert [*row.suites] == [*SUITES]
    assert {name: str(noticed) for name, noticed in row.suites.items()} == {
        "LinearKernelSuite": "3 of 3",
        "ExpertsKernelSuite": "2 of 2",
        "PackerSuite": "1 of 1",
        "LoaderSuite": "2 of 2",
    }
    assert row.let_through == ()


def test_a_fault_of_products_can_be_in_what_multiplies_or_shares(tmp_path: Path) -> None:
    rows = try_faults(tmp_path, (BY_NAME["tokens-left-out"], BY_NAME["share-of-rank-0"]))
    tokens, share = ({name: noticed.failed for name, noticed in row.suites.items()} for row in rows)

    assert [*tokens] == ["LinearKernelSuite", "ExpertsKernelSuite"]
    assert tokens["ExpertsKernelSuite"] == ("stays_within_the_bound",)  # three tokens fill no second tile
    assert share["LoaderSuite"] == ("shares_are_exact", "several_files_are_one")


def test_a_suite_that_notices_nothing_is_named() -> None:
    through = SuitesRow("a", "b", "c", {"PackerSuite": try_packer(SOUND, CASES[COMMON[0]])}, {})

    assert through.let_through == ("PackerSuite",)


@pytest.mark.parametrize("name", SAMPLE_WEIGHTS)
def test_lanes_read_what_a_subject_means(name: str) -> None:
    weight: Weight = SAMPLE_WEIGHTS[name]()

    assert torch.equal(emulated_weight(weight), weight.dequantize())


@pytest.mark.parametrize(
    "name", ["gptq.v1.w4.g128.k256n128", "gptq.v1.w3.g128.k256n128", "gptq.v1.w2.g128.k256n128"]
)
def test_lanes_read_words_in_the_order_of_marlin_or_exllama(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weight,) = load_shares(replace(CASES[name], M=1), "noise")
    expected = weight.dequantize()
    monkeypatch.setattr(type(weight), "dequantize", None)  # lanes have no use for it

    assert torch.equal(emulated_weight(weight), expected)


def test_the_command_prints_a_row_for_each_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [*try_faults(tmp_path, (BY_NAME["result-doubled"],))]
    monkeypatch.setattr(seeded_faults, "try_faults", lambda folder: rows)

    done = CliRunner().invoke(selftest, ["--suites", "--json"])

    assert done.exit_code == 0
    (row,) = json.loads(done.stdout)["faults"]
    assert (row["fault"], row["end"], row["PackerSuite"]) == ("result-doubled", "caught", "")
    assert (row["ExpertsKernelSuite"], row["cosine > .99"]) == ("2 of 2", "let through")
    assert CliRunner().invoke(selftest, ["--suites", "a:B"]).exit_code == 2
    assert CliRunner().invoke(selftest).exit_code == 2


def summary(rows: list[SuitesRow]) -> str:
    """Format the table of the page: faults caught by each suite and tolerance, out of its possible ones."""
    counts = {
        f"`{name}`": [bool(row.suites[name].failed) for row in rows if name in row.suites] for name in SUITES
    }
    counts |= {name: [row.tolerances[name] for row in rows] for name in rows[0].tolerances}
    lines = (f"| {name} | {sum(caught)} of {len(caught)} |\n" for name, caught in counts.items())
    return "| check | faults noticed |\n|---|---|\n" + "".join(lines)


def table(rows: list[SuitesRow]) -> str:
    """Format a row for each fault: tests that catch it, out of those that ran, and tolerances that do."""
    tolerances = [*rows[0].tolerances]
    heads = ["fault", *(f"`{name}`" for name in SUITES), *tolerances]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        ends = (str(row.suites.get(name, "")) for name in SUITES)
        caught = ("caught" if row.tolerances[name] else "**let through**" for name in tolerances)
        lines.append([row.words, *ends, *caught])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.slow
def test_every_suite_notices_every_fault_as_the_page_says(tmp_path: Path, golden: Any) -> None:
    rows = list(try_faults(tmp_path))

    assert [row.fault for row in rows] == [fault.name for fault in KERNEL_FAULTS]
    assert {row.fault: row.let_through for row in rows if row.let_through} == {}
    assert table(rows) == golden
    assert summary(rows) in PAGE.read_text(), summary(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [GPTQ, AWQ, CTPack, Fp8, NVFP4], ids=lambda kernel: kernel.format)
def test_faults_in_emulated_kernels_are_caught(kernel: type[EmulatedKernel]) -> None:
    rows = list(kill_matrix(kernel()))

    assert len(rows) > 15
    assert [row.fault for row in rows if not row.caught] == []
