"""The pages under docs/conformance run: their blocks are files, and pytest passes on them."""

import re
from pathlib import Path

import pytest

from tests.conformance.pytest_runs import run_here
from tests.page_files import files
from tests.paths import ROOT

KERNEL = ROOT / "docs" / "tutorials" / "kernel.md"
SLOW = "contracts"
PAGES = [KERNEL, *(page for page in sorted((ROOT / "docs" / "conformance").glob("*.md")) if files(page))]


def run_page(folder: Path, held: dict[str, str], *arguments: str) -> tuple[int, str]:
    syrupy = any("syrupy" in text for text in held.values())
    return run_here(folder, held, *(("-p", "syrupy", "--snapshot-update") if syrupy else ()), *arguments)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == SLOW)) for page in PAGES],
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    code, output = run_page(tmp_path, files(page))

    assert code == 0, output
    assert " passed" in output


def test_each_suite_has_a_page_of_files() -> None:
    assert {page.stem for page in PAGES} >= {"experts", "kernel", "loader", "packer", "contracts"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_suite_takes_no_more_than_fifteen_lines(page: Path) -> None:
    for text in files(page).values():
        (suite,) = re.findall(r"^class Test.*", text, re.MULTILINE | re.DOTALL) or [""]
        assert len([line for line in suite.splitlines() if line.strip()]) <= 15


def test_a_failure_says_what_the_page_shows(tmp_path: Path) -> None:
    held = files(KERNEL)
    broken = held["my_kernels.py"].replace("(codes - 8)", "(codes - 7)")
    assert broken != held["my_kernels.py"]

    code, output = run_page(tmp_path, {**held, "my_kernels.py": broken}, "-k", "reads_back")

    (shown,) = re.findall(r"^gptq\..*?replay.*?$", KERNEL.read_text(), re.MULTILINE | re.DOTALL)
    assert code == 1
    for line in shown.splitlines():
        assert line in output, output
