"""`inspect` and `verify`: open a checkpoint as hostile input, and tell what it is and whether it is true."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from os import PathLike, fspath
from typing import ParamSpec

from qload.detect import read_model_config
from qload.errors import (
    ArgumentError,
    ConfigError,
    QloadError,
    StorageError,
    checked,
)
from qload.listing import LayerInfo, info_of
from qload.loader import LayerDescription
from qload.parallel import ProcessGroup
from qload.verify import against as comparison
from qload.verify import parallel
from qload.verify.contradictions import of_model
from qload.verify.crew import Crew, Tell
from qload.verify.error_map import LayerMap
from qload.verify.judge import Progress, check_rule, collected, judge
from qload.verify.prompt import Prompt
from qload.verify.report import Finding, Report, finding_of, internal_finding
from qload.verify.rules import INSPECTED, Tier, zero_readings
from qload.verify.runs import runs
from qload.verify.subject import Subject
from qload.weights import Weights

P = ParamSpec("P")
# The rules that tell of what is not there, or of what belongs to something that is not there.
ELSEWHERE = (
    "missing-tensor",
    "missing-sibling",
    "architecture-missing",
    "layer-count",
    "unexplained-tensor",
    "claimed-method",
    "against-missing",
)
SHARD = (
    "this is one file of several: what it lacks may be in the others, and is not missed; name the directory, "
    "or its index, to have the whole checked"
)
REPORTED = 1024  # names of a run of layers to be reported, of most of which only headers are looked at


def _reporting(examine: Callable[P, Report]) -> Callable[P, Report]:
    """Turn a failing or replaced file, or an unexpected exception, into a finding."""

    @wraps(examine)
    def reporting(*arguments: P.args, **options: P.kwargs) -> Report:
        try:
            return examine(*arguments, **options)
        except (StorageError, ConfigError) as error:
            path = options.get("path", *arguments[:1])
            return Report(str(path), (finding_of(error),), readable=False)
        except (QloadError, MemoryError):
            raise
        except Exception as error:
            path = options.get("path", *arguments[:1])
            return Report(str(path), (internal_finding(examine.__name__, None, error),))

    return reporting


@checked
@_reporting
def inspect(path: str | PathLike[str]) -> Report:
    """What a checkpoint's layers are, from headers, `g_idx` and `qzeros` alone.

    A layer whose tensors contradict each other or the config is a finding. Nothing is raised for what
    the files hold.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import inspect
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"up.weight": torch.ones(4, 2)}, os.path.join(folder.name, "model.safetensors"))
    >>> report = inspect(folder.name)
    >>> report.verdict, [(layer.prefix, layer.format, layer.shape) for layer in report.layers]
    ('ok', [('up', 'unquantized', (4, 2))])
    >>> folder.cleanup()
    """
    with closing(Subject.open(path, settled=False)) as subject:
        if subject.weights is None or subject.errors:
            return _unreadable(subject)
        found = [finding for rule in INSPECTED for finding in check_rule(rule, subject)]
        return _report(subject, of_model(subject, found), [], Crew.of(None))


@checked
@_reporting
def verify(
    path: str | PathLike[str],
    *,
    against: str | PathLike[str] | None = None,
    tp: int | Sequence[int] | None = None,
    tier: Tier = "meaning",
    logits: Prompt | None = None,
    error_maps: bool = False,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> Report:
    """Whether a checkpoint is true: headers, then values, then meaning; `docs/rules` explains each rule.

    Nothing is raised for what the files hold. As many threads as native code may use share the layers; peak
    memory is a few pieces of some MiB for each of them.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index. Of one numbered file of several, what it lacks is
        not missed.
    against
        Another checkpoint of the same model, quantized or plain, that every layer is compared with.
    tp
        Check too that every layer can be shared among this many ranks, or among each of several numbers of
        ranks, which findings name; ArgumentError where one is less than 1, or where there is none.
    tier
        The last of "headers", "values" and "meaning" whose rules are asked; "headers" reads no weight.
    logits
        Check too that what multiplies by the weights computes what they mean: what the model runs on.
        ArgumentError for a type of model that there is no model of, for ids that are none, and where several
        processes share the work; NotEnoughMemoryError for one that is too large.
    error_maps
        Whether the report is to have a map of the errors of each layer beside `against`.
    progress
        Called with (stage, bytes that were looked at, bytes in all) as the work goes on.
    process_group
        A group of torch.distributed whose processes all call this, share the work, and get the same report.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import verify
    >>> folder = tempfile.TemporaryDirectory()
    >>> values = torch.tensor([[1.0, float("nan")]])
    >>> save_file({"up.weight": values}, os.path.join(folder.name, "model.safetensors"))
    >>> report = verify(folder.name)
    >>> report.verdict, report.findings[0].tensor
    ('findings', 'up.weight')
    >>> folder.cleanup()
    """
    worlds = parallel.world_sizes(tp)
    if logits is not None:
        _check_alone(path, logits, process_group)
    crew, tell = Crew.of(process_group), progress or _nothing
    with closing(Subject.open(path)) as subject:
        if subject.weights is None or subject.errors:
            return _unreadable(subject)
        found, told = judge(subject, crew, tell, tier)
        if worlds:
            _sort(collected("tensor-parallel", partial(parallel.check, subject, worlds), found), found, told)
        report = _report(subject, found, told, crew)
        if against is not None:
            report = _compared(report, subject, against, crew, partial(tell, "against"), error_maps)
    return report if logits is None else _with_logits(report, path, logits, against, tell)


def header_errors(subject: Subject, crew: Crew, progress: Progress) -> list[Finding]:
    """Errors that `verify(path, tier="headers")` reports of a checkpoint that is open."""
    found, _ = judge(subject, crew, progress, "headers")
    found = list(_told_of_shard(found)) if subject.shard else found
    return [finding for finding in found if finding.severity == "error"]


def _compared(
    report: Report, subject: Subject, path: str | PathLike[str], crew: Crew, tell: Tell, drawing: bool
) -> Report:
    """Extend the report by a comparison with the reference at `path`."""
    found, told, maps = list(report.findings), list(report.notes), dict[str, str]()
    with closing(Subject.open(path)) as reference:
        if reference.weights is None or reference.errors:
            return replace(report, findings=(*found, *reference.errors))
        compared = partial(comparison.check, subject, reference, crew, tell, drawing)
        for item in collected("against", compared, found):
            if isinstance(item, LayerMap):
                maps[item.layer] = item.text
            elif isinstance(item, comparison.ConfirmedReading):
                supported = f"{item.layer}.qzeros"
                found = [one for one in found if (one.rule, one.tensor) != (zero_readings.ID, supported)]
            else:
                _sort([item], found, told)
        told += [f"the reference: {note}" for note in reference.account.notes()]
        coverage = reference.account.coverage
    if subject.shard:
        found = list(_told_of_shard(found))
    return replace(
        report,
        findings=tuple(found),
        notes=tuple(told),
        error_maps=maps,
        reference_coverage=coverage,
    )


def _check_alone(path: str | PathLike[str], prompt: Prompt, group: ProcessGroup | None) -> None:
    """ArgumentError where logits cannot be had, before anything is read for long."""
    from qload.verify.logits.prompt import config_of, ids_of

    if group is not None and group.size() > 1:
        raise ArgumentError("logits", "one process, that has the whole model", f"{group.size()} of a group")
    ids_of(prompt, config_of(read_model_config(path)))


def _with_logits(
    report: Report,
    path: str | PathLike[str],
    prompt: Prompt,
    against: str | PathLike[str] | None,
    tell: Progress,
) -> Report:
    """The report, with what the model's layers and logits show."""
    if report.coverage is not None and report.coverage.unread:
        why = "logits were not compared: some tensors of the model are not read"
        return replace(report, notes=(*report.notes, why))
    from qload.verify.logits import check_logits

    made = check_logits(fspath(path), prompt, against, tell)
    return replace(
        report,
        findings=(*report.findings, *made.findings),
        notes=(*report.notes, *made.notes),
        logits=made.numbers,
    )


