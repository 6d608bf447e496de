"""Notes on modules with a contradiction of config and storage: one sentence per cause, in every dialect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.verify import Report, verify
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYERS = 3
# Fixture of one layer in each dialect, and the config key for excluded modules, in the words of the note.
DIALECTS = {
    "gptq/b4_g32_asym_noact_v1": "a pattern with '-:' in dynamic",
    "awq/g32_256x96": "modules_to_not_convert",
    "fp8/block_132x32": "modules_to_not_convert",
    "compressed_tensors/float_channel": "ignore",
    "modelopt/fp8_tensor_16x64": "ignore",
    "auto_round/auto_gptq_w4_g32_sym": "16 bits in extra_config",
    "bnb/int8_16x128": "llm_int8_skip_modules",
    "eetq/128x64": "modules_to_not_convert",
    "exl2/b6_g128_256x32": "modules_to_not_convert",
    "marlin/g128_256x128": "a pattern with '-:' in dynamic",
}


def several(case: str, plain: int | None) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return a fixture's layer in three decoder layers, one of them plain; its config; its kind."""
    folder = FIXTURES / case
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (prefix,) = {name.partition(".layers.0.")[2].rpartition("_proj")[0] + "_proj" for name in stored}
    tensors = {}
    for layer in range(LAYERS):
        if layer == plain:
            tensors[f"model.layers.{layer}.{prefix}.weight"] = torch.randn(8, 16)
        else:
            tensors |= {name.replace(".0.", f".{layer}.", 1): each.clone() for name, each in stored.items()}
    return tensors, config["quantization_config"], prefix


def notes(report: Report, *words: str) -> list[str]:
    """Return the notes with all of the words."""
    return [note for note in report.notes if all(word in note for word in words)]


@pytest.mark.parametrize("case", DIALECTS)
def test_a_plain_layer_whose_like_is_quantized_is_told_with_the_way_out(case: str, tmp_path: Path) -> None:
    tensors, config, name = several(case, plain=1)

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert (report.verdict, notes(report, "plain")) == (
        "ok",
        [
            f"model.layers.1.{name}: plain, while model.layers.0.{name} is quantized, and no entry of the "
            "config excludes it: programs that follow the config expect quantized tensors, and fail or "
            f"read others; exclude it by {DIALECTS[case]}"
        ],
    )


@pytest.mark.parametrize("case", DIALECTS)
def test_nothing_is_told_where_all_layers_are_quantized(case: str, tmp_path: Path) -> None:
    tensors, config, _ = several(case, plain=None)

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    assert not notes(report, "the config")[1:]


def test_one_sentence_tells_of_all_plain_layers_and_names_a_list_that_the_config_has(tmp_path: Path) -> None:
    """A plain multi-token prediction layer outside every list makes engines crash."""
    tensors = {}
    for name in ("q_proj", "k_proj", "up_proj"):
        tensors |= gptq(f"model.layers.0.{name}") | {f"model.mtp.layers.0.{name}.weight": torch.randn(8, 16)}
    config = {**GPTQ, "modules_to_not_convert": ["lm_head"]}

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    assert notes(report, "plain") == [
        "model.mtp.layers.0.k_proj: plain, while model.layers.0.k_proj is quantized, and no entry of the "
        "config excludes it; 3 in all: programs that follow the config expect quantized tensors, and fail "
        "or read others; exclude them by modules_to_not_convert"
    ]


LEFT_OUT = [
    ("gptq/b4_g32_asym_noact_v1", {"dynamic": {r"-:model\.layers\.1\..*": {}}}),
    ("gptq/b4_g32_asym_noact_v1", {"modules_to_not_convert": ["layers.1"]}),
    ("awq/g32_256x96", {"modules_to_not_convert": ["model.layers.1"]}),
    ("fp8/block_132x32", {"ignored_layers": ["model.layers.1"]}),
    ("fp8/block_132x32", {"modules_to_not_convert": ["model.layers.1"]}),
    ("compressed_tensors/float_channel", {"ignore": [r"re:.*layers\.1\..*"]}),
    ("modelopt/fp8_tensor_16x64", {"ignore": ["model.layers.1*"]}),
    ("modelopt/fp8_tensor_16x64", {"exclude_modules": ["model.layers.1.*"]}),
    ("auto_round/auto_gptq_w4_g32_sym", {"extra_config": {r".*layers\.1\..*": {"bits": 16}}}),
    ("bnb/int8_16x128", {"llm_int8_skip_modules": ["layers.1"]}),
    ("eetq/128x64", {"modules_to_not_convert": ["layers.1"]}),
    ("exl2/b6_g128_256x32", {"modules_to_not_convert": ["layers.1"]}),
]


