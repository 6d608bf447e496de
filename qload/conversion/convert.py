"""`convert`: write a checkpoint in another format and verify it by reading the output back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path

from qload.conversion import fp8
from qload.conversion.new_checkpoint import (
    SHARD_SIZE,
    NewCheckpoint,
    config_files,
    copied_files,
    dumped,
    format_of,
    nonfinite_layers,
    nothing,
    of_checkpoint,
    source_folder,
    target_of,
)
from qload.conversion.output_files import INDEX, OutputFile, Progress, index_of, shards_of
from qload.conversion.output_tensors import STACKED, Item, as_stored, copied
from qload.conversion.quantization_config import HEAD, WrittenConfig, section
from qload.conversion.report import Conversion, ConvertedLayer
from qload.conversion.stacked_experts import new_stacks, shared_sources
from qload.conversion.targets import EXPERTS, FLOATS, OLDER_NAMES, TARGETS, AskedTarget, StoredLayer
from qload.detect.matching import EMBEDDINGS
from qload.diff import LayerDiff, diff
from qload.errors import ArgumentError, QloadError, checked
from qload.errors.reporting import cause_of, group_by_cause
from qload.formats import GPTQConfig
from qload.listing.report_base import INTERNAL
from qload.loader import LayerDescription
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.parallel import ProcessGroup
from qload.spec import Role
from qload.storage import WeightStorage
from qload.verify.checkpoint import Checkpoint
from qload.verify.report import Finding
from qload.verify.rule_pages import rule_pages
from qload.verify.verification import header_errors
from qload.verify.workers import ByteProgress, Workers

OWNER = "compressed-tensors"
CACHE = "kv_cache_scheme"
FLOAT = "float32"  # the target that every readable layer can be written as
ROUND = "round the values by rounding=True (--round)"
KEEP = "or leave it as it is by keep (--keep)"


@dataclass(frozen=True)
class Planned:
    """A conversion before it begins.

    `layers`: those that change, by prefix; `kept`: quantized ones that stay. `refused`: reasons by prefix.
    """

    items: Sequence[Item]
    layers: Mapping[str, StoredLayer]
    section: WrittenConfig
    refused: Mapping[str, str]
    notes: Sequence[str]


def planned(
    asked: AskedTarget, keep: Sequence[str], tell: ByteProgress, nonfinite: Nonfinite = "error"
) -> Planned:
    """Every layer asked; ArgumentError where no layer would change, or a pattern of `keep` means none."""
    subject = asked.subject
    quantized = {
        prefix: layer
        for prefix, layer in subject.layers.items()
        if not (isinstance(layer, LayerDescription) and layer.format.weight_type.plain)
    }
    kept = _kept(subject, quantized, keep)
    asking = {prefix: layer for prefix, layer in quantized.items() if prefix not in kept}
    if asked.to == fp8.NAME and not quantized:
        asking = dict(_exact(subject, keep))
    stored, refused = _answers(asked, asking, tell)
    if not stored and not refused:
        raise ArgumentError(
            "path", "a checkpoint with quantized layers to convert", "none: all is plain, or kept"
        )
    refused |= _contradicting(quantized)
    spoiled = nonfinite_layers(subject) if nonfinite == "error" else {}
    refused |= spoiled
    items = list(_items(subject, stored, refused))
    made = _section(subject, [*stored.values(), *kept.values()])
    refused = {**made.refused, **refused}
    by_target = {prefix: reason for prefix, reason in refused.items() if prefix not in spoiled}
    notes = [*_notes(subject, stored, asked.to), *_remedies(asked, asking, by_target)]
    return Planned(items, stored, made, refused, notes)


def _remedies(
    asked: AskedTarget, layers: Mapping[str, LayerDescription | QloadError], refused: Mapping[str, str]
) -> Iterator[str]:
    """One note for each cause of refusals: what the first of these layers can be written as instead."""
    groups = group_by_cause(refused, name=str, cause=lambda prefix: cause_of(refused[prefix], prefix))
    for group in groups:
        layer = layers.get(group.first)
        if isinstance(layer, LayerDescription) and layer.contradiction is None:
            rest = group.count - 1
            more = f" and {rest} layer{'s' * (rest > 1)} like it" if rest else ""
            integers = () if asked.to in FLOATS else asked.as_other_integers(layer).items()
            others = [name for name, made in integers if not _section(asked.subject, [made]).refused]
            if asked.to != FLOAT and EXPERTS not in layer.sizes:
                others.append(FLOAT)
            ways = [f"write {' or '.join(others)} instead"] if others else []
            ways += [ROUND] if asked.can_round else []
            yield f"{group.first}{more}: {', '.join([*ways, KEEP])}"


def _exact(subject: Checkpoint, keep: Sequence[str]) -> Iterator[tuple[str, LayerDescription]]:
    """The matrices of a plain checkpoint that owners quantize: all but embeddings, heads and what is kept."""
    for prefix, layer in subject.layers.items():
        left_out = prefix.rpartition(".")[2] in (*EMBEDDINGS, HEAD)
        kept = any(fnmatchcase(prefix, pattern) for pattern in keep)
        if isinstance(layer, LayerDescription) and "K" in layer.sizes and not left_out and not kept:
            yield prefix, layer


def _answers(
    asked: AskedTarget, layers: Mapping[str, LayerDescription | QloadError], tell: ByteProgress
) -> tuple[dict[str, StoredLayer], dict[str, str]]:
    """What layers become, and why others cannot."""
    told = asked.answers(list(layers.values()), tell)
    stored = {prefix: made for prefix, made in zip(layers, told, strict=True) if not isinstance(made, str)}
    return stored, {prefix: why for prefix, why in zip(layers, told, strict=True) if isinstance(why, str)}


def _contradicting(layers: Mapping[str, LayerDescription | QloadError]) -> dict[str, str]:
    """Layers with values that contradict the config, each with its reason; they are refused."""
    return {
        prefix: " ".join(str(layer.contradiction).split())
        for prefix, layer in layers.items()
        if isinstance(layer, LayerDescription) and layer.contradiction is not None
    }


def _kept(
    subject: Checkpoint, quantized: Mapping[str, object], keep: Sequence[str]
) -> dict[str, StoredLayer]:
    """The quantized layers that patterns, as a shell has them, leave as they are."""
    for pattern in keep:
        if not any(fnmatchcase(prefix, pattern) for prefix in subject.layers):
            raise ArgumentError(
                "keep", "patterns of names of layers, such as *.q_proj", f"{pattern!r:.80}, of none"
            )
    return {
        prefix: _as_it_is(subject, layer)
        for prefix, layer in quantized.items()
        if isinstance(layer, LayerDescription) and any(fnmatchcase(prefix, pattern) for pattern in keep)
    }


def _as_it_is(subject: Checkpoint, layer: LayerDescription) -> StoredLayer:
    config = layer.format.config
    permuted = isinstance(config, GPTQConfig) and not config.positional and config.groups(layer.K) > 1
    symmetric = bool(layer.format.claims and layer.format.claims.sym)
    return StoredLayer(layer.prefix, layer.format.weight_type, config, layer.K, symmetric, permuted)


def _items(subject: Checkpoint, stored: Mapping[str, StoredLayer], refused: dict[str, str]) -> Iterator[Item]:
    """All that is written, in the order of the source; what stands in the way of a layer is entered."""
    raw = as_stored(subject)
    stacks = new_stacks(subject, stored)
    whole = {prefix: stack for stack in stacks for prefix in stack.layers}
    alone = {prefix: layer for prefix, layer in stored.items() if prefix not in whole}
    holders = _holders(subject, alone, raw, refused)
    holders |= {source: next(iter(stack.item.tensors)) for stack in stacks for source in stack.sources}
    items = {next(iter(stack.item.tensors)): stack.item for stack in stacks}
    items |= {prefix: layer.item for prefix, layer in alone.items() if layer.item is not None}
    new = {name: holder for holder, item in items.items() for name in item.tensors}
    begun: set[str] = set()
    left_out = {*subject.loader.config_tensors, *_meaningless(subject)}
    for name in list(raw.keys()):
        holder = holders.get(name)
        if holder is None and name not in left_out:
            if name in new:
                refused[new[name]] = f"there is another tensor {name} already"
            yield copied(raw, name)
        elif holder is not None and holder not in begun:
            begun.add(holder)
            yield items[holder]  # all that change have one


def _meaningless(subject: Checkpoint) -> Iterator[str]:
    """Tensors beside plain weights that its own config says nothing by, and another might."""
    for layer in subject.described():
        for spec in layer.specs:
            if spec.role is Role.UNUSED:
                yield layer.names.full(spec.name)


def _holders(
    subject: Checkpoint, stored: Mapping[str, StoredLayer], raw: WeightStorage, refused: dict[str, str]
) -> dict[str, str]:
    """The tensors that layers which change are stored in, and which layer that is."""
    found, there, shared = {}, raw.keys(), shared_sources(subject, stored)
    for prefix in stored:
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        for spec in layer.specs:
            name = layer.names.full(spec.name)
            if name not in there and name not in shared:
                refused[prefix] = f"{name} {STACKED}"
            found[shared.get(name, name)] = prefix
    return found


def _section(subject: Checkpoint, layers: Sequence[StoredLayer]) -> WrittenConfig:
    """The config of all that is quantized at the end, and of the matrices that are not."""
    changed = {layer.prefix for layer in layers}
    quantized = [layer for layer in layers if not layer.weight_type.plain]
    plain = [layer.prefix for layer in layers if layer.weight_type.plain]
    plain += [
        prefix
        for prefix, layer in subject.layers.items()
        if isinstance(layer, LayerDescription) and layer.format.weight_type.plain and "K" in layer.sizes
        if prefix not in changed
    ]
    made = section(quantized, sorted(name for name in plain if name.rpartition(".")[2] not in EMBEDDINGS))
    cache = _cache_scheme(subject)
    if cache is not None and CACHE in (made.values or {}):
        return replace(made, values={**(made.values or {}), CACHE: cache})
    return made


def _cache_scheme(subject: Checkpoint) -> object | None:
    """How keys and values are quantized in the cache, which compressed-tensors alone says beside weights."""
    found = next(iter(subject.configs), None)
    return None if found is None else found.values.get(CACHE)


def _notes(subject: Checkpoint, stored: Mapping[str, StoredLayer], to: str) -> Iterator[str]:
    schemes = {
        layer.format.activations
        for prefix in stored
        if isinstance(layer := subject.layers[prefix], LayerDescription) and layer.format.activations
    }
    for scheme in sorted(schemes, key=str):
        if to != fp8.NAME:
            yield f"inputs were quantized ({scheme}), which {to} does not say: they are taken as they come"
        elif scheme.dynamic and scheme.owner != OWNER:
            yield f"scales of inputs ({scheme}) were found as {scheme.owner} does, and are as {OWNER} does"
    if _cache_scheme(subject) is not None and to not in (OWNER, fp8.NAME):
        yield f"the config has a {CACHE}, which {to} does not say: engines keep keys and values as they come"
    doubtful = [layer for layer in subject.described() if layer.format.config.doubt]
    if doubtful:
        yield f"{doubtful[0].prefix}: {doubtful[0].format.config.doubt}; {len(doubtful)} layers in all"
    unused = sorted(_meaningless(subject))
    if unused:
        yield f"left out, as nothing reads them: {len(unused)} tensors, such as {unused[0]}"
    if subject.loader.config_tensors:
        yield f"left out, as the config says it: {', '.join(subject.loader.config_tensors)}"


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
        ByteProgress a stage, the bytes of it that are done, and all.
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
    crew = Workers.of(process_group)

    def make(subject: Checkpoint) -> Conversion:
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


def _refused(subject: Checkpoint, reasons: Mapping[str, str]) -> list[ConvertedLayer]:
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
