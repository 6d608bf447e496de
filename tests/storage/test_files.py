"""Files of tensors: folders and indices, untrusted input, and changes of an open file."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from qload.errors import StorageError
from qload.storage import SafetensorsStorage
from tests.storage.readings import reading

pytestmark = pytest.mark.usefixtures("seen_texts")

__all__ = ["reading"]  # a fixture


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return two shards, an index of both, and a stray file outside the index."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "EXPECTED.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_reads_only_the_files_it_names(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json", str(sharded)):
        storage = SafetensorsStorage(path)

        assert set(storage.keys()) == {"a", "b"}
        assert storage.info("b").file == "two.safetensors"
        assert storage.read("a").tolist() == [1, 1]


def test_a_directory_without_an_index_reads_all_its_safetensors(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "EXPECTED.safetensors").unlink()

    assert set(SafetensorsStorage(sharded).keys()) == {"a", "b"}
    assert set(SafetensorsStorage([sharded / "two.safetensors"]).keys()) == {"b"}


def test_links_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("blobs") / "blob"
    (sharded / "one.safetensors").rename(elsewhere)
    (sharded / "one.safetensors").symlink_to(elsewhere)

    assert SafetensorsStorage(sharded).read("a").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("weight_map", "rule"),
    [
        pytest.param({"a": "one.safetensors", "b": "../two.safetensors"}, "index-path", id="dots"),
        pytest.param({"a": "/one.safetensors"}, "index-path", id="absolute"),
        pytest.param({"a": "C:\\one.safetensors"}, "index-path", id="drive"),
        pytest.param({"a": "x\0.safetensors"}, "index-path", id="NUL"),
        pytest.param({"a": "one.bin"}, "index-path", id="another kind of file"),
        pytest.param({"a": ""}, "index-path", id="nothing"),
        pytest.param(
            {"a": "one.safetensors", "b": "lost.safetensors"}, "index-missing-file", id="a lost shard"
        ),
        pytest.param(
            {"a": "one.safetensors", "b": "one.safetensors"}, "index-mismatch", id="not in that shard"
        ),
        pytest.param(
            {"a": "one.safetensors", "x": "two.safetensors"},
            "index-mismatch",
            id="b is not named, x not there",
        ),
        pytest.param([], "index-json", id="a list"),
        pytest.param({"a": 1}, "index-json", id="numbers"),
        pytest.param(
            {"a": "one.safetensors", "c": "EXPECTED.safetensors"}, "duplicate-tensor", id="a in two"
        ),
    ],
)
def test_an_index_that_cannot_be_trusted_is_refused(
    sharded: Path, weight_map: Any, rule: str, golden: SnapshotAssertion
) -> None:
    write_index(sharded, weight_map)

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(sharded)

    assert caught.value.rule == rule
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param("{", "index-json", id="half an object"),
        pytest.param("[]", "index-json", id="a list"),
        pytest.param('{"weight_map":{"a":"x","a":"y"}}', "duplicate-key", id="a name twice"),
        pytest.param("[" * 100_000, "index-json", id="a nesting bomb"),
    ],
)
def test_an_index_that_is_no_index_is_refused(sharded: Path, text: str, rule: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(sharded)

    assert caught.value.rule == rule


def test_a_name_in_two_files_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()

    with pytest.raises(StorageError, match=r"one\.safetensors: a: is also in EXPECTED\.safetensors"):
        SafetensorsStorage(sharded)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param("nowhere", "no-files", id="no such path"),
        pytest.param("empty", "no-files", id="a directory without files"),
        pytest.param("model.bin", "unsupported-format", id="a pickle"),
        pytest.param("model.zip", "not-safetensors", id="another kind"),
        pytest.param("folder.safetensors", "no-files", id="a directory named like a file"),
    ],
)
def test_a_path_without_tensors_is_refused(tmp_path: Path, name: str, rule: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "model.zip").write_bytes(bytes(16))

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(tmp_path / name)

    assert caught.value.rule == rule


def test_reading_after_closing_is_refused(sharded: Path) -> None:
    with SafetensorsStorage(sharded) as storage:
        assert storage.read("a").tolist() == [1, 1]

    with pytest.raises(StorageError, match="read after its storage was closed"):
        storage.read("a")


@pytest.mark.parametrize("index", [(), (slice(0, 2), slice(0, 1))], ids=["whole", "rectangle"])
def test_a_file_cut_short_after_it_was_opened_is_an_error_and_no_crash(
    tmp_path: Path, index: tuple[slice, ...]
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000, 1000)}, file)
    storage = SafetensorsStorage(file)
    storage.read("a", index)

    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(StorageError, match="had 4000080 bytes when opened, now 100"):
        storage.read("a", index)


def test_threads_can_read_at_the_same_time(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((64, 64), i) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    storage, wrong = SafetensorsStorage(tmp_path), []

    def read(name: str) -> None:
        for _ in range(20):
            got = storage.read(name, (slice(0, 64), slice(3, 9)))
            wrong.extend([name] * (not torch.equal(got, tensors[name][:, 3:9])))

    threads = [threading.Thread(target=read, args=(name,)) for name in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_a_hundred_gigabytes_are_opened_by_their_header(tmp_path: Path) -> None:
    size = 100 * 10**9
    head = json.dumps({"a": {"dtype": "I32", "shape": [50_000, 500_000], "data_offsets": [0, size]}}).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        try:
            stream.truncate(8 + len(head) + size)
        except OSError:
            pytest.skip("this file system has no sparse files of 100 GB")

    storage = SafetensorsStorage(file)

    assert storage.info("a").nbytes == size
    assert storage.read("a", (slice(49_999, 50_000), slice(499_998, 500_000))).tolist() == [[0, 0]]
    assert storage.bytes_read == 8