@pytest.mark.parametrize(("case", "entry"), LEFT_OUT, ids=lambda value: str(value)[:60])
def test_an_entry_that_leaves_out_a_plain_layer_is_no_note_and_a_quantized_one_a_finding(
    case: str, entry: dict[str, Any], tmp_path: Path
) -> None:
    found = {}
    for kind, plain in (("plain", 1), ("quantized", None)):
        tensors, config, name = several(case, plain)
        (tmp_path / kind).mkdir()
        section = {key: value for key, value in config.items() if key != "ignore"} | entry
        found[kind] = verify(model(tmp_path / kind, tensors, quantization_config=section))

    assert not notes(found["plain"], "programs that follow the config")
    assert "excluded-module" not in rules(found["plain"])
    (finding,) = (each for each in found["quantized"].findings if each.rule == "excluded-module")
    (key,) = entry
    assert finding.tensor == f"model.layers.1.{name}"
    assert f"plain tensors, as {key} has" in finding.message
    assert finding.remedy == f"take the entry out of {key}, or store the layer plain"


def table(**layers: str) -> dict[str, Any]:
    """Return a config of ModelOpt with the algorithm of each layer by name."""
    entries = {f"model.layers.{name}": {"quant_algo": kind} for name, kind in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries}


def targets(*names: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"targets": list(names), "weights": weights}},
        "ignore": list(ignore),
    }


def fp8(*prefixes: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}": tensor
        for prefix in prefixes
        for name, tensor in (
            ("weight", torch.randn(8, 16).to(torch.float8_e4m3fn)),
            ("weight_scale", torch.ones(())),
        )
    }


ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 8,
    "sym": True,
}
UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"
NAMED = [
    pytest.param(fp8(UP), table(**{"0.mlp.up_proj": "FP8", "0.mlp.down_proj": "FP8"}), DOWN,
                 "quantized_layers", id="modelopt"),
    pytest.param(fp8(UP), table(**{"0.mlp.up_proj": "FP8", "1.mlp.experts": "FP8"}),
                 "model.layers.1.mlp.experts.3.down_proj", "quantized_layers", id="experts together"),
    pytest.param(fp8(UP), targets(UP, DOWN), DOWN, "config_groups.g", id="compressed-tensors"),
    pytest.param(fp8(UP), targets("Linear"), HEAD, "config_groups.g", id="a class"),
    pytest.param(gptq(UP), {**ROUND, "extra_config": {DOWN: {"group_size": 16}}}, DOWN,
                 "extra_config", id="auto-round"),
    pytest.param(gptq(UP), {**GPTQ, "lm_head": True}, HEAD, "lm_head", id="a quantized head"),
]  # fmt: skip


@pytest.mark.parametrize(("quantized", "config", "name", "key"), NAMED)
def test_a_plain_layer_that_an_entry_names_as_quantized_is_told(
    quantized: dict[str, Tensor], config: dict[str, Any], name: str, key: str, tmp_path: Path
) -> None:
    tensors = {**quantized, f"{name}.weight": torch.randn(8, 16)}

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    (note,) = notes(report, "programs that follow the config")
    assert note.startswith(f"{name}: {key} lists it as quantized, and its weight is plain: ")
    assert "; correct that entry, or exclude the layer by " in note


