"""Agreement of docs/architecture.md with the code: packages in their order, and existing locations."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.meta.test_house import RANK
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = {
    path.stem
    for path in (ROOT / "qload").iterdir()
    if not path.stem.startswith(("_", ".")) and (path.suffix == ".py" or (path / "__init__.py").is_file())
}
PLACES = re.findall(r"`((?:qload|csrc|tests|golden|fixtures|docs)/[\w./-]*)(?::([\w.]+))?`", PAGE)
MOST_LINES = 140  # two pages


def section(title: str) -> str:
    """Return the text from a heading to the next."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def rows(title: str) -> list[tuple[str, str]]:
    """Return the rows of a section's table without its header."""
    return re.findall(r"^\| (?!package of|word \|)([^|]+) \| (.+) \|$", section(title), re.MULTILINE)


@cache
def defined(file: Path) -> frozenset[str]:
    """Return the definitions of a module: functions, classes, methods as `Class.method`, assigned names."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_every_package_is_named_in_the_order_of_its_rank() -> None:
    named = [re.findall(r"`(\w+)`", package) for package, _ in rows("Packages")]
    flat = [name for names in named for name in names]

    assert sorted(flat) == sorted(PACKAGES)
    assert [RANK[name] for name in flat] == sorted(RANK[name] for name in flat)


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_every_place_that_is_named_exists(place: str, name: str) -> None:
    assert (ROOT / place).exists()
    assert not name or name in defined(ROOT / place)


def test_the_way_of_a_weight_is_told_with_its_functions() -> None:
    steps = re.findall(
        r"^\d+\. (.*?)(?=^\d+\. |^$)", section("The way of one weight"), re.MULTILINE | re.DOTALL
    )

    assert len(steps) == 10
    assert all(re.search(r"`qload/[\w/]+\.py:\w+", step) for step in steps)


def test_every_class_of_the_glossary_and_the_laws_exists() -> None:
    classes = {name for file in (ROOT / "qload").rglob("*.py") for name in defined(file) if name[0].isupper()}
    text = section("Glossary") + section("Laws") + section("Packages")
    named = {
        name
        for span in re.findall(r"`([^`]+)`", text)
        if "/" not in span
        for name in re.findall(r"\b[A-Z]\w*[a-z]\w*(?:\.\w+)?", span)
    }

    assert named >= {"TensorSpec", "Integers", "LayerDescription", "ShareBounds"}
    assert named <= classes


def test_a_word_stands_once_in_the_glossary() -> None:
    words = [word for words, _ in rows("Glossary") for word in words.split(", ")]

    assert len(words) == len(set(words))
    assert {"layout sentence", "digit", "code", "run", "share", "cut", "granule", "strips"} <= set(words)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES
