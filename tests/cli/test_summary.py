"""Summary of at most ten lines on stderr, for each verb with a JSON report in a pipe or a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qload.cli import main
from qload.cli.text import finding_lines, layer_lines, print_summary
from qload.errors.reporting import SCHEMA
from qload.testing import make_checkpoint
from qload.verify import Finding
from tests.cli.test_several import run
from tests.paths import FIXTURES, ROOT

MODEL = FIXTURES / "models" / "gptq_mixtral"
ACT_ORDER = FIXTURES / "gptq" / "model_g32_desc_act"
AWQ = FIXTURES / "awq" / "model_gemm_g64"
# By verb: arguments, exit code, and the beginning of the first line of the summary.
VERBS: dict[str, tuple[list[Any], int, str]] = {
    "inspect": ([MODEL], 0, f"ok  {MODEL}: 41 layers"),
    "verify": ([AWQ, "--tp", "4,16"], 1, f"findings  {AWQ}: 3 errors in 8 places; 21 layers"),
    "diff": ([ACT_ORDER, AWQ], 1, "findings  "),
    "convert": ([ACT_ORDER, "--to", "awq", "-o", "out"], 1, "findings  14 refused: nothing was"),
    "shard": ([MODEL, "--tp", "3", "-o", "out"], 1, "findings  "),
    "plan": ([MODEL, "--tp", "1,3"], 1, f"findings  {MODEL}: "),
    "explain": ([MODEL, "--arch", "sm90"], 0, f"ok  {MODEL} on sm90, activations of float16"),
    "doctor": ([], 0, "cpu"),
    "formats": ([], 0, ""),
    "bench-load": ([AWQ, "--rounds", "1"], 0, f"{AWQ}: 1.0 MiB to cpu"),
    "scoreboard": ([Path(__file__).parent / "report.json"], 1, "1 of 2 subjects fail"),
    "selftest": (["tests.testing.selftest.test_matrix:Plain"], 0, ""),
}


def ended(verb: str, *arguments: Any, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qload", verb, *map(str, arguments)],
        capture_output=True, text=True, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def test_each_verb_that_prints_json_or_tables_is_here() -> None:
    reporting = {
        name for name, verb in main.commands.items() if any(each.name == "as_json" for each in verb.params)
    }

    assert reporting == VERBS.keys()


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb == "selftest")) for verb in VERBS]
)
def test_a_pipe_gets_json_and_stderr_at_most_ten_lines(verb: str, tmp_path: Path) -> None:
    arguments, code, beginning = VERBS[verb]
    done = ended(verb, *arguments, folder=tmp_path, CLICOLOR_FORCE="1", FORCE_COLOR="1")
    lines = done.stderr.splitlines()

    assert (done.returncode, json.loads(done.stdout)["schema"]) == (code, 2)
    assert 1 <= len(lines) <= 10
    assert lines[0].startswith(beginning)
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_gets_json_too_and_tables_have_no_summary(tmp_path: Path) -> None:
    with open(tmp_path / "report.json", "w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "qload", "inspect", MODEL],
            stdout=file, stderr=subprocess.PIPE, check=True, cwd=ROOT,
        )  # fmt: skip

    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "ok"
    assert done.stderr.decode().startswith(f"ok  {MODEL}: 41 layers")
    assert run("inspect", MODEL, "--table").stderr == ""


def test_a_terminal_has_no_summary() -> None:
    pty = pytest.importorskip("pty", reason="this system has no pseudo terminals")
    parent, child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "qload", "doctor", "--json"],  # its output fits into the buffer of a terminal
        stdout=child, stderr=subprocess.PIPE, cwd=ROOT, check=True,
    )  # fmt: skip
    os.close(child)
    os.close(parent)

    assert done.stderr == b""


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_many_checkpoints_have_one_summary_with_what_is_wrong_first(verb: str, tmp_path: Path) -> None:
    result = run(verb, *[AWQ] * 11, tmp_path)
    lines = result.stderr.splitlines()

    assert len(result.stdout.splitlines()) == 12
    assert lines[0].startswith(f"unreadable  {tmp_path}: 1 error")
    assert all(line.startswith(f"ok  {AWQ}: ") for line in lines[1:9])
    assert lines[9:] == ["... and 3 more lines"]


def test_sarif_on_standard_output_has_a_summary_too() -> None:
    result = run("verify", AWQ, "--tier", "headers", "--sarif", "-")

    assert json.loads(result.stdout)["version"] == "2.1.0"
    assert result.stderr.startswith(f"ok  {AWQ}: 21 layers")


def test_an_error_of_the_command_is_one_line_and_no_summary(tmp_path: Path) -> None:
    assert run("explain", MODEL, "--arch", "x").stderr.count("\n") == 1


def test_findings_of_one_cause_are_one_line_with_whole_names() -> None:
    name = "model.language_model.layers.{}.block_sparse_moe.experts.17.down_projection.qzeros"
    found = [
        Finding(
            "symmetry", "error", name.format(at), "f", f"{name.format(at)}: zero {at}\n  of 8\x1b" + "x" * 400
        )
        for at in range(14)
    ]
    (line,) = finding_lines(found)

    assert line.startswith(f"error  symmetry  {name.format(0)}: zero 0; of 8\\x1bxxx")
    assert line.endswith("characters) (14 in all)")


def test_layers_of_one_reason_are_one_line() -> None:
    layers = [("refused", f"layers.{at}.up", f"layers.{at}.up: has act order") for at in range(3)]

    assert [*layer_lines([*layers, ("refused", "a", "")])] == [
        "refused  layers.0.up: has act order (3 in all)",
        "refused  a",
    ]


@pytest.mark.parametrize(("count", "last"), [(9, "line 8"), (10, "line 9"), (11, "... and 2 more lines")])
def test_there_are_ten_lines_at_most(count: int, last: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary((f"line {at}" for at in range(count)), None)
    out, err = capsys.readouterr()

    assert (out, len(err.splitlines()), err.splitlines()[-1]) == ("", min(count, 10), last)


def test_headers_that_refuse_a_conversion_are_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # a wider console has a table
    make_checkpoint("gptq", tmp_path / "in", config={"num_hidden_layers": 1})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    result = run("convert", tmp_path / "in", "--to", "awq", "-o", tmp_path / "out")
    first, second = result.stderr.splitlines()

    assert (result.exit_code, [each["rule"] for each in json.loads(result.stdout)["findings"]]) == (
        1,
        ["layer-count"],
    )
    assert first == (
        "findings  1 error in the header tier of verify: nothing was written; "
        "--accept RULE converts nevertheless"
    )
    assert second.startswith("error  layer-count  model.layers.1: num_hidden_layers is 3")
    shown = run("convert", tmp_path / "in", "--to", "awq", "-o", tmp_path / "out", "--table").stdout
    assert "error  layer-count  model.layers.1" in shown
    accepted = run(
        "convert", tmp_path / "in", "--to", "awq", "-o", tmp_path / "out", "--accept", "layer-count"
    )
    assert accepted.exit_code == 0
    assert "note  error of the rule layer-count, not refused: num_hidden_layers is 3" in accepted.stderr


def test_what_is_no_rule_is_a_usage_error(tmp_path: Path) -> None:
    assert (
        run("convert", AWQ, "--to", "gptq_v2", "-o", tmp_path / "out", "--accept", "nothing").exit_code == 2
    )


def test_a_kill_matrix_names_what_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"fault": name, "words": "", "end": end} for name, end in (("a", "caught"), ("b", "let through"))]
    monkeypatch.setattr("qload.cli.testing._judge_adapter", lambda adapter: rows)
    result = run("selftest", "module:Class")

    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"schema": SCHEMA, "faults": rows, "let_through": ["b"]}
    assert result.stderr.splitlines() == ["1 of 2 faults are caught", "let through  b"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give one of MODULE:CLASS, --tests and --suites"),
        (["a:b", "--suites"], "give one of MODULE:CLASS, --tests and --suites"),
        (["a:b", "--tests", "pytest"], "give one of MODULE:CLASS, --tests and --suites"),
        (["no_such_module:Class"], "no_such_module:Class: No module named 'no_such_module'"),
        (["json:Kernel"], "json:Kernel: module 'json' has no attribute 'Kernel'"),
    ],
)
def test_an_adapter_that_is_not_there_is_a_usage_error(arguments: list[str], text: str) -> None:
    result = run("selftest", *arguments)

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: {text}"


def test_a_kill_matrix_is_a_table_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"fault": "zeros off", "words": "a", "end": "caught", "first": "check", "second": None},
        {"fault": "scales off", "words": "b", "end": "caught", "first": "", "second": "other"},
    ]
    monkeypatch.setattr("qload.cli.testing._judge_adapter", lambda adapter: rows)
    result = run("selftest", "module:Class", "--table")
    lines = [line.split() for line in result.stdout.splitlines() if not set(line) <= set(" ─")]

    assert result.exit_code == 0
    assert lines == [
        ["fault", "end", "first", "second"],
        ["zeros", "off", "caught", "check"],
        ["scales", "off", "caught", "other"],
    ]
