"""What the README says: its code runs, its commands print what it shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_command_line import run
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_its_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}

    for block in [text for language, text in BLOCKS if language == "python"]:
        exec(compile(block, "README.md", "exec"), names)  # one after another, as they are read

    assert {"packed", "kernel", "quantizing"} <= set(names)


def test_its_commands_print_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    shown = next(text for _, text in BLOCKS if text.startswith("$ qload"))
    commands = re.findall(r"^\$ qload (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)

    assert len(commands) == 2
    for command, output in commands:
        printed = run(*command.split(), "--table").output
        assert lines(printed) == lines(output)


def lines(text: str) -> list[list[str]]:
    """The words of each line that has some, rules of a table aside."""
    return [words for line in text.splitlines() if (words := line.replace("─", " ").split())]


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_its_links_lead_somewhere(target: str) -> None:
    assert Path(ROOT, target).exists()
