"""`inspect` and `verify`: open a checkpoint as hostile input, describe its layers, and check it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import chain
from os import PathLike, fspath
from typing import ParamSpec

from qload.architecture.names import usual_split
from qload.checkpoint import LayerInfo, info_of
from qload.checkpoint.report_base import UNSUPPORTED
from qload.errors import ArgumentError, ConfigError, CutError, DivideError, QloadError, StorageError, checked
from qload.loader import Heads, LayerDescription, Part, Split
from qload.loader.sharding import share
from qload.parallel import ProcessGroup, Rank
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.notes import drafts
from qload.verify.report import Finding, Prompt, Report, finding_of, internal_finding
from qload.verify.rules import INSPECTED, Tier
from qload.verify.rules.rule import merge_contradictions
from qload.verify.run_rules import Progress, check_rule, collect, run_rules, split
from qload.verify.workers import ByteProgress, Workers
from qload.weights import Weights


def world_sizes(tp: int | Sequence[int] | None) -> Sequence[int]:
    """Return the numbers of ranks, each once; ArgumentError for a number below 1, or for none."""
    if tp is None:
        return ()
    sizes = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not sizes or min(sizes) < 1:
        raise ArgumentError("tp", "at least 1", str(tp))
    return sizes


def check_ranks(checkpoint: VerifiedCheckpoint, worlds: Sequence[int]) -> Iterator[Finding | str]:
    """Yield a finding for each layer and number of ranks without its usual split, and a note on other layers.

    The remedy names the numbers of ranks that suit all layers. The note counts layers without a usual split
    that can be split neither by outputs nor by inputs. For a known type of model, attention heads stay whole.
    """
    cuts = [cut for layer in checkpoint.described() if (cut := _usual_cut(checkpoint, layer)) is not None]
    refused = {ranks: [(cut, error) for cut in cuts if (error := cut.refusal(ranks))] for ranks in worlds}
    lawful = _lawful_ranks(cuts) if any(refused.values()) else None
    for ranks in worlds:
        for _, error in refused[ranks]:
            finding = finding_of(error)
            hint = error.hint.partition("remedy   ")[2] if isinstance(error, DivideError) else ""
            texts = ["" if lawful is None else lawful.text(), hint]
            yield replace(
                finding,
                remedy="; or ".join(filter(None, texts)) or finding.remedy,
                cause=f"{finding.cause} ({ranks} ranks)",
            )
        unusual = [
            layer.prefix
            for layer in checkpoint.described()
            if layer.K > 1
            and _usual_cut(checkpoint, layer) is None
            and all(_Cut(layer, split).refusal(ranks) for split in ("N", "K"))
        ]
        if unusual:
            names = ", ".join(unusual[:4])
            more = "another layer" if len(unusual) == 1 else f"{len(unusual)} other layers"
            yield f"for {ranks} ranks, {more} can be split neither by outputs nor by inputs: {names}"


@dataclass(frozen=True)
class _Cut:
    """Usual split of a layer over ranks: along `split`, or by whole `heads` of attention."""

    layer: LayerDescription
    split: Split
    heads: Heads | None = None

    def refusal(self, ranks: int) -> CutError | DivideError | None:
        """Return the error of a split over so many ranks; few heads of keys and values are repeated."""
        try:
            parts = [Part(self.layer.prefix)]
            if self.heads is not None:
                parts = self.heads.parts([(self.layer.prefix, self.layer.N)], ranks)
            for part in parts:
                share(self.layer, part, self.split, Rank(0, ranks), joined=part is not parts[-1])
        except (CutError, DivideError) as error:
            return error
        return None


def _usual_cut(checkpoint: VerifiedCheckpoint, layer: LayerDescription) -> _Cut | None:
    """Return the usual split of a layer; None without a usual name."""
    heads = checkpoint.architecture.heads(layer.prefix) if checkpoint.architecture else None
    split = "N" if heads is not None else usual_split(layer.prefix)
    return None if split is None else _Cut(layer, split, heads)


def _lawful_ranks(cuts: Sequence[_Cut]) -> LawfulRanks | None:
    """Return the numbers of ranks that suit all layers; equal layers are checked once."""
    unique = {(id(cut.layer.cuts), cut.split, cut.heads): cut for cut in reversed(cuts)}
    return lawful_ranks(
        {
            cut.layer.prefix: [ranks for ranks in CANDIDATES if cut.refusal(ranks) is None]
            for cut in reversed(unique.values())
        }
    )


P = ParamSpec("P")
# Rules about missing tensors, or about tensors that belong to missing ones.
RULES_OF_MISSING = (
    "missing-tensor",
    "missing-sibling",
    "architecture-missing",
    "layer-count",
    "unexplained-tensor",
    "claimed-method",
    "against-missing",
)
SHARD_NOTE = (
    "this is one file of several: other files may contain its missing tensors, and these are not reported; "
    "name the directory or the index to check the whole checkpoint"
)
NAMES_PER_REPORT_PART = 1024  # of a part whose layers are described; most need headers alone


def _reporting(function: Callable[P, Report]) -> Callable[P, Report]:
    """Turn a failing or replaced file, or an unexpected exception, into a finding."""

    @wraps(function)
    def reporting(*arguments: P.args, **options: P.kwargs) -> Report:
        try:
            return function(*arguments, **options)
        except (StorageError, ConfigError) as error:
            path = options.get("path", *arguments[:1])
            return Report(str(path), (finding_of(error),), readable=False)
        except (QloadError, MemoryError):
            raise
        except Exception as error:
            path = options.get("path", *arguments[:1])
            return Report(str(path), (internal_finding(function.__name__, None, error),))

    return reporting


@checked
@_reporting
def inspect(path: str | PathLike[str]) -> Report:
    """Describe a checkpoint's layers, from headers, `g_idx` and `qzeros` alone.

    A layer whose tensors contradict each other or the config is a finding. No contents of the files raise an
    exception.

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
    with VerifiedCheckpoint.open(path, collect=True, settled=False) as checkpoint:
        if not checkpoint.is_readable:
            return _unreadable(checkpoint)
        findings = [finding for rule in INSPECTED for finding in check_rule(rule, checkpoint)]
        noted = collect("notes", partial(drafts, checkpoint), findings)
        return _report(checkpoint, merge_contradictions(checkpoint, findings), noted, Workers.of(None))


