"""Writing of a new checkpoint: tensor files, configs, copied files, verification, certificate."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib import metadata
from os import PathLike
from os import path as paths
from pathlib import Path
from typing import Any, TypeVar

from qload.conversion.atomic_folder import UnfinishedFolder, check_target, hashed_file
from qload.conversion.output_files import OutputFile, Progress, behind, write_shards
from qload.conversion.output_tensors import as_stored
from qload.conversion.quantization_config import WrittenConfig
from qload.conversion.report import WrittenCheckpoint
from qload.detect.files import CONFIGS, MODEL_CONFIG, SECTIONS, FoundConfig
from qload.errors import ArgumentError, NonfiniteScaleError, QloadError
from qload.listing import make_report
from qload.loader import LayerDescription
from qload.loader.finite_scales import check_scales
from qload.storage import SafetensorsStorage, is_directory, snapshot
from qload.storage.files import special, status
from qload.verify.checkpoint import Checkpoint
from qload.verify.report import Reason, reason_of
from qload.verify.workers import Workers

MOST = 1 << 30  # bytes of a file that is copied; tokenizers have some 30 MB
TENSORS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)
CERTIFICATE = "qload-certificate.json"


def why_unreadable(subject: Checkpoint) -> str:
    """What is wrong with all of it; "" where it can be asked."""
    reason = unreadable(subject)
    return "" if reason is None else reason["unreadable"] or reason["unsupported"]


def unreadable(subject: Checkpoint) -> Reason | None:
    """Why nothing of it can be read, as fields of a report; None if it can."""
    return reason_of(subject.errors) if subject.errors or subject.weights is None else None


def source_files(subject: Checkpoint) -> Mapping[str, Path]:
    """Its files, by name."""
    storage = as_stored(subject)
    assert isinstance(storage, SafetensorsStorage)
    return {name: place for name, place in storage.files.items() if isinstance(place, Path)}


def source_folder(subject: Checkpoint) -> Path:
    """Where its configs and tokenizers stand."""
    place = Path(snapshot(subject.location))
    return place if is_directory(place) else place.parent


def format_of(layer: LayerDescription | QloadError | None) -> str | None:
    """The format that a layer is stored in; None of what is no layer, or cannot be read."""
    return layer.format.weight_type.format if isinstance(layer, LayerDescription) else None


def nonfinite_layers(subject: Checkpoint) -> dict[str, str]:
    """Layers with scales that are NaN or infinite, each with its reason; they are refused."""
    assert subject.weights is not None
    found = {}
    for layer in subject.described():
        try:
            check_scales(subject.weights, [layer], {}, whole=False)
        except NonfiniteScaleError as error:
            found[layer.prefix] = str(error)
    return found


def config_files(
    model_config: Mapping[str, Any], found: FoundConfig | None, section: WrittenConfig
) -> Iterator[tuple[str, bytes]]:
    """The names and the contents of the configs: that of the model, and the owner's own file."""
    config: dict[str, Any] = deepcopy(dict(model_config))
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in SECTIONS:
            holder.pop(key, None)
    if section.values is not None:
        nested = found is not None and found.file == MODEL_CONFIG and found.section.startswith("text_config.")
        (config["text_config"] if nested else config)[SECTIONS[0]] = dict(section.values)
    if config:
        yield MODEL_CONFIG, dumped(config)
    if section.side_file is not None:
        yield section.side_file, dumped(dict(section.values or {}))


def copied_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that hold no tensors and say nothing of how these are stored."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or name.endswith(TENSORS) or name in (*CONFIGS, CERTIFICATE):
            continue
        found = status(path, name)
        if found is not None and not special(found) and found.st_size <= MOST and path.is_file():
            yield path


def dumped(value: Mapping[str, Any]) -> bytes:
    """As JSON, as transformers indents it."""
    return (json.dumps(value, indent=2) + "\n").encode()


SCHEMA = 1


def certificate(
    found: WrittenCheckpoint,
    asked: Mapping[str, Any],
    source: Mapping[str, str],
    written: Mapping[str, str],
) -> dict[str, Any]:
    """As plain data, without a time or a place, so that one conversion has one certificate.

    `asked`: what was asked for; `source`, `written`: the hash of each file that was read, or written.
    """
    return {
        "schema": SCHEMA,
        "qload": version(),
        **asked,
        "source": dict(sorted(source.items())),
        "files": dict(sorted(written.items())),
        "counts": found.counts,
        "notes": list(found.notes),
        "layers": [asdict(layer) for layer in found.layers],
    }


