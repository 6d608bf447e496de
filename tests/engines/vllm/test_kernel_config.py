"""vLLM's description of a layer, as one of ours."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qload.engines.vllm.kernel_config import choose_kernel, to_qload_config
from qload.kernels import DequantizeLinearKernel


class Named:
    """A type of codes as vLLM has it, which prints its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def described(weight_type: str = "uint4b8", **said: Any) -> Any:
    known = {
        "full_weight_shape": (256, 128),
        "partition_weight_shape": (128, 128),
        "weight_type": Named(weight_type),
        "act_type": torch.float16,
        "group_size": 64,
        "zero_points": False,
        "out_type": None,
    }
    return SimpleNamespace(**{**known, **said})


def test_every_field_is_kept() -> None:
    config = to_qload_config(described("uint4", zero_points=True))

    assert (config.full_weight_shape, config.partition_weight_shape) == ((256, 128), (128, 128))
    assert (config.group_size, config.act_type, config.zero_points) == (64, torch.float16, True)
    assert str(config.weight_type) == "uint4"
    assert config.zeros is not None


def test_a_type_without_a_name_here_has_no_kernel() -> None:
    said = choose_kernel(described("float6_e3m2f"), 90)

    assert isinstance(said, str)
    assert "float6_e3m2f" in said


@pytest.mark.parametrize("weight_type", ["uint4b8", "uint8b128"])
def test_what_only_dequantizing_multiplies_runs_where_there_is_no_gpu_and_nowhere_else(
    weight_type: str,
) -> None:
    config = described(weight_type, act_type=torch.float32)

    assert choose_kernel(config, None) is DequantizeLinearKernel
    assert {choose_kernel(config, gpu) for gpu in (75, 80, 90)} == {"it would be dequantized at each call"}


def test_on_a_gpu_a_layer_is_left_to_others_rather_than_dequantized() -> None:
    config = described(act_type=torch.float32)

    assert choose_kernel(config, None) is DequantizeLinearKernel
    assert isinstance(choose_kernel(config, 90), str)
    assert not isinstance(choose_kernel(described(), 90), str)
