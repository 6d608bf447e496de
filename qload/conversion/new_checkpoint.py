"""Writing of a new checkpoint: tensor files, configs, copied files, verification, certificate."""

import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from os import PathLike
from os import path as paths
from pathlib import Path
from typing import Any, TypeVar

from qload.checkpoint import make_report
from qload.configs import FoundConfig
from qload.conversion.atomic_folder import AtomicFolder, check_output_folder, hash_file
from qload.conversion.float4 import EXPERT_DTYPE
from qload.conversion.output_files import OutputFile, Progress, background_thread, stored_tensors, write_files
from qload.conversion.quantization_config import WrittenConfig
from qload.conversion.report import WrittenCheckpoint
from qload.detect.config_reader import CONFIGS, MODEL_CONFIG, SECTIONS
from qload.errors import ArgumentError, NonfiniteScaleError, QloadError
from qload.errors.reporting import qload_version
from qload.loader import LayerDescription
from qload.loader.layer_values import check_scales
from qload.loader.source import Nonfinite
from qload.storage import SafetensorsStorage, is_directory, snapshot
from qload.storage.files import special, status
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import reason_of
from qload.verify.workers import Workers

MAX_COPIED_FILE_BYTES = 1 << 30  # tokenizers have some 30 MB
OTHER_TENSOR_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
TENSOR_FILE_SUFFIXES = (".safetensors", ".index.json", *OTHER_TENSOR_SUFFIXES)
CERTIFICATE = "qload-certificate.json"
CERTIFICATE_SCHEMA = 1
SHARD_SIZE_BYTES = 5_000_000_000
ReportType = TypeVar("ReportType", bound=WrittenCheckpoint)


def unreadable_reason(checkpoint: VerifiedCheckpoint) -> dict[str, str] | None:
    """Return why a checkpoint cannot be read, as the fields of a report; None if it can."""
    return None if checkpoint.is_readable else reason_of(checkpoint.findings)


def source_files(source: VerifiedCheckpoint) -> Mapping[str, Path]:
    """Return the tensor files of the source by name."""
    storage = stored_tensors(source)
    assert isinstance(storage, SafetensorsStorage)
    return {name: path for name, path in storage.files.items() if isinstance(path, Path)}


def source_folder(source: VerifiedCheckpoint) -> Path:
    """Return the folder with the configs and the tokenizer of the source."""
    path = Path(snapshot(source.location))
    return path if is_directory(path) else path.parent


def format_of(layer: LayerDescription | QloadError | None) -> str | None:
    """Return the stored format of a layer; None if it cannot be read, or if there is no layer."""
    return layer.format.weight_type.format if isinstance(layer, LayerDescription) else None


def nonfinite_layers(source: VerifiedCheckpoint, nonfinite: Nonfinite) -> tuple[dict[str, str], list[str]]:
    """Return refusals, by prefix, of layers with NaN or infinite scales; notes if these are allowed."""
    refused, notes = {}, []
    for layer in source.described():
        try:
            check_scales(source.weights, [layer], {}, whole=False)
        except NonfiniteScaleError as error:
            if nonfinite == "allow":
                notes.append(f"{error.tensor}: written as stored: {error.got}")
            else:
                refused[layer.prefix] = str(error)
    return refused, notes


def config_files(
    model_config: Mapping[str, Any], current: FoundConfig | None, written: WrittenConfig
) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of config.json and of the config file of the format's owner.

    The new `quantization_config` lies in `text_config` if that of the source, `current`, does.
    """
    config: dict[str, Any] = deepcopy(dict(model_config))
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in (*SECTIONS, EXPERT_DTYPE):
            section.pop(key, None)
    if written.values is not None:
        nested = current and current.file == MODEL_CONFIG and current.section.startswith("text_config.")
        (config["text_config"] if nested else config)[written.section] = dict(written.values)
    config |= written.model
    if config:
        yield MODEL_CONFIG, json_bytes(config)
    if written.side_file is not None:
        yield written.side_file, json_bytes(dict(written.values or {}))


def copied_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder to copy: all but tensor files, configs, and large or special files."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or name.endswith(TENSOR_FILE_SUFFIXES) or name in (*CONFIGS, CERTIFICATE):
            continue
        stat = status(path, name)
        if stat and not special(stat) and stat.st_size <= MAX_COPIED_FILE_BYTES and path.is_file():
            yield path


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Encode as JSON with the indentation of transformers."""
    return (json.dumps(value, indent=2) + "\n").encode()


