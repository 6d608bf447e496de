"""Writing of the vectors to a folder, with the same bytes on every machine, and their manifest."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from qload.errors import ArgumentError
from qload.errors.exceptions import written_to
from qload.testing.vectors.cases import CaseContent, rejected_cases, valid_cases

# Of the vectors: a changed or removed case increases the first number, a new one the second.
VERSION = "1.0.0"


class VectorFile(BaseModel):
    """One file of a case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="Relative to the manifest, with forward slashes.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="In bytes.")


class VectorCase(BaseModel):
    """One checkpoint with one quantized layer, called `layer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="Stable: the same case in every later version.")
    format: str
    result: Literal["valid", "must-reject", "disputed"] = Field(
        description="disputed: programs in use read it differently; `expected` is how the owner does."
    )
    flags: tuple[str, ...] = Field(description="The classes of bugs that the case is there to find.")
    comment: str
    N: int = Field(description="Outputs of the layer.")
    K: int = Field(description="Inputs of the layer.")
    split: Literal["N", "K"] | None = Field(
        default=None, description="Along which axis `world` ranks share the layer; null: it is read whole."
    )
    world: int = Field(default=1, ge=1)
    files: tuple[VectorFile, ...] = Field(description="The checkpoint: a config.json and safetensors files.")
    expected: VectorFile | None = Field(
        default=None,
        description="Where it may be read: safetensors with `weight`, float32 (N, K), the whole layer.",
    )


class Manifest(BaseModel):
    """All cases of one version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    schema_file: str = "schema.json"
    cases: tuple[VectorCase, ...]


def export(folder: Path) -> Manifest:
    """Write all cases, `manifest.json`, its `schema.json` and `SHA256SUMS` to `folder`.

    ArgumentError unless the folder is missing or empty. After an interrupt or a full disk nothing is left.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError("folder", "an empty or a missing folder", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_to(folder), TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        manifest = _write_all(Path(temporary))
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(temporary).iterdir(), key=Path.is_file):  # the manifest and sums come last
            path.rename(folder / path.name)
    return manifest


def _write_all(folder: Path) -> Manifest:
    cases = tuple(_write_case(case, folder) for case in chain(valid_cases(), rejected_cases()))
    manifest = Manifest(version=VERSION, cases=cases)
    sums = [(file.sha256, file.path) for case in cases for file in _files(case)]
    for name, text in (
        ("manifest.json", manifest.model_dump_json(indent=2)),
        (manifest.schema_file, json.dumps(Manifest.model_json_schema(), indent=2, sort_keys=True)),
    ):
        file = _write(folder, name, f"{text}\n".encode())
        sums.append((file.sha256, file.path))
    lines = (f"{digest}  {path}\n" for digest, path in sorted(sums, key=itemgetter(1)))
    _write(folder, "SHA256SUMS", "".join(lines).encode())
    return manifest


def _files(case: VectorCase) -> Iterator[VectorFile]:
    yield from case.files
    if case.expected is not None:
        yield case.expected


def _write_case(case: CaseContent, folder: Path) -> VectorCase:
    files = tuple(_write(folder, f"{case.id}/{name}", data) for name, data in sorted(case.files().items()))
    expected = case.expected_file()
    return VectorCase(
        id=case.id,
        format=case.format,
        result="must-reject" if expected is None else "disputed" if case.disputed else "valid",
        flags=case.flags,
        comment=case.comment,
        N=case.shape[0],
        K=case.shape[1],
        split=case.split,
        world=case.world,
        files=files,
        expected=None
        if expected is None
        else _write(folder, f"{case.id}/expected/weight.safetensors", expected),
    )


def _write(folder: Path, path: str, data: bytes) -> VectorFile:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return VectorFile(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
