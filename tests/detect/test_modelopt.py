"""ModelOpt: one algorithm for all layers, in each spelling, or a table of layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims, read_configs
from qload.errors import ConfigError, ExcludedModuleError, MismatchError, UnsupportedFormatError
from qload.formats import Fp8Config, Fp8Weight, ModelOptAWQConfig, ModelOptNVFP4ExtendedConfig
from qload.loader import FormatLoader
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
TABLE = {"model.layers.0.q_proj": NVFP4, "model.layers.0.down_proj": {"quant_algo": "FP8"}}
STORED = {
    "NVFP4": {
        "weight": torch.zeros(4, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
    },
    "FP8": {"weight": torch.ones(4, 32).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)},
    "plain": {"weight": torch.ones(4, 32)},
}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def mixed(table: Any = TABLE, **more: Any) -> dict[str, Any]:
    return modelopt("MIXED_PRECISION", ignore=[], quantized_layers=table, **more)


def group(*targets: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    more = {} if inputs is None else {"input_activations": inputs}
    return {"targets": [*targets], "weights": {"dynamic": False, **weights}, **more}


def load(config: dict[str, Any], layers: dict[str, str]) -> Any:
    """Load layers from one storage, each in the form of its algorithm."""
    named: dict[str, Tensor] = {
        f"{prefix}.{name}": tensor for prefix, kind in layers.items() for name, tensor in STORED[kind].items()
    }
    return Weights(MemoryStorage(named), loader=loader_from_config(config))


@pytest.mark.parametrize(
    ("algorithm", "weight"), [("NVFP4", "modelopt_nvfp4"), ("FP8", Fp8Weight.format)], ids=str
)
def test_modelopt_is_found_in_its_own_file(algorithm: str, weight: str, tmp_path: Path) -> None:
    own = {"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head", "", "*router*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    found = read_configs(tmp_path)[1][0]

    assert found is not None
    loader = loader_from_config(found.values)
    assert isinstance(loader, FormatLoader)
    assert loader.formats[0].weight_type.format == weight
    assert loader.exclusions.names == ("lm_head", "*router*")


@pytest.mark.parametrize(
    ("algorithm", "size", "weight", "config"),
    [
        ("FP8", None, "fp8", Fp8Config("tensor")),
        ("FP8_PER_CHANNEL_PER_TOKEN", None, "fp8", Fp8Config("channel")),
        ("fp8_pb_wo", None, "fp8", Fp8Config("block", (128, 128))),
        ("FP8_PB_WO", 128, "fp8", Fp8Config("block", (128, 128))),
        ("W4A16_NVFP4", 16, "modelopt_nvfp4", None),
        ("MXFP8", 32, "mxfp8", None),
        ("MXFP8", 0, "mxfp8", None),
        ("W4A16_AWQ", None, "modelopt_awq", ModelOptAWQConfig()),
        ("W4A16_AWQ", 64, "modelopt_awq", ModelOptAWQConfig(64)),
        ("W4A8_AWQ", 64, "modelopt_awq", ModelOptAWQConfig(64, fp8_inputs=True)),
        ("NVFP4_AWQ", 16, "modelopt_nvfp4", None),
        ("NVFP4_SVD", 16, "modelopt_nvfp4_extended", ModelOptNVFP4ExtendedConfig(low_rank=True)),
        ("W4A8_NVFP4_FP8", 32, "modelopt_nvfp4_extended", ModelOptNVFP4ExtendedConfig(32)),
        ("W4A8_MXFP4_FP8", 32, "ct_mxfp4", None),
        ("W8A8_SQ_PER_CHANNEL", None, "modelopt_int8", None),
    ],
)
@pytest.mark.parametrize("cache", [None, "NVFP4", {"dynamic": False, "num_bits": 8, "type": "float"}])
def test_every_algorithm_has_its_format(
    algorithm: str, size: int | None, weight: str, config: Any, cache: Any
) -> None:
    made = loader_from_config(modelopt(algorithm, group_size=size, kv_cache_scheme=cache)).formats[0]

    assert made.weight_type.format == weight
    assert config is None or made.config == config


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"quant_algo": "W8A16"}, r"W8A16"),
        ({"quant_algo": "FP8_PB_REAL"}, r"FP8_PB_REAL"),
        ({"quant_algo": "FP8", "quantized_layers": TABLE}, r"FP8 with quantized_layers"),
        (mixed({"a": {"quant_algo": "W8A16"}}), r"W8A16"),
        (mixed({"a": {"quant_algo": "MIXED_PRECISION"}}), r"MIXED_PRECISION"),
        (
            mixed(None, config_groups={"g": group("a", num_bits=8, type="int")}),
            "int of 8 bits in config_groups",
        ),
        (
            mixed(None, config_groups={"g": group(
                "a", inputs={"num_bits": 8, "type": "float"}, num_bits=4, type="float", group_size=16,
            )}),
            "float of 4 bits in config_groups",
        ),
    ],
)  # fmt: skip
def test_other_algorithms_of_modelopt_are_refused(values: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=rf"modelopt \({what}\): not read"):
        loader_from_config({"quant_method": "modelopt", **values})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (modelopt("NVFP4", group_size=32), "group_size"),
        (modelopt("MXFP8", group_size=16), "group_size"),
        (modelopt("fp8_pb_wo", group_size=64), "group_size"),
        (modelopt("W4A16_AWQ", group_size=-2), "group_size"),
        (modelopt("W4A16_AWQ", has_zero_point=True), "has_zero_point"),
        (mixed({}), "quantized_layers"),
        (modelopt("MIXED_PRECISION"), "quantized_layers"),
        (mixed({"a": {}}), "quantized_layers.a.quant_algo"),
        (mixed({"a": {"quant_algo": "NVFP4", "group_size": 32}}), "quantized_layers.a.group_size"),
        (mixed(None, config_groups={"g": {"targets": ["a"]}}), "config_groups.g.weights"),
    ],
)
def test_a_config_that_is_none_is_named_by_its_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loader_from_config(values)

    assert caught.value.key == f"quantization_config.{key}"


@pytest.mark.parametrize("front", ["", "language_model."])
@pytest.mark.parametrize(
    "config",
    [
        mixed(),
        mixed(None, config_groups={
            "group_0": group("model.layers.0.q_proj", inputs={"num_bits": 4, "type": "float"},
                             num_bits=4, type="float", group_size=16),
            "group_1": group("model.layers.0.down_proj", num_bits=8, type="float"),
        }),
    ],
    ids=["quantized_layers", "config_groups"],
)  # fmt: skip
def test_a_table_gives_each_layer_its_own(config: dict[str, Any], front: str) -> None:
    q, down, head = f"{front}model.layers.0.q_proj", f"{front}model.layers.0.down_proj", "lm_head"
    weights = load(config, {q: "NVFP4", down: "FP8", head: "plain"})

    assert [weights.get_weights(name).format for name in (q, down, head)] == [
        "modelopt_nvfp4", "fp8", "unquantized",
    ]  # fmt: skip
    assert weights.report().complete


def test_a_layer_that_the_table_does_not_have_is_plain_or_refused() -> None:
    weights = load(mixed(), {"model.layers.1.q_proj": "FP8", "other.layers.0.q_proj": "plain"})

    assert weights.get_weights("other.layers.0.q_proj").format == "unquantized"
    assert weights.report().notes == ()
    with pytest.raises(ExcludedModuleError, match="as no entry of quantized_layers means it"):
        weights.get_weights("model.layers.1.q_proj")


def test_what_the_table_says_of_experts_together_holds_for_each() -> None:
    """ModelOpt names the module of a stack; each of its experts is a layer in qload."""
    experts = {"quant_algo": "FP8"}
    table = {"model.layers.0.q_proj": NVFP4, "model.layers.0.mlp.experts": experts}
    prefixes = {
        "model.layers.0.mlp.experts.1.up_proj": "FP8",
        "model.layers.0.mlp.experts.0.down_proj": "FP8",
    }
    weights = load(mixed(table), {**prefixes, "model.layers.1.mlp.experts.0.up_proj": "FP8"})

    assert {weights.get_weights(prefix).format for prefix in prefixes} == {"fp8"}
    with pytest.raises(ExcludedModuleError, match="as no entry of quantized_layers means it"):
        weights.get_weights("model.layers.1.mlp.experts.0.up_proj")


def test_rules_of_a_table_select_the_experts_of_a_stack() -> None:
    lead = "model.layers.0.mlp"
    source = FoundConfig("config.json", "", mixed({f"{lead}.experts": {"quant_algo": "FP8"}}))

    rule = read_claims(source).rules[0]

    assert rule.selects is not None
    names = ("experts", "experts.1.up_proj", "experts.12.down_proj", "gate", "shared_expert.1.up_proj")
    assert [rule.selects(f"{lead}.{name}") for name in names] == [True, True, True, False, False]


def test_a_layer_of_the_table_that_is_plain_is_noted() -> None:
    weights = load(mixed(), {"model.layers.0.q_proj": "plain"})

    assert weights.get_weights("model.layers.0.q_proj").format == "unquantized"
    assert weights.report().notes == (
        "model.layers.0.q_proj: quantized_layers lists it as quantized, and its weight is plain: programs "
        "that "
        "follow the config expect quantized tensors and fail; correct that entry, or exclude the layer by "
        "ignore",
    )


def test_parts_that_a_table_tells_apart_are_not_fused() -> None:
    table = {"a.q_proj": NVFP4, "a.k_proj": {"quant_algo": "FP8"}, "a.v_proj": NVFP4}
    weights = load(mixed(table), {"a.q_proj": "NVFP4", "a.k_proj": "FP8", "a.v_proj": "NVFP4"})

    with pytest.raises(MismatchError, match="parts of a fused layer differ in format"):
        weights.get_multi_weights_col(["a.q_proj", "a.k_proj", "a.v_proj"])
    assert weights.get_multi_weights_col(["a.q_proj", "a.v_proj"]).shape == (8, 32)


def test_both_files_of_modelopt_say_the_same(tmp_path: Path) -> None:
    config = mixed(kv_cache_scheme="NVFP4")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    own = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "NVFP4", "quantized_layers": TABLE}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    prefix = "model.layers.0.down_proj"
    save_file(
        {f"{prefix}.{name}": each for name, each in STORED["FP8"].items()}, tmp_path / "model.safetensors"
    )

    first, second = map(read_claims, read_configs(tmp_path)[1])
    assert (
        (first.format, first.formats) == (second.format, second.formats) == ("mixed_precision", first.formats)
    )
    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights(prefix).format == "fp8"


@pytest.mark.parametrize("part", ["weights", "input_activations"])
@pytest.mark.parametrize(("key", "said", "fixed"), [("num_bits", 8, 4), ("group_size", 32, 16)])
def test_groups_beside_an_algorithm_have_the_numbers_that_it_fixes(
    part: str, key: str, said: int, fixed: int, tmp_path: Path
) -> None:
    numbers = {"num_bits": 4, "type": "float", "group_size": 16}
    sound = group("Linear", inputs=numbers, **numbers)
    damaged = {**sound, part: {**sound[part], key: said}}
    load(modelopt("NVFP4", config_groups={"g": sound}), {"a": "NVFP4"})

    with pytest.raises(ConfigError, match=rf"config_groups\.g\.{part}\.{key}\s+expected {fixed} with NVFP4"):
        load(modelopt("NVFP4", config_groups={"g": damaged}), {"a": "NVFP4"})
