"""Run all rules and notes on a checkpoint, tier by tier; a bug ends its own rule alone.

Rules of single layers or tensors run on parts of the checkpoint. One pass measures all values before the
first rule of values. An unexpected exception becomes a finding of the rule `internal`, at its layer or
tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from itertools import chain
from typing import TypeVar, get_args

from qload.checkpoint.report_base import INTERNAL
from qload.errors import ConfigError, LostRankError, QloadError, StorageError
from qload.loader import LayerDescription
from qload.verify import notes
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding, internal_finding
from qload.verify.rules import RULES, Rule, Tier
from qload.verify.rules.rule import merge_contradictions
from qload.verify.values import Values, measure
from qload.verify.workers import ByteProgress, Workers

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)
NAMES_PER_PART = 64  # few enough for many threads and ranks, many enough to be worth a task
# Failures of files and machines end the run: they are no bugs of a rule.
PASSED_ON = (StorageError, ConfigError, LostRankError, MemoryError)
NOTES = (
    notes.drafts,
    notes.architecture,
    notes.missing_by_design,
    notes.contradicted_settings,
    notes.loader_notes,
    notes.unmerged_adapters,
    notes.contradicted_ties,
    notes.unlisted_plain_layers,
    notes.useless_patterns,
    notes.unknown_modules,
)
NOTES_OF_LAYERS = (notes.zero_point_readings, notes.subnormals)


def run_rules(
    checkpoint: VerifiedCheckpoint, workers: Workers, progress: Progress, last: Tier
) -> tuple[list[Finding], list[str]]:
    """Return the findings of all rules up to those of the `last` tier, rule by rule, and all notes."""
    checkpoint.specs, checkpoint.prefixes, checkpoint.account  # noqa: B018  (computed once for all parts)
    parts = split(checkpoint)
    sizes = [part_bytes(part) for part in parts]
    findings: list[Finding] = []
    tiers = get_args(Tier)
    for tier in tiers[: tiers.index(last) + 1]:
        of_tier: ByteProgress = partial(progress, tier)
        if tier == "values":
            findings += _measure(checkpoint, parts, workers, sizes, of_tier)
            of_tier = _ignore_progress
        rules = [rule for rule in RULES if rule.tier == tier]
        of_parts = [rule for rule in rules if rule.each]
        by_part = workers.run(partial(_findings, parts, of_parts), sizes, of_tier)
        by_rule = {
            rule.id: chain.from_iterable(column)
            for rule, column in zip(of_parts, zip(*by_part, strict=True), strict=True)
        }
        for rule in rules:
            findings += by_rule[rule.id] if rule.each else check_rule(rule, checkpoint)
    texts: list[str] = []
    for note in NOTES:
        texts += collect("notes", partial(note, checkpoint), findings)
    if last != "headers":
        texts += collect("notes", partial(notes.repeated_layer_note, checkpoint), findings)
        noted = workers.run(partial(_notes, parts), sizes, _ignore_progress)
        texts += notes.merge_counts(chain.from_iterable(counted for counted, _ in noted))
        findings += chain.from_iterable(failed for _, failed in noted)
    return merge_contradictions(checkpoint, findings), texts


def check_rule(rule: Rule, checkpoint: VerifiedCheckpoint) -> list[Finding]:
    """Return the findings of a rule on a checkpoint or a part of it.

    After an exception a rule of single layers runs again, layer by layer and tensor by tensor: it skips only
    those with an exception.
    """
    failed: list[Finding] = []
    findings = collect(rule.id, partial(rule.check, rule, checkpoint), failed)
    if not failed:
        return findings
    if not rule.each:
        return findings + failed
    findings = []
    for name, single in split_fully(checkpoint):
        check = partial(rule.check, rule, single)
        findings += collect(rule.id, check, findings, _tensor_of(checkpoint, name))
    alone = any(finding.rule == INTERNAL for finding in findings)
    return findings if alone else findings + failed  # it may fail only for the whole part


def collect(
    where: str, work: Callable[[], Iterable[T]], failed: list[Finding], tensor: str | None = None
) -> list[T]:
    """Collect the items of `work` up to an exception, and append its finding to `failed`.

    `where`: id of the rule, or name of another part of the work.
    """
    items: list[T] = []
    try:
        items.extend(work())  # keeps the items before an exception
    except PASSED_ON:
        raise
    except Exception as error:
        failed.append(internal_finding(where, tensor, error))
    return items


def split(checkpoint: VerifiedCheckpoint, size: int = NAMES_PER_PART) -> list[VerifiedCheckpoint]:
    """Split a checkpoint into parts of `size` tensor names each, with their layers, in order.

    Findings of all parts have the order of findings of the whole. A layer is in the part of its first name.
    """
    names, prefixes, readable = checkpoint.names, checkpoint.prefixes, {*checkpoint.readable_names}
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        first.setdefault(prefixes[name], at // size)
    count = max(1, -(-len(names) // size))
    layers: list[dict[str, LayerDescription | QloadError]] = [{} for _ in range(count)]
    for prefix, layer in checkpoint.all_layers.items():
        layers[first[prefix]][prefix] = layer
    parts = []
    for at in range(count):
        part = copy(checkpoint)
        mine = names[at * size : (at + 1) * size]
        vars(part).update(
            names=mine, layers=layers[at], readable_names=[name for name in mine if name in readable]
        )
        parts.append(part)
    return parts


def split_fully(part: VerifiedCheckpoint) -> Iterator[tuple[str, VerifiedCheckpoint]]:
    """Yield each layer and then each tensor of a part as a part of its own, with its name."""
    for prefix, layer in part.layers.items():
        single = copy(part)
        vars(single).update(names=[], readable_names=[], layers={prefix: layer})
        yield prefix, single
    for name in part.names:
        single = copy(part)
        readable = [name] if name in part.readable_names else []
        vars(single).update(names=[name], readable_names=readable, layers={})
        yield name, single


def part_bytes(part: VerifiedCheckpoint) -> int:
    """Return the bytes of a part's tensors."""
    storage = part.weights.storage
    return sum(storage.info(name).nbytes for name in part.names)