def _sort(items: Iterable[Finding | str], findings: list[Finding], notes: list[str]) -> None:
    for item in items:
        if isinstance(item, Finding):
            findings.append(item)
        else:
            notes.append(item)


def _nothing(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress."""


def _unreadable(subject: Subject) -> Report:
    """Report of a checkpoint that cannot be opened; an unsupported format counts as readable."""
    return Report(subject.path, tuple(subject.errors), tuple(subject.notes), readable=subject.is_unsupported)


def _told_of_shard(findings: list[Finding]) -> Iterator[Finding]:
    """Of one file of several what it says itself: what it lacks may be in the others."""
    for finding in findings:
        beyond = finding.rule == "layer-count" and finding.severity == "warning"
        if finding.rule not in ELSEWHERE or beyond:
            yield finding


def _info(weights: Weights, layer: LayerDescription) -> list[LayerInfo]:
    return [info_of(weights, layer)]


def _report(subject: Subject, found: list[Finding], told: list[str], crew: Crew) -> Report:
    assert subject.weights is not None
    weights, parts = subject.weights, runs(subject, REPORTED)

    def report_layers(at: int) -> tuple[list[LayerInfo], list[Finding]]:
        failed: list[Finding] = []
        listed: list[LayerInfo] = []
        for layer in parts[at].described():
            name = layer.names.full(layer.specs[0].name)
            listed += collected("layers", partial(_info, weights, layer), failed, name)
        return listed, failed

    if subject.shard:
        found = list(_told_of_shard(found))
        told = [SHARD, *told]
    layers = crew.share_out(report_layers, [0] * len(parts), lambda *_: None)
    return Report(
        path=subject.path,
        findings=(*found, *chain.from_iterable(failed for _, failed in layers)),
        notes=(*subject.notes, *told, *subject.account.notes()),
        layers=tuple(chain.from_iterable(listed for listed, _ in layers)),
        claims={} if subject.claims is None else subject.claims.facts(),
        coverage=subject.account.coverage,
    )
