"""The bench's peers from a folder, its floor's bytes, and where it says that time jumps."""

import importlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.formats import AWQConfig, AWQWeight
from tests.bench import peer_folder, steps
from tests.bench.limits import bytes_of
from tests.bench.linear import peers_of

pytestmark = pytest.mark.usefixtures("seen_texts")

NAMES = ("one", "other")


def wheel(folder: Path, name: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}/__init__.py", "found = 7\n")
        program = zipfile.ZipInfo(f"{name}/compile")
        program.external_attr = 0o100755 << 16
        packed.writestr(program, "#!/bin/sh\n")
    return path


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_wheel_can_be_imported_and_its_programs_started(tmp_path: Path) -> None:
    wheel(tmp_path, "peer_of_this_test")

    assert peer_folder.add(tmp_path) == ["peer_of_this_test-1.0-py3-none-any.whl"]

    module = importlib.import_module("peer_of_this_test")
    assert module.found == 7
    assert Path(str(module.__file__)).with_name("compile").stat().st_mode & 0o100


def test_what_is_installed_comes_before_a_wheel(tmp_path: Path) -> None:
    wheel(tmp_path, "zipfile")

    peer_folder.add(tmp_path)

    assert importlib.import_module("zipfile") is zipfile


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.txt", "a folder of wheels and shared libraries"),
        ("broken-1.0-py3-none-any.whl", "broken-1.0-py3-none-any.whl: File is not a zip file"),
        ("lib_broken.so", "lib_broken.so"),
    ],
)
def test_a_folder_without_peers_is_refused_by_its_file(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_text("nothing of the kind")

    with pytest.raises(ArgumentError, match=reason):
        peer_folder.add(tmp_path)


def test_a_folder_stands_for_all_names_unless_some_are_asked_for(tmp_path: Path) -> None:
    wheel(tmp_path, "peer_by_name")

    assert peers_of([str(tmp_path)], NAMES) == ["one", "other"]
    assert peers_of([str(tmp_path), "other"], NAMES) == ["other"]
    assert peers_of([], NAMES) == []
    with pytest.raises(ArgumentError, match="third"):
        peers_of(["one", "third"], NAMES)


def test_the_floor_counts_scales_and_zero_points() -> None:
    weight = AWQWeight(
        config=AWQConfig(128),
        qweight=torch.zeros(1024, 128 // 8, dtype=torch.int32),
        qzeros=torch.zeros(8, 128 // 8, dtype=torch.int32),
        scales=torch.zeros(8, 128, dtype=torch.float16),
    )

    assert bytes_of(weight) == 1024 * 128 // 2 + 8 * 128 * 2 + 8 * 128 // 2


def row(M: int, us: float | None, K: int = 64) -> dict[str, Any]:
    return {"layout": "strips", "bits": 4, "group": 128, "K": K, "N": 64, "M": M, "us": us}


def test_a_jump_and_a_time_that_falls_are_named() -> None:
    rows = [row(16, 10.0), row(17, 12.6), row(32, 12.0), row(33, None), row(16, 1.0, K=128), row(64, 12.2)]

    assert list(steps.found(rows)) == [
        "strips, 4 bits, 64 x 64, M = 17: 12.6 us, 1.26 times M = 16",
        "strips, 4 bits, 64 x 64, M = 17: 12.6 us, 1.05 times M = 32",
    ]
