"""Writes the vectors into a folder: the same bytes on every machine."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from qload.errors import ArgumentError
from qload.errors.exceptions import written_to
from qload.testing.vectors import rejected, valid
from qload.testing.vectors.case import Content
from qload.testing.vectors.manifest import VERSION, Manifest, VectorCase, VectorFile


def export(folder: Path) -> Manifest:
    """Write all cases, `manifest.json`, its `schema.json` and `SHA256SUMS` into `folder`.

    ArgumentError where the folder holds anything already. Interrupted, or on a full disk, it leaves nothing.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError("folder", "one that is empty, or not there yet", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_to(folder), TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        manifest = _all(Path(beside))
        folder.mkdir(exist_ok=True)
        for made in sorted(Path(beside).iterdir(), key=Path.is_file):  # what names all others comes last
            made.rename(folder / made.name)
    return manifest


def _all(folder: Path) -> Manifest:
    cases = tuple(_written(case, folder) for case in chain(valid.cases(), rejected.cases()))
    manifest = Manifest(version=VERSION, cases=cases)
    sums = [(file.sha256, file.path) for case in cases for file in _files(case)]
    for name, text in (
        ("manifest.json", manifest.model_dump_json(indent=2)),
        (manifest.schema_file, json.dumps(Manifest.model_json_schema(), indent=2, sort_keys=True)),
    ):
        written = _put(folder, name, f"{text}\n".encode())
        sums.append((written.sha256, written.path))
    lines = (f"{digest}  {path}\n" for digest, path in sorted(sums, key=itemgetter(1)))
    _put(folder, "SHA256SUMS", "".join(lines).encode())
    return manifest


def _files(case: VectorCase) -> Iterator[VectorFile]:
    yield from case.files
    if case.expected is not None:
        yield case.expected


def _written(case: Content, folder: Path) -> VectorCase:
    files = tuple(_put(folder, f"{case.id}/{name}", data) for name, data in sorted(case.files().items()))
    meaning = case.meaning()
    return VectorCase(
        id=case.id,
        format=case.format,
        result="must-reject" if meaning is None else "disputed" if case.disputed else "valid",
        flags=case.flags,
        comment=case.comment,
        N=case.shape[0],
        K=case.shape[1],
        split=case.split,
        world=case.world,
        files=files,
        expected=None if meaning is None else _put(folder, f"{case.id}/expected/weight.safetensors", meaning),
    )


def _put(folder: Path, path: str, data: bytes) -> VectorFile:
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return VectorFile(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
