"""Text of a rule: id, fault, consequence and remedy. It imports the standard library alone."""

import re
from dataclasses import dataclass
from inspect import cleandoc
from typing import Literal

Severity = Literal["error", "warning"]
Stage = Literal["headers", "values", "meaning", "any", "--against", "--logits", "--tp", "exception"]

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def join_lines(text: str) -> str:
    """Join the lines of each paragraph; items of a list and rows of a table keep a line each."""
    paragraphs = cleandoc(text).split("\n\n")
    joined = (
        "\n".join(" ".join(line.split()) for line in re.split(r"\n(?=- |\|)", paragraph))
        for paragraph in paragraphs
    )
    return "\n\n".join(joined).strip()


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
    what: str
    why: str
    do: str
    measured: str = ""
    example: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "why", "do", "measured"):
            object.__setattr__(self, name, join_lines(getattr(self, name)))
        object.__setattr__(self, "example", cleandoc(self.example))

    @property
    def remedy(self) -> str:
        """`do` as plain text in the form of a finding's remedy: lower case, without a full stop."""
        text = LINK.sub(r"\1", self.do).replace("`", "").removesuffix(".")
        return text[:1].lower() + text[1:]