def version() -> str:
    """Of qload; "" of a source tree that is not installed."""
    try:
        return metadata.version("qload-weights")
    except metadata.PackageNotFoundError:
        return ""


SHARD_SIZE = 5_000_000_000  # bytes
F = TypeVar("F", bound=WrittenCheckpoint)


@dataclass(frozen=True)
class NewCheckpoint:
    """All that will stand in the folder `target`, and what it is read from.

    `asked`: what was asked for, as the certificate says it; `job`: what else tells this run from others.
    `shards` hold tensors; `texts`: contents of small files, by name; `copies`: files that stay what they are.
    `crew`: who writes it.
    """

    subject: Checkpoint
    target: Path
    asked: Mapping[str, Any]
    shards: Sequence[OutputFile]
    texts: Mapping[str, bytes]
    copies: Sequence[Path] = ()
    job: Sequence[Any] = ()
    crew: Workers = field(default_factory=lambda: Workers.of(None))

    def write(self, prove: Callable[[Path], F], tell: Progress) -> F:
        """Write it, and `prove` it: what is found has a `folder` where all is well; else nothing is left."""
        folder = UnfinishedFolder(self.target, self._job(), self.crew)
        with folder.opened(), behind("qload-hash") as hashing:
            if self.crew.is_first:
                folder.check_space(
                    sum(shard.nbytes for shard in self.shards) + sum(map(len, self.texts.values()))
                )
            folder.together()
            hashes = {
                name: hashing.later(partial(hashed_file, place))
                for name, place in self.crew.share(sorted(source_files(self.subject).items()))
            }
            write_shards(self.shards, folder, tell)
            if self.crew.is_first:
                self._write_beside(folder)
            folder.together()
            found = prove(folder.path)
            read = self.crew.gather({name: file.result() for name, file in hashes.items()})
            if found.verdict == "ok":
                found = replace(found, folder=str(self.target))
            if self.crew.is_first:
                self._end(folder, found, {name: digest for each in read for name, digest in each.items()})
            folder.together()
            return found

    def _write_beside(self, folder: UnfinishedFolder) -> None:
        """What is no file of tensors."""
        for name, text in self.texts.items():
            folder.write(name, text)
        for file in self.copies:
            folder.write(file.name, file.read_bytes())

    def _end(self, folder: UnfinishedFolder, found: WrittenCheckpoint, read: Mapping[str, str]) -> None:
        """The folder by its name and with a certificate; of what is not well, nothing. `read`: hashes."""
        if found.verdict != "ok":
            folder.discard()
            return
        folder.write(CERTIFICATE, dumped(certificate(found, self.asked, read, folder.done)))
        folder.finish()

    def _job(self) -> str:
        """What is being written, and from what, as a hash."""
        files = {
            name: [place.stat().st_size, place.stat().st_mtime_ns]
            for name, place in source_files(self.subject).items()
        }
        told = [version(), dict(self.asked), list(self.job), files]
        digest = sha256(json.dumps(told, sort_keys=True).encode())
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header)
        return digest.hexdigest()


def target_of(folder: str | PathLike[str], shard_size: int) -> Path:
    """Where to write; ArgumentError where something is there, or files would hold nothing."""
    if shard_size < 1:
        raise ArgumentError("shard_size", "bytes, at least 1", str(shard_size))
    target = Path(paths.abspath(folder))
    check_target(target)
    return target


def of_checkpoint(path: str | PathLike[str], make: Callable[[Checkpoint], F], empty: Callable[..., F]) -> F:
    """Report of `make` on a checkpoint; UnreadTensorsError if some of its tensors are not read.

    `empty`: builds the report of a path with the reason as `unreadable` or `unsupported`.
    """
    with closing(Checkpoint.open(path)) as subject:
        reason = unreadable(subject)
        if reason is not None:
            return empty(subject.path, **reason)

        def make_of_all_read() -> F:
            error = subject.account.error()
            if error is not None:
                raise error
            return make(subject)

        # A file may fail, or be replaced, meanwhile.
        return make_report(
            make_of_all_read,
            lambda why: empty(subject.path, unreadable=why),
            lambda why: empty(subject.path, unsupported=why),
        )


def nothing(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress."""