@checked
@_reporting
def verify(
    path: str | PathLike[str],
    *,
    against: str | PathLike[str] | None = None,
    target_model: str | PathLike[str] | None = None,
    tp: int | Sequence[int] | None = None,
    tier: Tier = "meaning",
    logits: Prompt | None = None,
    error_maps: bool = False,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> Report:
    """Check a checkpoint: headers, then values, then meaning. The documentation has a page for each rule.

    No contents of the files raise an exception. As many threads as native code may use share the layers; peak
    memory is a few pieces of some MiB for each thread.

    Parameters
    ----------
    path
        A safetensors file, a directory, or a sharded index. For one numbered file of several, missing tensors
        are not reported.
    against
        Reference for a comparison of every layer: another checkpoint of the same model, quantized or plain.
    target_model
        Target of a draft model for speculative decoding: also check that they belong together, by headers,
        configs and maps of vocabularies.
    tp
        Also check that every layer can be shared among this many ranks, or among each of several numbers of
        ranks; ArgumentError for a number below 1, or for no number.
    tier
        Last tier to check: "headers", "values" or "meaning"; "headers" reads no weight.
    logits
        Also check that kernels compute the products of the dequantized weights, on this prompt.
        ArgumentError for a type without a model, for invalid ids, and for a group of several processes;
        NotEnoughMemoryError for a model that is too large.
    error_maps
        True for a map of the errors of each layer, compared with `against`, in the report.
    progress
        Called with (stage, bytes done, bytes in all).
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
    worlds = world_sizes(tp)
    if logits is not None and process_group is not None and process_group.size() > 1:
        got = f"{process_group.size()} of a group"
        raise ArgumentError("logits", "one process, that has the whole model", got)
    workers, report_progress = Workers.of(process_group), progress or (lambda *_: None)
    with VerifiedCheckpoint.open(path, collect=True) as checkpoint:
        if not checkpoint.is_readable:
            return _unreadable(checkpoint)
        if logits is not None:
            _check_prompt(checkpoint, logits)
        findings, notes = run_rules(checkpoint, workers, report_progress, tier)
        if worlds:
            check = partial(check_ranks, checkpoint, worlds)
            _add_items(collect("tensor-parallel", check, findings), findings, notes)
        if target_model is not None:
            _add_items(
                collect("target", partial(_compare_target, checkpoint, target_model), findings),
                findings,
                notes,
            )
        report = _report(checkpoint, findings, notes, workers)
        if against is not None:
            of_stage = partial(report_progress, "against")
            report = _add_comparison(report, checkpoint, against, workers, of_stage, error_maps)
    return report if logits is None else _add_logits(report, path, logits, against, report_progress)


def header_errors(checkpoint: VerifiedCheckpoint, workers: Workers, progress: Progress) -> list[Finding]:
    """Return the errors that `verify(path, tier="headers")` reports for an open checkpoint."""
    findings, _ = run_rules(checkpoint, workers, progress, "headers")
    findings = list(_without_missing(findings)) if checkpoint.is_shard else findings
    return [finding for finding in findings if finding.severity == "error"]


def _add_comparison(
    report: Report,
    checkpoint: VerifiedCheckpoint,
    path: str | PathLike[str],
    workers: Workers,
    progress: ByteProgress,
    draw: bool,
) -> Report:
    """Extend the report by a comparison with the reference at `path`."""
    from qload.verify.against import ConfirmedReading, check_against
    from qload.verify.comparison import LayerMap

    findings, notes, maps = list(report.findings), list(report.notes), dict[str, str]()
    with VerifiedCheckpoint.open(path, collect=True) as reference:
        if not reference.is_readable:
            return replace(report, findings=(*findings, *reference.findings))
        compare = partial(check_against, checkpoint, reference, workers, progress, draw)
        for item in collect("against", compare, findings):
            if isinstance(item, LayerMap):
                maps[item.layer] = item.text
            elif isinstance(item, ConfirmedReading):
                confirmed = ("zero-point-reading", f"{item.layer}.qzeros")
                findings = [finding for finding in findings if (finding.rule, finding.tensor) != confirmed]
            else:
                _add_items([item], findings, notes)
        notes += [f"the reference: {note}" for note in reference.account.notes()]
        coverage = reference.account.coverage
    if checkpoint.is_shard:
        findings = list(_without_missing(findings))
    return replace(
        report,
        findings=tuple(findings),
        notes=tuple(notes),
        error_maps=maps,
        reference_coverage=coverage,
    )


def _compare_target(checkpoint: VerifiedCheckpoint, path: str | PathLike[str]) -> Iterator[Finding | str]:
    """Yield findings and notes of a comparison of a draft with its target at `path`."""
    from qload.verify.target import check_target

    with VerifiedCheckpoint.open(path, collect=True, settled=False) as target:
        yield from check_target(checkpoint, target) if target.is_readable else target.findings


def _check_prompt(checkpoint: VerifiedCheckpoint, prompt: Prompt) -> None:
    """Raise ArgumentError if logits cannot be computed, before any long read."""
    from qload.verify.logits.compared_model import ModelPrompt

    ModelPrompt.of(prompt, checkpoint.path, checkpoint.model_config)


def _add_logits(
    report: Report,
    path: str | PathLike[str],
    prompt: Prompt,
    against: str | PathLike[str] | None,
    progress: Progress,
) -> Report:
    """Extend the report by findings about the model's layers and logits."""
    if report.coverage is not None and report.coverage.unread:
        why = "logits were not compared: some tensors of the model are not read"
        return replace(report, notes=(*report.notes, why))
    from qload.verify.logits.logit_check import check_logits

    result = check_logits(fspath(path), prompt, against, progress)
    return replace(
        report,
        findings=(*report.findings, *result.findings),
        notes=(*report.notes, *result.notes),
        logits=result.numbers,
    )


def _add_items(items: Iterable[Finding | str], findings: list[Finding], notes: list[str]) -> None:
    for item in items:
        if isinstance(item, Finding):
            findings.append(item)
        else:
            notes.append(item)


def _unreadable(checkpoint: VerifiedCheckpoint) -> Report:
    """Return the report of a checkpoint that cannot be opened; an unsupported format counts as readable."""
    errors = checkpoint.findings
    unsupported = bool(errors) and all(error.rule == UNSUPPORTED for error in errors)
    return Report(checkpoint.path, errors, tuple(checkpoint.notes), readable=unsupported)


def _without_missing(findings: list[Finding]) -> Iterator[Finding]:
    """Drop findings about missing tensors, for one file of several: other files may contain them."""
    for finding in findings:
        beyond = finding.rule == "layer-count" and finding.severity == "warning"
        if finding.rule not in RULES_OF_MISSING or beyond:
            yield finding


def _info(weights: Weights, layer: LayerDescription) -> list[LayerInfo]:
    return [info_of(weights, layer)]


def _report(
    checkpoint: VerifiedCheckpoint, findings: list[Finding], notes: list[str], workers: Workers
) -> Report:
    weights, parts = checkpoint.weights, split(checkpoint, NAMES_PER_REPORT_PART)

    def describe_part(at: int) -> tuple[list[LayerInfo], list[Finding]]:
        failed: list[Finding] = []
        infos: list[LayerInfo] = []
        for layer in parts[at].described():
            name = layer.names.full(layer.specs[0].name)
            infos += collect("layers", partial(_info, weights, layer), failed, name)
        return infos, failed

    if checkpoint.is_shard:
        findings = list(_without_missing(findings))
        notes = [SHARD_NOTE, *notes]
    layers = workers.run(describe_part, [0] * len(parts), lambda *_: None)
    return Report(
        path=checkpoint.path,
        findings=(*findings, *chain.from_iterable(failed for _, failed in layers)),
        notes=(*checkpoint.notes, *notes, *checkpoint.account.notes()),
        layers=tuple(chain.from_iterable(infos for infos, _ in layers)),
        claims={} if checkpoint.claims is None else checkpoint.claims.facts(),
        coverage=checkpoint.account.coverage,
    )
