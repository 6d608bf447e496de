"""Pages of the documentation: links, anchors, public names, rules, navigation, length."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import qload
from tests.paths import ROOT
from tests.rule_pages import write_pages

write_pages()  # generated, and absent from the repository
PATTERNS = ("*.md", "csrc/*.md", "docs/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
RULES = ROOT / "docs" / "rules"
README = (RULES / "README.md").read_text()
CONFIG = (ROOT / "mkdocs.yml").read_text()
MAX_ENTRIES, MAX_WORDS, MAX_LAB_WORDS = 8, 24_000, 8_000


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return the text of a page without code, because brackets in code are not links."""
    return re.sub(r"^```.*?^```$|^    .*$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page, one for each heading."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()) for title in titles]
    return {re.sub(r"[\s-]+", "-", title.strip()) for title in plain}


def broken(page: Path, link: str) -> str | None:
    """Reason for a broken link, or None."""
    target, _, anchor = link.partition("#")
    if re.match(r"https?:", target):
        return None  # without a network, no check
    place = (page.parent / target).resolve() if target else page
    if not place.is_relative_to(ROOT) or not place.exists():
        return "there is no such file"
    if place.is_dir():
        return None if (place / "README.md").is_file() else "a folder without a README.md"
    return f"no heading #{anchor}" if anchor and anchor not in anchors(place) else None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))

    assert {link: why for link in links if (why := broken(page, link))} == {}


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("nowhere.md", "there is no such file"),
        ("../qload", "a folder without a README.md"),
        ("../../outside.md", "there is no such file"),
        ("architecture.md#nothing", "no heading #nothing"),
        ("architecture.md#the-way-of-one-weight", None),
        ("rules", None),
        ("#packages", None),
    ],
)
def test_a_broken_link_is_seen(link: str, why: str | None) -> None:
    assert broken(ROOT / "docs" / "architecture.md", link) == why


def test_every_public_name_stands_on_one_page_of_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    named = re.findall(r"^::: (qload\.\w+)$", text, re.MULTILINE)

    public = [*(f"qload.{each}" for each in qload.__all__), "qload.methods", "qload.models", "qload.testing"]
    missing, twice = sorted({*public} - {*named}), sorted({each for each in named if named.count(each) > 1})

    assert not missing, f"add a line `::: NAME` to a page of docs/api for each of {missing}"
    assert not twice, f"on two pages of docs/api: {twice}"
    assert not {*named} - {*public}, f"not public, but in docs/api: {sorted({*named} - {*public})}"


def test_every_rule_stands_in_the_list_of_rules() -> None:
    listed = {
        rule: (tier, severity)
        for tier, severity, rules in re.findall(
            r"^\| ([^|]*\w.*?) \| (\w+) \| (\[.*) \|$", README, re.MULTILINE
        )
        for rule in re.findall(r"\[([\w-]+)\]\(\1\.md\)", rules)
    }
    pages = {page.stem: page.read_text() for page in RULES.glob("*.md") if page.name != "README.md"}

    assert listed.keys() == pages.keys()
    for rule, (tier, severity) in listed.items():
        assert pages[rule].startswith(
            (f"# {rule}\n\nTier: {tier}, {severity}\n", f"# {rule}\n\n{tier}, {severity}\n")
        )


def test_the_site_asks_no_network_for_anything_and_claims_no_address() -> None:
    assert "://" not in CONFIG
    assert re.search(r"^  font: false", CONFIG, re.MULTILINE)
    assert not re.search(r"^(site_url|repo_url|edit_uri):", CONFIG, re.MULTILINE)


def test_every_page_has_a_place_in_the_site() -> None:
    listed = set(re.findall(r"^ +- (?:\w+: )?([\w./-]+\.md)$", CONFIG, re.MULTILINE))
    there = {name(page) for page in PAGES if page.parent != RULES or page.name == "README.md"}

    assert listed == there


def groups(entries: list[Any]) -> Iterator[list[Any]]:
    """Each list of entries in the navigation, from the outermost on."""
    yield entries
    for entry in entries:
        for inner in entry.values() if isinstance(entry, dict) else ():
            if isinstance(inner, list):
                yield from groups(inner)


def test_a_group_of_the_navigation_has_at_most_eight_entries() -> None:
    sizes = [len(group) for group in groups(yaml.safe_load(CONFIG)["nav"])]

    assert max(sizes) <= MAX_ENTRIES, sizes


def test_pages_stay_short() -> None:
    """Check page lengths, without the generated pages of docs/api and docs/rules, scoreboard and types."""
    words = Counter[str]()
    printed = {ROOT / "docs" / "conformance" / "scoreboard.md", ROOT / "docs" / "types.md"}
    for page in {*(ROOT / "docs").rglob("*.md")} - printed:
        folder = page.relative_to(ROOT / "docs").parts[0]
        words[folder if folder in ("api", "lab", "rules") else "others"] += len(page.read_text().split())

    assert words["lab"] <= MAX_LAB_WORDS
    assert words["others"] <= MAX_WORDS
