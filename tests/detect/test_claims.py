"""Every quant_method with one changed key at a time: the claims, or the whole text of the error."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from qload.configs import Claims, FoundConfig
from qload.configs.claims import Method
from qload.detect import read_claims
from qload.errors import QloadError
from qload.formats import AWQWeight, GPTQWeight

pytestmark = pytest.mark.usefixtures("seen_texts")

WORDS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FOURS = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True}
INVERSE = {"weight_scale_semantics": "inverse"}
NUMBERS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def groups(weights: Any, **more: Any) -> dict[str, Any]:
    """Return the only group of a compressed-tensors config."""
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}


def modelopt(weights: Any, **more: Any) -> dict[str, Any]:
    """Return a table of ModelOpt in the form of groups of layers."""
    return {"quantized_layers": None, "config_groups": {"g": {"targets": ["a"], "weights": weights, **more}}}


# quant_method -> a valid config, and single changes of it.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gptq": (
        {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        [
            *({"bits": bits} for bits in (1, 2, 3, 5, 8, 9, "4", None)),
            *({"group_size": size} for size in (-2, -1, 0, 1, 32, None)),
            *({"desc_act": said} for said in (True, None, 1)),
            *({"checkpoint_format": name} for name in ("gptq", "gptq_v2", "marlin", "marlin_24", "gemm")),
            {"checkpoint_format": "gptq", "format": "gptq_v2"},
            {"pack_dtype": "int16"},
            {"is_marlin_format": True},
            {"modules_in_block_to_quantize": [["a", "b"], "c"]},
            {"modules_in_block_to_quantize": []},
            {"modules_to_not_convert": ["lm_head"]},
            {"dynamic": {"-:a": {}, "+:b": {"bits": 8}, "c": {"group_size": 32}, "d": {"sym": False}}},
            {"dynamic": {"a": {"group_size": 0}}},
            {"dynamic": {"a": {"bits": 5}}},
        ],
    ),
    "awq": (
        {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        [
            *({"bits": bits} for bits in (3, 4, 8, None)),
            *({"group_size": size} for size in (-2, -1, 0, 64)),
            *({"zero_point": said} for said in (False, None)),
            *({"version": name} for name in ("GEMM", "gemv", None)),
            {"w_bit": 8},
            {"q_group_size": 64},
            {"backend": "llm-awq"},
            {"pack_dtype": "int16"},
            {"modules_to_not_convert": ["lm_head"]},
        ],
    ),
    "marlin": (
        {"bits": 4, "group_size": 128},
        [
            {"bits": 8},
            {"bits": 2},
            {"group_size": 0},
            {"group_size": -1},
            {"checkpoint_format": "marlin_24"},
            {"checkpoint_format": "gptq"},
            {"is_marlin_24_format": True},
            {"desc_act": True},
            {"sym": False},
        ],
    ),
    "gptq_marlin_24": (
        {"bits": 4, "group_size": 128},
        [{"checkpoint_format": "marlin"}, {"checkpoint_format": "gptq"}, {"checkpoint_format": "other"}],
    ),
    "exl2": (
        {"bits": 4.5, "version": "0.1"},
        [{"bits": 0}, {"bits": 16}, {"bits": 16.5}, {"head_bits": 1}, {"head_bits": 16}, {"head_bits": 17}],
    ),
    "eetq": ({"weights": "int8"}, [{"weights": None}, {"weights": "int4"}, {"weights": "x" * 60}]),
    "fp8": (
        {},
        [
            {"activation_scheme": "dynamic"},
            {"activation_scheme": "static"},
            {"weight_block_size": [128, 64], "activation_scheme": "dynamic"},
            *({"weight_block_size": size} for size in ([0, 1], [1], [1, 1, 1], [2**31 - 1, 1], [2**31, 1])),
            *({"fmt": name} for name in ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", "e3m4")),
            INVERSE,
            *(
                {**INVERSE, "weight_scale_method": method, "weight_block_size": size}
                for method in ("tensor", "row", "block")
                for size in (None, [128, 64])
            ),
            {"weight_scale_method": "row"},
            {"bits": 4},
            {"ignored_layers": ["a"]},
            {"ignored_layers": [""]},
        ],
    ),
    "fbgemm_fp8": ({}, [{"activation_scale_ub": size} for size in (1200.0, 0, -1.0, 1e-30)]),
    "bitsandbytes": (
        {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        [
            {"bnb_4bit_quant_type": "fp4"},
            {"bnb_4bit_quant_type": None},
            {"bnb_4bit_use_double_quant": True},
            {"load_in_8bit": True},
            {"load_in_4bit": False},
            {"load_in_4bit": None, "load_in_8bit": None},
            {"load_in_4bit": False, "load_in_8bit": True},
            {"_load_in_4bit": False},
            {"llm_int8_threshold": 0.0},
            {"llm_int8_threshold": -0.5},
            {"llm_int8_skip_modules": ["lm_head"]},
        ],
    ),
    "mxfp4": ({}, [{"modules_to_not_convert": ["a*"]}, {"modules_to_not_convert": ["["]}]),
    "modelopt": (
        {"quant_algo": "NVFP4"},
        [
            *(
                {"quant_algo": name, "group_size": size}
                for name in ("NVFP4", "FP8", "fp8_pb_wo", "W4A16_AWQ", "W4A16_NVFP4", "MXFP8")
                for size in (None, 0, 16, 32, 128, -1)
            ),
            {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            {"quant_algo": "INT8"},
            {"quant_algo": "FP8", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
            {"quant_algo": "MIXED_PRECISION"},
            *(
                {"quant_algo": "MIXED_PRECISION", **table}
                for table in (
                    {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}},
                    {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 32}}},
                    modelopt({"num_bits": 8, "type": "float"}),
                    modelopt({"num_bits": 8, "type": "float", "strategy": "channel"}),
                    modelopt({"num_bits": 8, "type": "float", "group_size": 32}),
                    modelopt({"num_bits": 4, "type": "float", "group_size": 16}),
                    modelopt({"num_bits": 4, "type": "int", "group_size": 16}),
                )
            ),
            {"exclude_modules": ["lm_head", "", "*router*"]},
            {"has_zero_point": True},
        ],
    ),
    "compressed-tensors": (
        {"format": "pack-quantized", "ignore": ["lm_head"], **groups(WORDS)},
        [
            *(groups({**WORDS, "num_bits": bits}) for bits in (1, 2, 5, 8, 9)),
            *(groups({**WORDS, "group_size": size}) for size in (0, -1, -2, 1, None)),
            *(groups({**WORDS, "strategy": name}) for name in ("tensor", "channel", "block", None)),
            *(groups({**WORDS, "actorder": said}) for said in ("group", "weight", "static", True, None)),
            groups({**WORDS, "symmetric": False}),
            *({"version": text} for text in ("0.17.9", "0.18", "0.18.0", "1.2", "other")),
            *({"format": name} for name in ("int-quantized", "naive-quantized", "float-quantized", "dense")),
            *(
                {"format": "int-quantized", **groups({**WORDS, "num_bits": 8, "strategy": strategy})}
                for strategy in ("tensor", "channel", "group")
            ),
            *(
                {"format": "int-quantized", **groups({**WORDS, "num_bits": 8}, input_activations=inputs)}
                for inputs in (NUMBERS, {**NUMBERS, "dynamic": False}, {**NUMBERS, "num_bits": 4})
            ),
            *(
                {"format": "float-quantized", **groups({**FLOATS, **change})}
                for change in (
                    {},
                    {"strategy": "channel"},
                    {"strategy": "group", "group_size": 32},
                    {"strategy": "block", "block_structure": [128, 64]},
                    {"strategy": "block", "block_structure": [128]},
                    {"num_bits": 4},
                    {"symmetric": False},
                )
            ),
            *(
                {"format": name, **groups({**FOURS, "group_size": size})}
                for name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
                for size in (16, 32)
            ),
            {"format": "marlin-24", **groups({**WORDS, "group_size": 128})},
            {"format": "marlin-24", **groups({**WORDS, "group_size": 64})},
            {"ignore": []},
            {"kv_cache_scheme": FLOATS},
            {"config_groups": {}},
        ],
    ),
    "auto-round": (
        {"bits": 4, "group_size": 128, "sym": True, "data_type": "int"},
        [
            *({"bits": bits} for bits in (1, 2, 3, 8, 16)),
            *({"group_size": size} for size in (0, -1, 32)),
            {"sym": False},
            *(
                {"packing_format": f"auto_round:{name}"}
                for name in ("auto_gptq", "gptqmodel", "auto_awq", "llm_compressor", "fp8_static", "other")
            ),
            {"data_type": "fp8"},
            {"extra_config": {"a": {"bits": 8}, "b": {"bits": 16}, "c": {"group_size": 32}}},
            {"act_bits": 8, "act_dynamic": False},
            {"to_quant_block_names": "model.layers"},
        ],
    ),
}


NAMED = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
# Optional keys of any config: keys outside a method change nothing.
EVERYWHERE: list[dict[str, Any]] = [
    *(
        {key: value}
        for key in (
            "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "exclude_modules", "ignore",
            "modules_in_block_to_quantize", "block_name_to_quantize", "lm_head",
        )
        for value in ([""], ["a."], ["a..b"], ["a*"], "a", {}, False)
    ),
    *(
        {key: value}
        for key in (*NAMED, "version", "checkpoint_format", "backend")
        for value in ("", 1)
    ),
]  # fmt: skip


def outcome(config: dict[str, Any]) -> str:
    """Return each claim on a line, or the error."""
    try:
        claims = read_claims(FoundConfig("config.json", "quantization_config", config))
    except QloadError as error:
        return f"{type(error).__name__}: {error}"
    said = {field.name: getattr(claims, field.name) for field in fields(Claims)}
    lines = (
        f"loader: {bool(value)}" if name == "rules" else f"{name}: {value}"
        for name, value in said.items()
        if value is not None
    )
    return "\n".join(lines)


def told(method: str) -> Iterator[str]:
    """Return the complete claims of a valid config, and for each change the changed lines."""
    base, changes = CASES[method]
    config = {"quant_method": method, **base}
    first = outcome(config)
    yield first
    for change in (*changes, *(change for change in EVERYWHERE if change.keys().isdisjoint(base))):
        changed = outcome({**config, **change})
        kept = set(first.splitlines())
        lines = [line for line in changed.splitlines() if line not in kept]
        if not lines and change in EVERYWHERE:
            continue
        lines = lines or ["the same"]
        yield f"{change}\n  " + "\n  ".join(lines)


@pytest.mark.parametrize("method", CASES)
def test_what_is_claimed(method: str, golden: SnapshotAssertion) -> None:
    assert "\n\n".join(told(method)) == golden


def test_inputs_may_be_quantized_only_by_a_method_with_a_key_for_them() -> None:
    method = Method(("some",), read=lambda found: "", formats=(GPTQWeight, AWQWeight))

    assert method.formats_with_activations == ()
    assert replace(method, activation_key="inputs").formats_with_activations == (GPTQWeight, AWQWeight)
    some = replace(method, activation_key="inputs", activation_formats=(AWQWeight,))
    assert some.formats_with_activations == (AWQWeight,)