@dataclass(frozen=True)
class NewCheckpoint:
    """Contents of an output folder.

    Attributes
    ----------
    source
        The checkpoint that is read.
    target
        Path of the output folder.
    request
        Arguments of the conversion, as the certificate records them.
    files
        Tensor files.
    texts
        Contents of small files, by name.
    copies
        Files to copy unchanged.
    job
        Further values that distinguish this conversion from others.
    workers
        Processes that share the work.
    """

    source: VerifiedCheckpoint
    target: Path
    request: Mapping[str, Any]
    files: Sequence[OutputFile]
    texts: Mapping[str, bytes]
    copies: Sequence[Path]
    job: Sequence[Any]
    workers: Workers

    def write(self, verify: Callable[[Path], ReportType], progress: Progress) -> ReportType:
        """Write all files, run `verify` on the folder, and return its report.

        If the verdict is "ok" the folder gets its certificate and its name, else it is removed.
        """
        folder = AtomicFolder(self.target, self._job_key(), self.workers)
        with folder.open(), background_thread("qload-hash") as hashing:
            if self.workers.is_first:
                text_bytes = sum(map(len, self.texts.values()))
                folder.check_space(sum(file.nbytes for file in self.files) + text_bytes)
            folder.synchronize()
            hashes = {
                name: hashing.submit(partial(hash_file, path))
                for name, path in self.workers.share(sorted(source_files(self.source).items()))
            }
            write_files(self.files, folder, progress)
            if self.workers.is_first:
                for name, text in self.texts.items():
                    folder.write(name, text)
                for file in self.copies:
                    folder.write(file.name, file.read_bytes())
            folder.synchronize()
            report = verify(folder.path)
            hashes_by_rank = self.workers.gather({name: digest.result() for name, digest in hashes.items()})
            if report.verdict == "ok":
                report = replace(report, folder=str(self.target))
            if self.workers.is_first:
                self._finish(folder, report, dict(ChainMap(*hashes_by_rank)))
            folder.synchronize()
            return report

    def _finish(self, folder: AtomicFolder, report: WrittenCheckpoint, hashes: Mapping[str, str]) -> None:
        if report.verdict != "ok":
            folder.discard()
            return
        # No time and no path, so that equal conversions have equal certificates.
        certificate = {
            "schema": CERTIFICATE_SCHEMA,
            "qload": qload_version() or "a source tree",
            **self.request,
            "source": dict(sorted(hashes.items())),
            "files": dict(sorted(folder.completed.items())),
            "counts": report.counts,
            "notes": list(report.notes),
            "layers": [asdict(layer) for layer in report.layers],
        }
        folder.write(CERTIFICATE, json_bytes(certificate))
        folder.commit()

    def _job_key(self) -> str:
        """Return a hash of the request, the state of the source files, and the headers of the output."""
        stats = {name: path.stat() for name, path in source_files(self.source).items()}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        key = [qload_version(), dict(self.request), list(self.job), files]
        digest = sha256(json.dumps(key, sort_keys=True).encode())
        for file in self.files:
            digest.update(file.name.encode() + file.header)
        return digest.hexdigest()


def output_path(folder: str | PathLike[str], shard_size: int) -> Path:
    """Return the absolute path of the output; ArgumentError if it is taken, or `shard_size` is below 1."""
    if shard_size < 1:
        raise ArgumentError("shard_size", "a number of bytes, at least 1", str(shard_size))
    path = Path(paths.abspath(folder))
    check_output_folder(path)
    return path


def report_on(
    path: str | PathLike[str],
    convert_source: Callable[[VerifiedCheckpoint], ReportType],
    empty_report: Callable[..., ReportType],
) -> ReportType:
    """Open a checkpoint and return the report of `convert_source` on it.

    `empty_report` builds the report of a checkpoint that cannot be read, from its path and the field
    `unreadable` or `unsupported`. UnreadTensorsError if no format reads some of its tensors.
    """
    with VerifiedCheckpoint.open(path, collect=True) as source:
        reason = unreadable_reason(source)
        if reason is not None:
            return empty_report(source.path, **reason)

        def convert_all_read() -> ReportType:
            error = source.account.error()
            if error is not None:
                raise error
            return convert_source(source)

        # A file may fail, or be replaced, during the conversion.
        return make_report(convert_all_read, partial(empty_report, source.path))


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""
