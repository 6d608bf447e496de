"""Parallel writes of layers by several threads within a memory limit, and concurrent work."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, get_ident

import pytest
import torch

from qload import convert
from qload.conversion import output_files
from qload.conversion.atomic_folder import AtomicFolder, hash_file
from qload.conversion.output_files import Chunk, OutputFile, OutputItem, background_thread
from qload.native import modules
from qload.storage import SafetensorsStorage, TensorInfo
from qload.testing import make_checkpoint
from qload.verify import blocks

pytestmark = pytest.mark.usefixtures("seen_texts")


def item(name: str, values: torch.Tensor, held: int = 0, seen: list[int] | None = None) -> OutputItem:
    """Return a tensor for a write in two pieces."""

    def read() -> Iterator[Chunk]:
        if seen is not None:
            seen.append(get_ident())
        yield name, values.nbytes // 2, values[len(values) // 2 :]
        yield name, 0, values[: len(values) // 2]

    return OutputItem({name: TensorInfo(values.dtype, tuple(values.shape))}, values.nbytes, read, held)


def written(items: list[OutputItem], folder: Path) -> list[tuple[str, int, int]]:
    """Write a folder with one file; return the progress calls."""
    told: list[tuple[str, int, int]] = []
    unfinished = AtomicFolder(folder, "job")
    with unfinished.open():
        output_files.write_files(
            [OutputFile("model.safetensors", items)], unfinished, lambda *step: told.append(step)
        )
        unfinished.commit()
    return told


def test_pieces_stand_where_the_header_says_whatever_their_order(tmp_path: Path) -> None:
    values = {f"{at}.weight": torch.arange(at * 10, at * 10 + 8).float() for at in range(5)}
    told = written([item(name, each) for name, each in values.items()], tmp_path / "out")

    with SafetensorsStorage(tmp_path / "out") as storage:
        assert {name: storage.read(name).tolist() for name in list(storage.keys())} == {
            name: each.tolist() for name, each in values.items()
        }
    assert told[0] == ("writing", 0, 160)
    assert told[-1] == ("writing", 160, 160)


@pytest.mark.parametrize("name", ["a", "ab", "abcdefg"])
def test_elements_lie_at_multiples_of_their_size(name: str) -> None:
    values = {name: torch.ones(3).half(), "long": torch.ones(2), "odd": torch.ones(3, dtype=torch.uint8)}
    file = OutputFile("model.safetensors", [item(each, tensor) for each, tensor in values.items()])
    length = int.from_bytes(file.header[:8], "little")
    entries = json.loads(file.header[8:])

    assert len(file.header) == 8 + length
    assert length % 8 == 0
    assert file.header.rstrip(b" ").endswith(b"}}")
    assert [*file.tensors] == ["long", name, "odd"]  # 8 bytes first, then the larger elements
    assert {each: start - len(file.header) for each, start in file.offsets.items()} == {
        "long": 0,
        name: 8,
        "odd": 14,
    }
    assert entries.pop("__metadata__") == {"format": "pt"}
    assert entries == {
        "long": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        name: {"dtype": "F16", "shape": [3], "data_offsets": [8, 14]},
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [14, 17]},
    }
    assert (file.nbytes, file.source_bytes) == (len(file.header) + 17, 17)


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (1, ["a", "b", "c", "d"]),
        (15, ["a", "b", "c", "d"]),
        (16, ["ab", "c", "d"]),
        (39, ["ab", "c", "d"]),
        (40, ["ab", "cd"]),
        (47, ["ab", "cd"]),
        (48, ["abc", "d"]),
        (55, ["abc", "d"]),
        (56, ["abcd"]),
    ],
)
def test_a_file_has_at_most_so_many_bytes_and_its_number_and_that_of_all(
    limit: int, files: list[str]
) -> None:
    items = [item(name, torch.zeros(size)) for name, size in (("a", 2), ("b", 2), ("c", 8), ("d", 2))]

    split = output_files.split_into_files(items, limit)

    assert ["".join(name for each in file.items for name in each.tensors) for file in split] == files
    count = f"{len(files):05}"
    names = [f"model-{at + 1:05}-of-{count}.safetensors" for at in range(len(files))]
    assert [file.name for file in split] == (names if len(files) > 1 else ["model.safetensors"])


@pytest.mark.parametrize(
    ("held", "want"),
    [
        ([0, 0], output_files.MAX_MEMORY_BYTES),
        ([1, output_files.MAX_MEMORY_BYTES // 3], 3),
        ([2 * output_files.MAX_MEMORY_BYTES], 1),
    ],
)
def test_as_many_layers_at_once_as_memory_allows(held: list[int], want: int) -> None:
    items = [item(f"{at}", torch.zeros(2), size) for at, size in enumerate(held)]

    assert output_files.max_threads(OutputFile("model.safetensors", items)) == want


def test_large_layers_are_written_by_one_thread(tmp_path: Path) -> None:
    seen: list[int] = []
    with modules.using(threads=4):
        written(
            [item(f"{at}", torch.zeros(2), output_files.MAX_MEMORY_BYTES, seen) for at in range(8)],
            tmp_path / "out",
        )

    assert len(seen) == 8
    assert len({*seen}) == 1


def test_what_one_call_does_not_write_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write fewer bytes than requested, for example of more than 2 GiB."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: pwrite(file, content[:5], place))
    written([item("a", torch.arange(8).float())], tmp_path / "out")

    with SafetensorsStorage(tmp_path / "out") as storage:
        assert storage.read("a").tolist() == list(range(8))


def test_what_goes_on_beside_is_raised_at_the_next_step() -> None:
    def fails() -> None:
        raise OSError("full")

    with background_thread("test") as thread:
        failed = thread.submit(fails)
        assert failed.exception() is not None
        with pytest.raises(OSError, match="full"):
            thread.submit(lambda: None)
        with pytest.raises(OSError, match="full"):
            thread.wait()


def test_what_was_not_begun_is_not_done_after_an_error() -> None:
    begun, done = Event(), []

    def first() -> None:
        begun.set()
        time.sleep(0.05)  # meanwhile the second task waits, and is cancelled

    def interrupted() -> None:
        with background_thread("test") as thread:
            thread.submit(first)
            thread.submit(lambda: done.append(1))
            begun.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == []


def test_a_layer_of_several_runs_is_dequantized_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("gptq", tmp_path / "in", config={"num_hidden_layers": 1})
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 1 << 10)
    found = convert(tmp_path / "in", tmp_path / "out", to="float32")

    assert (found.verdict, set(found.counts)) == ("ok", {"bits"})
    with SafetensorsStorage(tmp_path / "out") as plain, SafetensorsStorage(tmp_path / "in") as stored:
        name = next(name for name in list(stored.keys()) if name.endswith("up_proj.qweight"))
        K, N = stored.info(name).shape
        assert plain.info(name.replace("qweight", "weight")).shape == (N, K * 8)
        assert N * K * 8 > 2 << 10


def test_the_certificate_has_the_hash_of_each_file_that_was_read(tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", to="awq")
    said = json.loads((tmp_path / "out" / "qload-certificate.json").read_text())

    assert said["source"] == {"model.safetensors": hash_file(tmp_path / "in" / "model.safetensors")}
