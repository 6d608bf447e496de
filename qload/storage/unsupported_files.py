"""Unsupported kinds of files, recognised for error messages with a program that reads them.

Name and first bytes tell the kind; no more of the file is read, and nothing is parsed or unpickled. Source of
the first bytes: the format descriptions of GGUF, pickle, HDF5 and Git LFS.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qload.errors import QloadError, StorageError
from qload.storage.files import (
    is_directory,
    is_taken,
    list_directory,
    load_json,
    open_regular,
    read_first,
    read_whole,
    shortened,
)

HEAD_BYTES = 16  # first bytes of a file that tell its kind
MAX_CONFIG_BYTES = 1 << 20  # size of a config, read for its method
MAX_ENTRIES = 256  # entries of a folder to examine
SUFFIX = ".safetensors"
PIPELINE = "model_index.json"
CONFIG_NAME = "config.json"

# Usual names of files with weights, without the other files of a trainer.
MODEL_NAME = re.compile(r"(.*model.*|consolidated.*|adapter.*)\.")
SOURCE = "qload reads the safetensors that it was made from"


@dataclass(frozen=True)
class FileKind:
    """A kind of file: first bytes, suffixes, description and remedy.

    `holds_model`: True for a model in a format of another program.
    """

    words: str
    remedy: str
    begins: tuple[bytes, ...] = ()
    ends: tuple[str, ...] = ()
    holds_model: bool = True

    @property
    def rule(self) -> str:
        """Rule that `verify` reports for such a file: `unsupported-format` for an undamaged model."""
        return "unsupported-format" if self.holds_model else "not-safetensors"


PICKLE = FileKind(
    "a pickle of PyTorch, which can run code when it is loaded",
    "take the safetensors of this model; or load it by torch.load(file, weights_only=True), and write it by "
    "safetensors.torch.save_file",
    tuple(bytes((0x80, protocol)) for protocol in range(2, 6)),
    (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
)
POINTER = FileKind(
    "a Git LFS pointer in the place of the file",
    "fetch the file: git lfs pull",
    (b"version ",),
    holds_model=False,
)
TORCHAO = FileKind(
    "a pickle of PyTorch with tensors of torchao",
    "transformers loads it where torchao is installed; qload reads the safetensors of the plain model",
)
KINDS = (
    FileKind(
        "a GGUF file",
        "open it by its own path, with the suffix .gguf",
        (b"GGUF",),
        (".gguf",),
    ),
    FileKind(
        "a GGML file, from before GGUF",
        f"only old versions of llama.cpp read it; {SOURCE}",
        (b"lmgg", b"fmgg", b"tjgg"),
        (".ggml",),
    ),
    POINTER,
    FileKind(
        "a web page, as a failed download leaves",
        "fetch the file again",
        (b"<!DOCTYPE", b"<html"),
        holds_model=False,
    ),
    FileKind(
        "a TensorRT engine",
        f"the version of TensorRT that built it runs it, on such a GPU; {SOURCE}",
        (),
        (".engine", ".plan", ".trt"),
    ),
    FileKind(
        "an HDF5 file, as Keras writes it",
        "convert it with the tool that wrote it",
        (b"\x89HDF\r\n\x1a\n",),
        (".h5", ".hdf5", ".keras"),
    ),
    PICKLE,
    FileKind("an ONNX graph", f"ONNX Runtime runs it; {SOURCE}", (), (".onnx", ".onnx_data")),
    FileKind("Flax weights", "convert it with the tool that wrote it", (), (".msgpack",)),
    FileKind(
        "NumPy arrays, as MLX wrote them before safetensors",
        "mlx-lm loads it, and its convert writes safetensors",
        (),
        (".npz",),
    ),
)
MODEL_SUFFIXES = tuple(end for file_kind in KINDS for end in file_kind.ends)


def kind_of_head(head: bytes) -> FileKind | None:
    """Kind of a file by its first bytes, at least 8; None for an unknown start."""
    for file_kind in KINDS:
        for begin in file_kind.begins:
            if len(head) >= min(8, len(begin)) and head.startswith(begin[: len(head)]):
                return file_kind
    return None


def file_error(path: Path) -> StorageError:
    """Build the error for an existing file with another suffix than `.safetensors`."""
    file_kind = _kind_of_file(path)
    if file_kind is None:
        words = "not a *.safetensors file; other kinds may run code and are refused"
        return StorageError(shortened(path.name), "not-safetensors", words)
    return StorageError(
        shortened(path.name),
        file_kind.rule,
        f"is {file_kind.words}, not a safetensors file",
        remedy=file_kind.remedy,
    )


def folder_error(
    folder: Path, listing: Sequence[Path], name: str, folders: Sequence[str], remedy: str
) -> StorageError:
    """Build the error for the directory `name` without a safetensors file; `listing`: its content.

    `folders`: subfolders with models. `remedy`: for a folder without either.
    """
    if any(file.name == PIPELINE for file in listing):
        return _pipeline_error(folder, listing, name)
    likely = [file for file in listing if file.name.lower().endswith(MODEL_SUFFIXES)]
    kinds = {file_kind: file for file in likely[MAX_ENTRIES::-1] if (file_kind := _kind_of_file(file))}
    if not kinds:
        if folders:
            remedy = f"name one of its subfolders: {_paths(folder, folders)}"
        return StorageError(name, "no-files", f"no *{SUFFIX} file in this directory", remedy=remedy)
    file_kind, file = next((file_kind, kinds[file_kind]) for file_kind in KINDS if file_kind in kinds)
    if file_kind is PICKLE and _quant_method(folder) == "torchao":
        file_kind = TORCHAO
    others = f", and there are {len(likely) - 1} more such files" if len(likely) > 1 else ""
    return StorageError(
        name,
        file_kind.rule,
        f"no *{SUFFIX} file in this directory: {shortened(file.name)} is {file_kind.words}{others}",
        remedy=file_kind.remedy,
    )


def other_models(listing: Iterable[Path]) -> tuple[str, ...]:
    """Names of the files in a folder that hold models in other formats, by name alone."""
    names = (file.name for file in listing)
    return tuple(name for name in names if name.lower().endswith(MODEL_SUFFIXES) and _model_kind(name))


def other_notes(names: Iterable[str]) -> Iterator[str]:
    """Yield a note for each other kind of model file in a folder; `names`: result of `other_models`."""
    files_by_kind: dict[FileKind, list[str]] = {}
    for name in names:
        if file_kind := _model_kind(name):
            files_by_kind.setdefault(file_kind, []).append(shortened(name))
    for file_kind, files in files_by_kind.items():
        more = f", as are {len(files) - 1} more files" if len(files) > 1 else ""
        yield (
            f"{files[0]}, in the folder of the safetensors, is not read: by its name it is "
            f"{file_kind.words}{more}; {file_kind.remedy}"
        )


def _model_kind(name: str) -> FileKind | None:
    """Kind of a model file by its name; None for other files, such as a trainer's pickles."""
    file_kind = _kind_of_name(name)
    return file_kind if file_kind is not PICKLE or MODEL_NAME.match(name.lower()) else None


