"""Invalid arguments of `repack` and `KernelTarget`, and a layer without outputs."""

from typing import Any

import pytest
import torch

from qload.detect import KernelTarget
from qload.errors import ArgumentError
from qload.formats import Fp8Config, Fp8Weight, GPTQWeight
from qload.kernel_formats import repack, restore
from qload.kernel_formats.repack import targets
from qload.layouts import Stored
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer

INTEGERS = layer(128, 64, 32)
FP8 = Fp8Weight(
    config=Fp8Config(), weight=torch.ones(64, 128).to(torch.float8_e4m3fn), weight_scale=torch.ones(1)
)
HALF: dict[str, Any] = {"dtype": torch.float16, "exponent_bias": True}


@pytest.mark.parametrize(
    ("weight", "layout", "options", "argument"),
    [
        (None, "marlin", {}, "weight"),
        (FP8, "marlin", {**HALF, "whole": INTEGERS}, "whole"),
        (INTEGERS, "marlin", {"whole": FP8}, "whole"),
        (INTEGERS, "awq", {"whole": torch.ones(2)}, "whole"),
        (INTEGERS, "awq", {"out": torch.ones(2)}, "out"),
        (INTEGERS, "exllama", {"zeros": "x"}, "zeros"),
        (INTEGERS, "gptq", {"zeros": Stored}, "zeros"),
        (FP8, "marlin", {**HALF, "dtype": [1]}, "dtype"),
        (FP8, "marlin", {**HALF, "exponent_bias": 1}, "exponent_bias"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    weight: Any, layout: str, options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        repack(weight, layout, **options)

    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("kernel", "setting"),
    [("exllama", {"zeros": "x"}), ("marlin", {"exponent_bias": "x"}), ("marlin", {"dtype": [1]})],
)
def test_a_target_checks_its_settings(kernel: Any, setting: Any) -> None:
    with pytest.raises(ArgumentError, match=f"target: {next(iter(setting))}"):
        KernelTarget(kernel, **setting)


@pytest.mark.parametrize("layout", targets(GPTQWeight))
def test_a_layer_without_outputs_is_repacked_and_restored(layout: str) -> None:
    empty = layer(128, 0, 32)

    packed = repack(empty, layout)

    assert packed.dequantize().shape == (0, 128)
    restored = restore(packed)
    assert restored.config == empty.config
    for name, tensor in empty.fields().items():
        assert_same_bits(restored.fields()[name], tensor)
