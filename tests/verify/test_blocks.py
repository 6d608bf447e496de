"""Layers in runs of outputs: the same elements, in few reads of limited size."""

import pytest
import torch

from qload import MemoryStorage, Weights, loader_from_config
from qload.spec import Role
from qload.verify import blocks
from qload.verify.blocks import WindowSource

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
