"""Files of other kinds than safetensors, named for what they are, with what does read them.

A name and the first bytes tell; no more of such a file is read, nothing in it is parsed, and nothing is
unpickled. Source of the first bytes: the format descriptions of GGUF, pickle, HDF5 and Git LFS.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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

HEAD_BYTES = 16  # bytes of a file that are looked at
MAX_CONFIG_BYTES = 1 << 20  # bytes of a config that is asked only which method it names
MAX_ENTRIES = 256  # entries of a pipeline's folder that are looked into
SUFFIX = ".safetensors"
PIPELINE = "model_index.json"

# The pickles that hold weights, by their usual names, and not what a trainer leaves beside them.
MODEL_PICKLE = re.compile(r"(.*model.*|consolidated.*|adapter.*)\.")
SOURCE = "qload reads the safetensors that it was made from"


@dataclass(frozen=True, slots=True)
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
        """Rule of its finding in `verify`: `unsupported-format` for a model, which is not damaged."""
        return "unsupported-format" if self.holds_model else "not-safetensors"


PICKLE = FileKind(
    "a pickle of PyTorch, which can run code where it is loaded",
    "take the safetensors of this model; or load it by torch.load(file, weights_only=True), and write it by "
    "safetensors.torch.save_file",
    tuple(bytes((0x80, protocol)) for protocol in range(2, 6)),
    (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
)
TORCHAO = FileKind(
    "a pickle of PyTorch with tensors of torchao",
    "transformers loads it where torchao is installed; qload reads the safetensors of the plain model",
)
KINDS = (
    FileKind(
        "a GGUF file",
        "llama.cpp runs it; transformers loads it by from_pretrained(folder, gguf_file=name), and then "
        "save_pretrained writes plain safetensors",
        (b"GGUF",),
        (".gguf",),
    ),
    FileKind(
        "a GGML file, from before GGUF",
        f"only old versions of llama.cpp read it; {SOURCE}",
        (b"lmgg", b"fmgg", b"tjgg"),
        (".ggml",),
    ),
    FileKind(
        "a Git LFS pointer in the place of the file",
        "fetch the file: git lfs pull",
        (b"version ",),
        holds_model=False,
    ),
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


def kind_of_head(head: bytes) -> FileKind | None:
    """The kind whose files begin with these bytes, of which 8 are enough."""
    return next((kind for kind in KINDS if any(_have_same_start(head, begin) for begin in kind.begins)), None)


def file_error(path: Path) -> StorageError:
    """The error for a file that exists and is not called `*.safetensors`."""
    kind = _kind_of_file(path)
    if kind is None:
        words = "not a *.safetensors file; other kinds may run code and are refused"
        return StorageError(shortened(path.name), "not-safetensors", words)
    return StorageError(
        shortened(path.name),
        kind.rule,
        f"is {kind.words}, not a safetensors file",
        remedy=kind.remedy,
    )


def folder_error(place: Path, there: Sequence[Path], name: str) -> StorageError:
    """The error for a directory with no safetensors file; `there`: what is in it, `name`: of it."""
    if any(file.name == PIPELINE for file in there):
        return _pipeline_error(place, there, name)
    known = tuple(end for kind in KINDS for end in kind.ends)
    likely = [file for file in there if file.name.lower().endswith(known)]
    kinds = {kind: file for file in likely[MAX_ENTRIES::-1] if (kind := _kind_of_file(file))}
    if not kinds:
        return StorageError(name, "no-files", f"no *{SUFFIX} file in this directory")
    kind, file = next((kind, kinds[kind]) for kind in KINDS if kind in kinds)
    if kind is PICKLE and _quant_method(place) == "torchao":
        kind = TORCHAO
    others = f", and there are {len(likely) - 1} such files more" if len(likely) > 1 else ""
    return StorageError(
        name,
        kind.rule,
        f"no *{SUFFIX} file in this directory: {shortened(file.name)} is {kind.words}{others}",
        remedy=kind.remedy,
    )


def other_models(there: Iterable[Path]) -> tuple[str, ...]:
    """Of what is in a folder the names of files that hold models in other formats, by their names alone."""
    return tuple(file.name for file in there if _model_kind(file.name) is not None)


def other_notes(names: Iterable[str]) -> Iterator[str]:
    """One note for each other kind of model files beside safetensors; `names`: of `other_models`."""
    found: dict[FileKind, list[str]] = {}
    for name in names:
        if kind := _model_kind(name):
            found.setdefault(kind, []).append(shortened(name))
    for kind, files in found.items():
        more = f", and {len(files) - 1} files more are such" if len(files) > 1 else ""
        said = f"{files[0]}, beside the safetensors, is not read: by its name it is {kind.words}{more}"
        yield f"{said}; {kind.remedy}"


def _model_kind(name: str) -> FileKind | None:
    """The kind of a model's file; pickles that trainers write beside a model hold none."""
    kind = _kind_of_name(name)
    return kind if kind is not PICKLE or MODEL_PICKLE.match(name.lower()) else None


def mistral_notes(files: Collection[str], folder: Path) -> Iterator[str]:
    """A note on a folder that is in Mistral's own format and in no other; `files`: those that are read."""
    own = files and all(Path(file).name.startswith("consolidated") for file in files)
    params, config = (is_taken(folder / name, name) for name in ("params.json", "config.json"))
    if own and params and not config:
        yield (
            "this is Mistral's own format (consolidated*.safetensors beside params.json): its names are not "
            "those of transformers, and params.json is not read; vLLM loads it with --load-format mistral"
        )


def _pipeline_error(place: Path, there: Sequence[Path], name: str) -> StorageError:
    """Of a pipeline each part is a checkpoint of its own."""
    parts = [part.name for part in there[:MAX_ENTRIES] if is_directory(part) and _has_safetensors(part)]
    named = ", ".join(str(place / shortened(part)) for part in parts[:8])
    return StorageError(
        name,
        "no-files",
        f"is a diffusers pipeline ({PIPELINE}), whose parts are checkpoints of their own",
        remedy=f"name one of them: {named}"
        if parts
        else f"fetch its {SUFFIX} files; there is none in its parts",
    )


def _has_safetensors(folder: Path) -> bool:
    try:
        return any(file.name.endswith(SUFFIX) for file in list_directory(folder))
    except StorageError:
        return False


def _kind_of_file(path: Path) -> FileKind | None:
    """By its first bytes, where it can be read; else by its name."""
    try:
        descriptor = open_regular(path, path.name)
    except StorageError:
        head = b""
    else:
        head = _read_head(descriptor, path.name)
    return kind_of_head(head) or _kind_of_name(path.name)


def _kind_of_name(name: str) -> FileKind | None:
    return next((kind for kind in KINDS if name.lower().endswith(kind.ends or ("\0",))), None)


def _read_head(descriptor: int, file: str) -> bytes:
    try:
        return read_first(descriptor, HEAD_BYTES, file)
    except StorageError:
        return b""
    finally:
        os.close(descriptor)


def _have_same_start(head: bytes, begin: bytes) -> bool:
    """Whether both agree as far as both go."""
    return len(head) >= min(8, len(begin)) and head.startswith(begin[: len(head)])


def _quant_method(place: Path) -> str | None:
    """The quantization method that the config beside pickles names, if that can be told."""
    try:
        config = load_json(
            read_whole(place / "config.json", "config.json", MAX_CONFIG_BYTES, "unreadable"),
            "config.json",
            "config",
        )
    except QloadError:
        return None
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    return method if isinstance(method, str) else None
