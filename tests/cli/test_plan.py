"""qload plan: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest

from qload.plan import plan
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "models" / "gptq_mixtral"


def test_json_is_the_plan_itself() -> None:
    result = run("plan", MODEL, "--tp", "2,3")

    assert json.loads(result.stdout) == json.loads(json.dumps(plan(MODEL, tp=(2, 3)).to_json()))


@pytest.mark.parametrize(("sizes", "code"), [("1,2", 0), ("2,3", 1)])
def test_the_exit_code_says_whether_all_fits(sizes: str, code: int) -> None:
    assert run("plan", MODEL, "--tp", sizes).exit_code == code


def test_a_table_says_why_not_and_what_instead() -> None:
    shown = run("plan", MODEL, "--tp", "2,3", "--table").stdout

    assert "key/value heads = 2 does not divide into 3 ranks" in shown
    assert "instead  copied: all 2 key/value heads on each of 3 ranks; 960 B more" in shown
    assert "ok  2 ranks: 71.3 KiB each" in shown
    assert "no  3 ranks: 8 layers cannot be shared" in shown


def test_all_has_a_line_for_each_layer() -> None:
    folded, every = (run("plan", MODEL, "--table", *more).stdout for more in ((), ("--all",)))

    assert "model.layers.{0..1}.self_attn.o_proj" in folded
    assert "model.layers.1.self_attn.o_proj" in every


def test_what_cannot_be_read_is_a_report_and_exit_code_1(tmp_path: Path) -> None:
    result = run("plan", tmp_path)

    assert (json.loads(result.stdout)["verdict"], result.exit_code) == ("unreadable", 1)
    assert "unreadable" in run("plan", tmp_path, "--table").stdout


@pytest.mark.parametrize("asked", [["--tp", "0"], ["--ep", "0"], ["--tp", "x"], ["--ep", "2", "--tp", "2"]])
def test_what_cannot_be_asked_is_a_usage_error(asked: list[str]) -> None:
    dense = FIXTURES / "gptq" / "model_g32_desc_act"

    assert run("plan", dense, *asked).exit_code == 2
