"""The plugin in a pytest of its own: tiers, expected failures, the report, and what a failure prints."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from qload.conformance import cases
from qload.conformance.plugin import LINE_FORM, ExpectedFailure, read_expected_failures
from qload.errors import ArgumentError
from tests.conformance.pytest_runs import run, run_here
from tests.paths import ROOT

KERNEL = """
from qload.conformance import LinearKernelSuite

class TestMine(LinearKernelSuite):
    format = "unquantized"
    subject, package = "float32 product", "torch"
    def pack(self, weight):
        return weight.weight
    def gemm(self, x, w):
        return (x.float() @ w.float().T).to(x.dtype)

class TestShifted(TestMine):
    def gemm(self, x, w):
        return super().gemm(x, w).roll(1, 1)

class TestNone(TestMine):
    def can_implement(self, case):
        return False, "no such kernel here"
"""


def run_mine(folder: Path, *arguments: str) -> tuple[int, str]:
    return run_here(folder, {"test_mine.py": KERNEL}, "-rs", *arguments)


def test_a_run_with_a_report_of_each_case(tmp_path: Path) -> None:
    code, output = run_mine(tmp_path, "--qload-report=report.json")
    report = json.loads((tmp_path / "report.json").read_text())

    assert code == 1
    assert (report["version"], report["tier"], report["device"]) == (1, "smoke", "cpu")
    by_test = {entry["test"].partition("::")[2].partition("[")[0]: entry for entry in report["tests"]}
    shifted = by_test["TestShifted::test_reads_back"]
    assert (shifted["outcome"], shifted["fault"]) == ("failed", "outputs-shifted")
    assert shifted["case"] == "unquantized.w16.k256n128"
    assert shifted["replay"].startswith("pytest 'test_mine.py::TestShifted::test_reads_back[unquantized.")
    described = {name: shifted[name] for name in ("kind", "subject", "package", "version")}
    assert described == {
        "kind": "LinearKernelSuite",
        "subject": "float32 product",
        "package": "torch",
        "version": torch.__version__,
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", report["date"])
    assert (report["isa"], report["torch"]) == (torch.backends.cpu.get_cpu_capability(), torch.__version__)
    assert by_test["TestMine::test_reads_back"]["outcome"] == "passed"
    assert 0 < by_test["TestMine::test_stays_within_the_bound"]["error of bound"] <= 1
    assert by_test["TestNone::test_reads_back"]["outcome"] == "skipped"
    assert by_test["TestNone::test_reads_back"]["reason"] == "no such kernel here"
    assert sum(report["outcomes"].values()) == len(report["tests"]) == 21

    assert "cause     " in output
    replay = "replay    pytest 'test_mine.py::TestShifted::test_reads_back[unquantized.w16.k256n128]'"
    assert replay in output
    assert "all 1 cases are refused, unquantized.w16.k256n128 because: no such kernel here" in output
    assert len(output.splitlines()) < 80


def test_a_report_has_the_error_of_a_kernel(tmp_path: Path) -> None:
    raising = KERNEL.replace("return (x.float()", "raise ValueError('no such operator'); return (x.float()")
    options = ("--qload-report=report.json", "-k", "TestMine and reads_back")
    run_here(tmp_path, {"test_mine.py": raising}, *options)

    (entry,) = json.loads((tmp_path / "report.json").read_text())["tests"]
    assert (entry["outcome"], entry["failure"]) == ("failed", "ValueError: no such operator")


def test_expected_failures_are_strict_and_told(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text(
        "# what is known\n"
        "\n"
        "test_reads_back[unquantized.*] https://example.org/1 outputs are shifted\n"
        "unquantized.w8.* https://example.org/2 no such case\n"
        "gptq.* https://example.org/2 no suite of this format\n"
    )
    options = ("--qload-xfails=known.txt", "--qload-report=report.json", "-k", "reads_back and not None")
    _, output = run_mine(tmp_path, *options, "-rx")
    report = json.loads((tmp_path / "report.json").read_text())

    assert "1 failed" in output
    assert "1 xfailed" in output
    assert "[XPASS(strict)] outputs are shifted (https://example.org/1)" in output
    assert "qload: no collected test matches gptq.*, unquantized.w8.*\n" in output
    assert report["outcomes"] == {"failed": 1, "xfailed": 1}
    assert [entry["test"].partition("::")[2].partition("::")[0] for entry in report["tests"]] == [
        "TestMine",
        "TestShifted",
    ]
    assert report["tests"][1]["reason"] == "outputs are shifted (https://example.org/1)"


def test_a_line_without_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("gptq.v1.w4 because of this\n")

    code, output = run_mine(tmp_path, "--qload-xfails=known.txt")

    assert code == pytest.ExitCode.USAGE_ERROR
    assert output.strip().splitlines()[-3:] == [
        "ERROR: --qload-xfails: known.txt, line 1",
        f"  expected {LINE_FORM}",
        "  got      'gptq.v1.w4 because of this'",
    ]


@pytest.mark.slow
def test_collecting_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    done = run(tmp_path, {"test_mine.py": f"{KERNEL}\n{code}"}, "-k", "test_it")

    assert "1 passed" in done.stdout, done.stdout


def test_a_line_matches_a_case_or_a_test_of_it() -> None:
    case, test = (ExpectedFailure(text, "https://a", "b") for text in ("gptq.v1.*", "test_a[gptq.v1.w4]"))

    assert case.matches("test_a", "gptq.v1.w4")
    assert case.matches("test_b", "gptq.v1.w8")
    assert not case.matches("test_a", "gptq.v2.w4")
    assert test.matches("test_a", "gptq.v1.w4")
    assert not test.matches("test_b", "gptq.v1.w4")
    assert not test.matches("test_a", "gptq.v1.w8")


@pytest.mark.parametrize("line", ["gptq", "gptq https://a", "gptq why https://a"])
def test_a_line_has_a_link_and_a_reason(line: str, tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text(f"# first\n{line}\n")

    with pytest.raises(ArgumentError, match=r"known\.txt, line 2"):
        read_expected_failures(tmp_path / "known.txt")


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"gptq\xff", "can't decode byte")])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "known.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ArgumentError) as caught:
        read_expected_failures(path)

    assert (caught.value.argument, caught.value.expected) == ("--qload-xfails", "a text file")
    assert caught.value.got.startswith(f"{path}: ")
    assert reason in caught.value.got


def test_the_plugin_is_registered_by_the_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()

    assert '[project.entry-points.pytest11]\nqload = "qload.conformance.plugin"\n' in text


def test_tiers_grow_and_smaller_cases_come_first() -> None:
    tiers = [[case.id for case in cases("gptq", tier)] for tier in ("smoke", "default", "gpu", "exhaustive")]

    for less, more in pairwise(tiers):
        assert more[: len(less)] == less
        assert len(more) > len(less)
    assert all(len(each) == len(set(each)) for each in tiers)
    assert "gptq.v1.w4.g128.actorder.k512n256.tp2row" in tiers[1]
    assert "gptq.v1.w4.g128.actorder.k4096n512" in tiers[2]
