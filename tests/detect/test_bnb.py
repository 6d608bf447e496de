"""Claims of a bitsandbytes config, and the layers of its loader."""

from math import inf
from typing import Any

import pytest
import torch

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import ConfigError, ExcludedModuleError
from qload.formats import BNBFP4Weight, BNBNF4Weight, BNBWeight, UnquantizedWeight
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.formats.bnb_layers import layer

pytestmark = pytest.mark.usefixtures("seen_texts")

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}


def claims(config: dict[str, Any]) -> Any:
    return read_claims(FoundConfig("config.json", "quantization_config", config))


@pytest.mark.parametrize(
    ("config", "kind", "bits"),
    [
        pytest.param(NF4, "nf4", 4, id="nf4"),
        pytest.param({**NF4, "bnb_4bit_quant_type": "fp4"}, "fp4", 4, id="fp4"),
        pytest.param({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4", 4, id="the default"),
        pytest.param(INT8, "int8", 8, id="int8"),
        pytest.param({**INT8, "bnb_4bit_quant_type": "fp4"}, "int8", 8, id="a type that is not asked for"),
        pytest.param({"load_in_8bit": True}, "int8", 8, id="before there was quant_method"),
    ],
)
def test_the_claims_of_a_config(config: dict[str, Any], kind: str, bits: int) -> None:
    read = claims(config)

    assert (read.method, read.format, read.bits, read.group_size) == ("bitsandbytes", kind, bits, None)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        pytest.param({"load_in_8bit": True}, "load_in_4bit", id="both"),
        pytest.param({"load_in_4bit": False}, "load_in_4bit", id="neither"),
        pytest.param({"load_in_4bit": 1}, "load_in_4bit", id="no boolean"),
        pytest.param({"_load_in_4bit": False}, "_load_in_4bit", id="two spellings"),
        pytest.param({"bnb_4bit_quant_type": "nf8"}, "bnb_4bit_quant_type", id="type"),
        pytest.param({"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant", id="double quant"),
        pytest.param({"bnb_4bit_quant_storage": 8}, "bnb_4bit_quant_storage", id="storage"),
        pytest.param({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules", id="modules"),
        pytest.param({"llm_int8_threshold": -1.0}, "llm_int8_threshold", id="threshold"),
        pytest.param({"llm_int8_threshold": inf}, "llm_int8_threshold", id="no threshold at all"),
    ],
)
def test_a_malformed_config_is_refused_with_the_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        claims({**NF4, **change})

    assert caught.value.key == f"quantization_config.{key}"


def test_each_layer_is_what_its_tensors_say() -> None:
    tensors = {
        **layer(4, 4, 4, prefix="a"),
        **layer(4, 4, 4, prefix="b", kind="fp4"),
        "c.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    }
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(NF4))

    kinds = [type(weights.get_weights(prefix)) for prefix in "abc"]

    assert kinds == [BNBNF4Weight, BNBFP4Weight, UnquantizedWeight]


def test_int8_layers_are_told_from_plain_ones() -> None:
    tensors = {
        "a.weight": torch.ones(2, 4, dtype=torch.int8),
        "a.SCB": torch.ones(2),
        "b.weight": torch.ones(2, 4),
    }
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(INT8))

    assert [type(weights.get_weights(prefix)) for prefix in "ab"] == [BNBWeight, UnquantizedWeight]


def test_modules_that_are_skipped_have_to_be_plain() -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["mlp.gate"]}
    tensors = {
        f"mlp.{name}.{suffix}": tensor
        for name in ("gate", "gate_proj")
        for suffix, tensor in {"weight": torch.ones(2, 4, dtype=torch.int8), "SCB": torch.ones(2)}.items()
    }
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config))

    assert weights.get_weights("mlp.gate_proj").format == "bnb_int8"
    with pytest.raises(ExcludedModuleError, match="as llm_int8_skip_modules has"):
        weights.get_weights("mlp.gate")


@pytest.mark.parametrize("claimed", ["nf4", "fp4"])
def test_a_state_of_another_type_than_its_name_is_read_as_neither(claimed: str) -> None:
    config = {**NF4, "bnb_4bit_quant_type": claimed}
    for kind, other in (("nf4", "fp4"), ("fp4", "nf4")):
        stored = layer(4, 4, 4, kind=kind, quant_type=other)

        with pytest.raises(ConfigError, match="quant_type"):
            Weights(MemoryStorage(stored), loader=loader_from_config(config)).get_weights("a")
