"""The pages of docs/rules in short, as the package carries them."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources


@cache
def rule_pages() -> Mapping[str, Mapping[str, str]]:
    """By the rule's id: `what` it says, `why` it matters and what to `do`, each in Markdown."""
    text = resources.files("qload.verify.rules").joinpath("pages.json").read_text("utf-8")
    pages: dict[str, dict[str, str]] = json.loads(text)
    return pages