PATTERNS = [
    pytest.param(gptq(UP), {**GPTQ, "dynamic": {r"+:.*down_proj": {"bits": 8}}}, "dynamic", id="gptq"),
    pytest.param(gptq(UP), {**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]},
                 "modules_in_block_to_quantize", id="in a block"),
    pytest.param(gptq(UP), {**ROUND, "extra_config": {r"down_pro[j]": {"bits": 8}}}, "extra_config",
                 id="auto-round"),
    pytest.param(fp8(UP), targets(r"re:.*up_proj", r"re:.*down_proj"), "config_groups.g",
                 id="compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("quantized", "config", "key"), PATTERNS)
def test_a_pattern_that_means_plain_layers_alone_is_told_once(
    quantized: dict[str, Tensor], config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    second = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in quantized.items()}
    plain = {f"model.layers.{layer}.mlp.down_proj.weight": torch.randn(8, 16) for layer in range(2)}
    tensors = {**quantized, **second, **plain}

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    (note,) = notes(report, "programs that follow the config")
    assert note.startswith(f"{DOWN}: plain, and {key} lists it as quantized by ")
    assert "; 2 in all: " in note
    assert note.endswith("; remove the entry")


def test_names_of_modules_that_are_not_stored_are_one_note_for_a_key(tmp_path: Path) -> None:
    entries = {"0.mlp.up_proj": "FP8", "7.mlp.up_proj": "FP8", "8.mlp.up_proj": "FP8", "0.mlp": "FP8"}
    config = table(**entries, **{"0.self_attn.qkv_proj": "FP8"})
    tensors = {**fp8(UP), "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 16)}

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    assert notes(report, "no such layer is stored") == [
        "model.layers.7.mlp.up_proj: quantized_layers lists it as quantized, and no such layer is stored; "
        "2 in "
        "all: remove the entries, if no layer was lost"
    ]


@pytest.mark.parametrize("said", ["top", "inner"])
def test_lists_that_name_modules_which_are_not_there_say_nothing(said: str, tmp_path: Path) -> None:
    listed = ["lm_head", "visual.blocks.0"] if said == "top" else ["model.layers.99.mlp.gate"]
    config = {**GPTQ, "modules_to_not_convert": listed}

    report = verify(model(tmp_path, gptq(UP), quantization_config=config), tier="headers")

    assert report.verdict == "ok"
    assert not any(name in note for name in listed for note in report.notes)


def test_a_model_of_no_table_may_deny_a_quantized_head_no_more_than_others(tmp_path: Path) -> None:
    tensors = {**gptq(UP), **gptq("model.lm_head")}

    report = verify(model(tmp_path, tensors, quantization_config={**GPTQ, "lm_head": False}), tier="headers")

    assert [(finding.rule, finding.tensor) for finding in report.findings] == [
        ("quantized-head", "model.lm_head.qweight")
    ]


def test_a_scale_that_is_lost_is_found_also_where_layers_may_be_plain(tmp_path: Path) -> None:
    tensors, config, name = several("compressed_tensors/float_channel", plain=1)
    del tensors[f"model.layers.2.{name}.weight_scale"]

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert {finding.tensor for finding in report.findings} == {f"model.layers.2.{name}.weight_scale"}


def test_a_pattern_that_means_quantized_layers_too_is_no_note_of_its_own(tmp_path: Path) -> None:
    tensors = {**gptq(UP), f"{DOWN}.weight": torch.randn(8, 16)}
    config = {**GPTQ, "dynamic": {r"+:.*mlp\..*": {"group_size": 8}}}

    report = verify(model(tmp_path, tensors, quantization_config=config), tier="headers")

    assert not notes(report, "programs that follow the config")


def test_a_quantized_layer_that_lacks_what_it_may_lack_is_missed_as_before(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(3):
        tensors |= gptq(f"model.layers.{layer}.mlp.up_proj")
    del tensors["model.layers.1.mlp.up_proj.g_idx"]

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ), tier="headers")

    assert [(finding.rule, finding.tensor) for finding in report.findings] == [
        ("missing-sibling", "model.layers.1.mlp.up_proj.g_idx")
    ]


@pytest.mark.parametrize(
    ("case", "entry"),
    [
        ("gptq", {"dynamic": {r"+:.*layers\.1\..*": {"group_size": 32}}}),
        ("modelopt", {"quantized_layers": True}),
    ],
)
def test_a_plain_layer_that_an_entry_means_is_told_in_one_sentence(
    case: str, entry: dict[str, Any], tmp_path: Path
) -> None:
    folder = next(each for each in DIALECTS if each.startswith(case))
    tensors, config, name = several(folder, plain=1)
    if case == "modelopt":
        listed = {f"model.layers.{at}.{name}": {"quant_algo": config["quant_algo"]} for at in range(LAYERS)}
        entry = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}

    report = verify(model(tmp_path, tensors, quantization_config=config | entry), tier="headers")

    (note,) = notes(report, f"model.layers.1.{name}", "plain")
    assert "lists it as quantized" in note
