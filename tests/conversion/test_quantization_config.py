"""Quantization config of a conversion: conventions of zero points, and claims of unchanged layers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from qload import convert
from qload.conversion.float4 import DEEPSEEK_TENSORS, QUARK_TENSORS
from qload.conversion.quantization_config import CT_VERSION, NO_ACT_ORDER, quantization_config
from qload.conversion.targets import OutputLayer
from qload.formats import (
    AWQConfig,
    AWQWeight,
    BNBNF4Weight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    MLXFloatConfig,
    MLXFloatWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    NVFP4Config,
    QuarkInt4Config,
    QuarkInt4Weight,
)
from qload.layouts import Stored, StoredMinusOne, StoredMinusOnePerField
from qload.spec.activations import ActivationScheme
from qload.spec.weight import Weight
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")


def integers(bits: int, group_size: int | None, strategy: str, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": group_size, "actorder": None, "dynamic": False,
    }  # fmt: skip


def floats(strategy: str, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "group_size": None,
        "dynamic": dynamic,
    }  # fmt: skip


def ct_config(packing: str, groups: list[tuple[list[str], Any, Any]]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "version": CT_VERSION,
        "config_groups": {
            f"group_{n}": {
                "targets": targets, "weights": weights, "input_activations": inputs,
                "output_activations": None,
            }
            for n, (targets, weights, inputs) in enumerate(groups)
        },
        "ignore": ["p.q", "lm_head"],
        "kv_cache_scheme": None,
    }  # fmt: skip


V2, WHOLE, FIELDS = Stored(), StoredMinusOne(), StoredMinusOnePerField()
# Convention and evidence of each layer; expected checkpoint_format, or None: no config covers both.
CONVENTIONS: list[tuple[list[tuple[Any, Any]], str | None]] = [
    ([(WHOLE, "alike"), (WHOLE, "alike")], "gptq"),
    ([(WHOLE, "alike"), (FIELDS, "alike")], "gptq"),
    ([(WHOLE, "alike"), (FIELDS, "codes")], "gptq"),
    ([(FIELDS, "codes"), (WHOLE, "alike")], "gptq"),
    ([(WHOLE, None), (FIELDS, "codes")], None),
    ([(V2, "alike"), (V2, None)], "gptq_v2"),
    ([(V2, "alike"), (V2, "alike")], "gptq_v2"),
    ([(V2, "alike"), (WHOLE, "alike")], None),
    ([(V2, "alike"), (WHOLE, "none")], None),
    ([(V2, None), (WHOLE, "alike")], None),
    ([(V2, None), (FIELDS, "codes")], None),
]


def layers_of(weight_type: type[Weight], *layers: tuple[str, Any, int, dict[str, Any]]) -> list[OutputLayer]:
    return [OutputLayer(name, weight_type, config, K, **values) for name, config, K, values in layers]


ACT_ORDER, SYMMETRIC, ITEM = {"act_order": True}, {"symmetric": True}, {"item": "converted"}
TOKENS, TENSOR = ActivationScheme("float", 8, True, "token"), ActivationScheme("float", 8, False, "tensor")
# Layers unlike each other, their written config, and the refusals.
WRITTEN: dict[str, tuple[list[OutputLayer], dict[str, Any], dict[str, str]]] = {
    "gptq": (
        layers_of(
            GPTQWeight,
            ("l0.a", GPTQConfig(4, 64), 128, ACT_ORDER),
            ("l0.b", GPTQConfig(4, 64), 128, SYMMETRIC),
            ("l1.a", GPTQConfig(8, 64), 128, SYMMETRIC),
            ("l1.b", GPTQConfig(4, -1), 64, SYMMETRIC),
            ("l1.c", GPTQConfig(4, -1), 65, SYMMETRIC),
            ("lm_head", GPTQConfig(4, 64), 128, SYMMETRIC),
        ),
        {
            "quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": False,
            "lm_head": True, "checkpoint_format": "gptq", "pack_dtype": "int32",
            "dynamic": {
                "-:^p\\.q$": {},
                "+:^l1\\.a$": {"bits": 8, "group_size": 64},
                "+:^l1\\.c$": {"bits": 4, "group_size": -1},
            },
        },
        {},
    ),
    "gptq alike": (
        layers_of(GPTQWeight, *((name, GPTQConfig(8, -1), 64, SYMMETRIC) for name in ("a", "head.lm_head"))),
        {
            "quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True,
            "lm_head": True, "checkpoint_format": "gptq", "pack_dtype": "int32",
            "dynamic": {"-:^p\\.q$": {}},
        },
        {},
    ),
    "awq": (
        layers_of(
            AWQWeight,
            ("l0.a", AWQConfig(64), 128, {}),
            ("l0.b", AWQConfig(64), 128, {}),
            ("l1.a", AWQConfig(64, 8), 128, {}),
            ("l1.p.q", AWQConfig(64), 128, {}),
            ("l1.b", AWQConfig(64, zero_point=False), 128, {}),
        ),
        {
            "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["p.q", "lm_head"],
        },
        {
            "l1.a": "the config of awq has 4 bits and groups of 64 for all layers, this one 8 bits and "
            "groups of 64",
            "l1.p.q": "awq excludes modules by parts of names, and the plain layer p.q is part of this one",
            "l1.b": "it stores no zero points, and other layers do",
        },
    ),
    "marlin": (
        layers_of(
            MarlinWeight,
            ("l0.a", MarlinConfig(128), 256, {}),
            ("l0.b", MarlinConfig(128), 256, {}),
            ("l1.a", MarlinConfig(-1), 256, {}),
        ),
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
            "lm_head": False, "checkpoint_format": "marlin", "is_marlin_format": True,
            "modules_to_not_convert": ["p.q", "lm_head"],
        },
        {
            "l1.a": "the config of marlin has 4 bits and groups of 128 for all layers, this one 4 bits and "
            "groups of -1"
        },
    ),
    "compressed-tensors": (
        layers_of(
            CTPackWeight,
            ("l0.a", CTPackConfig(4, 64, symmetric=False), 128, {}),
            ("l0.b", CTPackConfig(8, -1), 128, {}),
            ("l1.a", CTPackConfig(8, -1), 128, {}),
            ("l1.b", CTPackConfig(4, 64, act_order=True), 128, {}),
        ),
        ct_config(
            "pack-quantized",
            [
                (["Linear"], integers(8, None, "channel", True), None),
                (["l0.a"], integers(4, 64, "group", False), None),
                (["l1.b"], integers(4, 64, "group", True), None),
            ],
        ),
        {"l1.b": NO_ACT_ORDER},
    ),
    "fp8": (
        layers_of(
            Fp8Weight,
            ("l0.a", Fp8Config("channel"), 128, {"activations": TOKENS, **ITEM}),
            ("l0.b", Fp8Config("tensor"), 128, {"activations": TENSOR, **ITEM}),
            ("l1.a", Fp8Config("tensor"), 128, {"activations": TENSOR, **ITEM}),
            ("l1.b", Fp8Config("block", (128, 128)), 128, {}),
        ),
        ct_config(
            "float-quantized",
            [
                (["Linear"], {**floats("tensor"), "block_structure": None}, floats("tensor")),
                (["l0.a"], {**floats("channel"), "block_structure": None}, floats("token", dynamic=True)),
                (["l1.b"], {**floats("block"), "block_structure": [128, 128]}, None),
            ],
        ),
        {"l1.b": "it is kept unchanged, and its config would need another dialect of fp8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_the_config_of_layers_unlike_each_other(case: str) -> None:
    layers, values, refused = WRITTEN[case]

    written = quantization_config(layers, ["p.q", "lm_head"])

    assert (written.values, written.refused) == (values, refused)
    assert written.side_file == ("quantize_config.json" if values["quant_method"] == "gptq" else None)


MX, NV = {"item": "converted"}, NVFP4Config()
FLOATS: dict[str, list[OutputLayer]] = {
    "quark int4": layers_of(
        QuarkInt4Weight,
        ("l0.a", QuarkInt4Config(64), 128, {}),
        ("l0.b", QuarkInt4Config(64), 256, {}),
        ("l1.a", QuarkInt4Config(-1), 128, {}),
        ("l1.b", QuarkInt4Config(-1), 64, {}),
    ),
    "quark mxfp4": layers_of(CTMXFP4Weight, ("a", MXFP4Config(QUARK_TENSORS), 64, MX)),
    "deepseek": layers_of(CTMXFP4Weight, ("a", MXFP4Config(DEEPSEEK_TENSORS), 64, MX)),
    "compressed-tensors mxfp4": layers_of(CTMXFP4Weight, ("a", MXFP4Config(), 64, MX)),
    "compressed-tensors nvfp4": layers_of(CTNVFP4Weight, ("a", NV, 64, MX), ("b", NV, 64, {})),
    "modelopt nvfp4": layers_of(ModelOptNVFP4Weight, ("a", NV, 64, MX)),
    "gpt-oss": layers_of(MXFP4ExpertsWeight, ("a", MXFP4Config(), 64, MX)),
    "mlx mxfp4": layers_of(MLXFloatWeight, ("a", MLXFloatConfig("mxfp4"), 64, MX)),
    "mlx nvfp4": layers_of(MLXFloatWeight, ("a", MLXFloatConfig("nvfp4"), 64, MX)),
    "marlin 2:4": layers_of(
        Marlin24Weight, ("a", Marlin24Config(128), 256, {}), ("lm_head", Marlin24Config(128), 256, {})
    ),
    "two types": layers_of(GPTQWeight, ("a", GPTQConfig(4, 64), 64, {}))
    + layers_of(AWQWeight, ("b", AWQConfig(64), 64, {})),
    "no writer": layers_of(BNBNF4Weight, ("a", None, 64, {})),
}


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.parametrize("plain", [[], ["p.q", "lm_head"]], ids=["quantized", "with plain layers"])
def test_configs_of_other_programs(case: str, plain: list[str], golden: SnapshotAssertion) -> None:
    written = quantization_config(FLOATS[case], plain)

    assert json.dumps(asdict(written), indent=1) == golden


@pytest.mark.parametrize(("told", "format"), CONVENTIONS)
def test_a_config_says_one_convention_of_zero_points(told: list[tuple[Any, Any]], format: str | None) -> None:
    layers = [
        OutputLayer(f"l{at}", GPTQWeight, GPTQConfig(4, 64, zeros, evidence=evidence), 64)
        for at, (zeros, evidence) in enumerate(told)
    ]

    written = quantization_config(layers, [])

    if format is None:
        assert set(written.refused) == {"l0", "l1"}
        assert all("two conventions" in why for why in written.refused.values())
    else:
        assert written.values is not None
        assert (written.values["checkpoint_format"], written.refused) == (format, {})


def test_a_kept_layer_of_another_convention_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """One layer has plain zero points; those of the other are 0 if read as stored minus one."""
    (tmp_path / "source").mkdir()
    tensors = {**gptq("a", zero=7), **gptq("b", zero=15)}
    source = model(tmp_path / "source", tensors, quantization_config={**GPTQ, "sym": False})

    made = convert(source, tmp_path / "made", to="gptq_v2", keep=["b"])

    assert {layer.outcome for layer in made.layers} == {"refused"}
    assert "two conventions" in made.layers[0].detail
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("base", "own"), [(True, False), (False, True), (True, None), (False, None)])
def test_a_kept_layer_is_symmetric_where_the_claims_of_its_own_module_say_so(
    base: bool, own: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    rules = {} if own is None else {"dynamic": {r"+:^b$": {"sym": own}}}
    source = model(
        tmp_path / "source", {**gptq("a"), **gptq("b")}, quantization_config={**GPTQ, "sym": base, **rules}
    )

    made = convert(source, tmp_path / "made", to="gptq", keep=["b"])

    assert made.verdict == "ok"
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert written["sym"] == (base if own is None else own)
