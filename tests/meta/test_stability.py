"""Agreement of docs/stability.md with the code: every listed name exists."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from qload import errors
from qload.checkpoint import Coverage
from qload.cli.main import main
from qload.errors.reporting import EXIT_CODES, SCHEMA, WORST_FIRST
from qload.errors.rules import rule_pages, rule_texts
from qload.verify import Finding, Report
from qload.verify.rules import RULES
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "stability.md").read_text()
NAME = re.compile(r"`([a-z][a-z_-]*)`")


def section(title: str) -> str:
    """Return the text from a title to the next."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def listed(title: str) -> set[str]:
    """Return the names in the last paragraph of a section."""
    return set(NAME.findall(section(title).strip().split("\n\n")[-1]))


def paragraph(begin: str) -> list[str]:
    """Return the names between a colon and the next full stop, in the paragraph with this beginning."""
    (found,) = (each for each in PAGE.split("\n\n") if each.startswith(begin))
    return NAME.findall(re.split(r"\.\s", found.partition(":")[2] + " ")[0])


def error_rules() -> set[str]:
    kinds = (each for each in vars(errors).values() if isinstance(each, type))
    own = (vars(kind).get("rule") for kind in kinds if issubclass(kind, errors.QloadError))
    return {rule for rule in own if isinstance(rule, str)}


def literals() -> Iterator[str]:
    """Return the literal ids in constructors of `StorageError` and findings."""
    for path in sorted((ROOT / "qload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"StorageError": 1, "Finding": 0}.get(node.func.id)
                given = node.args[at] if at is not None and len(node.args) > at else None
                if isinstance(given, ast.Constant):
                    yield str(given.value)


def test_verdicts_and_codes_are_those_of_the_page_in_their_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \|", section("Verdicts and exit codes"), re.MULTILINE)

    assert [(verdict, int(code)) for verdict, code in rows] == list(EXIT_CODES.items())
    assert f"the first of {', '.join(map(str, WORST_FIRST))} that" in PAGE.replace("\n", " ")


def test_rules_are_those_of_the_page() -> None:
    told = listed("Rules")

    assert told == {*rule_pages()}
    assert {rule.id for rule in RULES} - {"layer"} <= told
    assert {*literals()} <= told
    assert error_rules() - told == listed("Errors") == {*rule_texts()} - told


def test_fields_are_those_of_the_page() -> None:
    empty = Coverage(0, 0, 0, 0, {}, 0, 0, 0)
    report = Report("a", coverage=empty, reference_coverage=empty, logits={}).to_json()
    finding = Finding("a", "error", None, None, "a")

    assert f"`schema` is {SCHEMA}" in PAGE
    assert set(report) == {*paragraph("`schema` is"), "logits", "reference_coverage"}
    assert list(vars(finding)) == [each.name for each in fields(Finding)] == paragraph("A finding has")
    assert set(report["coverage"]) == set(paragraph("A coverage has"))
    assert paragraph("An error of the command is") == ["schema", "verdict", "error", "exit_code"]


def test_every_help_says_the_exit_codes_that_it_can_have() -> None:
    for name, command in main.commands.items():
        told = command.epilog or ""
        codes = set(re.findall(r"(?:Exit codes: |, )(\d) ", told.replace("\n", " ")))
        takes = any(type(each.type).__name__ == "CheckpointPath" for each in command.params)
        assert {"0", "2", "3"} <= codes, name
        assert ("4" in codes) == takes, name


@pytest.mark.parametrize("verdict", EXIT_CODES)
def test_the_page_of_the_command_line_names_every_code(verdict: str) -> None:
    text = Path(ROOT / "docs" / "cli.md").read_text()

    assert re.search(rf"^\| {EXIT_CODES[verdict]} \|", text, re.MULTILINE)  # type: ignore[index]
