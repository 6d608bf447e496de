"""Activation schemes from the config of each method."""

from typing import Any

import pytest
import torch

from qload import ActivationScheme, layers
from qload.detect import loader_from_config
from qload.errors import ArgumentError, ConfigError
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group},
    }  # fmt: skip


def claimed(config: dict[str, Any]) -> ActivationScheme | None:
    return loader_from_config(config).formats[0].activations


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        pytest.param(compressed(None), None, id="weights alone"),
        pytest.param(
            compressed({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}),
            ActivationScheme("float", 8, True, "token"),
            id="each token's",
        ),
        pytest.param(
            compressed({"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}),
            ActivationScheme(
                "int", 8, False, "tensor", symmetric=False, scale="input_scale", zero_point="input_zero_point"
            ),
            id="one that is stored",
        ),
        pytest.param(
            compressed(
                {
                    "num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group",
                    "group_size": 16,
                }
            ),
            ActivationScheme(
                "float", 4, "local", "tensor_group", 16, scale="input_global_scale", scale_type="e4m3"
            ),
            id="groups' and one that is stored",
        ),
        pytest.param({"quant_method": "fp8"}, None, id="fp8 that says nothing"),
        pytest.param(
            {"quant_method": "fp8", "activation_scheme": "static"},
            ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="transformers"),
            id="static fp8",
        ),
        pytest.param(
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            ActivationScheme("float", 8, True, "token", owner="transformers"),
            id="dynamic fp8",
        ),
        pytest.param(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]},
            ActivationScheme("float", 8, True, "group", 128, owner="transformers"),
            id="fp8 in blocks",
        ),
        pytest.param(
            {
                "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64],
                "scale_fmt": "ue8m0",
            },
            ActivationScheme("float", 8, True, "group", 64, scale_type="e8m0", owner="transformers"),
            id="fp8 in blocks, whose scales are powers of two",
        ),
        pytest.param(
            {"quant_method": "fbgemm_fp8"},
            ActivationScheme("float", 8, True, "token", owner="fbgemm"),
            id="fbgemm",
        ),
        pytest.param(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            ActivationScheme("float", 8, True, "token", upper_bound=1200.0, owner="fbgemm"),
            id="fbgemm with a bound",
        ),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="modelopt"),
            id="ModelOpt FP8",
        ),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            ActivationScheme(
                "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3",
                owner="modelopt",
            ),
            id="ModelOpt NVFP4",
        ),
        pytest.param({"quant_method": "gptq", "bits": 4, "group_size": 32}, None, id="gptq"),
    ],
)  # fmt: skip
def test_what_a_config_claims(config: dict[str, Any], scheme: ActivationScheme | None) -> None:
    assert claimed(config) == scheme


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", "8"), ("type", "complex"), ("dynamic", "sometimes"), ("strategy", 3), ("symmetric", 1)],
)
def test_a_malformed_claim_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config_groups\.a\.input_activations\.{key}"):
        loader_from_config(compressed({key: value}))


@pytest.mark.parametrize("stored", [True, False])
def test_a_layer_names_the_scale_that_is_stored(stored: bool) -> None:
    tensors = {"a.up.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "a.up.weight_scale": torch.ones(1)}
    tensors |= {"a.up.input_scale": torch.ones(1)} if stored else {}
    loader = loader_from_config({"quant_method": "modelopt", "quant_algo": "FP8"})

    (layer,) = layers(Weights(MemoryStorage(tensors), loader=loader))

    assert layer.activations is not None
    assert layer.activations.scale == ("a.up.input_scale" if stored else None)


def test_a_claim_changes_no_format() -> None:
    one, other = (loader_from_config(compressed(inputs)) for inputs in (None, {"dynamic": True}))

    assert one.formats == other.formats
    with pytest.raises(ArgumentError, match="bits"):
        ActivationScheme("int", "8", True)  # type: ignore[arg-type]
