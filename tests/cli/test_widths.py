"""Whole names of tensors, layers, files and rules in the tables of every verb, on a terminal of any width."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from qload.cli.tables import NO_BREAK_SPACE, FindingTable, NamedRow, NameTable, Paragraph, join_words, stdout
from qload.verify import Finding
from tests.cli.test_several import run
from tests.cli.test_summary import VERBS
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model

LEAD = "model.language_model.layers.{}.block_sparse_moe.experts.{}.a_projection_of_a_rather_long_name"
LONG = [
    f"{LEAD.format(layer, expert)}{kind}" for layer in (0, 1) for expert in (0, 11) for kind in ("", "_up")
]
NAME = re.compile(r"[\w{}-]+(?:[./,]+[\w{}-]+)+")  # dotted, or a path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with long names: `in` has a NaN and wrong zero points, `other` has other codes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "other").mkdir()
    stored = {name: tensor for prefix in LONG for name, tensor in gptq(prefix).items()}
    stored[f"{LONG[0]}.scales"][0, 0] = float("nan")
    stored[f"{LONG[1]}.qzeros"] += 0x11111111
    model(tmp_path / "in", stored, quantization_config=GPTQ)
    stored[f"{LONG[2]}.qweight"] += 1
    stored[f"{LONG[3]}.qweight"] += 1
    model(tmp_path / "other", stored, quantization_config=GPTQ)
    return tmp_path


COMMANDS: dict[str, list[Any]] = {
    "inspect": ["in"],
    "verify": ["in", "--tp", "3"],
    "diff": ["in", "other"],
    "convert": ["in", "--to", "marlin_checkpoint", "-o", "out"],
    "shard": [FIXTURES / "models" / "gptq_mixtral", "--tp", "3", "-o", "out"],
    "plan": ["in", "--tp", "1,3,4"],
    "explain": ["in", "--arch", "sm90", "--tp", "2"],
    "doctor": [],
    "formats": [],
    "bench-load": ["in", "--rounds", "1"],
    "scoreboard": [Path(__file__).parent / "report.json"],
    "selftest": ["module:Class"],
}


def names(text: str) -> set[str]:
    """Return whole words with dots, line by line."""
    return {found for line in text.splitlines() for found in NAME.findall(line)}


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.usefixtures("folder")
def test_no_name_is_broken_at_any_width(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"subject": LONG[0], "fault": LONG[1], "end": "caught", "words": "", "named": LONG[2]}
    monkeypatch.setattr("qload.cli.testing._judge_adapter", lambda adapter: [row])
    monkeypatch.setattr("qload.cli.bench_load.measure_load", lambda *_: BENCH)
    printed = {}
    for width in (40, 60, 80, 120, 2000):
        monkeypatch.setenv("COLUMNS", str(width))
        printed[width] = run(verb, *COMMANDS[verb], "--table").stdout

    longest = max(map(len, names(printed[2000])))
    assert longest > (80 if COMMANDS[verb][:1] in (["in"], ["module:Class"]) and verb != "bench-load" else 3)
    for width in (40, 60, 80, 120):
        assert names(printed[width]) == names(printed[2000]), width
        assert "…" not in printed[width]


BENCH = {
    "path": "in", "bytes": 3, "device": "cpu",
    "stages": [
        {"stage": name, "gigabytes_per_second": 1.0, "rounds": [1.0] * 30, "peak_above_result": None}
        for name in ("load_file", "as stored", "auto")
    ],
}  # fmt: skip


def test_each_verb_with_tables_is_here() -> None:
    assert COMMANDS.keys() == VERBS.keys()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_long_file_and_a_word_of_a_message_stay_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = Finding(
        "rule", "error", LONG[0], f"{LONG[1]}.safetensors", f"it is {LONG[2]}", f"name it {LONG[3]}"
    )
    stdout().print(FindingTable([found, Finding("rule", "warning", "a b.c d", None, "m " * 100)]))
    shown = capsys.readouterr().out

    assert {*LONG[:1], f"{LONG[1]}.safetensors", *LONG[2:4]} <= names(shown)
    assert [line for line in shown.splitlines() if "a b.c d" in line]
    assert NO_BREAK_SPACE not in shown


def test_a_paragraph_breaks_between_words_and_keeps_styles(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        Text("one two ")
        .append("abcdefghijklmnop", "bold")
        .append(" three\n\nfour five")
        .append(join_words(" six x"))
    )
    out = stdout()
    out.width = 10
    out.print(Paragraph(text, 2))

    assert capsys.readouterr().out.splitlines() == [
        "  one two", "  abcdefghijklmnop", "  three", "", "  four", "  five six x"
    ]  # fmt: skip


def test_facts_are_a_table_columns_or_titled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [NamedRow("a.name", [Text("x"), Text("12")], 3), NamedRow("other", [Text(""), Text("345")])]
    shown = {}
    for width in (60, 16, 12):
        monkeypatch.setenv("COLUMNS", str(width))
        stdout().print(NameTable("layer", ("a fact", "size"), rows, ("size",)))
        shown[width] = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    assert [shown[60][0], *shown[60][2:]] == [
        "layer   count  a fact  size",
        "a.name      3  x         12",
        "other                   345",
    ]
    assert shown[16] == ["a fact  size", "a.name  x3", "x       12", "other", "345"]
    assert shown[12] == ["a.name  x3", "a fact x,", "size 12", "other", "size 345"]
