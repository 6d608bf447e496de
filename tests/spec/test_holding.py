"""A weight over other tensors keeps all else that it says."""

from dataclasses import dataclass

import pytest
import torch

from qload.devices.operands import values
from qload.errors import MissingTensorError
from qload.formats import CTIntConfig, CTIntWeight, UnquantizedConfig, UnquantizedWeight


@dataclass(frozen=True, eq=False, repr=False)
class NotedWeight(UnquantizedWeight):
    """With a field that is no tensor, and one that may be absent."""

    note: str = "none"
    beside: torch.Tensor | None = None


def test_fields_that_are_no_tensors_go_along() -> None:
    weight = NotedWeight(config=UnquantizedConfig(), weight=torch.ones(2, 3), note="mine")

    moved = weight.to("cpu")
    twin = weight.holding({"weight": torch.zeros(2, 3)})

    assert (moved.note, twin.note, twin.beside) == ("mine", "mine", None)
    assert (twin.config, twin.layer) == (weight.config, weight.layer)
    assert torch.equal(twin.dequantize(), torch.zeros(2, 3))


def test_a_weight_without_a_tensor_that_its_config_declares_is_refused() -> None:
    codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)

    with pytest.raises(MissingTensorError, match="weight_zero_point"):
        CTIntWeight(config=CTIntConfig(None, symmetric=False), weight=codes, weight_scale=scale)


@pytest.mark.parametrize(("count", "rows"), [(8, 2), (1, 1), (100, 5)])
def test_values_are_computed_in_blocks_of_rows(count: int, rows: int) -> None:
    codes = torch.arange(20, dtype=torch.int8).reshape(5, 4)

    blocks = list(values(codes, None, count))

    assert [len(found) for _, found in blocks] == [rows] * (5 // rows) + [5 % rows] * (5 % rows > 0)
    assert torch.equal(torch.cat([found for _, found in blocks]), codes.float())
