"""Claims of a config for one module, in every method: the base, or a specific entry."""

import pickle
from typing import Any

import pytest

from qload.detect import loader_from_config
from qload.errors import ConfigError
from qload.spec import LayerClaims

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def claims_of(config: dict[str, Any], module: str) -> tuple[Any, ...]:
    found = pickle.loads(pickle.dumps(loader_from_config(config))).claims_of(module)
    assert isinstance(found, LayerClaims)
    return found.bits, found.group_size, found.sym, found.desc_act, found.source


@pytest.mark.parametrize(
    ("rule", "claims"),
    [
        ({"sym": False}, (4, 128, False, False)),
        ({"desc_act": True}, (4, 128, True, True)),
        ({"bits": 8, "group_size": 32, "sym": False, "desc_act": True}, (8, 32, False, True)),
        ({"mse": 2.4}, (4, 128, True, False)),
    ],
)
def test_rules_of_gptq_change_what_they_state(rule: dict[str, Any], claims: tuple[Any, ...]) -> None:
    config = {**GPTQ, "dynamic": {"-:.*gate": {}, "+:.*down": rule, ".*down_proj": {"bits": 2}}}

    assert claims_of(config, "model.layers.0.down_proj") == (*claims, "dynamic.+:.*down")
    assert claims_of(config, "model.layers.0.up_proj") == (4, 128, True, False, "")


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_a_rule_has_no_convention_of_its_own(key: str) -> None:
    loader_from_config({**GPTQ, "dynamic": {"a": {key: "gptq"}}})
    with pytest.raises(ConfigError, match=rf"dynamic.a.{key}\n  expected gptq, as for all modules"):
        loader_from_config({**GPTQ, "dynamic": {"a": {key: "gptq_v2"}}})
    with pytest.raises(ConfigError, match="pack_dtype"):
        loader_from_config({**GPTQ, "dynamic": {"a": {"pack_dtype": "int64"}}})


@pytest.mark.parametrize("key", ["model.layers.0.down_proj", ".*down_proj"])
@pytest.mark.parametrize(
    "packing", ["auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"]
)
def test_entries_of_auto_round_change_what_they_state(key: str, packing: str) -> None:
    config = {**AUTO_ROUND, "packing_format": packing, "extra_config": {key: {"sym": False, "bits": 8}}}

    assert claims_of(config, "model.layers.0.down_proj") == (8, 128, False, None, f"extra_config.{key}")
    assert claims_of(config, "model.layers.0.up_proj") == (4, 128, True, None, "")


def test_groups_of_compressed_tensors_have_claims_of_their_own() -> None:
    groups = {
        "first": {
            "targets": ["re:.*down_proj"],
            "weights": {**INT4, "symmetric": False, "actorder": "group"},
        },
        "second": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 8, "actorder": None}},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}

    assert claims_of(config, "model.layers.0.down_proj") == (4, 32, False, True, "config_groups.first")
    assert claims_of(config, "model.layers.0.up_proj") == (8, 32, True, False, "config_groups.second")


def test_layers_of_modelopt_have_claims_of_their_own() -> None:
    layers = {"a.up": {"quant_algo": "W4A16_AWQ", "group_size": 64}, "a.down": {"quant_algo": "FP8"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    assert claims_of(config, "model.a.up") == (4, 64, True, None, "quantized_layers")
    assert claims_of(config, "model.a.down") == (8, None, True, None, "quantized_layers")


def test_claims_make_no_two_formats_of_one() -> None:
    config = {**GPTQ, "dynamic": {"+:.*down": {"sym": False}}}

    assert len(loader_from_config(config).formats) == 2  # GPTQ and plain
