"""The layers of anybody's model, exchanged for those of a checkpoint."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import (
    ArgumentError,
    Fp8Quantizer,
    Linear,
    MemoryStorage,
    QuantizingLoader,
    ShapeError,
    Weights,
    loader_from_config,
    replace_linears,
)

pytestmark = pytest.mark.usefixtures("seen_texts")

CONFIG = {"quant_method": "fp8"}


def stored(prefix: str, N: int, K: int, bias: bool = False) -> dict[str, Tensor]:
    """A layer in FP8, each of whose rows has one number."""
    rows = torch.arange(1, N + 1).float()[:, None].expand(N, K)
    held = {f"{prefix}.weight": rows.to(torch.float8_e4m3fn), f"{prefix}.weight_scale": torch.tensor([2.0])}
    return held | ({f"{prefix}.bias": torch.arange(N).float()} if bias else {})


def weights(tensors: Mapping[str, Tensor]) -> Weights:
    return Weights(MemoryStorage(tensors), loader=loader_from_config(CONFIG), dtype=torch.float32)


class Model(nn.Module):
    """Two layers, one of which stands in two places, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, device="meta")
        self.down = nn.Linear(8, 4, bias=False, device="meta")
        self.again = self.down
        self.head = nn.Linear(4, 2, bias=False)


def replaced(names: Any = None, model: nn.Module | None = None) -> tuple[Any, list[str]]:
    tensors = stored("up", 8, 4, bias=True) | stored("down", 4, 8) | {"head.weight": torch.ones(2, 4)}
    model = Model() if model is None else model
    return model, replace_linears(model, weights(tensors), names, activations="unquantized")


def test_quantized_layers_are_replaced_wherever_they_stand_and_plain_ones_are_not() -> None:
    model, names = replaced()

    assert names == ["again", "down", "up"]
    assert model.down is model.again
    assert isinstance(model.down, Linear)
    assert type(model.head) is nn.Linear


def test_a_shared_layer_is_found_under_any_of_its_names() -> None:
    model = Model()
    held = weights(stored("again", 4, 8))

    assert replace_linears(model, held, activations="unquantized") == ["again", "down"]
    assert model.down is model.again


def test_a_bias_comes_with_its_layer() -> None:
    model, _ = replaced()

    assert model.up(torch.ones(1, 4)).tolist() == [[4 * 2.0 * (n + 1) + n for n in range(8)]]
    assert model.down(torch.ones(1, 8)).tolist() == [[8 * 2.0 * (n + 1) for n in range(4)]]


@pytest.mark.parametrize(
    "names", [{"a.up": "up"}, lambda name: name.removeprefix("a.")], ids=["dict", "call"]
)
def test_names_lead_from_the_model_to_the_checkpoint(names: Any) -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(4, 8)}), "b": nn.Linear(4, 8)})

    assert replaced(names, model)[1] == ["a.up"]


def test_a_function_leaves_layers_alone_by_none() -> None:
    assert replaced(lambda name: "down" if name == "down" else None)[1] == ["again", "down"]


@pytest.mark.parametrize(
    ("names", "said"), [({"nowhere": "up"}, "nowhere"), ({"up": "gone"}, "gone"), ({"head": "gone"}, "gone")]
)
def test_a_dict_that_names_what_is_not_there_is_refused(names: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replaced(names)


def test_nothing_is_replaced_where_one_layer_has_other_sizes() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 5)})

    with pytest.raises(ShapeError, match=r"\(5, 8\) = \(N, K\), as down of the model has it"):
        replaced(None, model)
    assert type(model["up"]) is nn.Linear


def test_layers_may_be_quantized_while_they_are_loaded() -> None:
    loader = QuantizingLoader(loader_from_config(None), Fp8Quantizer())
    held = Weights(MemoryStorage({"up.weight": torch.ones(8, 4)}), loader=loader)
    model: Any = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False), "head": nn.Linear(4, 2)})

    assert replace_linears(model, held) == ["up"]
    assert model["up"].typed.format == "fp8"