def mistral_notes(files: Collection[str], folder: Path) -> Iterator[str]:
    """Yield a note on a folder in Mistral's own format alone; `files`: names of the files to read."""
    has_mistral_names = files and all(Path(file).name.startswith("consolidated") for file in files)
    params, config = (is_taken(folder / name, name) for name in ("params.json", CONFIG_NAME))
    if has_mistral_names and params and not config:
        yield (
            "this is Mistral's own format (consolidated*.safetensors and params.json): its names are not "
            "those of transformers, and only the quantization of params.json is read; vLLM loads it with "
            "--load-format mistral"
        )


def _pipeline_error(folder: Path, listing: Sequence[Path], name: str) -> StorageError:
    """Build the error for a diffusers pipeline, with its parts, which are checkpoints of their own."""
    parts = [part.name for part in listing[:MAX_ENTRIES] if is_directory(part) and _has_safetensors(part)]
    return StorageError(
        name,
        "no-files",
        f"is a diffusers pipeline ({PIPELINE}), whose parts are checkpoints of their own",
        remedy=f"name one of them: {_paths(folder, parts)}"
        if parts
        else f"fetch its {SUFFIX} files; its parts have none",
    )


def _paths(folder: Path, names: Sequence[str]) -> str:
    """Text with the paths of the first eight of the names in a folder."""
    return ", ".join(str(folder / shortened(name)) for name in names[:8])


def _has_safetensors(folder: Path) -> bool:
    try:
        return any(file.name.endswith(SUFFIX) for file in list_directory(folder))
    except StorageError:
        return False


def head_kind(path: Path) -> FileKind | None:
    """Kind of a file by its first bytes; None for an unreadable file, and for an unknown start."""
    head = b""
    with suppress(StorageError):
        descriptor = open_regular(path, path.name)
        try:
            head = read_first(descriptor, HEAD_BYTES, path.name)
        finally:
            os.close(descriptor)
    return kind_of_head(head)


def holds_model(name: str) -> bool:
    """Return whether a file has the usual name of a model's file, in any format."""
    if name.endswith(SUFFIX):
        return MODEL_NAME.match(name.lower()) is not None
    kind = _model_kind(name)
    return kind is not None and kind.holds_model


def _kind_of_file(path: Path) -> FileKind | None:
    """Kind of a file by its first bytes, or by its name."""
    return head_kind(path) or _kind_of_name(path.name)


def _kind_of_name(name: str) -> FileKind | None:
    return next((file_kind for file_kind in KINDS if name.lower().endswith(file_kind.ends or ("\0",))), None)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a folder for a note on it; StorageError for other content."""
    return load_json(read_whole(folder / name, name, MAX_CONFIG_BYTES, "unreadable"), name, "config")


def _quant_method(folder: Path) -> str | None:
    """Quantization method in the config of a folder; None without a valid config."""
    try:
        config = read_config(folder, CONFIG_NAME)
    except QloadError:
        return None
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    return method if isinstance(method, str) else None
