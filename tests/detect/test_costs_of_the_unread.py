"""Configs with unread formats cost only their own layers; sections without effect on stored weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import layers, open_checkpoint
from qload.detect import effective_claims, loader_from_config, read_configs
from qload.errors import (
    ConfigError,
    MissingTensorError,
    QloadError,
    TwoFormatsError,
    UnsupportedFormatError,
)
from qload.formats import UnquantizedConfig
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights
from tests.detect import dialect_layers as make

pytestmark = pytest.mark.usefixtures("seen_texts")

Stored = dict[str, dict[str, Tensor]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
SQ = {"weight": torch.zeros(64, 128, dtype=torch.int8), "weight_scale": torch.ones(64)}
PLAIN = {"weight": torch.ones(64, 128, dtype=torch.bfloat16)}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a section of compressed-tensors, by default of all linear layers in 4 bits."""
    own = groups or ({"targets": ["Linear"], "weights": WEIGHTS},)
    named = {f"group_{at}": group for at, group in enumerate(own)}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": named,
        **more,
    }


def auto_round(**more: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, **more}


def source(config: dict[str, Any], stored: Stored, rank: Any = None) -> Weights:
    tensors = {f"{prefix}.{name}": t for prefix, layer in stored.items() for name, t in layer.items()}
    storage = MemoryStorage(tensors)
    more = {} if rank is None else {"process_group": rank}
    return Weights(storage, loader=loader_from_config(config, storage), **more)


def saved(folder: Path, config: dict[str, Any] | None, stored: Stored) -> Path:
    tensors = {f"{prefix}.{name}": t for prefix, layer in stored.items() for name, t in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"up": {"quant_algo": "NVFP4"}, "down": {"quant_algo": "W8A16"}},
}
NUMBERS = [{"targets": ["up"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}]
NUMBERS += [{"targets": ["down"], "weights": {"num_bits": 3, "type": "int", "group_size": 16}}]
BY_NUMBERS = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "config_groups": {"a": NUMBERS[0], "b": NUMBERS[1]},
}
UNKNOWN_GROUP = compressed(
    {"targets": ["up"], "weights": WEIGHTS},
    {"targets": ["down"], "weights": WEIGHTS, "format": "turbo-quantized"},
)
UNKNOWN_EXTRA = auto_round(
    packing_format="auto_round:auto_gptq", extra_config={"down": {"data_type": "mx_int", "bits": 4}}
)
UNKNOWN_PACKING = auto_round(
    packing_format="auto_round:auto_gptq", extra_config={"down": {"packing_format": "auto_round:svdquant"}}
)
NVFP4, GPTQ, PACKED = make.nvfp4(), make.gptq(), make.packed()
COSTS = {
    "ModelOpt, a table": (MIXED, NVFP4[0], "W8A16"),
    "ModelOpt, groups": (BY_NUMBERS, NVFP4[0], "int of 3 bits"),
    "compressed-tensors": (UNKNOWN_GROUP, PACKED[0], "turbo-quantized"),
    "AutoRound, a type": (UNKNOWN_EXTRA, GPTQ, "mx_int"),
    "AutoRound, a packing": (UNKNOWN_PACKING, GPTQ, "svdquant"),
}


@pytest.mark.parametrize("case", COSTS)
def test_what_is_not_read_costs_its_own_layers(case: str) -> None:
    config, read, name = COSTS[case]
    weights = source(config, {"up": read, "down": SQ, "norm": {"weight": torch.ones(4)}})

    assert not weights.get_weights("up").plain
    with pytest.raises(UnsupportedFormatError) as caught:
        weights.loader.describe(weights, "down")
    assert name in caught.value.format
    assert caught.value.reason.startswith("down: ")
    errors = {layer.prefix: layer.error for layer in layers(weights)}
    assert {prefix: type(error) for prefix, error in errors.items()} == {
        "up": type(None),
        "down": UnsupportedFormatError,
        "norm": type(None),
    }


@pytest.mark.parametrize("case", COSTS)
def test_what_is_not_read_may_be_plain_and_has_to_be_there(case: str) -> None:
    config, read, _ = COSTS[case]
    weights = source(config, {"up": read, "down": PLAIN})

    assert torch.equal(weights.get_weights("down").dequantize(), PLAIN["weight"].float())
    with pytest.raises(MissingTensorError, match="down"):
        source(config, {"up": read}).get_weights("down")


