"""Run all rules and notes over a subject, tier by tier; a bug ends its own rule alone.

Rules about single layers or tensors run on parts of the checkpoint. Statistics for rules about values are
measured once, before the first of them. An unexpected exception becomes a finding of the rule `internal`, at
its layer or tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TypeVar, get_args

from qload.errors import ConfigError, LostRankError, StorageError
from qload.listing.report_base import INTERNAL
from qload.loader import LayerDescription
from qload.verify import notes
from qload.verify.contradictions import of_model
from qload.verify.crew import Crew, Tell
from qload.verify.disagreement import disagreements
from qload.verify.report import Finding, internal_finding
from qload.verify.rules import RULES, Rule, Tier
from qload.verify.runs import pieces_of, runs, size_of
from qload.verify.subject import Subject
from qload.verify.values import Values, measure

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
# Failures of files and machines end the run: they are no bugs of a rule.
PASSED_ON = (StorageError, ConfigError, LostRankError, MemoryError)
NOTES = (notes.architecture, notes.absences, notes.flags, notes.of_loaders, disagreements)
NOTES_OF_LAYERS = (notes.readings, notes.subnormals)


def judge(
    subject: Subject, crew: Crew, progress: Progress, last: Tier = "meaning"
) -> tuple[list[Finding], list[str]]:
    """What the rules find, rule by rule up to those of the `last` tier, and what is worth telling."""
    subject.specs, subject.prefixes, subject.account  # noqa: B018  (computed once for all runs)
    parts = runs(subject)
    sizes = [size_of(part) for part in parts]
    findings: list[Finding] = []
    tiers = get_args(Tier)
    for tier in tiers[: tiers.index(last) + 1]:
        tell: Tell = partial(progress, tier)
        if tier == "values":
            findings += _measure(subject, parts, crew, sizes, tell)
            tell = _nothing
        rules = [rule for rule in RULES if rule.tier == tier]
        each = [rule for rule in rules if rule.each]
        judged = crew.share_out(partial(_findings, parts, each), sizes, tell)
        by_rule = {
            rule.id: chain.from_iterable(column)
            for rule, column in zip(each, zip(*judged, strict=True), strict=True)
        }
        for rule in rules:
            findings += by_rule[rule.id] if rule.each else check_rule(rule, subject)
    texts: list[str] = []
    for note in NOTES:
        texts += collected("notes", partial(note, subject), findings)
    if last != "headers":
        texts += collected("notes", partial(notes.repeated, subject), findings)
        noted = crew.share_out(partial(_notes, parts), sizes, _nothing)
        texts += notes.told_once(chain.from_iterable(counted for counted, _ in noted))
        findings += chain.from_iterable(failed for _, failed in noted)
    return of_model(subject, findings), texts


def check_rule(rule: Rule, subject: Subject) -> list[Finding]:
    """Collect the findings of a rule on a subject, or on a run of one.

    After an exception a rule about single layers runs again, layer by layer and tensor by tensor: it skips
    only those that raise.
    """
    failed: list[Finding] = []
    findings = collected(rule.id, partial(rule.check, rule, subject), failed)
    if not failed:
        return findings
    if not rule.each:
        return findings + failed
    findings = []
    for name, piece in pieces_of(subject):
        check = partial(rule.check, rule, piece)
        findings += collected(rule.id, check, findings, _tensor_of(subject, name))
    alone = any(finding.rule == INTERNAL for finding in findings)
    return findings if alone else findings + failed  # it may fail only for the whole run


def collected(
    where: str, work: Callable[[], Iterable[T]], failed: list[Finding], tensor: str | None = None
) -> list[T]:
    """Collect items of `work` up to an exception, and append its finding to `failed`.

    `where`: id of the rule, or name of another part of the work.
    """
    items: list[T] = []
    try:
        items.extend(work())  # keeps what comes before an exception
    except PASSED_ON:
        raise
    except Exception as error:
        failed.append(internal_finding(where, tensor, error))
    return items


def _tensor_of(subject: Subject, name: str) -> str:
    """First tensor of the layer `name`; the name itself for a tensor."""
    layer = subject.all_layers.get(name)
    return layer.names.full(layer.specs[0].name) if isinstance(layer, LayerDescription) else name


def _measure(
    subject: Subject, parts: list[Subject], crew: Crew, sizes: list[int], tell: Tell
) -> list[Finding]:
    """Measure all bytes in one pass, for the rules of runs and of the whole.

    Rules skip tensors that could not be measured, and their layers.
    """
    measured = crew.share_out(lambda at: _measured(parts[at]), sizes, tell)
    values = Values.joined(part for part, _ in measured)
    failed = {finding.tensor or "": finding for _, findings in measured for finding in findings}
    for target in (subject, *parts):
        vars(target)["values"] = values
        if failed:
            _leave_out(target, failed)
    return list(failed.values())


def _measured(part: Subject) -> tuple[Values, list[Finding]]:
    """Measure a run; after an exception, its layers and tensors one by one."""
    failed: list[Finding] = []
    values = collected("values", partial(_measure_one, part), failed)
    if not failed:
        return values[0], []
    parts: list[Values] = []
    failed = []
    for name, piece in pieces_of(part):
        measuring = partial(_measure_one, piece)
        parts += collected("values", measuring, failed, _tensor_of(part, name))
    return Values.joined(parts), failed


def _measure_one(piece: Subject) -> list[Values]:
    return [measure(piece)]


def _leave_out(subject: Subject, failed: Mapping[str, Finding]) -> None:
    """Exclude these tensors and their layers from all rules."""
    layers = {
        prefix: layer
        for prefix, layer in subject.layers.items()
        if not isinstance(layer, LayerDescription)
        or not any(layer.names.full(spec.name) in failed for spec in layer.specs)
    }
    judged = [name for name in subject.judged if name not in failed]
    vars(subject).update(layers=layers, judged=judged)


def _nothing(done: int, total: int) -> None:
    """Nobody is told."""


def _findings(parts: list[Subject], rules: list[Rule], at: int) -> list[list[Finding]]:
    """Of one run, what each rule finds."""
    return [check_rule(rule, parts[at]) for rule in rules]


def _notes(parts: list[Subject], at: int) -> tuple[list[notes.Counted], list[Finding]]:
    """Collect notes on single layers of a run, and findings for their exceptions."""
    failed: list[Finding] = []
    counted: list[notes.Counted] = []
    for note in NOTES_OF_LAYERS:
        counted += collected("notes", partial(note, parts[at]), failed)
    return counted, failed
