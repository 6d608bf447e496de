"""Files and folders beside a checkpoint that are not read, named by their kind.

A folder of the hub is often several models at once: Mistral's and Meta's own files, adapters, other
quantizations in subfolders, shards of an older upload, and downloads that did not end. Names and first bytes
tell the kind. Sources: `weight_files` of mlx-lm and `_weight_hub_files_from_model_info` of
text-generation-inference, which read every file; "Understand caching" in the guides of huggingface_hub.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from qload.errors import QloadError, StorageError
from qload.storage.files import Place, is_directory, is_taken, list_directory, list_subfolders, shortened
from qload.storage.unsupported_files import (
    CONFIG_NAME,
    MAX_ENTRIES,
    POINTER,
    head_kind,
    holds_model,
    read_config,
)

ADAPTER_CONFIG = "adapter_config.json"
DOWNLOADS = (".cache", "huggingface", "download")  # of huggingface_hub, for a download to a folder
# Names of downloads that did not end: of huggingface_hub, aria2, curl, browsers.
UNFINISHED = re.compile(
    r".*(\.incomplete|\.(safetensors|gguf|bin|pth)\.(aria2|part|tmp|crdownload|download))"
)
# Kinds of safetensors files by name, in their order in the notes.
STRAY_KINDS = (
    (re.compile(r"consolidated.*"), "the model under Mistral's or Meta's own names"),
    (re.compile(r"adapter_model.*"), "an adapter of PEFT, which is not applied"),
    (re.compile(r"\..*"), "hidden, as macOS leaves beside a copy"),
)


def is_hidden(file: Path) -> bool:
    """Return whether a file is hidden, such as `._model.safetensors` of macOS."""
    return file.name.startswith(".")


def unfinished_downloads(folder: Path, listing: Sequence[Path]) -> tuple[str, ...]:
    """List the names of downloads into a folder that did not end."""
    names = [file.name for file in listing if UNFINISHED.fullmatch(file.name)]
    cache = folder.joinpath(*DOWNLOADS)
    if is_directory(cache):
        names += [
            "/".join((*DOWNLOADS, file.name))
            for file in list_directory(cache)
            if UNFINISHED.fullmatch(file.name)
        ]
    return tuple(names)


def model_folders(place: Path) -> tuple[str, ...]:
    """List the names of subfolders with files of models, such as `original`, `onnx` and `fp8`."""
    folders = []
    for folder in list_subfolders(place)[:MAX_ENTRIES]:
        with suppress(StorageError):
            if any(holds_model(file.name) for file in list_directory(folder)):
                folders.append(folder.name)
    return tuple(folders)


def fetch_remedy(unfinished: Sequence[str]) -> str:
    """Return the remedy for missing files, with the first download that did not end."""
    again = "fetch the missing files"
    return f"{again}: the download {shortened(unfinished[0])} did not end" if unfinished else again


def stray_notes(beside: Mapping[str, Place], older: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return notes on the safetensors files of a known kind, and the names of all others.

    `older`: numbered files of the same model in another division.
    """
    if not beside:
        return [], []
    rest = [name for name in beside if name not in older]
    notes = []
    if older:
        what = "numbered files of another upload, which some programs read too (mlx-lm, TGI); remove them"
        notes.append(_note(older, what))
    pointers = [name for name in rest if _is_pointer(beside[name])]
    if pointers:
        notes.append(_note(pointers, "a pointer of Git LFS in the place of the file"))
    rest = [name for name in rest if name not in pointers]
    for pattern, what in STRAY_KINDS:
        known = [name for name in rest if pattern.fullmatch(name)]
        if known:
            notes.append(_note(known, what))
        rest = [name for name in rest if name not in known]
    return notes, rest


def folder_strays(folders: Sequence[str], unfinished: Sequence[str]) -> Iterator[str]:
    """Yield notes on subfolders with models, and on downloads that did not end."""
    if folders:
        names = ", ".join(map(shortened, folders[:8])) + (", ..." if len(folders) > 8 else "")
        yield f"subfolders with models are not read: {names}; name one of them to read it"
    if unfinished:
        yield _note(unfinished, "the rest of a download that did not end")


def adapter_note(files: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield a note on an adapter without its model; `files`: names of the files to read."""
    if is_taken(folder / CONFIG_NAME, CONFIG_NAME) or not is_taken(folder / ADAPTER_CONFIG, ADAPTER_CONFIG):
        return
    if all(file.startswith("adapter") for file in files):
        base = None
        with suppress(QloadError):
            base = read_config(folder, ADAPTER_CONFIG).get("base_model_name_or_path")
        of = f" of {base:.200}" if isinstance(base, str) else ""
        yield f"this is an adapter of PEFT{of}, and no model ({ADAPTER_CONFIG}): only PEFT applies it"


def _note(names: Sequence[str], what: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{shortened(names[0])}{more}: not read: {what}"


def _is_pointer(place: Place) -> bool:
    """Return whether a file begins like a pointer of Git LFS; False for a file on a server."""
    kind = head_kind(place) if isinstance(place, Path) else None
    return kind is POINTER
