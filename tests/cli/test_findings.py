"""Findings and notes in text form: one line per cause, with locations, numbers and remedy."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qload.cli.tables import MIN_TABLE_COLUMNS, finding_tables, verdict_text
from qload.verify import Finding, Report
from tests.cli.test_several import run
from tests.paths import FIXTURES
from tests.verify.damage.model import Model

WIDTHS = pytest.mark.parametrize(
    "width", [MIN_TABLE_COLUMNS - 1, MIN_TABLE_COLUMNS + 60], ids=["narrow", "wide"]
)
NAMES = [f"l.{number}.{part}.scales" for number in range(7) for part in ("up", "down")]


def shown(report: Report, width: int = 200) -> str:
    """Return the printed report, with runs of spaces as one."""
    out = Console(file=io.StringIO(), width=width)
    for each in finding_tables(report):
        out.print(each)
    assert isinstance(out.file, io.StringIO)
    return "\n".join(" ".join(line.split()) for line in out.file.getvalue().splitlines())


def alike(*names: str, **changes: str) -> tuple[Finding, ...]:
    return tuple(
        Finding("hole", "error", name, "f.safetensors", f"{name}: {changes.get(name, '3')} bytes", "mend it")
        for name in names
    )


@WIDTHS
def test_findings_of_one_cause_are_one_with_all_places(width: int) -> None:
    text = shown(Report("a", alike(*NAMES)), width)

    assert (text.count("hole"), text.count("3 bytes"), text.count("mend it")) == (1, 1, 1)
    assert "l.{0..6}.down.scales" in text
    assert "l.{0..6}.up.scales" in text
    assert "14 tensors" in text
    assert text.count("f.safetensors") == 1
    assert "for example" not in text


@WIDTHS
def test_where_numbers_differ_those_of_the_first_stand_with_its_name(width: int) -> None:
    text = shown(Report("a", alike(*NAMES, **{NAMES[3]: "4"})), width)

    assert "for example l.0.up.scales: 3 bytes" in " ".join(text.split())
    assert "4 bytes" not in text


@WIDTHS
def test_a_single_finding_is_as_it_was(width: int) -> None:
    text = shown(Report("a", alike("l.0.up.scales")), width)

    assert "3 bytes" in text
    assert "for example" not in text
    assert "1 tensor" not in text


def test_more_places_than_fit_are_counted() -> None:
    names = [f"l.{number}.part{part}" for number in range(2) for part in range(20)]

    text = shown(Report("a", alike(*names)))

    assert "l.{0..1}.part0" in text
    assert "and 26 more" in text
    assert "40 tensors" in text


def test_files_are_counted_where_no_tensor_is_named() -> None:
    files = [Finding("header-json", "error", None, f"m{n}.safetensors", "no JSON") for n in range(3)]

    assert "3 files" in shown(Report("a", tuple(files)))


def test_the_verdict_counts_causes_and_their_places() -> None:
    warning = Finding("dtype", "warning", "x", None, "x: complex")

    assert verdict_text(Report("a", alike(*NAMES))).plain == "findings  a: 1 error in 14 places"
    assert (
        verdict_text(Report("a", (*alike("x", "y"), warning))).plain
        == "findings  a: 1 error in 2 places, 1 warning"
    )
    assert verdict_text(Report("a", alike("x"))).plain == "findings  a: 1 error"


def test_notes_that_differ_in_names_and_numbers_are_one() -> None:
    notes = [f"l.{number}.up: relative error 0.0{number} to a plain reference" for number in range(5)]

    text = shown(Report("a", notes=(*notes, "config.json: model_type is missing")))

    assert text.splitlines() == [
        "note l.0.up: relative error 0.00 to a plain reference",
        "(4 more like it)",
        "note config.json: model_type is missing",
    ]


def test_scales_that_are_nan_in_fourteen_layers_are_one_finding(tmp_path: Path) -> None:
    damaged = Model.read(FIXTURES / "gptq" / "model_g32_desc_act")
    for name in (name for name in damaged.tensors if name.endswith(".scales")):
        damaged.tensors[name][0, 3] = torch.nan

    text = run("verify", damaged.write(tmp_path), "--table").stdout

    assert text.count("scale-value") == text.count("NaN scale at (0, 3); 1 in all") == 1
    assert "1 error in 14 places" in " ".join(text.split())
    assert "14 tensors" in text
    assert text.count("remedy  fetch the file again") == 1
