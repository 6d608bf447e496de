"""Texts of all rules, of findings and exceptions, from `rules.md`, by the standard library alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning"]
Stage = Literal[
    "headers", "values", "meaning", "any", "--against", "--logits", "--target", "--tp", "exception"
]

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PAGES = Path(__file__).with_name("rules.md")
PAGE = re.compile(
    r"# (?P<id>[a-z0-9-]+)\n\n"
    r"(?P<stage>\S+), (?P<severity>\w+)\n\n"
    r"(?P<what>.+?)"
    r"(\n\n\*\*Measured\.\*\* (?P<measured>.+?))?"
    r"\n\n\*\*Why it matters\.\*\* (?P<why>.+?)"
    r"\n\n\*\*Remedy\.\*\* (?P<do>.+?)"
    r"(\n\n```\n(?P<example>.+?)\n```)?",
    re.DOTALL,
)


def join_lines(text: str) -> str:
    """Join the lines of each paragraph; items of a list and rows of a table keep a line each."""
    return "\n\n".join(
        "\n".join(" ".join(line.split()) for line in re.split(r"\n(?=- |\|)", paragraph))
        for paragraph in text.split("\n\n")
    )


@dataclass(frozen=True, kw_only=True)
class RuleText:
    """Text of one rule: the source of its page and of its entry in HTML and SARIF reports.

    Attributes
    ----------
    id
        Stable id in findings, errors and `--accept`.
    stage
        Tier or option of `verify` that applies the rule; "any" for every tier, "exception" for ids of
        exceptions without a finding.
    severity
        Usual severity of a finding.
    what, why, do
        Markdown: the fault, its consequence, and the remedy.
    measured
        Markdown, on the page alone: figures behind the thresholds; "" for none.
    example
        A message as printed, on the page alone; "" for none.
    """

    id: str
    stage: Stage
    severity: Severity = "error"
    what: str = ""
    why: str = ""
    do: str = ""
    measured: str = ""
    example: str = ""

    @property
    def remedy(self) -> str:
        """`do` as plain text in the form of a finding's remedy: lower case, without a full stop."""
        text = LINK.sub(r"\1", self.do).replace("`", "").removesuffix(".")
        return text[:1].lower() + text[1:]


def parse_rule(page: str) -> RuleText:
    """Parse one section of `rules.md`; ValueError for a section of another form."""
    match = PAGE.fullmatch(page.strip())
    if match is None:
        raise ValueError(f"not the page of a rule: {page:.80}")
    parts: dict[str, Any] = match.groupdict(default="")
    return RuleText(**parts | {name: join_lines(parts[name]) for name in ("what", "why", "do", "measured")})


@cache
def rule_texts() -> Mapping[str, RuleText]:
    """Return rule id -> text, of all findings and exceptions, sorted by id."""
    pages = re.split(r"^(?=# )", PAGES.read_text("utf-8"), flags=re.MULTILINE)
    return {text.id: text for text in map(parse_rule, filter(None, pages))}


@cache
def rule_pages() -> Mapping[str, Mapping[str, str]]:
    """Return rule id -> its page in Markdown, `what`, `why` and `do`, of all rules of findings."""
    return {
        rule: {"what": text.what, "why": text.why, "do": text.do}
        for rule, text in rule_texts().items()
        if text.stage != "exception"
    }
