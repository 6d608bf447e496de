"""The frozen vectors, read from their files: valid ones mean what they say, others are refused."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from syrupy.assertion import SnapshotAssertion

from qload import open_checkpoint
from qload.errors import ArgumentError, QloadError
from qload.testing import assert_same_bits
from qload.testing.vectors import VERSION, Manifest, VectorCase, export, rejected_cases, valid_cases
from qload.verify import verify
from tests.support.changed_values import shown

VALID = [case.id for case in valid_cases()]
REJECTED = [case.id for case in rejected_cases()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vectors") / "made"
    export(made)
    return made


def case(folder: Path, name: str) -> VectorCase:
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_text())
    return next(case for case in manifest.cases if case.id == name)


def test_the_cases_of_a_version_are_frozen(golden: SnapshotAssertion) -> None:
    """Another case needs another version; tensors are compared by shape, dtype and sum, files by hash."""
    lines = [
        f"{each.id}: {each.format} {each.flags} {each.shape} {each.split} of {each.world} {each.comment}\n"
        f"  {each.config}\n  {sorted(f'{name} {shown(held)}' for name, held in each.tensors.items())}\n"
        f"  expected {shown(each.expected)} "
        f"{sorted((name, len(data), digest(data)) for name, data in each.raw.items())}"
        for each in (*valid_cases(), *rejected_cases())
    ]

    assert "\n".join((VERSION, *lines)) == golden


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_the_schema_describes_each_field(golden: SnapshotAssertion) -> None:
    lines = [
        f"{kind}.{name}: {field.get('description')} default {field.get('default')!r}"
        for kind, definition in Manifest.model_json_schema()["$defs"].items()
        for name, field in definition["properties"].items()
    ]

    assert "\n".join(lines) == golden


class Rank:
    """One of several."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


def read(place: Path, found: VectorCase, rank: int) -> torch.Tensor:
    with open_checkpoint(place, process_group=Rank(rank, found.world)) as weights:
        load = {"N": weights.get_weights_col, "K": weights.get_weights_row, None: weights.get_weights}[
            found.split
        ]
        return load("layer").dequantize()


@pytest.mark.parametrize("name", VALID)
def test_a_valid_case_means_what_it_says(name: str, folder: Path) -> None:
    found = case(folder, name)
    assert found.expected is not None
    expected = load_file(folder / found.expected.path)["weight"]
    axis = "NK".index(found.split or "N")

    shares = [read(folder / name, found, rank) for rank in range(found.world)]

    assert tuple(expected.shape) == (found.N, found.K)
    assert_same_bits(torch.cat(shares, axis), expected)


WRAPPED = "gptq.v1.w4.g32.wrapped"


def fields(words: torch.Tensor) -> torch.Tensor:
    """(G, N) of the eight fields of each word (G, N/8)."""
    return (words[:, :, None].long() >> 4 * torch.arange(8) & 15).flatten(1)


def test_zero_points_of_0_are_stored_as_15(folder: Path) -> None:
    stored = fields(load_file(folder / WRAPPED / "model.safetensors")["layer.qzeros"])
    plain = (torch.arange(stored.shape[1])[None] + 3 * torch.arange(stored.shape[0])[:, None]) % 15

    assert bool((stored[plain == 0] == 15).all())
    assert torch.equal(stored[plain > 0], plain[plain > 0] - 1)


def test_the_owner_carries_over_the_field_beside_a_zero_point_of_0_by_hand(folder: Path) -> None:
    """The first word holds 15, 0, 1, ..., 6; one more in each field is 0, carry, 2, 2, 3, ..., 7."""
    found = case(folder, WRAPPED)
    assert found.expected is not None
    expected = load_file(folder / found.expected.path)["weight"][:8, 0]
    scales = load_file(folder / WRAPPED / "model.safetensors")["layer.scales"][0, :8]
    codes = torch.tensor([0, 5, 10, 15, 4, 9, 14, 3])

    zeros = codes - expected / scales.float()

    assert zeros.tolist() == [0, 2, 2, 3, 4, 5, 6, 7]


def refused(place: Path, found: VectorCase) -> bool:
    try:
        for rank in range(found.world):
            read(place, found, rank)
    except QloadError:
        return True
    return verify(place).verdict != "ok"


@pytest.mark.parametrize("name", REJECTED)
def test_a_case_that_must_be_rejected_is(name: str, folder: Path) -> None:
    assert refused(folder / name, case(folder, name))


def test_the_files_are_those_of_the_sums_and_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    export(tmp_path / "again")
    sums = (folder / "SHA256SUMS").read_text()
    listed = {line.split("  ")[1]: line.split("  ")[0] for line in sums.splitlines()}
    written = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}

    assert (tmp_path / "again" / "SHA256SUMS").read_text() == sums
    assert {*listed} | {"SHA256SUMS"} == {*written}
    assert all(hashlib.sha256(written[name].read_bytes()).hexdigest() == sum for name, sum in listed.items())
    assert sum(path.stat().st_size for path in written.values()) < 1 << 20


def test_ids_are_told_once_and_the_schema_has_every_field(folder: Path) -> None:
    schema = json.loads((folder / "schema.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())

    assert len({*VALID, *REJECTED}) == len(VALID) + len(REJECTED) == len(manifest["cases"])
    assert {*schema["$defs"]["VectorCase"]["properties"]} == {*manifest["cases"][0]}


def test_an_empty_folder_is_filled(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    assert export(tmp_path / "empty").version == VERSION
    assert (tmp_path / "empty" / "SHA256SUMS").read_text() == (folder / "SHA256SUMS").read_text()


def test_a_folder_that_holds_something_is_left_alone(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="an empty or a missing folder"):
        export(folder)