def _tensor_of(checkpoint: VerifiedCheckpoint, name: str) -> str:
    """Return the first tensor of the layer `name`; the name itself for a tensor."""
    layer = checkpoint.all_layers.get(name)
    return layer.names.full(layer.specs[0].name) if isinstance(layer, LayerDescription) else name


def _measure(
    checkpoint: VerifiedCheckpoint,
    parts: list[VerifiedCheckpoint],
    workers: Workers,
    sizes: list[int],
    progress: ByteProgress,
) -> list[Finding]:
    """Measure all bytes in one pass, for the rules of parts and of the whole.

    Rules skip tensors without measurements, and their layers.
    """
    measured = workers.run(lambda at: _measure_part(parts[at]), sizes, progress)
    values = Values.joined(part for part, _ in measured)
    failed = {finding.tensor or "": finding for _, findings in measured for finding in findings}
    for target in (checkpoint, *parts):
        vars(target)["values"] = values
        if failed:
            _exclude(target, failed)
    return list(failed.values())


def _measure_part(part: VerifiedCheckpoint) -> tuple[Values, list[Finding]]:
    """Measure a part; after an exception, its layers and tensors one by one."""
    failed: list[Finding] = []
    values = collect("values", partial(_measure_single, part), failed)
    if not failed:
        return values[0], []
    measured: list[Values] = []
    failed = []
    for name, single in split_fully(part):
        measured += collect("values", partial(_measure_single, single), failed, _tensor_of(part, name))
    return Values.joined(measured), failed


def _measure_single(part: VerifiedCheckpoint) -> list[Values]:
    return [measure(part)]


def _exclude(checkpoint: VerifiedCheckpoint, failed: Mapping[str, Finding]) -> None:
    """Exclude these tensors and their layers from all rules."""
    layers = {
        prefix: layer
        for prefix, layer in checkpoint.layers.items()
        if not isinstance(layer, LayerDescription)
        or not any(layer.names.full(spec.name) in failed for spec in layer.specs)
    }
    readable = [name for name in checkpoint.readable_names if name not in failed]
    vars(checkpoint).update(layers=layers, readable_names=readable)


def _ignore_progress(done: int, total: int) -> None:
    """Ignore progress that the first pass already reported."""


def _findings(parts: list[VerifiedCheckpoint], rules: list[Rule], at: int) -> list[list[Finding]]:
    """Return the findings of each rule in one part."""
    return [check_rule(rule, parts[at]) for rule in rules]


def _notes(parts: list[VerifiedCheckpoint], at: int) -> tuple[list[notes.Counted], list[Finding]]:
    """Return counts for notes on single layers of a part, and findings for their exceptions."""
    failed: list[Finding] = []
    counted: list[notes.Counted] = []
    for note in NOTES_OF_LAYERS:
        counted += collect("notes", partial(note, parts[at]), failed)
    return counted, failed
