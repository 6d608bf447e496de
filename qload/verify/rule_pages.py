"""Pages of `docs/rules` in short: what a rule says, why it matters, and what to do."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@cache
def rule_pages() -> Mapping[str, Mapping[str, str]]:
    """Rule id -> its page: `what`, `why` and `do`, in Markdown."""
    text = resources.files("qload.verify").joinpath("rules/pages.json").read_text("utf-8")
    pages: dict[str, dict[str, str]] = json.loads(text)
    return pages


@cache
def remedy_of(rule: str) -> str:
    """Remedy of a rule's page as plain text; "" for a rule without a page."""
    page = rule_pages().get(rule)
    if page is None:
        return ""
    text = LINK.sub(r"\1", page["do"]).replace("`", "").removesuffix(".")
    return text[:1].lower() + text[1:]
