"""`quant_method: compressed-tensors`: the format of each module."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config, read_configs
from qload.errors import ConfigError, ExcludedModuleError, MissingTensorError, UnsupportedFormatError
from qload.formats import (
    CTIntConfig,
    CTNVFP4Weight,
    CTPackConfig,
    Fp8Config,
    Marlin24Config,
    UnquantizedWeight,
)
from qload.loader import ModuleLoader
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.formats.test_ct_pack import tensors

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
SMALL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def group(weights: Any, *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": list(targets or ["Linear"]), "weights": weights, **more}


def config(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{i}": each for i, each in enumerate(groups)},
        "format": "pack-quantized",
        "quantization_status": "compressed",
        **more,
    }


def weight_type(*groups: dict[str, Any], **more: Any) -> Any:
    return loader_from_config(config(*groups, **more)).formats[0]


def layer(bits: int = 4, size: int = 8) -> dict[str, Tensor]:
    return tensors(torch.full((1, 16), 2 ** (bits - 1) + 1), size, bits=bits)


PLAIN = {"weight": torch.ones(1, 16)}


def load(config: dict[str, Any], prefix: str, stored: dict[str, Tensor]) -> Any:
    named = {f"{prefix}.{name}": tensor for name, tensor in stored.items()}
    return Weights(MemoryStorage(named), loader=loader_from_config(config)).get_weights(prefix)


@pytest.mark.parametrize(
    ("stated", "weights", "want"),
    [
        ("pack-quantized", GROUP, CTPackConfig(4, 8)),
        ("pack-quantized", {**GROUP, "actorder": "group"}, CTPackConfig(4, 8, act_order=True)),
        ("pack-quantized", {**GROUP, "actorder": "static"}, CTPackConfig(4, 8)),
        ("pack-quantized", {**CHANNEL, "symmetric": False}, CTPackConfig(8, -1, symmetric=False)),
        ("int-quantized", CHANNEL, CTIntConfig((1, -1))),
        ("int-quantized", {**CHANNEL, "strategy": "tensor"}, CTIntConfig(None)),
        ("naive-quantized", GROUP, CTIntConfig((1, 8), 4)),
        ("naive-quantized", FLOAT, Fp8Config("tensor")),
        ("float-quantized", {**FLOAT, "strategy": "channel"}, Fp8Config("channel")),
        ("float-quantized", {**FLOAT, "strategy": "group", "group_size": 8}, Fp8Config("block", (1, 8))),
        (
            "float-quantized",
            {**FLOAT, "strategy": "block", "block_structure": [128, 64]},
            Fp8Config("block", (128, 64)),
        ),
        (
            "float-quantized",
            {**FLOAT, "strategy": "block", "block_structure": "128x64"},
            Fp8Config("block", (128, 64)),
        ),
        ("marlin-24", {**GROUP, "group_size": 128}, Marlin24Config(128, compressed=True)),
        ("pack-quantized", {"num_bits": 4, "group_size": -1}, CTPackConfig(4, -1)),
    ],
)
def test_every_format_has_its_room(stated: str, weights: Any, want: Any) -> None:
    assert weight_type(group(weights), format=stated).config == want


def test_activations_with_stored_scales_have_to_have_them() -> None:
    static, dynamic = {**CHANNEL, "dynamic": False}, {**CHANNEL, "dynamic": True}

    assert weight_type(group(CHANNEL, input_activations=static), format="int-quantized").config.static
    assert not weight_type(group(CHANNEL, input_activations=dynamic), format="int-quantized").config.static
    assert weight_type(group(FLOAT, input_activations=static), format="float-quantized").config.input_scale


@pytest.mark.parametrize(
    ("version", "dense"),
    [(None, None), ("0.17.1", False), ("0.18.0", True), ("0.9", False), ("1.0.dev3", True)],
)
def test_the_version_says_which_packing_a_shape_that_fits_both_has(version: Any, dense: Any) -> None:
    assert weight_type(group(GROUP), version=version).config.dense == dense


def test_a_format_of_a_group_comes_before_that_of_all() -> None:
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

    assert (
        weight_type(group(nvfp4, format="nvfp4-pack-quantized"), format="mixed-precision").weight_type
        is CTNVFP4Weight
    )


def test_trap_52_a_layer_of_every_tensor_under_its_own_name_is_read() -> None:
    stored = {
        **layer(),
        "weight_zero_point": torch.full((1, 2), 8, dtype=torch.int32),
        "weight_g_idx": torch.arange(16, dtype=torch.int32) % 2,
    }
    act_order = config(group({**GROUP, "symmetric": False, "actorder": "group"}))

    assert load(act_order, "a", stored).dequantize()[0].tolist() == [1, 2] * 8


def test_trap_54_a_module_that_no_target_means_is_not_quantized() -> None:
    only_mlp = config(group(GROUP, "re:.*mlp.*"))

    assert isinstance(load(only_mlp, "attn.q_proj", PLAIN), UnquantizedWeight)
    assert load(only_mlp, "mlp.up_proj", layer()).config.bits == 4
    with pytest.raises(ExcludedModuleError, match=r"no entry of config_groups\.group_0\.targets means it"):
        load(only_mlp, "attn.q_proj", layer())


@pytest.mark.parametrize("actorder", ["group", "dynamic", True], ids=repr)
def test_an_act_order_without_its_index_says_why_it_is_needed(actorder: Any) -> None:
    with pytest.raises(MissingTensorError) as caught:
        load(config(group({**GROUP, "actorder": actorder})), "a", layer())

    assert str(caught.value).splitlines() == [
        "a.weight_g_idx: not in the checkpoint",
        "  stored   a.weight_packed, a.weight_scale, a.weight_shape",
        "  reason   by the config's actorder any input may be of any group; only this tensor says which",
        "  remedy   save the layer with it, or, if the inputs are in order, an actorder of 'weight' or null",
    ]
    assert load(config(group({**GROUP, "actorder": "weight"})), "a", layer()).format == "ct_pack"


@pytest.mark.parametrize(
    ("targets", "bits"),
    [
        pytest.param((["Linear"], ["re:.*down_proj"]), 8, id="a pattern before a class"),
        pytest.param((["re:.*down_proj"], ["mlp.down_proj"]), 8, id="a name before a pattern"),
        pytest.param((["re:.*down.*"], ["re:.*down_proj"]), 4, id="of two patterns the first"),
        pytest.param((["Linear"], ["down"]), 4, id="a part of a name is none"),
    ],
)
def test_trap_54_several_groups_have_their_say_in_order(targets: Any, bits: int) -> None:
    both = config(group(GROUP, *targets[0]), group({**GROUP, "num_bits": 8}, *targets[1]))

    assert load(both, "layers.0.mlp.down_proj", layer(bits)).dequantize()[0].tolist() == [1] * 8 + [2] * 8


@pytest.mark.parametrize("entry", ["lm_head", "re:.*head", "model.lm_head"])
def test_trap_54_what_is_ignored_is_plain_or_refused(entry: str) -> None:
    ignoring = config(group(GROUP), ignore=[entry])

    assert isinstance(load(ignoring, "model.lm_head", PLAIN), UnquantizedWeight)
    with pytest.raises(ExcludedModuleError, match=f"as ignore has {entry!r}".replace("*", r"\*")):
        load(ignoring, "model.lm_head", layer())


def test_a_linear_target_does_not_make_a_norm_quantized() -> None:
    assert isinstance(load(config(group(GROUP)), "model.norm", {"weight": torch.ones(4)}), UnquantizedWeight)


def test_a_group_without_weights_is_plain() -> None:
    loader = loader_from_config(config(group(None, "re:.*attn.*"), group(GROUP)))

    assert [each.weight_type.format for each in loader.formats] == ["ct_pack", "unquantized"]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (config(group(FLOAT), format="mxfp6-quantized"), "compressed-tensors (mxfp6-quantized)"),
        (config(group(FLOAT), format="mxfp6-pack-quantized"), "compressed-tensors (mxfp6-pack-quantized)"),
        (
            config(group(GROUP), sparsity_config={"format": "sparse-24-bitmask"}),
            "compressed-tensors (sparse-24-bitmask)",
        ),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "compressed-tensors (sparse-bitmask)"),
        (
            config(group(GROUP), transform_config={"groups": {}}),
            "compressed-tensors with transforms",
        ),
        (config(group(GROUP, "Conv2d")), "compressed-tensors for Conv2d"),
    ],
)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        loader_from_config(values)

    assert caught.value.format == name


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (config(), "config_groups"),
        (config(group(GROUP), quantization_status="halfway"), "quantization_status"),
        (config(group(GROUP), format=None), "config_groups.group_0.format"),
        (config(group({**GROUP, "num_bits": 9})), "config_groups.group_0.weights.num_bits"),
        (config(group({**GROUP, "num_bits": 4.0})), "config_groups.group_0.weights.num_bits"),
        *(
            (
                config(group({**SMALL, "num_bits": bits}), format=name),
                "config_groups.group_0.weights.num_bits",
            )
            for name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
            for bits in (3, 5)
        ),
        (config(group({**GROUP, "type": "float"})), "config_groups.group_0.weights.type"),
        (config(group({**GROUP, "group_size": None})), "config_groups.group_0.weights.group_size"),
        (config(group({**GROUP, "strategy": "block"})), "config_groups.group_0.weights.strategy"),
        (
            config(group({**FLOAT, "strategy": "block", "block_structure": [128]}), format="float-quantized"),
            "config_groups.group_0.weights.block_structure",
        ),
        (
            config(group({**GROUP, "symmetric": False}), format="marlin-24"),
            "config_groups.group_0.weights.symmetric",
        ),
    ],
)
def test_a_config_that_is_none_is_named_by_its_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loader_from_config(values)

    assert caught.value.key == f"quantization_config.{key}"


def test_patterns_may_look_around_them() -> None:
    values = config(group(GROUP, "re:.*proj"), ignore=["re:(?!.*mlp).*"])
    loader = loader_from_config(values)

    assert isinstance(loader, ModuleLoader)
    assert loader.chosen("layers.0.self_attn.q_proj").exclusions.entry("layers.0.self_attn.q_proj")
    assert loader.chosen("layers.0.mlp.up_proj").exclusions.entry("layers.0.mlp.up_proj") is None


def test_an_embedding_has_the_scheme_of_its_class_before_that_of_linear_layers() -> None:
    eight = {**GROUP, "num_bits": 8}
    loader = loader_from_config(config(group(GROUP), group(eight, "Embedding")))

    assert isinstance(loader, ModuleLoader)
    assert [fmt.config.bits for fmt in loader.chosen("model.embed_tokens").formats[:1]] == [8]
    assert [fmt.config.bits for fmt in loader.chosen("model.layers.0.mlp.up_proj").formats[:1]] == [4]


def test_a_cache_of_its_own_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="qload"):
        weight_type(group(GROUP), kv_cache_scheme={"num_bits": 8})

    assert "has a kv_cache_scheme" in caplog.text


def test_the_old_section_needs_no_method(tmp_path: Path) -> None:
    old = {key: value for key, value in config(group(GROUP)).items() if key != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": old}))
    found = read_configs(tmp_path)[1][0]

    assert found is not None
    assert loader_from_config(found.values).formats[0].config == CTPackConfig(4, 8)


def test_a_module_whose_name_only_ends_like_an_ignored_one_is_quantized() -> None:
    ignoring = config(group(GROUP), ignore=["gate"])

    assert load(ignoring, "mlp.up_gate", layer()).format == "ct_pack"
    with pytest.raises(ExcludedModuleError, match="as ignore has 'gate'"):
        load(ignoring, "mlp.gate", layer())


@pytest.mark.parametrize(
    ("targets", "ignore", "prefix", "noted"),
    [
        (["Linear"], [], "lm_head", True),
        (["Linear"], None, "model.lm_head", True),
        (["Linear"], ["lm_head"], "lm_head", False),
        (["Linear"], [], "model.norm", False),
        (["model.up_proj"], [], "model.up_proj", True),
        (["re:.*"], [], "model.norm", False),
    ],
)
def test_a_module_that_the_config_has_quantized_and_is_plain_is_noted(
    targets: list[str], ignore: Any, prefix: str, noted: bool
) -> None:
    """AutoRound has an empty ignore list and a plain head: the tensors decide."""
    claims = config(group(GROUP, *targets, format=None), ignore=ignore, provider="auto-round")
    stored = {f"{prefix}.{name}": tensor for name, tensor in PLAIN.items()}
    weights = Weights(MemoryStorage(stored), loader=loader_from_config(claims))

    assert weights.get_weights(prefix).format == "unquantized"
    want = (
        f"{prefix}: config_groups.group_0 lists it as quantized, and its weight is plain: programs that "
        "follow "
        "the config expect quantized tensors and fail; correct that entry, or exclude the layer by ignore"
    )
    assert weights.report().notes == ((want,) if noted else ())


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({**FLOAT, "strategy": "group", "group_size": 32}, "mxfp8"),
        ({**GROUP, "strategy": "tensor", "group_size": None}, "ct_pack_tensor"),
    ],
)
def test_formats_of_one_scale_and_of_powers_of_two(weights: dict[str, Any], name: str) -> None:
    stated = "mxfp8-quantized" if name == "mxfp8" else "pack-quantized"
    cache = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}

    made = weight_type(group(weights, format=None), format=stated, kv_cache_scheme=cache)
    assert made.weight_type.format == name


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"group_size": 16}, "group_size"), ({"strategy": "channel"}, "strategy"), ({"type": "int"}, "type")],
)
def test_mxfp8_has_one_shape(changes: dict[str, Any], key: str) -> None:
    scheme = {**FLOAT, "strategy": "group", "group_size": 32, **changes}

    with pytest.raises(ConfigError) as caught:
        weight_type(group(scheme), format="mxfp8-quantized")
    assert caught.value.key == f"quantization_config.config_groups.group_0.weights.{key}"
