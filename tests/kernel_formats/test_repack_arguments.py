"""Invalid arguments of `repack` and `KernelTarget`, and a layer without outputs."""

from typing import Any

import pytest
import torch

from qload.detect import KernelTarget
from qload.errors import ArgumentError
from qload.formats import Fp8Config, Fp8Weight, GPTQWeight
from qload.kernel_formats import (
    Fp4MarlinConfig,
    Fp8MarlinConfig,
    Fp8StripsConfig,
    GPTQMarlinConfig,
    PanelsConfig,
    TableStripsConfig,
    repack,
    restore,
)
from qload.kernel_formats.repack import targets
from qload.layouts import Stored
from qload.testing import assert_same_bits
from tests.kernel_formats.marlin_layers import layer

pytestmark = pytest.mark.usefixtures("seen_texts")

INTEGERS = layer(128, 64, 32)
FP8 = Fp8Weight(
    config=Fp8Config(), weight=torch.ones(64, 128).to(torch.float8_e4m3fn), weight_scale=torch.ones(1)
)
HALF: dict[str, Any] = {"dtype": torch.float16, "exponent_bias": True}


COPIES = "1, or more for a group_size other than -1"


@pytest.mark.parametrize(
    ("kind", "values", "argument", "expected"),
    [
        (Fp8StripsConfig, {"codes": "e4m3fnuz"}, "fp8_strips: codes", "'e4m3fn' or 'e5m2'"),
        (TableStripsConfig, {"quant_type": "af4"}, "table_strips: quant_type", "'nf4' or 'fp4'"),
        (TableStripsConfig, {"quant_type": "nf4", "group_size": 32}, "table_strips: group_size", "64 or 128"),
        (Fp4MarlinConfig, {"group_size": 64}, "fp4_marlin_vllm_0_11: group_size", "16 (NVFP4) or 32 (MXFP4)"),
        (
            Fp8MarlinConfig,
            {"group_size": 0, "exponent_bias": True},
            "fp8_marlin: group_size",
            "-1 or at least 1",
        ),
        (GPTQMarlinConfig, {"bits": 3, "group_size": 32}, "marlin: bits", "4 or 8"),
        (GPTQMarlinConfig, {"bits": 4, "group_size": 0}, "marlin: group_size", "-1 or at least 1"),
        (GPTQMarlinConfig, {"bits": 4, "group_size": 32, "copies": 0}, "marlin: copies", COPIES),
        (GPTQMarlinConfig, {"bits": 4, "group_size": -1, "copies": 2}, "marlin: copies", COPIES),
        (PanelsConfig, {"bits": 9, "group_size": 32}, "panels: bits", "2 or 3 or 4 or 5 or 6 or 8"),
        (PanelsConfig, {"bits": 4, "group_size": -2}, "panels: group_size", "-1 or at least 1"),
    ],
)
def test_a_config_of_a_kernel_refuses_what_its_kernel_does_not_read(
    kind: Any, values: dict[str, Any], argument: str, expected: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        kind(**values)

    name = argument.rpartition(" ")[2]
    assert (caught.value.argument, caught.value.expected) == (argument, expected)
    assert caught.value.got == (repr if isinstance(values[name], str) else str)(values[name])


@pytest.mark.parametrize(
    "values",
    [
        {"bits": 4, "group_size": -1, "copies": 1},
        {"bits": 4, "group_size": 32, "copies": 2},
        {"bits": 8, "group_size": 1},
    ],
)
def test_a_config_takes_the_last_lawful_values(values: dict[str, Any]) -> None:
    config = GPTQMarlinConfig(**values)

    assert {name: getattr(config, name) for name in values} == values


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
