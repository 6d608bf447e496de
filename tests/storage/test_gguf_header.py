"""Checks of GGUF headers before any use of the data."""

import struct
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from qload.errors import StorageError
from qload.storage import ArrayLength, parse_gguf_header, read_gguf_header
from qload.storage.gguf_header import MAX_HEADER_BYTES, MAX_ITEMS, MAX_KEPT_ITEMS
from qload.storage.gguf_types import GGML_TYPES, IK_TYPES, UNREAD_TYPES
from tests.storage.gguf_files import LLAMA, NUMBERS, blocks, entry, gguf_file, header, text, value_of
from tests.storage.gguf_mutations import gguf_mutations, try_gguf

ALIGNMENT = "general.alignment"
Q4_0 = NUMBERS["Q4_0"]


def parse(file: bytes, size: int | None = None) -> Any:
    return parse_gguf_header(lambda at, count: file[at : at + count], size or len(file), "a.gguf")


def with_entry(*entries: bytes, data: int = 64, **keys: Any) -> bytes:
    head = header(keys, entries)
    return head + bytes(-len(head) % 32) + bytes(data)


def array_of(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


NESTED = reduce(lambda inner, _: array_of(9, 1, inner[4:]), range(5), array_of(4, 0))
DAMAGED = [
    pytest.param(b"", "header-length", "within the 0 bytes", id="empty"),
    pytest.param(b"GGUF\3", "header-length", "within the 5 bytes", id="five bytes"),
    pytest.param(b"GGML" + bytes(60), "not-safetensors", "letters GGUF", id="other letters"),
    pytest.param(b"GGUF" + struct.pack(">I", 3) + bytes(60), "byte-order", "s390x", id="big-endian"),
    pytest.param(
        b"GGUF" + struct.pack("<I", 1) + bytes(60), "unsupported-format", "version 1", id="version 1"
    ),
    pytest.param(b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "header-length", "tensors", id="tensors"),
    pytest.param(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "header-length", "keys", id="keys"),
    pytest.param(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "header-length", "text", id="key"
    ),
    pytest.param(
        header({"a": struct.pack("<IQ", 8, 1 << 60)}, []), "header-length", "text", id="a long text"
    ),
    pytest.param(
        header({"a": struct.pack("<IQ", 8, 99)}, []), "header-length", "within", id="beyond the file"
    ),
    pytest.param(header({"a": b"\x0d\0\0\0"}, []), "header-entry", "unknown type 13", id="type of a value"),
    pytest.param(
        header({"a": struct.pack("<I", 8) + text(b"\xff")}, []), "header-entry", "UTF-8", id="UTF-8"
    ),
    pytest.param(header({"a": array_of(4, 1 << 60)}, []), "header-length", "within", id="array of numbers"),
    pytest.param(header({"a": array_of(8, 1 << 60)}, []), "header-length", "items", id="array of texts"),
    pytest.param(
        header({"a": array_of(8, MAX_ITEMS + 1)}, []), "header-length", "items", id="one text too many"
    ),
    pytest.param(header({"a": NESTED}, []), "header-length", "depth 4", id="nested arrays"),
    pytest.param(
        header({"a": array_of(9, 1, struct.pack("<IQ", 9, 1) * 5000)}, []),
        "header-length",
        "depth 4",
        id="a nesting bomb",
    ),
    pytest.param(
        header({}, [])[:16] + struct.pack("<Q", 2) + 2 * (text("a") + value_of(1)),
        "duplicate-key",
        "twice",
        id="a key twice",
    ),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), **{ALIGNMENT: 12}),
        "header-entry",
        "alignment is 12",
        id="alignment",
    ),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), **{ALIGNMENT: 0}),
        "header-entry",
        "alignment is 0",
        id="alignment 0",
    ),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), **{ALIGNMENT: "x"}),
        "header-entry",
        "alignment",
        id="alignment of text",
    ),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), entry("a", (32,), Q4_0, 32)),
        "duplicate-tensor",
        "twice",
        id="a tensor twice",
    ),
    pytest.param(with_entry(entry("", (32,), Q4_0, 0)), "header-entry", "not a tensor name", id="no name"),
    pytest.param(
        with_entry(entry("a..b", (32,), Q4_0, 0)), "header-entry", "not a tensor name", id="two dots"
    ),
    pytest.param(
        with_entry(entry("a" * 2000, (32,), Q4_0, 0)), "header-entry", "not a tensor name", id="a long name"
    ),
    pytest.param(with_entry(entry("a", (), Q4_0, 0)), "header-entry", "0 dimensions", id="no dimension"),
    pytest.param(
        with_entry(entry("a", (1,) * 5, Q4_0, 0)), "header-entry", "5 dimensions", id="5 dimensions"
    ),
    pytest.param(
        with_entry(entry("a", (0, 32), Q4_0, 0)), "header-entry", "without elements", id="no element"
    ),
    pytest.param(
        with_entry(entry("a", (1 << 62, 32), Q4_0, 0)), "header-entry", "too large", id="a huge shape"
    ),
    pytest.param(
        with_entry(entry("a", (1 << 61, 1 << 61, 32), Q4_0, 0)),
        "file-length",
        "truncated",
        id="a huge product",
    ),
    pytest.param(
        with_entry(entry("a", (2, 48), Q4_0, 0)), "offset-span", "blocks of 32 (Q4_0)", id="a part of a block"
    ),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 8)),
        "offset-gap",
        "alignment is 32",
        id="an offset off the alignment",
    ),
    pytest.param(with_entry(entry("a", (32,), Q4_0, 64), data=128), "offset-gap", "begins at", id="a hole"),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), entry("b", (32,), Q4_0, 0)),
        "offset-overlap",
        "ends at",
        id="an overlap",
    ),
    pytest.param(with_entry(entry("a", (32,), Q4_0, 1 << 63)), "offset-gap", "begins at", id="a huge offset"),
    pytest.param(
        with_entry(entry("a", (32,), Q4_0, 0), data=17), "file-length", "truncated", id="one byte short"
    ),
    pytest.param(with_entry(entry("a", (32,), Q4_0, 0), data=64), "file-length", "too long", id="too long"),
    pytest.param(  # 18 bytes, and all 32 of an alignment
        with_entry(entry("a", (32,), Q4_0, 0), data=50), "file-length", "too long", id="one byte too long"
    ),
]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("file", "rule", "words"), DAMAGED)
def test_a_damaged_header_is_refused(file: bytes, rule: str, words: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse(file)

    assert (caught.value.rule, caught.value.file) == (rule, "a.gguf")
    assert words in str(caught.value)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("number", [*UNREAD_TYPES, 43, 96, 1 << 31], ids=str)
def test_a_type_of_another_program_is_refused_by_number_and_name(number: int) -> None:
    with pytest.raises(StorageError) as caught:
        parse(with_entry(entry("blk.0.attn_q.weight", (256,), number, 0)))

    assert caught.value.rule == "unsupported-format"
    assert caught.value.tensor == "blk.0.attn_q.weight"
    assert f"has type {number}, " in str(caught.value)
    if number in UNREAD_TYPES:
        assert UNREAD_TYPES[number].name in str(caught.value)
    assert ("ik_llama.cpp" in str(caught.value)) == (number in IK_TYPES)
    assert caught.value.remedy


def test_every_number_up_to_the_last_type_has_a_name() -> None:
    assert {*range(max(GGML_TYPES) + 1)} <= GGML_TYPES.keys() | UNREAD_TYPES.keys()
    assert GGML_TYPES.keys().isdisjoint(UNREAD_TYPES)


@pytest.mark.parametrize("kind", GGML_TYPES.values(), ids=lambda kind: kind.name)
def test_a_tensor_has_the_bytes_of_its_blocks(kind: Any) -> None:
    file = gguf_file({}, {"a.weight": blocks(kind.name, (3, 2, 2 * kind.elements)), "b": blocks("F32", (5,))})
    tensors = parse(file).tensors

    assert tensors["a.weight"].shape == (3, 2, 2 * kind.elements)
    assert tensors["a.weight"].end - tensors["a.weight"].begin == 12 * kind.nbytes
    assert len(file) - 32 <= tensors["b"].end <= len(file)
    assert tensors["b"].begin % 32 == 0


def test_keys_of_all_types_are_read() -> None:
    keys = {
        "u": 7,
        "f": 0.5,
        "t": True,
        "s": "äx",
        "n": [1, 2],
        "names": ["a", "b", "c"],
        "deep": [[1], [2, 3]],
    }
    parsed = parse(header(keys, []))

    assert {**parsed.keys} == {**keys, "names": ArrayLength(3), "deep": ArrayLength(2)}


def test_a_long_array_is_counted_and_not_kept() -> None:
    keys = {"a": [0] * (MAX_KEPT_ITEMS + 1), "b": [0] * MAX_KEPT_ITEMS, "after": "read"}
    parsed = parse(header(keys, []))

    assert parsed.keys["a"] == ArrayLength(MAX_KEPT_ITEMS + 1)
    assert len(parsed.keys["b"]) == MAX_KEPT_ITEMS
    assert parsed.keys["after"] == "read"


@pytest.mark.usefixtures("seen_texts")
def test_a_header_is_read_up_to_a_limit() -> None:
    """Test a file that is a header for more than 100 MB, without such a file."""
    asked: list[int] = []
    head = header({"a": array_of(0, MAX_HEADER_BYTES)}, [])

    def fetch(at: int, count: int) -> bytes:
        asked.append(count)
        return (head + bytes(1 << 20))[at : at + count]

    with pytest.raises(StorageError, match="does not end"):
        parse_gguf_header(fetch, 1 << 40, "a.gguf")
    assert sum(asked) <= 1 << 17


@pytest.mark.usefixtures("seen_texts")
def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    with pytest.raises(StorageError, match="ended before") as caught:
        parse(header({"a": "x"}, []), size=1 << 20)
    assert caught.value.rule == "file-length"


def test_a_file_on_disk_is_read_like_its_bytes(tmp_path: Path) -> None:
    file = gguf_file({**LLAMA, "tokens": ["token"] * 20_000}, {"a.weight": blocks("Q4_K", (2, 256))})
    (tmp_path / "a.gguf").write_bytes(file)
    read = read_gguf_header(tmp_path / "a.gguf", "a.gguf")

    assert (read.tensors, read.keys, read.file_size) == (parse(file).tensors, parse(file).keys, len(file))
    assert read.keys["tokens"] == ArrayLength(20_000)


def test_mutated_headers_raise_only_errors_of_qload() -> None:
    outcomes = {try_gguf(file) for file in gguf_mutations(20_000)}

    assert outcomes == {True, False}
