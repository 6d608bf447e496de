"""Answers of the process that runs the tests of mutants, for a folder with a few tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

SOURCE = """
import os
import time

def test_passes():
    pass

def test_fails():
    assert False

def test_hangs():
    time.sleep(100)

def test_crashes():
    os.abort()
"""
ANSWERS = {
    ("test_passes",): None,
    ("test_passes", "test_fails", "test_crashes"): "test_few.py::test_fails",
    ("test_of_another_name",): "test_few.py::test_fails",  # then the whole file runs
    ("test_hangs",): "time",
    ("test_crashes",): "exit code -6",
}


@pytest.mark.slow
def test_each_request_has_an_answer(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(SOURCE)
    tests = [[f"test_few.py::{name}" for name in names] for names in ANSWERS]
    requests = [{"options": ["-x", "-q"], "tests": each, "seconds": 10} for each in tests]
    command = (sys.executable, "-m", "tests.mutants.forked_tests")
    lines = "".join(json.dumps(request) + "\n" for request in requests)

    run = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )

    assert [json.loads(line)["failed"] for line in run.stdout.splitlines()] == list(ANSWERS.values())
