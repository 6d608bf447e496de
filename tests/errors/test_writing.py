"""A disk that is full while something is written: who is told of it hears which file."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from qload import convert
from qload.errors.exceptions import written_to
from qload.testing import make_checkpoint
from qload.testing.vectors import export
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "gptq" / "model_g32_desc_act"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "made", [lambda place: make_checkpoint("gptq", place), export], ids=["make", "export"]
)
def test_the_file_is_named_that_is_written_at_once(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(OSError, match="No space left") as caught:
        made(tmp_path / "out")
    assert str(caught.value.filename).startswith(str(tmp_path / "out"))


def test_vectors_that_were_interrupted_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def stopped(place: Path, data: bytes) -> int:
        if place.name == "manifest.json":
            raise KeyboardInterrupt
        return write(place, data)

    monkeypatch.setattr(Path, "write_bytes", stopped)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_an_error_that_names_a_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, written_to(tmp_path):
        (tmp_path / "nowhere" / "file").write_bytes(b"")

    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_of_vectors_the_manifest_that_names_them_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, folders = Path.rename, list[bool]()

    def noted(place: Path, target: Path) -> Path:
        folders.append(place.is_dir())
        return rename(place, target)

    monkeypatch.setattr(Path, "rename", noted)
    export(tmp_path / "out")

    assert folders == sorted(folders, reverse=True)
    assert {True, False} == set(folders)


def test_a_conversion_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(OSError, match="No space left") as caught:
        convert(MODEL, tmp_path / "out", to="float32")
    assert Path(caught.value.filename).parent == tmp_path


@pytest.mark.parametrize("verb", [["verify"], ["explain", "--arch", "sm90"]], ids=lambda verb: verb[0])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_page_is_named(verb: list[str]) -> None:
    result = run(*verb, MODEL, "--html", "/dev/full")

    assert result.exit_code == 2
    assert "Error: /dev/full: No space left on device" in result.stderr
