"""Folders of huggingface_hub's cache, and an index, as paths."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import qload
from qload.errors import StorageError
from qload.storage import snapshot
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts")

SOUND = FIXTURES / "gptq" / "model_g32_desc_act"
LAYER = "model.layers.0.mlp.down_proj"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model folder in the cache with two snapshots; the second is valid, and `main` refers to it."""
    top = tmp_path / "models--org--name"
    (top / "snapshots" / FIRST).mkdir(parents=True)
    shutil.copytree(SOUND, top / "snapshots" / SECOND)
    (top / "refs").mkdir()
    (top / "refs" / "main").write_text(SECOND)
    return top


def top(model: Path) -> Path:
    return model


def snapshots(model: Path) -> Path:
    return model / "snapshots"


def index(model: Path) -> Path:
    return model / "snapshots" / SECOND / "model.safetensors.index.json"


@pytest.mark.parametrize("named", [top, snapshots, index], ids=lambda named: named.__name__)
def test_every_reader_finds_the_snapshot(model: Path, named: Callable[[Path], Path]) -> None:
    path = named(model)

    assert qload.inspect(path).layers == qload.inspect(SOUND).layers
    assert qload.verify(path, against=path).verdict == "ok"
    with qload.open_checkpoint(path) as weights:
        assert weights.get_weights(LAYER).format == "gptq"


def test_an_index_is_read_with_the_config_beside_it(tmp_path: Path) -> None:
    shutil.copytree(SOUND, tmp_path / "model")
    report = qload.verify(tmp_path / "model" / "model.safetensors.index.json")

    assert report.claims == qload.verify(SOUND).claims != {}
    assert report.layers == qload.verify(SOUND).layers


def test_the_report_says_which_snapshot(model: Path) -> None:
    assert qload.inspect(model).path == str(model / "snapshots" / SECOND)


def test_the_folder_of_a_model_may_be_the_current_directory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)

    assert qload.inspect(".").verdict == "ok"


def test_one_snapshot_needs_no_name(model: Path) -> None:
    shutil.rmtree(model / "snapshots" / FIRST)
    shutil.rmtree(model / "refs")

    assert snapshot(model) == model / "snapshots" / SECOND


def no_ref(model: Path) -> None:
    (model / "refs" / "main").unlink()


def another_ref(model: Path) -> None:
    (model / "refs" / "main").write_text("c" * 40)


def a_ref_that_is_a_path(model: Path) -> None:
    (model / "refs" / "main").write_text("../../../elsewhere")


def a_ref_that_is_a_fifo(model: Path) -> None:
    no_ref(model)
    os.mkfifo(model / "refs" / "main")


def a_long_ref(model: Path) -> None:
    (model / "refs" / "main").write_bytes(bytes(1 << 20))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_ref, "has 2 snapshots, and no refs/main that names one of them"),
        (another_ref, "refs/main names 'cccc"),
        (a_ref_that_is_a_path, "which is not one of its 2 snapshots"),
        (a_long_ref, "larger than 4096"),
        pytest.param(
            a_ref_that_is_a_fifo, "is a FIFO",
            marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs"),
        ),
    ],
)  # fmt: skip
def test_no_snapshot_is_chosen_where_none_is_named(
    model: Path, damage: Callable[[Path], None], said: str, golden: SnapshotAssertion
) -> None:
    damage(model)

    (finding,) = qload.verify(model).findings
    assert said in finding.message
    assert finding.message.replace(str(model), "MODEL") == golden
    with pytest.raises(StorageError, match=(finding.rule == "no-files" and "snapshots") or "refs/main"):
        qload.open_checkpoint(model)


@pytest.mark.parametrize(("count", "more"), [(4, ""), (5, " and 1 more"), (7, " and 3 more")])
def test_four_snapshots_are_named_and_the_others_counted(model: Path, count: int, more: str) -> None:
    no_ref(model)
    for number in range(2, count):
        (model / "snapshots" / (str(number) * 40)).mkdir()

    with pytest.raises(StorageError) as caught:
        snapshot(model)

    remedy = str(caught.value).partition("name one of them: ")[2]
    assert (remedy.count("snapshots/"), remedy.endswith(more)) == (4, True)
    assert (" more" in remedy) == bool(more)


def test_any_other_folder_is_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "models--org--name").mkdir()

    assert snapshot(tmp_path / "models--org--name") == tmp_path / "models--org--name"
    assert snapshot("nothing") == "nothing"
