"""Advice about pages reaches the system for large new tensors on a CPU, and for nothing else."""

import ctypes
from typing import Any

import pytest
import torch

from qload.devices import tensors as pages
from qload.layouts import gptq

Asked = list[tuple[int, int, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the system is asked for: start, bytes, advice."""
    calls: Asked = []

    def advise(start: Any, size: ctypes.c_size_t, advice: int) -> None:
        calls.append((start.value, size.value, advice))

    monkeypatch.setattr(pages, "_madvise", lambda: advise)
    return calls


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
def test_whole_pages_inside_of_a_large_tensor(asked: Asked, offset: int) -> None:
    tensor = torch.empty(pages.MIN_ADVISED_BYTES + 8191, dtype=torch.uint8)[offset:]
    assert pages.in_large_pages(tensor) is tensor

    assert len(asked) == (1 if tensor.numel() >= pages.MIN_ADVISED_BYTES else 0)
    for start, size, advice in asked:
        assert start % pages.PAGE_BYTES == size % pages.PAGE_BYTES == 0
        assert 0 <= start - tensor.data_ptr() < pages.PAGE_BYTES
        assert 0 <= tensor.data_ptr() + tensor.numel() - (start + size) < pages.PAGE_BYTES
        assert advice == pages.HUGEPAGE


def test_small_tensors_and_those_elsewhere_are_left_alone(asked: Asked) -> None:
    pages.in_large_pages(torch.empty(pages.MIN_ADVISED_BYTES - 1, dtype=torch.uint8))
    pages.in_large_pages(torch.empty(pages.MIN_ADVISED_BYTES, dtype=torch.uint8, device="meta"))

    assert asked == []


def test_what_is_packed_into_new_memory_asks_and_a_buffer_does_not(asked: Asked) -> None:
    codes = torch.zeros(2048, 4096, dtype=torch.int32)
    words = gptq.rows(4).pack(codes)
    assert len(asked) == 1

    gptq.rows(4).pack(codes, out=words)
    assert len(asked) == 1


def test_a_system_that_cannot_advise_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    tensor = torch.empty(pages.MIN_ADVISED_BYTES, dtype=torch.uint8)

    assert pages.in_large_pages(tensor) is tensor
