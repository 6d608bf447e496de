"""Execution of each tutorial in an empty folder, and comparison of the output with the page."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import page_files
from tests.cli.test_command_line import run
from tests.meta.test_readme import COLUMNS, COMMAND, TABLES, TUTORIALS, lines
from tests.paths import ROOT

PAGES = sorted(TUTORIALS.glob("*.md"))
PYTEST = ("-m", "pytest", "-p", "qload.conformance.plugin", "-p", "no:cacheprovider")


def output(command: str) -> str:
    """Return the output of a command in the current folder; for qload, its output on a terminal."""
    program, *arguments = shlex.split(command)
    if program == "qload":
        done = run(*arguments, *(["--table"] if arguments[0] in TABLES else []))
        return done.stdout or done.stderr
    if program == "rm":
        shutil.rmtree(arguments[-1])
        return ""
    assert program in ("python", "pytest"), command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    started = [sys.executable, *(PYTEST if program == "pytest" else ()), *arguments]
    ended = subprocess.run(started, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr


def matches(shown: str, printed: str) -> bool:
    """Return whether the output on a page matches the printed output; `...` stands for any text."""
    pattern = re.escape("\n".join(lines(shown))).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, "\n".join(lines(printed)), re.DOTALL) is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    files: dict[str, str] = {}
    ran = 0

    for language, text in page_files.blocks(page):
        if language == "py" and (name := page_files.NAMED.match(text)):
            files[name[1]] = text
            Path(name[1]).write_text(text)
        elif language == "diff":
            changed = page_files.change(files, text)
            Path(changed).write_text(files[changed])
        elif language == "console":
            for command, shown in COMMAND.findall(text):
                printed = output(command)
                assert matches(shown, printed), f"{command}\n{printed}"
                ran += 1

    assert ran > 1


def test_there_is_a_tutorial_for_each_door() -> None:
    assert [page.stem for page in PAGES] == ["engine", "kernel", "quantizer", "serve"]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("in ...\n", "in 3.1s\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\nd\n", "b\nd\n", False),
    ],
)
def test_dots_stand_for_what_is_left_out(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same
