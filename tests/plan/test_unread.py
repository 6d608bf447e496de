"""`plan` and `explain` count what is read, name what is not, and say `incomplete`."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from qload import explain, plan
from tests.support.unread import KINDS

pytestmark = pytest.mark.usefixtures("seen_texts")

KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
def test_bytes_are_those_of_what_is_read(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")
    tensors = load_file(given.folder / "model.safetensors")

    found = plan(given.folder, tp=1)

    read = sum(tensor.nbytes for name, tensor in tensors.items() if name not in given.unread)
    assert found.worlds[1].bytes == (read,)
    assert found.worlds[1].fits
    assert found.unread.keys() == given.unread.keys()
    assert not any(layer.prefix in given.prefixes for layer in found.layers)
    assert any(given.reason in note and str(given.nbytes) in note for note in found.notes)
    assert found.to_json()["unread"].keys() == given.unread.keys()
    assert (found.verdict, found.exit_code) == ("incomplete", 4)


@KIND
def test_kernels_are_told_of_what_is_read(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path / "checkpoint")

    found = explain(given.folder, arch="sm90")

    assert found.unread.keys() == given.unread.keys()
    assert not any(layer.error or layer.prefix in given.prefixes for layer in found.layers)
    assert any(given.reason in note for note in found.notes)
    assert found.to_json()["unread"].keys() == given.unread.keys()
    assert (found.verdict, found.exit_code) == ("incomplete", 4)


def test_a_cut_that_is_refused_comes_first(tmp_path: Path) -> None:
    given = KINDS["stacks of a known type"](tmp_path / "checkpoint")

    assert plan(given.folder, tp=2).verdict == "findings"  # blocks of 128 of a width of 128
