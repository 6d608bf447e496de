"""Bounds of slices, runs of rows, and hostile JSON, by hand."""

from typing import Any

import pytest
import torch

from qload.errors import ArgumentError, StorageError
from qload.storage import MemoryStorage, TensorInfo
from qload.storage.files import load_json, shortened
from qload.storage.protocol import MAX_COMPARED_NAMES, RUN_ELEMENTS, bounds, missing, rows

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("index", "pairs"),
    [
        ((), ((0, 4), (0, 6))),
        ((slice(1, 3),), ((1, 3), (0, 6))),
        ((slice(None, 3), slice(2, None)), ((0, 3), (2, 6))),
        ((slice(4, 4), slice(0, 6, 1)), ((4, 4), (0, 6))),
        ((slice(0, 5),), None),
        ((slice(-1, 4),), None),
        ((slice(3, 2),), None),
        ((slice(0, 4, 2),), None),
        ((slice(0, 4), slice(0, 6), slice(0, 1)), None),
    ],
)
def test_bounds_lie_within_the_shape(index: tuple[slice, ...], pairs: Any) -> None:
    if pairs is not None:
        assert bounds("a", (4, 6), index) == pairs
        return
    with pytest.raises(ArgumentError, match=r"index\n  expected .* shape \(4, 6\)"):
        bounds("a", (4, 6), index)


@pytest.mark.parametrize(
    ("shape", "starts"),
    [
        ((), [0]),
        ((0, 3), []),
        ((3, 0), [0]),
        ((RUN_ELEMENTS,), [0]),
        ((RUN_ELEMENTS + 1,), [0, RUN_ELEMENTS]),
        ((5, RUN_ELEMENTS // 2), [0, 2, 4]),
        ((3, RUN_ELEMENTS), [0, 1, 2]),
        ((2, RUN_ELEMENTS + 1), [0, 1]),
        ((4, RUN_ELEMENTS // 2 + 1), [0, 1, 2, 3]),
    ],
)
def test_rows_come_in_runs_of_few_elements(shape: tuple[int, ...], starts: list[int]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).to(torch.int16).reshape(shape)
    found = list(rows(MemoryStorage({"a": tensor}), "a"))

    assert [start for start, _ in found] == starts
    if found:
        assert torch.equal(torch.cat([run for _, run in found]), tensor.reshape(shape or (1,)))


def test_names_that_are_alike_are_named() -> None:
    few = [f"a.b{number:04}" for number in range(MAX_COMPARED_NAMES)]
    many = [*few, "a.b0000.c", "a.b00001234"]

    assert missing("a.b00000", few).near
    assert missing("a.b00000", many).near == missing("a.b00000", few).near
    assert not missing("a" * 201, ["a" * 201 + "b"]).near
    assert missing("a" * 200, ["a" * 199 + "b"]).near


def test_of_so_many_names_those_of_another_length_are_compared_too() -> None:
    few = [f"{number:04}" for number in range(MAX_COMPARED_NAMES - 1)]

    assert missing("layers.0.up", [*few, "layers.0.up_proj"]).near == ["layers.0.up_proj"]
    assert not missing("layers.0.up", [*few, "more", "layers.0.up_proj"]).near


def test_bytes_are_those_of_all_elements() -> None:
    assert TensorInfo(torch.float16, (3, 5)).nbytes == 30
    assert TensorInfo(torch.float64, ()).nbytes == 8


@pytest.mark.parametrize(("length", "shown"), [(200, "x" * 200), (201, f"{'x' * 80}... (201 letters)")])
def test_a_name_is_cut_from_201_letters_on(length: int, shown: str) -> None:
    assert shortened("x" * length) == shown


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"{", "f: not JSON: Expecting"),
        (b"\xff", "f: not JSON: 'utf-8' codec"),
        (b"[]", "f: a JSON object is needed, not list"),
        (b"3", "f: a JSON object is needed, not int"),
        (b'{"a": 1, "b": 2, "a": 3}', "occurs twice in one JSON object"),
        (b'{"b": {"c": 1, "c": 1}}', "occurs twice in one JSON object"),
        (b'{"a": "\\ud800"}', "f: not JSON: 'utf-8' codec"),
    ],
)
def test_what_is_no_object_is_refused(text: bytes, error: str) -> None:
    with pytest.raises(StorageError) as caught:
        load_json(text, "f", "header-json")

    assert error in str(caught.value)
    assert load_json(b'{"a": {"a": "\\u00e9"}}', "f", "header-json") == {"a": {"a": "\u00e9"}}