@pytest.mark.parametrize("case", COSTS)
def test_where_nothing_else_is_quantized_the_whole_is_refused_by_name(case: str) -> None:
    config, _, name = COSTS[case]
    if case.startswith("ModelOpt, a"):
        config = {**config, "quantized_layers": {"down": config["quantized_layers"]["down"]}}
    elif "config_groups" in config:
        config = {**config, "config_groups": {"b": list(config["config_groups"].values())[1]}}
    else:
        config = {**config, **config["extra_config"]["down"], "extra_config": None}

    with pytest.raises(UnsupportedFormatError) as caught:
        source(config, {"down": SQ})

    assert name in caught.value.format
    assert "2 tensors are stored so, as down.weight" in caught.value.reason


def test_parts_of_a_fused_layer_that_are_not_read_are_told_apart() -> None:
    table = {"q_proj": {"quant_algo": "NVFP4"}, "k_proj": {"quant_algo": "FP8_PB_REAL"}}
    table["v_proj"] = table["q_proj"]
    loader = loader_from_config({**MIXED, "quantized_layers": table})

    assert "UnreadLoader(modelopt (FP8_PB_REAL))" in repr([loader.chosen(part) for part in table])


FLOAT8 = {"bits": 8, "data_type": "fp", "act_bits": 16}
SMALL = {
    **FLOAT8,
    "group_size": [32, 64],
    "packing_format": "auto_round:fp8",
    "act_bits": 8,
    "act_data_type": "fp",
}
AUTO_ROUND = {
    "blocks": (SMALL, make.fp8((64, 128), (2, 2), (32, 64), "weight_scale_inv", torch.bfloat16)),
    "blocks, as fp8_static": (
        {**SMALL, "packing_format": "auto_round:fp8_static"},
        make.fp8((64, 128), (2, 2), (32, 64), "weight_scale_inv", torch.bfloat16),
    ),
    "blocks, as llm_compressor": (
        {**SMALL, "packing_format": "auto_round:llm_compressor"},
        make.fp8((64, 128), (2, 2), (32, 64)),
    ),
    "outputs": ({**FLOAT8, "group_size": -1}, make.fp8(scales=(64,), dtype=torch.bfloat16)),
    "the tensor": ({**FLOAT8, "group_size": 0}, make.fp8(scales=(1,), dtype=torch.bfloat16)),
    "groups": ({**FLOAT8, "group_size": 32}, make.fp8((64, 128), (64, 4), (1, 32))),
}


@pytest.mark.parametrize("case", AUTO_ROUND)
def test_fp8_of_auto_round_is_read_whole_and_cut(case: str) -> None:
    changes, (layer, want) = AUTO_ROUND[case]
    whole = torch.from_numpy(want.astype(np.float32))

    weight = source(auto_round(**changes), {"up": layer}).get_weights("up")

    assert torch.equal(weight.dequantize(), whole)
    assert (weight.activations is not None) == (changes["act_bits"] == 8)
    for rank in FakeWorld(2):
        share = source(auto_round(**changes), {"up": layer}, rank).get_weights_row("up").dequantize()
        assert torch.equal(share, whole.chunk(2, 1)[rank.rank()])


@pytest.mark.parametrize("size", [[], [128], [128, 128, 128], [0, 128], ["128", 128], -2, "128"])
def test_a_group_size_of_another_form_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="group_size"):
        loader_from_config(auto_round(**{**FLOAT8, "group_size": size}))


def test_blocks_of_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="group size"):
        loader_from_config(auto_round(group_size=[32, 32]))


def test_integers_of_sign_and_magnitude_are_no_mxfp4() -> None:
    layer, _ = make.mxfp4(names=("weight_packed", "weight_scale"))
    for packing in ("auto_round", "auto_round:llm_compressor"):
        with pytest.raises(UnsupportedFormatError, match="sign and magnitude"):
            source(auto_round(data_type="mx_int", packing_format=packing), {"up": layer})


def test_fake_weights_are_plain_and_noted(tmp_path: Path) -> None:
    config = auto_round(bits=8, group_size=-1, act_bits=8, packing_format="auto_round:fake")
    drawn = {"weight": torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()}

    report = verify(saved(tmp_path, config, {"up": drawn}))

    assert (report.verdict, report.findings) == ("ok", ())
    assert any("packing_format fake" in note for note in report.notes)
    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("up").dequantize(), drawn["weight"].float())


def test_rotations_of_auto_round_are_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="rotation_config"):
        loader_from_config(auto_round(rotation_config={"type": "hadamard"}))
    assert loader_from_config(auto_round(rotation_config={})).formats


