"""A weight over other tensors keeps all else that it says."""

from dataclasses import dataclass

import torch

from qload.formats import UnquantizedConfig, UnquantizedWeight


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
