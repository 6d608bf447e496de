"""All rules and notes over a subject: tier by tier, and of what is judged one by one run by run.

What rules about values need is measured once, before the first of them.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import get_args

from qload.verify import notes
from qload.verify.crew import Crew, Tell
from qload.verify.report import Finding
from qload.verify.rules import RULES, Rule, Tier
from qload.verify.runs import runs, size_of
from qload.verify.subject import Subject
from qload.verify.values import Values, measure

Progress = Callable[[str, int, int], None]


def judge(
    subject: Subject, crew: Crew, progress: Progress, last: Tier = "meaning"
) -> tuple[list[Finding], list[str]]:
    """What the rules find, rule by rule up to those of the `last` tier, and what is worth telling."""
    subject.specs, subject.prefixes  # noqa: B018  (computed once here, and not once a run)
    parts = runs(subject)
    sizes = [size_of(part) for part in parts]
    found: list[Finding] = []
    tiers = get_args(Tier)
    for tier in tiers[: tiers.index(last) + 1]:
        tell: Tell = partial(progress, tier)
        if tier == "values":
            _measure(subject, parts, crew, sizes, tell)
            tell = _nothing
        rules = [rule for rule in RULES if rule.tier == tier]
        each = [rule for rule in rules if rule.each]
        judged = crew.share_out(partial(_findings, parts, each), sizes, tell)
        by_rule = {
            rule.id: chain.from_iterable(column)
            for rule, column in zip(each, zip(*judged, strict=True), strict=True)
        }
        for rule in rules:
            found += by_rule[rule.id] if rule.each else rule.check(rule, subject)
    told = [
        *notes.architecture(subject),
        *notes.absences(subject),
        *notes.flags(subject),
        *notes.of_loaders(subject),
    ]
    if last != "headers":
        told += notes.repeated(subject)
        noted = crew.share_out(partial(_notes, parts), sizes, _nothing)
        told += notes.told_once(chain.from_iterable(noted))
    return found, told


def _measure(subject: Subject, parts: list[Subject], crew: Crew, sizes: list[int], tell: Tell) -> None:
    """The one pass over all bytes, for the rules of a run as for those of the whole."""
    values = Values.joined(crew.share_out(lambda at: measure(parts[at]), sizes, tell))
    for each in (subject, *parts):
        vars(each)["values"] = values


def _nothing(done: int, total: int) -> None:
    """Nobody is told."""


def _findings(parts: list[Subject], rules: list[Rule], at: int) -> list[list[Finding]]:
    """Of one run, what each rule finds."""
    return [list(rule.check(rule, parts[at])) for rule in rules]


def _notes(parts: list[Subject], at: int) -> list[notes.Counted]:
    """Of one run, what is told layer by layer."""
    return [*notes.readings(parts[at]), *notes.subnormals(parts[at])]
