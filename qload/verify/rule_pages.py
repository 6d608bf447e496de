"""Texts of all rules, for HTML pages, SARIF logs and `--accept`."""

from collections.abc import Mapping
from functools import cache

from qload.errors.rule_text import RuleText
from qload.errors.rules import ERROR_RULES
from qload.verify.against import AGAINST_MISSING, AGAINST_SHAPE, AGAINST_VALUE
from qload.verify.logits import AGAINST_OUTPUT, KERNEL_PRODUCT
from qload.verify.report import INTERNAL_RULE
from qload.verify.rules import RULES


@cache
def rule_texts() -> Mapping[str, RuleText]:
    """Return rule id -> text, of all findings and exceptions, sorted by id."""
    checked = (rule.text for rule in RULES if rule.text.what)
    compared = (AGAINST_MISSING, AGAINST_SHAPE, AGAINST_VALUE, AGAINST_OUTPUT, KERNEL_PRODUCT)
    texts = {text.id: text for text in (*ERROR_RULES.values(), *checked, *compared, INTERNAL_RULE)}
    return dict(sorted(texts.items()))


@cache
def rule_pages() -> Mapping[str, Mapping[str, str]]:
    """Return rule id -> its page in Markdown, `what`, `why` and `do`, of all rules of findings."""
    return {
        rule: {"what": text.what, "why": text.why, "do": text.do}
        for rule, text in rule_texts().items()
        if text.stage != "exception"
    }
