"""`convert`: a checkpoint in another format, proven to mean the same by reading back what was written."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from os import PathLike
from os import path as paths
from pathlib import Path

from qload.conversion.asked import AskedTarget
from qload.conversion.behind import behind
from qload.conversion.beside import CERTIFICATE, config_files, copied_files, dumped
from qload.conversion.certificate import certificate, version
from qload.conversion.folder import UnfinishedFolder, check_target, hashed_file
from qload.conversion.planned import Planned, planned
from qload.conversion.report import Conversion, ConvertedLayer
from qload.conversion.shards import INDEX, OutputFile, index_of, shards_of
from qload.conversion.targets import TARGETS
from qload.conversion.write import Progress, write_shards
from qload.diff import LayerDiff, diff
from qload.errors import ArgumentError, QloadError, checked
from qload.experts import ExpertStacks
from qload.loader import LayerDescription
from qload.storage import SafetensorsStorage, is_directory, snapshot
from qload.verify.subject import Subject

SHARD_SIZE = 5_000_000_000  # bytes
OUTCOMES = {"bits": "bits", "rounded": "rounded"}


@checked
def convert(
    path: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    to: str,
    keep: Sequence[str] = (),
    rounding: bool = False,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint in another format: the same weights, bit for bit, and its config and side files.

    Every layer is asked first, and a target that cannot say one refuses them all before a byte is written.
    What was written is then read back through its own config and compared with what was read, layer by layer,
    and only then has the folder its name. A run that was interrupted goes on where it was, file by file. What
    is plain already stays as it is stored; nothing is quantized.

    Parameters
    ----------
    path
        Safetensors files, a directory, or a sharded index.
    folder
        Which is made; ArgumentError where it has anything in it, or the disk too little space.
    to
        "gptq" (zero points stored minus one), "gptq_v2", "awq", "marlin", "marlin_24", "compressed-tensors"
        (pack-quantized); "fp8" (FP8 of any dialect, as compressed-tensors' float-quantized); or "float32",
        "float16", "bfloat16": dequantized.
    keep
        Patterns, as a shell has them, of the layers that stay as they are.
    rounding
        Whether values may be rounded to float16 or bfloat16, once; without it what is no such number refuses.
    shard_size
        Of how many bytes a file is at most, but for one of a larger layer.
    progress
        Told a stage, the bytes of it that are done, and all.

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
    if to not in TARGETS:
        raise ArgumentError("to", f"one of {', '.join(TARGETS)}", f"{to!r:.80}")
    if shard_size < 1:
        raise ArgumentError("shard_size", "bytes, at least 1", str(shard_size))
    target, tell = Path(paths.abspath(folder)), progress or _nothing
    check_target(target)
    with closing(Subject.open(path)) as subject:
        if subject.weights is None or subject.errors:
            first = subject.errors[0].message if subject.errors else "it cannot be read"
            return Conversion(subject.path, to=to, unreadable=first)
        try:
            asked = AskedTarget(subject, to, rounding)
            plan = planned(asked, keep, lambda done, total: tell("asking layers", done, total))
            if plan.refused:
                return Conversion(subject.path, "", to, list(_refused(subject, plan.refused)), plan.notes)
            return _written(asked, plan, target, shards_of(plan.items, shard_size), tell)
        except ArgumentError:
            raise
        except QloadError as error:  # a file that fails or is replaced meanwhile
            return Conversion(subject.path, to=to, unreadable=str(error))


def _refused(subject: Subject, reasons: Mapping[str, str]) -> list[ConvertedLayer]:
    formats = {
        prefix: layer.format.weight_type.format if isinstance(layer, LayerDescription) else None
        for prefix, layer in subject.layers.items()
    }
    return [
        ConvertedLayer(prefix, formats[prefix], None, "refused", reason)
        for prefix, reason in sorted(reasons.items())
    ]


def _written(
    asked: AskedTarget, plan: Planned, target: Path, shards: Sequence[OutputFile], tell: Progress
) -> Conversion:
    """The files, the proof, the certificate, and last the folder's name."""
    subject = asked.subject
    assert subject.weights is not None
    source = Path(snapshot(subject.place))
    beside = source if is_directory(source) else source.parent
    texts = dict(config_files(subject.model_config, next(iter(subject.configs), None), plan.section))
    index = index_of(shards)
    texts |= {} if index is None else {INDEX: dumped(index)}
    copies = [file for file in copied_files(beside) if file.name not in texts]
    folder = UnfinishedFolder(target, _job(asked, shards, texts))
    with folder.opened(), behind("qload-hash") as hashing:
        folder.check_space(sum(shard.nbytes for shard in shards) + sum(map(len, texts.values())))
        read = {
            name: hashing.later(partial(hashed_file, place)) for name, place in source_files(subject).items()
        }
        write_shards(shards, folder, tell)
        for name, text in texts.items():
            folder.write(name, text)
        for file in copies:
            folder.write(file.name, file.read_bytes())
        found = Conversion(
            subject.path, str(target), asked.to, _proven(asked, plan, folder, tell), plan.notes
        )
        if found.verdict != "ok":
            folder.discard()
            return replace(found, folder="")
        hashes = {name: file.result() for name, file in read.items()}
        said = certificate(found, {"to": found.to}, hashes, folder.done)
        folder.write(CERTIFICATE, dumped(said))
        folder.finish()
        return found


def _proven(
    asked: AskedTarget, plan: Planned, folder: UnfinishedFolder, tell: Progress
) -> list[ConvertedLayer]:
    """What the new files say beside the old ones, each read through its own config."""
    compared = diff(asked.subject.path, folder.path, progress=tell)
    if compared.unreadable:
        return [ConvertedLayer("", None, None, "differs", compared.unreadable)]
    return [_outcome(asked, plan, layer) for layer in compared.layers]


def _outcome(asked: AskedTarget, plan: Planned, layer: LayerDiff) -> ConvertedLayer:
    source = asked.subject.layers.get(layer.name)
    stored = plan.layers.get(layer.name)
    read = source.format.weight_type.format if isinstance(source, LayerDescription) else None
    made = stored.weight_type.format if stored else read
    if layer.outcome == "bits" or (layer.outcome == "rounded" and asked.rounding):
        return ConvertedLayer(layer.name, read, made, layer.outcome, layer.detail)
    return ConvertedLayer(layer.name, read, made, "differs", layer.detail or layer.outcome)


def _job(asked: AskedTarget, shards: Sequence[OutputFile], texts: Mapping[str, bytes]) -> str:
    """What is being written, and from what, as a hash."""
    files = {
        name: [place.stat().st_size, place.stat().st_mtime_ns]
        for name, place in source_files(asked.subject).items()
    }
    told = [version(), asked.to, asked.rounding, files, {name: text.hex() for name, text in texts.items()}]
    digest = sha256(json.dumps(told, sort_keys=True).encode())
    for shard in shards:
        digest.update(shard.name.encode() + shard.header)
    return digest.hexdigest()


def source_files(subject: Subject) -> Mapping[str, Path]:
    """The files of a checkpoint, by name."""
    assert subject.weights is not None
    storage = subject.weights.storage
    raw = storage.storage if isinstance(storage, ExpertStacks) else storage
    assert isinstance(raw, SafetensorsStorage)
    return {name: place for name, place in raw.files.items() if isinstance(place, Path)}


def _nothing(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress."""
