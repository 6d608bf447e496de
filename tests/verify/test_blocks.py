"""Layers in runs of outputs: the same elements, in few reads of limited size."""

import pytest
import torch

from qload import MemoryStorage, Weights, loader_from_config
from qload.spec import Role
from qload.verify import blocks
from qload.verify.blocks import WindowSource, find_wrong, pieces, read_span

TENSOR = torch.arange(6 * 40, dtype=torch.int32).reshape(6, 40)
BYTES = TENSOR.nbytes // TENSOR.shape[1]  # of a column


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage({"up": TENSOR, "flat": torch.arange(5), "none": torch.empty(3, 0)})


@pytest.fixture
def source(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> WindowSource:
    monkeypatch.setattr(blocks, "MAX_WINDOW_BYTES", 10 * BYTES)
    return WindowSource(Weights(storage, loader=loader_from_config(None)))


def columns(source: WindowSource, start: int, stop: int) -> torch.Tensor:
    return source.read("up", (slice(0, 6), slice(start, stop)), role=Role.WORD)


def test_runs_of_columns_are_read_a_window_at_a_time(source, storage):
    for start in range(0, 40, 4):
        assert torch.equal(columns(source, start, start + 4), TENSOR[:, start : start + 4])

    # A window of ten columns begins at 0, 8, 16, 24 and 32; the end of the tensor shortens the last one.
    assert storage.reads["up"] == 5
    assert storage.bytes_read == (4 * 10 + 8) * BYTES


def test_a_run_that_is_wider_is_read_as_asked(source, storage):
    assert torch.equal(columns(source, 3, 33), TENSOR[:, 3:33])
    assert storage.bytes_read == 30 * BYTES


def test_what_lies_before_the_window_is_read_again(source, storage):
    columns(source, 20, 24)
    assert torch.equal(columns(source, 18, 22), TENSOR[:, 18:22])
    assert storage.reads["up"] == 2


@pytest.mark.parametrize(
    ("index", "nbytes"),
    [
        pytest.param((slice(2, 3),), 160, id="rows lie together"),
        pytest.param((slice(1, 3), slice(4, 6)), 16, id="a rectangle"),
        pytest.param((), 960, id="all of it"),
        pytest.param((slice(None), slice(None)), 960, id="all of it, said otherwise"),
    ],
)
def test_no_more_is_read_of_what_needs_no_window(source, storage, index, nbytes, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_WINDOW_BYTES", TENSOR.nbytes)
    assert torch.equal(source.read("up", index, role=Role.WORD), TENSOR[index])
    assert storage.bytes_read == nbytes


def test_a_window_of_another_axis_is_no_window_of_this_one(storage, monkeypatch):
    cube = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    source = WindowSource(Weights(MemoryStorage({"cube": cube}), loader=loader_from_config(None)))
    first = (slice(0, 2), slice(0, 2), slice(0, 4))
    second = (slice(0, 2), slice(0, 3), slice(1, 2))
    for index in (first, second, first):
        assert torch.equal(source.read("cube", index, role=Role.WORD), cube[index])


def test_an_empty_tensor_has_no_window(source):
    assert source.read("none", (slice(0, 3), slice(0, 0)), role=Role.WORD).shape == (3, 0)


def test_a_span_is_read_piece_by_piece_up_to_its_end(storage, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_PIECE_BYTES", 160)  # a row
    data = TENSOR.view(torch.uint8).flatten()

    assert torch.equal(read_span(storage, "up", 200, 300), data[200:500])
    assert storage.reads["up"] == 4
    assert torch.equal(read_span(storage, "up", 900, 300), data[900:])
    assert torch.equal(read_span(storage, "up", 160, 160), data[160:320])
    assert read_span(storage, "up", 960, 8).shape == read_span(storage, "up", 3, 0).shape == (0,)


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 0), (7, 3), (2, 3, 5), (4, 64), (1, 1, 700)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("most", [64, 300, 1 << 20])
def test_pieces_are_all_elements_in_order_and_none_is_too_large(shape, dtype, most, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_PIECE_BYTES", most)
    tensor = (
        torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    )

    found = list(pieces(MemoryStorage({"a": tensor}), "a"))

    assert torch.equal(torch.cat([torch.empty(0, dtype=dtype), *found]), tensor.flatten())
    assert all(each.nbytes <= most for each in found)


def test_wrong_values_are_counted_and_the_first_has_its_place():
    values = torch.arange(12.0).reshape(4, 3)
    runs = [(at, values[at : at + 2], values[at : at + 2] % 4 == 3) for at in (0, 2)]

    assert find_wrong(runs) == (3, (1, 0), 3.0)
    assert find_wrong(runs[1:]) == (2, (2, 1), 7.0)
    assert find_wrong([(0, values, values < 0)]) is None
    assert find_wrong([]) is None
