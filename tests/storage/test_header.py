"""Checks of headers before any use of the data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from syrupy.assertion import SnapshotAssertion

from qload.dtypes import TORCH
from qload.errors import StorageError
from qload.storage import DTYPES, SafetensorsStorage, parse_header, read_header
from qload.storage.header import ITEM_BYTES
from tests.storage.mutations import mutations, try_one


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: int = 8, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


DAMAGED = [
    pytest.param(b"", "header-length", "0 bytes long", id="empty file"),
    pytest.param(b"\x01\0\0", "header-length", "3 bytes long", id="three bytes"),
    pytest.param(file_of({}, 0, length=99), "header-length", "99 bytes", id="header beyond the file"),
    pytest.param(file_of({}, 0, length=1 << 63), "header-length", str(1 << 63), id="header of 2**63 bytes"),
    pytest.param(file_of(b"[1]", 0), "header-json", "begins with b'['", id="a list"),
    pytest.param(file_of(b" {}", 0), "header-json", "begins with b' '", id="a space first"),
    pytest.param(file_of(b"{", 0), "header-json", "not JSON", id="half an object"),
    pytest.param(file_of(b'{"a":\xff}', 0), "header-json", "utf-8", id="not UTF-8"),
    pytest.param(file_of(b'{"a":' + b"[" * 200_000, 0), "header-json", "not JSON", id="a nesting bomb"),
    pytest.param(
        file_of(b'{"a":' + b"9" * 5000 + b"}", 0), "header-json", "digits", id="a number of 5000 digits"
    ),
    pytest.param(file_of({"a": 1}), "header-entry", "needs dtype, shape", id="an entry that is a number"),
    pytest.param(
        file_of({"a": {"dtype": "F32"}}), "header-entry", "needs dtype", id="an entry without a shape"
    ),
    pytest.param(
        file_of({"a": {**entry(), "more": 1}}), "header-entry", "nothing else", id="an entry with more"
    ),
    pytest.param(
        file_of({"__metadata__": {"a": 1}}, 0), "header-entry", "text to text", id="metadata of numbers"
    ),
    pytest.param(file_of({"a": entry("F4")}), "dtype", "'F4'", id="a dtype of half bytes"),
    pytest.param(file_of({"a": entry(3)}), "dtype", "3", id="a dtype that is a number"),
    pytest.param(file_of({"a": entry(shape=[-2])}), "header-entry", "[-2]", id="a negative shape"),
    pytest.param(file_of({"a": entry(shape=[2.0])}), "header-entry", "[2.0]", id="a fractional shape"),
    pytest.param(file_of({"a": entry(shape=[True])}), "header-entry", "[True]", id="a shape of booleans"),
    pytest.param(file_of({"a": entry(shape="2")}), "header-entry", "'2'", id="a shape of text"),
    pytest.param(file_of({"a": entry(shape=[1 << 70])}), "header-entry", str(1 << 70), id="a huge shape"),
    pytest.param(file_of({"a": entry(shape=[1] * 65)}), "header-entry", "shape", id="65 dimensions"),
    pytest.param(
        file_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'), "header-entry", "nan", id="NaN"
    ),
    pytest.param(file_of({"a": entry(offsets=[8, 0])}), "header-entry", "[8, 0]", id="offsets backwards"),
    pytest.param(file_of({"a": entry(offsets=[0])}), "header-entry", "[0]", id="one offset"),
    pytest.param(file_of({"a": entry(offsets=[-8, 0])}), "header-entry", "[-8, 0]", id="a negative offset"),
    pytest.param(
        file_of({"a": entry(shape=[3])}), "offset-span", "takes 12 bytes, data_offsets span 8", id="span"
    ),
    pytest.param(
        file_of({"a": entry(), "b": entry(offsets=[4, 12])}, 12), "offset-overlap", "by 4 bytes", id="overlap"
    ),
    pytest.param(
        file_of({"a": entry(), "b": entry()}), "offset-overlap", "by 8 bytes", id="the same bytes twice"
    ),
    pytest.param(
        file_of({"a": entry(), "b": entry(offsets=[12, 20])}, 20), "offset-gap", "of 4 bytes", id="a hole"
    ),
    pytest.param(
        file_of({"a": entry(offsets=[4, 12])}, 12), "offset-gap", "of 4 bytes", id="a hole at the start"
    ),
    pytest.param(file_of({"a": entry()}, 7), "file-length", "truncated", id="truncated"),
    pytest.param(file_of({"a": entry()}, 9), "file-length", "too long", id="lengthened"),
    pytest.param(
        file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}'),
        "duplicate-key",
        "twice",
        id="a twice",
    ),
    pytest.param(
        file_of(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}'),
        "duplicate-key",
        "twice",
        id="dtype twice",
    ),
]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("content", "rule", "text"), DAMAGED)
def test_a_damaged_header_is_refused(
    content: bytes, rule: str, text: str, tmp_path: Path, golden: SnapshotAssertion
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)

    with pytest.raises(StorageError) as caught:
        SafetensorsStorage(file)

    assert caught.value.rule == rule
    assert text in str(caught.value)
    assert str(caught.value).partition("not JSON: ")[0] == golden  # Python words the rest


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(file_of({"a": entry()}), id="one tensor"),
        pytest.param(file_of({}, 0), id="no tensor"),
        pytest.param(
            file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     '), id="spaces after"
        ),
        pytest.param(file_of({"a": entry(shape=[], offsets=[0, 4])}, 4), id="a scalar"),
        pytest.param(file_of({"a": entry(shape=[0, 3], offsets=[0, 0]), "b": entry()}), id="an empty tensor"),
        pytest.param(file_of({"b": entry(offsets=[8, 16]), "a": entry()}, 16), id="in another order"),
    ],
)
def test_a_lawful_header_is_read(content: bytes) -> None:
    header = parse_header(content, len(content), "x")

    assert all(header.file_size >= entry.end for entry in header.tensors.values())


def test_a_tensor_of_each_dtype_has_its_torch_dtype_and_its_size(tmp_path: Path) -> None:
    stored = {name: torch.zeros(3, dtype=TORCH[dtype]) for name, dtype in DTYPES.items()}
    save_file(stored, tmp_path / "model.safetensors")

    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
    header = read_header(tmp_path / "model.safetensors", "model.safetensors")
    assert {name: entry.dtype for name, entry in header.tensors.items()} == {name: name for name in stored}
    with SafetensorsStorage(tmp_path) as storage:
        assert {name: storage.info(name).stored_dtype for name in stored} == DTYPES
        assert all(storage.info(name).dtype == tensor.dtype for name, tensor in stored.items())
        assert all(storage.read(name).dtype == tensor.dtype for name, tensor in stored.items())


def test_mutated_headers_raise_only_qloads_errors_and_stay_inside_their_file() -> None:
    passed = [try_one(file) for file in mutations(20_000)]

    assert 0 < sum(passed) < len(passed)
