"""Excluded modules in the config of each method: patterns, two lists, fused layers and their parts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import ConfigError, ExcludedModuleError, MismatchError
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.kernels.mp_layers import Case

pytestmark = pytest.mark.usefixtures("seen_texts")

FP8 = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}
INT8 = {"weight": torch.ones(4, 4, dtype=torch.int8), "SCB": torch.ones(4)}
GPTQ = Case(K=128).weight().fields()
EXPERTS = {
    "down_proj_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
    "down_proj_scales": torch.full((2, 4, 2), 127, dtype=torch.uint8),
}
PLAIN = {"weight": torch.ones(4, 4)}

MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}
DYNAMIC = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}


def compressed(*targets: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": list(targets or ["Linear"]), "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": group},
        **more,
    }


def load(config: dict[str, Any], prefix: str, layer: dict[str, Tensor]) -> str:
    """Return the format of the layer."""
    stored = {f"{prefix}.{name}": tensor for name, tensor in layer.items()}
    return Weights(MemoryStorage(stored), loader=loader_from_config(config)).get_weights(prefix).format


def is_left_out(config: dict[str, Any], prefix: str, layer: dict[str, Tensor]) -> bool:
    """Check for an excluded module: a plain layer loads in any case, a quantized one causes an error."""
    assert load(config, prefix, PLAIN) == "unquantized"
    try:
        return load(config, prefix, layer) == "unquantized"
    except ExcludedModuleError:
        return True


@pytest.mark.parametrize("key", ["exclude_modules", "ignore", "modules_to_not_convert"])
@pytest.mark.parametrize(
    ("entry", "prefix", "out"),
    [
        pytest.param("model.layers.0*", "model.layers.0.a", True, id="any letters"),
        pytest.param("model.layers.0*", "model.layers.1.a", False, id="another layer"),
        pytest.param("model.layers.?.a", "model.layers.1.a", True, id="one letter"),
        pytest.param("model.layers.?.a", "model.layers.10.a", False, id="two letters for one"),
        pytest.param("*router*", "model.layers.0.mlp.router", True, id="in the middle"),
        pytest.param("layers.0*", "model.layers.0.a", False, id="from the start"),
        pytest.param("*.mlp", "layers.0.mlp.up", True, id="what lies under it"),
        pytest.param("*.mlp", "layers.0.mlp2", False, id="to the end"),
        pytest.param("*.q_proj(a)", "x.q_proj", False, id="signs are letters"),
        pytest.param("*.[q]_proj", "x.q_proj", False, id="brackets are letters"),
        pytest.param("a.b*", "a_b.c", False, id="a dot is a dot"),
        pytest.param("*qkv_proj", "x.q_proj", True, id="the fused layer of it"),
    ],
)
def test_modelopts_patterns_are_those_of_a_shell(key: str, entry: str, prefix: str, out: bool) -> None:
    assert is_left_out({**MODELOPT, key: [entry]}, prefix, FP8) is out


INSIDE = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]


@pytest.mark.parametrize(
    "inside", [INSIDE, [name for names in INSIDE for name in names]], ids=["lists", "one"]
)
@pytest.mark.parametrize(
    ("prefix", "out"),
    [
        pytest.param("model.layers.0.mlp.up_proj", False, id="named"),
        pytest.param("model.layers.0.self_attn.q_proj", False, id="a part"),
        pytest.param("model.layers.11.self_attn.qkv_proj", False, id="fused of parts"),
        pytest.param("model.layers.0.mlp.down_proj", True, id="not named"),
        pytest.param("model.layers.0.mlp.up_proj_2", True, id="a longer segment"),
        pytest.param("lm_head", False, id="in no block"),
    ],
)
def test_of_a_block_only_the_modules_that_gptq_names_are_quantized(
    inside: list[Any], prefix: str, out: bool
) -> None:
    config = {**DYNAMIC, "modules_in_block_to_quantize": inside}

    assert load(config, prefix, PLAIN) == "unquantized"
    if out:
        with pytest.raises(ExcludedModuleError, match="modules_in_block_to_quantize does not name it"):
            load(config, prefix, GPTQ)
    else:
        assert load(config, prefix, GPTQ) == "gptq"


def test_a_block_s_modules_may_be_left_out_by_name_too_and_fused_only_alike() -> None:
    config = {**DYNAMIC, "modules_in_block_to_quantize": ["mlp.gate_proj", "mlp.down_proj"]}
    without = {**config, "modules_to_not_convert": ["layers.1"]}

    with pytest.raises(MismatchError, match=r"up_proj left out, .*gate_proj not"):
        load(config, "layers.0.mlp.gate_up_proj", GPTQ)
    with pytest.raises(ExcludedModuleError, match=r"modules_to_not_convert has 'layers\.1'"):
        load(without, "layers.1.mlp.down_proj", GPTQ)
    assert load(without, "layers.2.mlp.down_proj", GPTQ) == "gptq"


def test_a_pattern_as_in_a_shell_is_matched_in_bounded_time() -> None:
    assert load({**MODELOPT, "ignore": ["*a" * 200 + "b"]}, "a" * 300, FP8) == "fp8"
    for key in ("exclude_modules", "ignore", "modules_to_not_convert"):
        with pytest.raises(ConfigError, match=f"{key}\n.*\n.*more than 1024"):
            loader_from_config({**MODELOPT, key: ["*a" * 600]})


@pytest.mark.parametrize(
    ("entry", "out"),
    [
        pytest.param("model.layers.0.mlp.experts.down_proj", True, id="the name"),
        pytest.param("model.layers.*.mlp", True, id="a pattern"),
        pytest.param("model.layers.*.self_attn", False, id="what gpt-oss leaves out"),
    ],
)
def test_the_list_of_mxfp4_is_read(entry: str, out: bool) -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": [entry, "lm_head"]}
    prefix = "model.layers.0.mlp.experts"
    stored = {f"{prefix}.{name}": tensor for name, tensor in EXPERTS.items()}
    weights = Weights(MemoryStorage(stored), loader=loader_from_config(config))

    if out:
        with pytest.raises(ExcludedModuleError, match="modules_to_not_convert has"):
            weights.get_weights(f"{prefix}.down_proj")
    else:
        assert weights.get_weights(f"{prefix}.down_proj").format == "mxfp4_experts"


def test_a_pattern_that_cannot_be_read_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match="modules_to_not_convert"):
        loader_from_config({"quant_method": "mxfp4", "modules_to_not_convert": ["*" * 2000]})


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        pytest.param({**BNB, "llm_int8_skip_modules": ["b"]}, INT8, id="bitsandbytes"),
        pytest.param(compressed(ignore=["b"]), FP8, id="compressed-tensors"),
        pytest.param({**MODELOPT, "ignore": ["b"]}, FP8, id="modelopt"),
    ],
)
def test_a_second_list_is_read_beside_a_methods_own(config: dict[str, Any], layer: dict[str, Tensor]) -> None:
    both = {**config, "modules_to_not_convert": ["a"]}

    assert [is_left_out(both, prefix, layer) for prefix in "abc"] == [True, True, False]
    assert [is_left_out(config, prefix, layer) for prefix in "abc"] == [False, True, False]


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        pytest.param({"quant_method": "fp8", "modules_to_not_convert": ["qkv_proj"]}, FP8, id="fp8"),
        pytest.param(compressed(ignore=["qkv_proj"]), FP8, id="compressed-tensors"),
        pytest.param(compressed(ignore=["re:.*qkv_proj"]), FP8, id="a regular expression"),
        pytest.param({**DYNAMIC, "dynamic": {r"-:.*\.qkv_proj": {}}}, GPTQ, id="gptq"),
        pytest.param({**DYNAMIC, "modules_to_not_convert": ["qkv_proj"]}, GPTQ, id="gptq, by name"),
    ],
)
def test_with_a_fused_layer_its_parts_are_left_out(config: dict[str, Any], layer: dict[str, Tensor]) -> None:
    names = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj"]

    assert [is_left_out(config, f"a.{name}", layer) for name in names] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        pytest.param(compressed(ignore=["q_proj", "k_proj", "v_proj"]), FP8, id="compressed-tensors"),
        pytest.param(compressed(ignore=["re:.*[qkv]_proj$"]), FP8, id="one expression"),
        pytest.param({**DYNAMIC, "dynamic": {rf"-:.*\.{part}_proj$": {} for part in "qkv"}}, GPTQ, id="gptq"),
    ],
)
def test_with_all_its_parts_a_fused_layer_is_left_out(
    config: dict[str, Any], layer: dict[str, Tensor]
) -> None:
    assert is_left_out(config, "a.qkv_proj", layer)
    assert not is_left_out(config, "a.o_proj", layer)


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        pytest.param(compressed(ignore=["k_proj"]), FP8, id="compressed-tensors"),
        pytest.param({**DYNAMIC, "dynamic": {r"-:.*\.k_proj$": {}}}, GPTQ, id="gptq"),
        pytest.param({**DYNAMIC, "modules_to_not_convert": ["k_proj"]}, GPTQ, id="gptq, by name"),
    ],
)
def test_parts_that_are_not_left_out_alike_are_refused(
    config: dict[str, Any], layer: dict[str, Tensor]
) -> None:
    with pytest.raises(
        MismatchError, match=r"qkv_proj: fused of layers that are not all quantized"
    ) as caught:
        load(config, "a.qkv_proj", layer)

    assert "got      a.k_proj left out, a.q_proj " in str(caught.value)
    assert load(config, "a.qkv_proj", PLAIN) == "unquantized"


def test_parts_of_two_rules_are_refused_with_both() -> None:
    config = {**DYNAMIC, "dynamic": {r"+:.*\.k_proj$": {"bits": 8}}}

    with pytest.raises(MismatchError, match="not quantized alike") as caught:
        load(config, "a.qkv_proj", GPTQ)
    assert "a.q_proj as FormatLoader(gptq: GPTQConfig(bits=4" in str(caught.value)
    assert "a.k_proj as FormatLoader(gptq: GPTQConfig(bits=8" in str(caught.value)


def test_what_a_rule_says_of_the_fused_layer_itself_comes_first() -> None:
    rules = {r"+:.*\.qkv_proj$": {"bits": 4}, r"+:.*\.k_proj$": {"bits": 8}}

    assert load({**DYNAMIC, "dynamic": rules}, "a.qkv_proj", GPTQ) == "gptq"


def test_parts_that_are_targets_of_one_group_are_quantized_alike() -> None:
    targets = [f"{part}_proj" for part in "qkv"]

    assert load(compressed(*targets), "a.qkv_proj", FP8) == "fp8"


def test_a_quantized_layer_that_no_target_means_is_refused_with_the_keys_that_were_looked_at() -> None:
    config = compressed("re:.*b")
    assert load(config, "b", FP8) == "fp8"
    assert load(config, "a", PLAIN) == "unquantized"

    with pytest.raises(ExcludedModuleError) as caught:
        load(config, "a", FP8)
    assert str(caught.value) == (
        "a: left out by the config, and quantized\n"
        "  expected plain tensors, as no entry of config_groups.g.targets means it\n"
        "  got      fp8: weight, weight_scale\n"
        "  remedy   name the module in config_groups.g.targets, or store it plain"
    )


@pytest.mark.parametrize("entry", [r"re:.*\.mlp\..*", "re:a.."], ids=repr)
def test_an_expression_may_have_dots_in_a_row(entry: str) -> None:
    assert is_left_out(compressed(ignore=[entry]), "a.mlp.up", FP8)


@pytest.mark.parametrize("said", [{"ignore": ["proj"]}, {}], ids=["ignored", "a target"])
def test_a_name_means_no_layer_that_only_ends_like_it(said: dict[str, Any]) -> None:
    config = compressed("Linear" if said else "proj", **said)

    assert is_left_out(config, "model.proj", FP8) is bool(said)
    assert is_left_out(config, "model.down_proj", FP8) is not bool(said)
