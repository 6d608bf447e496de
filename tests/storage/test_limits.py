"""Limits of a header, each from both sides, and messages with their numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from qload.errors import ArgumentError, StorageError
from qload.storage import MemoryStorage, SafetensorsStorage, parse_header
from qload.storage.checkpoint_files import CheckpointFiles, check_index, folder_notes
from qload.storage.header import MAX_EMPTY_SIDE, MAX_HEADER_BYTES, MAX_NAME_LENGTH, MAX_RANK, Entry, Header
from qload.storage.unsupported_files import file_error, kind_of_head, mistral_notes

pytestmark = pytest.mark.usefixtures("seen_texts")

ENTRY = Entry("U8", (0,), 0, 0)


def refused(entries: dict[str, Any], data: int = 0, spare: int = 0) -> str:
    """Return the error of a header for so many bytes of data, with trailing spaces; "" without an error."""
    text = json.dumps(entries).encode() + b" " * spare
    try:
        parse_header(len(text).to_bytes(8, "little") + text, 8 + len(text) + data, "f")
    except StorageError as error:
        return f"{error.rule} {error}"
    return ""


def entry(shape: list[int], begin: int = 0, end: int = 0, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("entries", "data", "error"),
    [
        ({"a" * MAX_NAME_LENGTH: entry([0])}, 0, ""),
        (
            {"a" * (MAX_NAME_LENGTH + 1): entry([0])},
            0,
            "is not a tensor name: words between dots, at most 1024 letters",
        ),
        ({"a": entry([1] * MAX_RANK, 0, 1)}, 1, ""),
        ({"a": entry([1] * (MAX_RANK + 1), 0, 1)}, 1, "shape [1, 1, 1, 1, 1"),
        ({"a": entry([0, MAX_EMPTY_SIDE])}, 0, ""),
        (
            {"a": entry([0, MAX_EMPTY_SIDE + 1])},
            0,
            "has no elements and a dimension of 16777217: [0, 16777217]",
        ),
        ({"a": entry([(1 << 62) - 1])}, 0, "takes 4611686018427387903 bytes, data_offsets span 0"),
        ({"a": entry([1 << 62])}, 0, "shape [4611686018427387904] is not a list of"),
        ({"a": entry([-1])}, 0, "shape [-1] is not a list of"),
        ({"a": entry([1], 1, 0)}, 1, "data_offsets [1, 0] are not the begin and the end of a range"),
        (
            {"a": {**entry([1]), "data_offsets": [0]}},
            1,
            "data_offsets [0] are not the begin and the end of a range",
        ),
        (
            {"a": {**entry([1]), "data_offsets": [0, 1, 1]}},
            1,
            "data_offsets [0, 1, 1] are not the begin and the end of a range",
        ),
        ({"a": entry([3], 0, 3), "b": entry([2], 2, 4)}, 4, "overlaps the tensor before it by 1 bytes"),
        ({"a": entry([3], 0, 3), "b": entry([2], 5, 7)}, 7, "leaves a hole before it of 2 bytes"),
        ({"a": entry([3], 2, 5)}, 5, "leaves a hole before it of 2 bytes"),
        ({"a": entry([3, 5], 0, 30, "F16")}, 30, ""),
        ({"a": entry([3, 5], 0, 29, "F16")}, 29, "takes 30 bytes, data_offsets span 29"),
        ({"a": entry([3], 0, 3)}, 2, "truncated: its header accounts for"),
        ({"a": entry([3], 0, 3)}, 4, "too long: its header accounts for"),
    ],
)
def test_a_header_is_refused_from_its_limits_on(
    entries: dict[str, Any], data: int, error: str, golden: SnapshotAssertion
) -> None:
    found = refused(entries, data)

    assert error in found
    assert found == golden if error else not found


@pytest.mark.parametrize(
    ("head", "size", "error"),
    [
        (b"", 0, "0 bytes long, too short for a header"),
        (b"\2\0\0\0\0\0\0", 7, "7 bytes long, too short for a header"),
        (
            b"\3\0\0\0\0\0\0\0{}",
            10,
            "says its header has 3 bytes; the file has 10, the format allows 100000000",
        ),
        (b"\2\0\0\0\0\0\0\0 {}", 10, r"begins with b' ', not with '{'"),
        (
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
            1 << 40,
            "says its header has 100000001 bytes; the file has 1099511627776, the format allows 100000000",
        ),
    ],
)
def test_the_length_of_a_header_is_held_to_the_file(head: bytes, size: int, error: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse_header(head, size, "f")

    assert error in str(caught.value)


def test_the_shortest_header_is_read() -> None:
    assert parse_header(b"\2\0\0\0\0\0\0\0{}", 10, "f").tensors == {}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (1, "model-00002-of-00009.safetensors not found: 1 of 9 files are missing"),
        (
            4,
            "model-00002-of-00009.safetensors, model-00003-of-00009.safetensors,"
            " model-00004-of-00009.safetensors, model-00005-of-00009.safetensors not found: 4 of 9 files",
        ),
        (5, "model-00005-of-00009.safetensors and 1 more not found: 5 of 9 files are missing"),
        (7, "model-00005-of-00009.safetensors and 3 more not found: 7 of 9 files are missing"),
    ],
)
def test_of_files_that_are_missing_four_are_named(missing: int, said: str, tmp_path: Path) -> None:
    for number in (1, *range(2 + missing, 10)):
        save_file({f"t{number}": torch.ones(1)}, tmp_path / f"model-{number:05}-of-00009.safetensors")

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(tmp_path)

    assert said in str(caught.value)


def test_files_may_be_numbered_from_0(tmp_path: Path) -> None:
    for number in range(3):
        save_file({f"t{number}": torch.ones(1)}, tmp_path / f"model-{number}-of-3.safetensors")

    with SafetensorsStorage(tmp_path) as storage:
        assert sorted(storage.keys()) == ["t0", "t1", "t2"]


def test_of_several_indices_none_is_chosen_but_the_usual_one(tmp_path: Path) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors")
    content = json.dumps({"weight_map": {"t": "model.safetensors"}})
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(content)

    with pytest.raises(StorageError, match=r"has several indices: a\.safetensors\.index\.json, b\.safeten"):
        SafetensorsStorage(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with SafetensorsStorage(tmp_path) as storage:
        assert [*storage.keys()] == ["t"]


def test_of_files_that_an_index_names_in_vain_the_tensors_are_counted(tmp_path: Path) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "here.safetensors")
    lost = {f"t{number}": f"lost{number // 2}.safetensors" for number in range(6)}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"t": "here.safetensors", **lost}})
    )

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(tmp_path)

    assert "lost0.safetensors, lost1.safetensors, lost2.safetensors not found, with 6 tensors" in str(
        caught.value
    )


def test_an_argument_of_another_type_is_refused_in_memory_too() -> None:
    with pytest.raises(ArgumentError, match="tensors"):
        MemoryStorage({"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="index"):
        MemoryStorage({"a": torch.ones(2)}).read("a", (1,))  # type: ignore[arg-type]


BEGINNINGS = {
    b"GGUF": "a GGUF file",
    b"lmgg": "a GGML file",
    b"fmgg": "a GGML file",
    b"tjgg": "a GGML file",
    b"version ": "a Git LFS pointer",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    **{bytes((0x80, protocol)): "a pickle of PyTorch" for protocol in range(2, 6)},
}


@pytest.mark.parametrize(("begin", "words"), BEGINNINGS.items(), ids=repr)
def test_a_kind_of_file_is_told_by_its_first_bytes(begin: bytes, words: str) -> None:
    found = kind_of_head(begin + b"\1" * 8)
    assert found is not None
    assert found.words.startswith(words)
    for other in (begin[:-1] + b"\1" * 8, b"\1" + begin + b"\1" * 8, begin[: min(7, len(begin) - 1)]):
        assert kind_of_head(other) is None
    assert (kind_of_head(begin[:8]) is found) == (len(begin[:8]) >= min(8, len(begin)))


@pytest.mark.parametrize("protocol", [0, 1, 6, 7])
def test_there_are_no_other_protocols_of_pickles(protocol: int) -> None:
    assert kind_of_head(bytes((0x80, protocol)) + b"\1" * 8) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((f"a.{end}", "is a pickle") for end in ("bin", "pt", "pth", "ckpt", "pkl", "pickle")),
        ("a.ggml", "is a GGML file"),
        *((f"a.{end}", "is a TensorRT engine") for end in ("engine", "plan", "trt")),
        *((f"a.{end}", "is an HDF5 file") for end in ("h5", "hdf5", "keras")),
        *((f"a.{end}", "is an ONNX graph") for end in ("onnx", "onnx_data")),
        ("a.msgpack", "is Flax weights"),
        ("a.npz", "is NumPy arrays"),
        ("a.txt", "not a *.safetensors file; other kinds may run code and are refused"),
    ],
)
def test_a_file_of_no_known_beginning_is_told_by_its_name(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\1" * 32)

    assert f"{name}: {words}" in str(file_error(tmp_path / name))


@pytest.mark.parametrize(
    ("total", "noted"),
    [(7, True), (8, False), (8 + 2 * 92, False), (8 + 2 * 92 + 1, True), (None, False)],
)
def test_a_total_may_count_headers_twice_and_no_more(total: int | None, noted: bool) -> None:
    header = Header({"a": Entry("F32", (2,), 92, 100)}, {}, 100)
    located = CheckpointFiles({}, {"a": "f"}, "index", {}, total)

    said = [f"index says total_size {total}; its tensors take 8 bytes"] if noted else []
    assert [*folder_notes(located, {"f": header})] == said


@pytest.mark.parametrize(("count", "shown"), [(1, "f0"), (4, "f0, f1, f2, f3"), (5, "f0, f1, f2, f3, ...")])
def test_of_files_beside_an_index_four_are_named(count: int, shown: str) -> None:
    beside = {f"f{number}": Path("nowhere") for number in range(count)}

    (note,) = folder_notes(CheckpointFiles({}, {}, "index", beside), {})
    assert note == f"index names no tensor of {count} files in its folder: {shown}"


def test_every_disagreement_of_index_and_headers_is_told() -> None:
    one, two = Header({"a": ENTRY, "b": ENTRY}, {}, 0), Header({"b": ENTRY, "c": ENTRY}, {}, 0)
    located = CheckpointFiles({}, {"a": "two", "b": "one", "d": "one", "e": "elsewhere"}, "index")

    assert [str(error).splitlines()[0] for error in check_index(located, {"one": one, "two": two})] == [
        str(error).splitlines()[0]
        for error in (
            StorageError("two", "duplicate-tensor", "is also in one", "b"),
            StorageError("two", "index-mismatch", "index maps it to this file, and it is in one", "a"),
            StorageError("one", "index-mismatch", "index maps it to this file, and no file has it", "d"),
            StorageError("two", "index-mismatch", "is in this file, and index does not name it", "c"),
        )
    ]


@pytest.mark.parametrize(
    ("files", "beside", "noted"),
    [
        (["consolidated.safetensors"], ["params.json"], True),
        (["consolidated-1.safetensors", "consolidated-2.safetensors"], ["params.json"], True),
        (["consolidated.safetensors"], [], False),
        (["consolidated.safetensors"], ["params.json", "config.json"], False),
        (["consolidated.safetensors", "model.safetensors"], ["params.json"], False),
        (["model.safetensors"], ["params.json"], False),
        ([], ["params.json"], False),
    ],
)
def test_mistrals_own_format_is_noted_where_it_is_the_only_one(
    files: list[str], beside: list[str], noted: bool, tmp_path: Path
) -> None:
    for name in beside:
        (tmp_path / name).write_text("{}")

    assert len([*mistral_notes(files, tmp_path)]) == noted
