"""Codes that the CPU module reads where they lie: nothing is made of them before a call."""

import pytest
import torch

from qload.formats import CTIntConfig, CTIntWeight
from qload.kernels import cpu


@pytest.mark.parametrize("point", [None, 0, 3])
def test_integers_of_a_byte_are_read_where_they_lie(
    point: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CTIntWeight, "codes", lambda weight: pytest.fail("codes became others"))
    monkeypatch.setattr(cpu, "has_routines", lambda *tensors: True)
    zeros = None if point is None else torch.full((32, 1), point, dtype=torch.int8)
    weight = CTIntWeight(
        config=CTIntConfig((1, -1), symmetric=point is None),
        weight=torch.ones(32, 64, dtype=torch.int8),
        weight_scale=torch.ones(32, 1),
        weight_zero_point=zeros,
    )
    rows = cpu.rows_of(weight)

    assert rows is not None
    assert rows.bytes.data_ptr() == weight.weight.data_ptr()
    assert (rows.meaning.zeros is None) == (not point)
