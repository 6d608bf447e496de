"""The order of a stack's axes by each kind of evidence: where one order fits, where both do, where none does.

Outputs first is (E, N, K), inputs first (E, K, N). Where evidence fits neither order, or both, no order is
taken: the stack stays unread, with a reason that has the shapes of the weight and of its scales.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import MemoryStorage, with_experts
from qload.experts import ExpertStacks

E = 3
MODULE = "model.layers.0.moe"
FP8 = {"quant_method": "fp8"}
E4M3 = torch.float8_e4m3fn
OUTPUTS_FIRST, INPUTS_FIRST, NONE = "outputs first", "inputs first", "no order"


def weight(*shape: int) -> Tensor:
    return torch.ones(E, *shape).to(E4M3)


def order_of(tensors: dict[str, Tensor], name: str, config: dict[str, Any]) -> str:
    """Which order was taken for a stack of rows and columns of different sizes."""
    stacks = with_experts(
        MemoryStorage({f"{MODULE}.{key}": tensor for key, tensor in tensors.items()}), config
    )
    assert isinstance(stacks, ExpertStacks)
    stored = f"{MODULE}.{name}.weight"
    first, second = tensors[f"{name}.weight"].shape[1:]
    if stored in stacks.unread:
        reason = stacks.unread[stored]
        assert f"{stored} of shape {[E, first, second]}" in reason
        scale = tensors.get(f"{name}.weight_scale")
        assert scale is None or f"weight_scale of shape {list(scale.shape)}" in reason
        assert "order of outputs and inputs" in reason
        return NONE
    shape = stacks.info(f"{MODULE}.0.{name}.weight").shape
    assert sorted(shape) == sorted((first, second))
    return OUTPUTS_FIRST if shape == (first, second) else INPUTS_FIRST


@pytest.mark.parametrize(
    ("name", "shape", "hidden", "order"),
    [
        ("down_proj", (128, 64), 128, OUTPUTS_FIRST),  # down has the hidden size as outputs
        ("down_proj", (64, 128), 128, INPUTS_FIRST),
        ("down_proj", (64, 96), 128, NONE),
        ("down_proj", (96, 64), 128, NONE),
        ("down_proj", (128, 128), 128, NONE),
        ("w2", (128, 64), 128, OUTPUTS_FIRST),
        ("w2", (64, 128), 128, INPUTS_FIRST),
        ("w2", (64, 96), 128, NONE),
        ("gate_proj", (64, 128), 128, OUTPUTS_FIRST),  # all others have it as inputs
        ("gate_proj", (128, 64), 128, INPUTS_FIRST),
        ("gate_proj", (64, 96), 128, NONE),
        ("up_proj", (64, 128), 128, OUTPUTS_FIRST),
        ("up_proj", (128, 64), 128, INPUTS_FIRST),
        ("up_proj", (96, 64), 128, NONE),
        ("w1", (64, 128), 128, OUTPUTS_FIRST),
        ("w3", (128, 64), 128, INPUTS_FIRST),
    ],
)
def test_the_hidden_size_of_the_config(name: str, shape: tuple[int, int], hidden: int, order: str) -> None:
    tensors = {f"{name}.weight": weight(*shape), f"{name}.weight_scale": torch.ones(E)}
    config = {"hidden_size": hidden, "quantization_config": FP8}

    assert order_of(tensors, name, config) == order


@pytest.mark.parametrize(
    ("scale", "order"),
    [
        ((64,), OUTPUTS_FIRST),  # a scale for each output
        ((128,), INPUTS_FIRST),
        ((32,), NONE),
        ((96,), NONE),
        ((65,), NONE),
        ((64, 1), OUTPUTS_FIRST),
        ((1, 128), INPUTS_FIRST),  # in the order of its weight
        ((96, 1), NONE),
        ((1, 96), NONE),
        ((64, 4), OUTPUTS_FIRST),  # groups of 32 inputs
        ((2, 128), INPUTS_FIRST),
        ((96, 4), NONE),
        ((3, 96), NONE),
    ],
)
def test_the_shape_of_a_scale(scale: tuple[int, ...], order: str) -> None:
    tensors = {"up_proj.weight": weight(64, 128), "up_proj.weight_scale": torch.ones(E, *scale)}

    assert order_of(tensors, "up_proj", {"quantization_config": FP8}) == order


def test_blocks_of_gate_and_up_do_not_cross_their_border() -> None:
    """Each has 192 outputs, two blocks; in the other order of axes the scale fits no weight."""
    tensors = {"gate_up_proj.weight": weight(384, 256), "gate_up_proj.weight_scale": torch.ones(E, 4, 2)}
    stored = MemoryStorage({f"{MODULE}.{name}": tensor for name, tensor in tensors.items()})

    stacks = with_experts(stored, {"quantization_config": FP8})

    assert stacks.info(f"{MODULE}.0.gate_proj.weight").shape == (192, 256)


@pytest.mark.parametrize(
    ("scale", "order"),
    [
        ((64, 6), OUTPUTS_FIRST),  # 64 outputs, 96 inputs in groups of 16 or 32
        ((64, 3), OUTPUTS_FIRST),
        ((64, 4), NONE),
        ((63, 6), NONE),
        ((8, 48), INPUTS_FIRST),  # 48 outputs, 128 inputs
        ((4, 48), INPUTS_FIRST),
        ((6, 48), NONE),
        ((6, 64), OUTPUTS_FIRST),  # in the other order than its weight
        ((48, 8), INPUTS_FIRST),
        ((4, 64), NONE),
    ],
)
def test_the_groups_of_four_bit_floats(scale: tuple[int, int], order: str) -> None:
    tensors = {
        "up_proj.weight": torch.zeros(E, 64, 48, dtype=torch.uint8),
        "up_proj.weight_scale": torch.ones(E, *scale).to(torch.float8_e4m3fn),
        "up_proj.weight_scale_2": torch.ones(E),
    }

    assert order_of(tensors, "up_proj", {"quantization_config": {"quant_method": "modelopt"}}) == order


@pytest.mark.parametrize(
    ("scale", "order"),
    [((64, 4), OUTPUTS_FIRST), ((64, 5), NONE), ((65, 4), NONE), ((2, 128), INPUTS_FIRST), ((3, 128), NONE)],
)
def test_the_exponents_of_groups_of_32_inputs(scale: tuple[int, int], order: str) -> None:
    tensors = {
        "up_proj.weight": weight(64, 128),
        "up_proj.weight_scale": torch.full((E, *scale), 127, dtype=torch.uint8),
    }

    assert order_of(tensors, "up_proj", {"quantization_config": FP8}) == order


def test_a_matrix_of_more_axes_tells_nothing_of_its_sibling() -> None:
    tensors = {
        "gate_up_proj.weight": weight(128, 96),
        "gate_up_proj.weight_scale": torch.ones(E),
        "down_proj.weight": weight(96, 64),
        "down_proj.weight_scale": torch.ones(E),
    }
    assert order_of(tensors, "gate_up_proj", {"quantization_config": FP8}) == OUTPUTS_FIRST

    tensors["down_proj.weight"] = tensors["down_proj.weight"][..., None]
    assert order_of(tensors, "gate_up_proj", {"quantization_config": FP8}) == NONE


@pytest.mark.parametrize(
    ("scale", "order"), [((64,), NONE), ((64, 1), OUTPUTS_FIRST), ((1, 64), INPUTS_FIRST), ((32, 32), NONE)]
)
def test_a_square_matrix_is_told_by_the_axis_of_its_scale_alone(scale: tuple[int, ...], order: str) -> None:
    """Square in shape, and so without order where the scale fits both."""
    tensors = {
        f"{MODULE}.up_proj.weight": weight(64, 64),
        f"{MODULE}.up_proj.weight_scale": torch.ones(E, *scale),
    }
    stacks = with_experts(MemoryStorage(tensors), {"quantization_config": FP8})

    assert isinstance(stacks, ExpertStacks)
    assert (stacks.unread.keys() == tensors.keys()) == (order == NONE)


@pytest.mark.parametrize(
    ("gate_up", "down", "order"),
    [
        ((128, 96), (96, 64), OUTPUTS_FIRST),  # twice the inputs of down as outputs, its outputs as inputs
        ((96, 128), (64, 96), INPUTS_FIRST),
        ((128, 96), (96, 32), NONE),
        ((128, 96), (80, 64), NONE),
        ((96, 128), (64, 80), NONE),
        ((96, 128), (32, 96), NONE),
    ],
)
def test_gate_up_and_down_together(gate_up: tuple[int, int], down: tuple[int, int], order: str) -> None:
    tensors = {
        "gate_up_proj.weight": weight(*gate_up),
        "gate_up_proj.weight_scale": torch.ones(E),
        "down_proj.weight": weight(*down),
        "down_proj.weight_scale": torch.ones(E),
    }

    assert order_of(tensors, "down_proj", {"quantization_config": FP8}) == order


@pytest.mark.parametrize(("known", "order"), [((64,), OUTPUTS_FIRST), ((128,), INPUTS_FIRST), ((96,), NONE)])
def test_one_matrix_tells_the_order_of_the_others(known: tuple[int, ...], order: str) -> None:
    """All matrices of a module are in one order, and where none is told, all stay unread."""
    tensors = {
        "up_proj.weight": weight(64, 128),
        "up_proj.weight_scale": torch.ones(E, *known),
        "gate_proj.weight": weight(64, 128),
        "gate_proj.weight_scale": torch.ones(E),
    }

    assert order_of(tensors, "up_proj", {"quantization_config": FP8}) == order
    assert order_of(tensors, "gate_proj", {"quantization_config": FP8}) == order


def test_matrices_in_two_orders_tell_nothing_of_a_third() -> None:
    tensors = {
        "up_proj.weight": weight(64, 128),
        "up_proj.weight_scale": torch.ones(E, 64),
        "gate_proj.weight": weight(64, 128),
        "gate_proj.weight_scale": torch.ones(E, 128),
        "down_proj.weight": weight(128, 64),
        "down_proj.weight_scale": torch.ones(E),
    }
    config = {"quantization_config": FP8}

    assert order_of(tensors, "up_proj", config) == OUTPUTS_FIRST
    assert order_of(tensors, "gate_proj", config) == INPUTS_FIRST
    assert order_of(tensors, "down_proj", config) == NONE
