"""Exit code of a failed command, and one line or nothing on standard error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import FIXTURES, ROOT

pytestmark = pytest.mark.slow

MODEL = str(FIXTURES / "gptq" / "model_g32_desc_act")
COMMANDS = [
    ["inspect", MODEL],
    ["verify", "--table", MODEL],
    ["formats"],
    ["doctor", "--table"],
    ["--help"],
    ["--version"],
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


def run(command: list[str], stdout: Any, stderr: Any = subprocess.PIPE, **variables: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "qload", *command],
        stdout=stdout, stderr=stderr, env=environment, cwd=ROOT, check=False, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_a_closed_standard_error_changes_no_verdict(verb: str) -> None:
    paths = [MODEL, MODEL] if verb == "diff" else [MODEL]
    line = f'exec "{sys.executable}" -m qload "$@" 2>&-'

    done = subprocess.run(
        ["sh", "-c", line, "sh", verb, *paths], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "ok")


@pytest.fixture
def full() -> Any:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as file:
        yield file


@every_command
def test_a_full_disk_is_told_in_one_line(command: list[str], full: Any) -> None:
    code, said = run(command, full)

    assert (code, said) == (2, "Error: standard output: No space left on device\n")


def test_where_nothing_can_be_written_the_exit_code_still_tells(full: Any) -> None:
    assert run(["inspect", MODEL], full, full)[0] == 2


@every_command
def test_a_reader_that_has_left_is_no_error(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code, said = run(command, writer)
    os.close(writer)

    assert (code, said) == (141, "")


@pytest.mark.parametrize("variable", ["QLOAD_ISA", "QLOAD_NUM_THREADS"])
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_variable_that_cannot_be_used_is_told_in_one_line(verb: str, variable: str) -> None:
    code, said = run([verb, MODEL], subprocess.DEVNULL, **{variable: "foo"})

    assert code == 2
    assert said.count("\n") == 1
    assert said.startswith(f"Error: {variable}, expected ")
    assert said.endswith(", got 'foo'\n")


@pytest.mark.parametrize("variable", ["QLOAD_ISA", "QLOAD_NUM_THREADS"])
def test_the_doctor_says_1_of_a_variable_that_cannot_be_used(variable: str) -> None:
    code, summary = run(["doctor"], subprocess.DEVNULL, **{variable: "foo"})

    assert code == 1
    assert summary.startswith(f"wrong         {variable}\n")
    assert "Error" not in summary


@pytest.mark.skipif(sys.platform == "win32", reason="closes a descriptor by a POSIX shell")
@pytest.mark.parametrize("command", COMMANDS[:1], ids=" ".join)
def test_a_closed_standard_output_is_told_in_one_line(command: list[str]) -> None:
    line = f'exec "{sys.executable}" -m qload "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *command],
        capture_output=True, check=False, text=True, cwd=ROOT,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (2, "Error: standard output: closed\n")


def test_a_full_disk_for_sarif_is_told_of_its_file(full: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qload", "verify", MODEL, "--json", "--sarif", "/dev/full"],
        capture_output=True, check=False, text=True, cwd=ROOT,
    )  # fmt: skip

    summary, error_line = done.stderr.splitlines()
    assert (done.returncode, error_line) == (2, "Error: /dev/full: No space left on device")
    assert summary.startswith(f"ok  {MODEL}: 21 layers")
    error = json.loads(done.stdout.splitlines()[-1])
    assert (error["verdict"], error["error"]) == ("error", "/dev/full: No space left on device")
