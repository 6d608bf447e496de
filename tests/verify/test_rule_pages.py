"""One text for each id of a finding or an exception, one id for each text, and pages from the texts."""

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import get_args

import pytest

from qload import errors
from qload.checkpoint.report_base import INTERNAL, UNSUPPORTED
from qload.errors.rules import PAGES, Severity, Stage, parse_rule, rule_pages, rule_texts
from qload.verify import verification
from qload.verify.rules import INSPECTED, RULES
from tests.paths import ROOT
from tests.rule_pages import page, read_records, write_pages

TREES = {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "qload").rglob("*.py"))}
RAISING = {
    "StorageError": 1,
    "HubUnreachableError": 1,
    "Finding": 0,
}  # position of the id among the arguments
OWN_IDS = {"layer"}  # a rule with the ids of loading errors


def error_classes() -> Iterator[type[errors.QloadError]]:
    kinds = [errors.QloadError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("qload."):
            yield kind


def texts_of(node: ast.AST) -> Iterator[str]:
    """Yield the possible constants of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from chain(texts_of(node.body), texts_of(node.orelse))
    elif isinstance(node, ast.Tuple) and node.elts:
        yield from texts_of(node.elts[0])


@cache
def raised() -> frozenset[str]:
    """Return the ids of errors and findings in the code: in classes, calls and variables."""
    found = {kind.rule for kind in error_classes() if isinstance(vars(kind).get("rule"), str)}
    taking = dict(RAISING)
    for tree in TREES.values():
        for node in ast.walk(tree):
            arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
            for at, argument in enumerate(arguments):
                is_id = argument.annotation is not None and ast.unparse(argument.annotation) == "str"
                if argument.arg == "rule" and is_id and arguments[0].arg != "self":
                    taking[node.name] = at  # type: ignore[attr-defined]
    for node in chain.from_iterable(map(ast.walk, TREES.values())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in taking:
            at = taking[node.func.id]
            given = node.args[at : at + 1] + [each.value for each in node.keywords if each.arg == "rule"]
            found |= {text for each in given for text in texts_of(each)}
        elif isinstance(node, ast.Assign):
            names = [
                each for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)
            ]
            if names and names[0].id == "rule":
                found |= {*texts_of(node.value)}
        elif isinstance(node, ast.FunctionDef) and node.name == "rule":
            returns = (each for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)
            found |= {text for each in returns for text in texts_of(each.value)}  # type: ignore[arg-type]
    return frozenset(found)


def used_texts() -> set[str]:
    """Return the ids of texts that the code looks up: `rule_texts()[id]`, and `TEXTS[id]` of the rules."""
    nodes = [
        node
        for node in chain.from_iterable(map(ast.walk, TREES.values()))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("rule_texts()", "TEXTS")
    ]
    return {text for node in nodes for text in texts_of(node.slice)}


def test_every_id_of_an_error_or_a_rule_has_a_text_and_no_text_is_left_over() -> None:
    running = {rule.id for rule in (*RULES, *INSPECTED)} - OWN_IDS

    assert {kind.rule for kind in error_classes() if isinstance(kind.rule, str)} <= raised()
    assert running <= used_texts()
    assert {*rule_texts()} == raised() | used_texts() | {INTERNAL}
    assert {INTERNAL, UNSUPPORTED, *verification.RULES_OF_MISSING} <= {*rule_pages()}


def test_the_rules_are_sorted_and_each_has_one_text() -> None:
    ids = re.findall(r"^# (.*)$", PAGES.read_text("utf-8"), re.MULTILINE)

    assert ids == [*rule_texts()] == sorted({*ids})


def test_a_section_of_another_form_is_refused() -> None:
    section = "# a\n\nheaders, error\n\nb\n\n**Why it matters.** c\n\n**Remedy.** d"

    assert parse_rule(section).do == "d"
    for broken in (section[1:], section.replace(", error", ""), section.replace("**Remedy.** ", "")):
        with pytest.raises(ValueError, match="not the page of a rule"):
            parse_rule(broken)


def test_ids_of_exceptions_alone_are_no_rules_of_findings() -> None:
    alone = {rule for rule, text in rule_texts().items() if text.stage == "exception"}

    assert {*rule_pages()} == {*rule_texts()} - alone
    assert alone.isdisjoint({rule.id for rule in RULES})


@pytest.mark.parametrize("rule", rule_texts())
def test_a_text_says_what_why_and_what_to_do(rule: str) -> None:
    text = rule_texts()[rule]

    assert all((text.what, text.why, text.do))
    assert text.example or text.stage == "exception"
    assert "  " not in text.what + text.why + text.do + text.measured
    assert text.stage in get_args(Stage)
    assert text.severity in get_args(Severity)


def test_the_pages_are_made_of_the_texts_that_the_package_has() -> None:
    """Compare with records from the source, without an import of their modules."""
    assert {rule: asdict(record) for rule, record in read_records().items()} == {
        rule: asdict(text) for rule, text in rule_texts().items()
    }


def test_every_rule_has_a_page_and_every_link_between_them_leads_to_one(tmp_path: Path) -> None:
    (tmp_path / "of-a-rule-that-went.md").touch()
    for _ in range(2):
        write_pages(tmp_path)

    pages = {file.stem: file.read_text("utf-8") for file in tmp_path.iterdir()}
    assert pages.keys() == {*rule_texts(), "README"}
    assert all(f"]({rule}.md)" in pages["README"] for rule in rule_texts())
    for rule, text in rule_texts().items():
        assert pages[rule] == page(text)
        for part in (text.what, text.why, text.do, text.measured, text.example):
            assert part in pages[rule]


def test_lines_are_joined_but_those_of_lists_and_tables() -> None:
    text = parse_rule("""
# a

headers, error

One
line.

- an item
  of two
- another

| a | b |
|---|---|
| c
d | e |

**Measured.** Once
or twice.

**Why it matters.** b

**Remedy.** Set [`c`](c.md) to `d`.

```
one
  two
```
""")

    assert text.what == "One line.\n\n- an item of two\n- another\n\n| a | b |\n|---|---|\n| c d | e |"
    assert (text.measured, text.example) == ("Once or twice.", "one\n  two")
    assert text.remedy == "set c to d"