def observed(scales: bool = True, zeros: bool = True) -> dict[str, Tensor]:
    """Return a plain weight of compressed-tensors before compression, with scales and zero points if set."""
    layer = {"weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()}
    if scales:
        layer["weight_scale"] = torch.full((64, 4), 0.01, dtype=torch.bfloat16)
    if zeros:
        layer["weight_zero_point"] = torch.zeros(64, 4, dtype=torch.int8)
    return layer


@pytest.mark.parametrize("status", ["frozen", "calibration", "initialized"])
@pytest.mark.parametrize("more", [{}, {"input_scale": torch.ones(1), "weight_g_idx": torch.zeros(128).int()}])
def test_plain_weights_beside_scales_of_a_frozen_model_are_read_with_a_note(
    status: str, more: dict[str, Tensor], tmp_path: Path
) -> None:
    layer = {**observed(), **more}
    config = compressed(quantization_status=status)

    report = verify(saved(tmp_path, config, {"up": layer}))

    assert (report.verdict, report.findings) == ("ok", ())
    assert any(f"quantization_status is {status}" in note and "weight_scale" in note for note in report.notes)
    weight = source(config, {"up": layer}).get_weights("up")
    assert weight.plain
    assert torch.equal(weight.dequantize(), layer["weight"].float())


@pytest.mark.parametrize("stated", ["int-quantized", "float-quantized"])
def test_plain_weights_of_one_name_with_codes_are_told_by_their_dtype(stated: str, tmp_path: Path) -> None:
    kind = {"int-quantized": "int", "float-quantized": "float"}[stated]
    scheme = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    config = compressed(
        {"targets": ["Linear"], "weights": scheme}, format=stated, quantization_status="frozen"
    )
    layer = observed(scales=False, zeros=False) | {"weight_scale": torch.full((64, 1), 0.01)}
    codes, want = make.fp8(scales=(64, 1))

    assert source(config, {"up": layer}).get_weights("up").plain
    assert verify(saved(tmp_path, config, {"up": layer})).verdict == "ok"
    if stated == "float-quantized":
        weight = source(config, {"up": codes}).get_weights("up")
        assert torch.equal(weight.dequantize(), torch.from_numpy(want.astype(np.float32)))


def test_a_frozen_model_may_be_compressed_all_the_same() -> None:
    layer, want = make.packed()

    weight = source(compressed(quantization_status="frozen"), {"up": layer}).get_weights("up")

    assert torch.equal(weight.dequantize(), torch.from_numpy(want.astype(np.float32)))


@pytest.mark.parametrize("status", ["compressed", None])
def test_plain_weights_beside_scales_of_a_compressed_model_are_refused_with_the_way_out(status: Any) -> None:
    with pytest.raises(TwoFormatsError, match="quantization_status to frozen"):
        source(compressed(quantization_status=status), {"up": observed()}).get_weights("up")


def test_a_frozen_model_without_any_scale_has_lost_what_it_was_made_for(tmp_path: Path) -> None:
    config = compressed(quantization_status="frozen")

    report = verify(saved(tmp_path, config, {"up": observed(scales=False, zeros=False)}))

    assert {finding.rule for finding in report.findings} == {"claimed-method"}


def transform(*locations: Any) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "head_dim": None, "apply": apply}}}


@pytest.mark.parametrize(
    "locations", [("weight_input",), ("weight_output",), ("weight_output", "weight_input")]
)
def test_transforms_of_weights_are_in_the_stored_weights(locations: tuple[str, ...], tmp_path: Path) -> None:
    layer, want = make.packed()
    config = compressed(transform_config=transform(*locations))

    report = verify(saved(tmp_path, config, {"up": layer}))

    assert report.findings == ()
    assert any("transform_config" in note for note in report.notes)
    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("up").dequantize(), torch.from_numpy(want.astype(np.float32)))


@pytest.mark.parametrize(
    ("transforms", "error"),
    [
        (transform("input"), UnsupportedFormatError),  # without the checkpoint that stores the matrix
        (transform("weight_input", "output"), UnsupportedFormatError),
        (transform("q_attn"), UnsupportedFormatError),
        (transform("residual"), UnsupportedFormatError),
        ({"groups": {}, **transform("weight_input")}, UnsupportedFormatError),
        ({"R1": transform("weight_input")}, UnsupportedFormatError),
        (transform(), ConfigError),
        ({"config_groups": {"R1": {"type": "hadamard"}}}, ConfigError),
        ({"config_groups": {"R1": "hadamard"}}, ConfigError),
        ({"config_groups": {"R1": {"apply": ["weight_input"]}}}, ConfigError),
        ({"config_groups": ["R1"]}, ConfigError),
    ],
    ids=str,
)
def test_transforms_of_anything_else_are_refused(transforms: dict[str, Any], error: type[QloadError]) -> None:
    with pytest.raises(error, match="transform_config"):
        loader_from_config(compressed(transform_config=transforms))


