"""`convert`: a checkpoint in another format, proven to mean the same by reading back what was written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

from qload.conversion.asked import AskedTarget
from qload.conversion.beside import config_files, copied_files, dumped
from qload.conversion.planned import Planned, planned
from qload.conversion.report import Conversion, ConvertedLayer
from qload.conversion.shards import INDEX, OutputFile, index_of, shards_of
from qload.conversion.source import format_of, source_folder
from qload.conversion.targets import OLDER_NAMES, TARGETS
from qload.conversion.write import Progress
from qload.conversion.written import SHARD_SIZE, NewCheckpoint, nothing, of_checkpoint, target_of
from qload.diff import LayerDiff, diff
from qload.errors import ArgumentError, checked
from qload.listing.report_base import INTERNAL
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.parallel import ProcessGroup
from qload.verify.crew import Crew
from qload.verify.examine import header_errors
from qload.verify.report import Finding
from qload.verify.rule_pages import rule_pages
from qload.verify.subject import Subject


@checked
def convert(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    to: str,
    keep: Sequence[str] = (),
    rounding: bool = False,
    accept: Sequence[str] = (),
    shard_size: int = SHARD_SIZE,
    nonfinite: Nonfinite = "error",
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> Conversion:
    """Write a checkpoint in another format: the same weights, bit for bit, and its config and side files.

    The header tier of `verify` runs first, and its errors refuse the checkpoint. Then every layer is asked,
    and a target that cannot say one refuses them all before a byte is written. What was written is then read
    back through its own config and compared with what was read, layer by layer, and only then has the folder
    its name. A run that was interrupted goes on where it was, file by file. What is plain already stays as it
    is stored; nothing is quantized. UnreadTensorsError for a tensor in a form that no format reads; such a
    tensor is never copied.

    Parameters
    ----------
    path
        Safetensors files, a directory, or a sharded index.
    folder
        Which is made; ArgumentError where it has anything in it, or the disk too little space.
    to
        "gptq" (zero points stored minus one), "gptq_v2", "awq", "marlin_checkpoint", "marlin_24",
        "compressed-tensors" (pack-quantized); "fp8" (FP8 of any dialect, and plain weights that it says to
        the bit, as compressed-tensors' float-quantized); or "float32", "float16", "bfloat16": dequantized.
        "marlin" is the older name of "marlin_checkpoint"; Marlin's kernel order is no format of files.
    keep
        Patterns, as a shell has them, of the layers that stay as they are.
    rounding
        Whether values may be rounded to float16 or bfloat16, once; without it what is no such number refuses.
    accept
        Ids of rules whose errors in the header tier do not refuse the checkpoint; they become notes.
        ArgumentError for an id that is no rule's.
    shard_size
        Of how many bytes a file is at most, but for one of a larger layer.
    nonfinite
        "error": a layer with a scale that is NaN or infinite is refused. "allow": such scales are taken as
        they are stored.
    progress
        Told a stage, the bytes of it that are done, and all.
    process_group
        A group of torch.distributed whose processes all call this and see the same files; they share the
        work, and get the same answer.

    Examples
    --------
    >>> import os, tempfile
    >>> from qload import convert
    >>> from qload.testing import make_checkpoint
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, other = os.path.join(folder.name, "gptq"), os.path.join(folder.name, "awq")
    >>> stored = make_checkpoint("gptq", one)
    >>> found = convert(one, other, to="awq")
    >>> found.verdict, set(found.counts), sorted(os.listdir(other))
    ('ok', {'bits'}, ['config.json', 'model.safetensors', 'qload-certificate.json'])
    >>> folder.cleanup()
    """
    to = OLDER_NAMES.get(to, to)
    if to not in TARGETS:
        raise ArgumentError("to", f"one of {', '.join(TARGETS)}", f"{to!r:.80}")
    check_nonfinite(nonfinite)
    unknown = [rule for rule in accept if rule not in rule_pages()]
    if unknown:
        raise ArgumentError("accept", "ids of rules, as docs/rules lists them", f"{unknown[0]!r:.80}")
    target, tell = target_of(folder, shard_size), progress or nothing
    crew = Crew.of(process_group)

    def make(subject: Subject) -> Conversion:
        errors = header_errors(subject, crew, tell)
        refusing = [each for each in errors if each.rule not in (*accept, INTERNAL)]
        if refusing:
            return Conversion(subject.path, to=to, findings=refusing)
        asked = AskedTarget(subject, to, rounding, crew)
        plan = planned(asked, keep, lambda done, total: tell("asking layers", done, total), nonfinite)
        plan = replace(plan, notes=[*_accepted(errors), *plan.notes])
        if plan.refused:
            return Conversion(subject.path, "", to, _refused(subject, plan.refused), plan.notes)
        return _written(asked, plan, target, shards_of(plan.items, shard_size), tell)

    return of_checkpoint(path, make, partial(Conversion, to=to))


def _accepted(errors: Sequence[Finding]) -> Iterator[str]:
    """A note for each cause of errors that do not refuse the checkpoint."""
    causes: dict[str, list[Finding]] = {}
    for finding in errors:
        causes.setdefault(finding.cause, []).append(finding)
    for first, *others in causes.values():
        more = f" ({len(others)} more of this cause)" if others else ""
        yield f"error of the rule {first.rule}, not refused: {' '.join(first.message.split())}{more}"


def _refused(subject: Subject, reasons: Mapping[str, str]) -> list[ConvertedLayer]:
    return [
        ConvertedLayer(prefix, format_of(subject.layers[prefix]), None, "refused", reason)
        for prefix, reason in sorted(reasons.items())
    ]


def _written(
    asked: AskedTarget, plan: Planned, target: Path, shards: Sequence[OutputFile], tell: Progress
) -> Conversion:
    subject, index = asked.subject, index_of(shards)
    texts = dict(config_files(subject.model_config, next(iter(subject.configs), None), plan.section))
    texts |= {} if index is None else {INDEX: dumped(index)}
    copies = [file for file in copied_files(source_folder(subject)) if file.name not in texts]
    job = asked.rounding, {name: text.hex() for name, text in texts.items()}
    new = NewCheckpoint(subject, target, {"to": asked.to}, shards, texts, copies, job, asked.crew)

    def prove(folder: Path) -> Conversion:
        return Conversion(
            subject.path, to=asked.to, layers=_proven(asked, plan, folder, tell), notes=plan.notes
        )

    return new.write(prove, tell)


def _proven(asked: AskedTarget, plan: Planned, folder: Path, tell: Progress) -> list[ConvertedLayer]:
    """What the new files say beside the old ones, each read through its own config."""
    compared = diff(asked.subject.path, folder, progress=tell, process_group=asked.crew.group)
    if compared.unreadable or compared.unsupported:
        why = compared.unreadable or compared.unsupported
        return [ConvertedLayer("", None, None, "differs", why)]
    return [_outcome(asked, plan, layer) for layer in compared.layers]


def _outcome(asked: AskedTarget, plan: Planned, layer: LayerDiff) -> ConvertedLayer:
    source = asked.subject.layers.get(layer.name)
    stored = plan.layers.get(layer.name)
    read = format_of(source)
    made = stored.weight_type.format if stored else read
    if layer.outcome == "bits" or (layer.outcome == "rounded" and asked.rounding):
        return ConvertedLayer(layer.name, read, made, layer.outcome, layer.detail)
    return ConvertedLayer(layer.name, read, made, "differs", layer.detail or layer.outcome)
