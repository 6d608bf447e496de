"""Execution of each block of Python in README and docs, and comparison of command output with the pages."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import demo
from tests.cli.test_command_line import run
from tests.paths import FIXTURES, ROOT
from tests.rule_pages import write_pages

write_pages()  # generated, and absent from the repository
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
COLUMNS = "100"  # width of the terminal on the pages
# Verbs with tables on a terminal, and JSON elsewhere.
TABLES = ("inspect", "verify", "plan", "explain", "diff", "convert", "formats", "doctor")


class Block(NamedTuple):
    """Text of a fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def execute(self) -> None:
        """Run the block as a separate module."""
        exec(compile("\n" * self.line + self.text, str(self), "exec"), {"__name__": str(self)})


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            yield Block(page, text.count("\n", 0, found.start()) + 1, *found.groups())


ENGINES = ROOT / "docs" / "engines"  # its pages run in the tests of the engines
OUTSIDERS = ROOT / "docs" / "conformance" / "outsiders.md"  # runs in tests/outsiders
TUTORIALS = ROOT / "docs" / "tutorials"  # test_tutorials.py runs each tutorial as a whole
PYTHON = [
    block
    for block in blocks()
    if block.language == "python" and block.page.parent != ENGINES and block.page != OUTSIDERS
]
COMMANDS = [block for block in blocks() if COMMAND.search(block.text) and block.page.parent != TUTORIALS]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a writable folder with the fixtures of a checkout, as current directory."""
    (tmp_path / "fixtures").symlink_to(FIXTURES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON, ids=str)
@pytest.mark.usefixtures("checkout")
def test_each_block_of_python_runs_by_itself(block: Block) -> None:
    block.execute()


@pytest.mark.parametrize("block", COMMANDS, ids=str)
@pytest.mark.usefixtures("checkout")
def test_commands_print_what_the_page_shows(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    write_damaged_copies(block)

    for command, output in COMMAND.findall(block.text):
        program, verb, *arguments = command.split()
        assert program == "qload"
        printed = run(verb, *arguments, *(["--table"] if verb in TABLES else []))
        assert lines(printed.stdout) == lines(output), command


def write_damaged_copies(block: Block) -> None:
    """Write the folder of `nox -s demo` for a block with a command on it."""
    if demo.FOLDER.as_posix() in block.text:
        demo.write_copies(demo.FOLDER, demo.models(), demo.DAMAGES)


def lines(text: str) -> list[str]:
    """Return the lines without trailing spaces, as on the pages."""
    return [line.rstrip() for line in text.strip().splitlines()]


def test_readme_shows_damage_that_is_found_alone_and_damage_that_is_found_beside_another() -> None:
    shown = [pair for block in COMMANDS if block.page == README for pair in COMMAND.findall(block.text)]

    assert any("error" in output for command, output in shown if "--against" not in command)
    assert any("it agrees" in output for command, output in shown if "--against" in command)


def test_readme_has_at_most_1800_words() -> None:
    assert len(README.read_text().split()) <= 1800


@pytest.mark.parametrize(
    ("page", "target"),
    [(page, target) for page in PAGES for target in LINK.findall(page.read_text())],
    ids=lambda part: part.name if isinstance(part, Path) else part,
)
def test_links_lead_somewhere(page: Path, target: str) -> None:
    assert (page.parent / target).exists()