def test_transforms_of_queries_and_keys_change_no_layer(tmp_path: Path) -> None:
    layer, want = make.packed()
    saved(tmp_path, compressed(transform_config=transform("q_attn", "k_cache")), {"up": layer})

    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("up").dequantize(), torch.from_numpy(want.astype(np.float32)))


NO_METHOD = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"]}


@pytest.mark.parametrize("section", [NO_METHOD, {"bits": 4}, {"load_in_4bit": True}, {"quant_type": "qat"}])
def test_a_section_without_a_method_beside_plain_weights_is_noted(
    section: dict[str, Any], tmp_path: Path
) -> None:
    drawn = {"weight": torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()}
    counts = {"counts": torch.zeros(3, dtype=torch.int64)}

    report = verify(
        saved(tmp_path, section, {"up": drawn, "norm": {"weight": torch.ones(4)}, "stats": counts})
    )

    assert (report.verdict, report.findings) == ("ok", ())
    assert sum("no quant_method, and all weights are plain" in note for note in report.notes) == 1
    with open_checkpoint(tmp_path) as weights:
        assert torch.equal(weights.get_weights("up").dequantize(), drawn["weight"].float())


@pytest.mark.parametrize(
    "layer", [make.packed()[0], make.fp8()[0], {**PLAIN, "weight_scale": torch.ones(1)}, SQ], ids=range(4)
)
def test_a_section_without_a_method_beside_anything_else_is_not_excused(layer: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match="format"):
        source(NO_METHOD, {"up": layer})


def test_a_tools_own_file_states_its_method_by_its_name(tmp_path: Path) -> None:
    saved(tmp_path, None, {"up": PLAIN})
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 32, "desc_act": False})
    )

    (found,) = read_configs(tmp_path)[1]

    claims = effective_claims(found, MemoryStorage({"up.weight": PLAIN["weight"]}))
    assert claims is not None
    assert claims.method == "gptq"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"weight_block_size": [32, 32]}, "mxfp8 in blocks of"),
        ({"weight_block_size": [1, 64]}, "mxfp8 in blocks of"),
    ],
)
def test_mxfp8_has_one_block(config: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=name):
        loader_from_config({"quant_method": "mxfp8", **config})


def test_mxfp8_leaves_out_what_is_ignored() -> None:
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
    loader = loader_from_config({**config, "activation_scheme": "dynamic"})

    assert loader.left_out("lm_head") is not None
    assert loader.left_out("up") is None
    (fmt,) = [fmt for fmt in loader.formats if not fmt.weight_type.plain]
    assert str(fmt.activations) != "None"
    assert loader_from_config(config).formats[0].activations is None


def test_any_number_of_axes_may_lie_unused_beside_a_plain_weight() -> None:
    names = ("weight_scale", "weight_zero_point", "input_scale")
    config = UnquantizedConfig(unused=names)
    from qload.formats import UnquantizedWeight
    from qload.loader import ConfiguredFormat, FormatLoader

    for shapes in ((), (3,), (3, 5)), ((64, 4, 1, 1), (7,), ()), ((2, 3, 4), (5, 6, 7), (8, 9, 10)):
        stored = {f"up.{name}": torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
        storage = MemoryStorage({**stored, "up.weight": PLAIN["weight"]})
        weights = Weights(storage, loader=FormatLoader(ConfiguredFormat(UnquantizedWeight, config)))

        assert weights.get_weights("up").shape == (64, 128)
        assert weights.report().complete


def test_a_rotation_of_auto_round_may_stand_beside_its_section(tmp_path: Path) -> None:
    saved(tmp_path, None, {"up": make.gptq()})
    section = auto_round(packing_format="auto_round:auto_gptq")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": section, "rotation_config": {"type": "hadamard"}})
    )

    with pytest.raises(UnsupportedFormatError, match="rotation_config"):
        open_checkpoint(tmp_path)


def test_a_table_that_routes_tokens_is_no_weight(tmp_path: Path) -> None:
    tensors = {"gate.weight": torch.ones(4, 8), "gate.tid2eid": torch.zeros(16, 2, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")

    report = verify(tmp_path)

    assert (report.verdict, report.findings) == ("ok", ())
    assert report.coverage is not None
    assert [reason for reason in report.coverage.exempt if "experts that a token is routed to" in reason]


@pytest.mark.parametrize("size", [0, -1, None])
def test_modelopt_may_state_no_group_size_in_any_way(size: int | None) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": size}
    layer, want = make.nvfp4()

    weight = source(config, {"up": layer}).get_weights("up")

    assert torch.equal(weight.dequantize(), torch.from_numpy(want.astype(np.float32)))
