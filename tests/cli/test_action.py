"""Composite action: its inputs are options of verify, and no input is executed as shell code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qload.cli.verify import verify
from tests.paths import FIXTURES, ROOT
from tests.verify.checkpoints import model, plain

ACTION = ROOT / ".ci" / "verify"
SOUND = FIXTURES / "models" / "gptq_mixtral"


@pytest.fixture
def action() -> dict[str, Any]:
    return yaml.safe_load((ACTION / "action.yml").read_text())  # type: ignore[no-any-return]


def ran(folder: Path, **given: str) -> tuple[int, str, list[str]]:
    """Run the script with a program for recording arguments: exit code, summary, arguments."""
    program = folder / "program"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nnoted = open({str(folder / 'seen')!r}, 'w')\n"
        "noted.write(chr(10).join(sys.argv[1:]))\n"
        "print('a table')\nsys.exit('bad' in sys.argv)\n"
    )
    program.chmod(0o755)
    places = {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "GITHUB_OUTPUT": str(folder / "output")}
    env = {**os.environ, **places, "PROGRAM": str(program), **given}
    done = subprocess.run(["bash", ACTION / "run"], env=env, cwd=folder, capture_output=True, text=True)
    seen = folder / "seen"
    arguments = seen.read_text().split("\n") if seen.exists() else []
    summary = folder / "summary"
    return done.returncode, summary.read_text() if summary.exists() else "", arguments


def test_every_input_is_an_option_of_verify_or_about_the_installation(action: dict[str, Any]) -> None:
    options = {option.removeprefix("--") for each in verify.params for option in each.opts}

    assert action["inputs"].keys() - options == {"package"}
    assert action["runs"]["using"] == "composite"
    assert all(each["shell"] == "bash" for each in action["runs"]["steps"])


def test_no_input_is_put_into_shell_code(action: dict[str, Any]) -> None:
    steps = action["runs"]["steps"]
    given = {name: value for each in steps for name, value in each["env"].items()}
    read = set(re.findall(r"inputs\.(\w+)", " ".join(given.values())))

    assert not any("${{" in each["run"] for each in steps)
    assert read == {*action["inputs"]}
    script = (ACTION / "run").read_text() + steps[0]["run"]
    assert all(re.search(rf"\$\{{?{name}\b", script) for name in given)


@pytest.mark.slow
def test_what_is_given_reaches_verify(tmp_path: Path) -> None:
    for name in ("models/a", "models/b c"):
        (tmp_path / name).mkdir(parents=True)
    code, summary, seen = ran(
        tmp_path, PATHS="models/*\n\n$(touch no)\n", TP="1,2", SARIF="f", HTML="h", TIER="values"
    )

    options = ["verify", "--table", "--tier", "values", "--tp", "1,2", "--sarif", "f", "--html", "h", "--"]
    assert seen == [*options, "models/a", "models/b c", "$(touch no)"]
    assert (code, summary) == (0, "### qload verify: ok\n\n    a table\n")
    assert (tmp_path / "output").read_text() == "verdict=ok\n"
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_findings_fail_the_step_and_stand_in_the_summary(tmp_path: Path) -> None:
    code, summary, _ = ran(tmp_path, PATHS="bad")

    assert (code, summary.splitlines()[0]) == (1, "### qload verify: findings")
    assert (tmp_path / "output").read_text() == "verdict=findings\n"


@pytest.mark.slow
def test_no_path_is_a_wrong_command(tmp_path: Path) -> None:
    assert ran(tmp_path, PATHS=" \n") == (2, "", [])


@pytest.mark.slow
def test_verify_itself_takes_what_the_script_gives(tmp_path: Path) -> None:
    (tmp_path / "program").write_text(f'#!/bin/sh\nexec {sys.executable} -m qload "$@"\n')
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "other").mkdir()
    model(tmp_path / "other", plain("a.weight"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": str(tmp_path / "program"), "TP": "1,2"}
    given = {
        "PATHS": f"{SOUND}\n{tmp_path / 'other'}",
        "SARIF": str(tmp_path / "found.sarif"),
        "TIER": "headers",
    }
    done = subprocess.run(["bash", ACTION / "run"], env={**env, **given}, capture_output=True, text=True)

    assert done.returncode in (0, 1), done.stderr
    assert "gptq_mixtral" in done.stdout
    assert (tmp_path / "found.sarif").exists()
