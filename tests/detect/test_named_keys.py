"""Errors with the name of the wrong key: each key of each method's section, one invalid value at a time.

`SECTIONS` has a section for each method, with every key of its reader; a missing key fails a test.
A separate table has contradictions of two keys.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from pydantic import AliasChoices, BaseModel

from qload.configs import FoundConfig
from qload.detect import compare_configs, effective_claims, read_claims
from qload.detect.config_reader import named_modules
from qload.detect.loaders import is_comfy
from qload.detect.methods import (
    METHODS,
    auto_round,
    bitsandbytes,
    comfy,
    compressed_tensors,
    ct_schemes,
    ct_transforms,
    fp8,
    gptq,
    modelopt,
    mx,
)
from qload.errors import ConfigError, ConfigsDisagreeError, UnsupportedFormatError
from qload.experts.stacked_storage import ExpertStacks
from qload.formats import MODULES, bnb
from qload.storage import ComfyStorage, MemoryStorage

READERS = (
    auto_round,
    bitsandbytes,
    comfy,
    compressed_tensors,
    ct_schemes,
    ct_transforms,
    fp8,
    gptq,
    modelopt,
    mx,
)
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
    "checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "is_marlin_format": False,
    "lm_head": False,
    "modules_in_block_to_quantize": ["self_attn.q_proj"], "modules_to_not_convert": ["head"],
    "dynamic": {
        "+:.*up": {
            "bits": 8, "group_size": 32, "sym": True, "desc_act": False, "pack_dtype": "int32",
            "checkpoint_format": "gptq", "format": "gptq",
        }
    },
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
    "checkpoint_format": "gemm", "format": "gemm", "pack_dtype": "int32", "backend": "autoawq",
    "modules_to_not_convert": ["head"],
}  # fmt: skip
LLM_AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "gemm"}
MARLIN = {
    "quant_method": "marlin", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
    "checkpoint_format": "marlin", "format": "marlin", "pack_dtype": "int32", "is_marlin_format": True,
    "is_marlin_24_format": False, "modules_to_not_convert": ["head"],
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
    "scale_fmt": "float", "bits": 8, "format": "fp8", "weight_scale_method": "block",
    "weight_scale_semantics": "inverse", "ignored_layers": ["head"], "modules_to_not_convert": ["head"],
}  # fmt: skip
MXFP8 = {
    "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0",
    "ignored_layers": ["head"], "modules_to_not_convert": ["head"],
}  # fmt: skip
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["head"]}
MISTRAL = {
    "quant_method": "mistral", "qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR",
    "modules_to_not_convert": ["head"],
}  # fmt: skip
MLX = {
    "quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine", "modules_to_not_convert": ["head"],
    "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8, "mode": "affine"},
}  # fmt: skip
QUARK = {
    "quant_method": "quark", "exclude": ["head"], "modules_to_not_convert": ["head"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 32}},
}  # fmt: skip
TORCHAO = {
    "quant_method": "torchao", "quant_type": "int8_weight_only",
    "include_input_output_embeddings": False, "untie_embedding_weights": False,
    "modules_to_not_convert": ["head"],
}  # fmt: skip
BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["head"],
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False, "modules_to_not_convert": ["head"],
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["head"], "sparsity_config": {"format": "dense"}, "version": "0.12.0",
    "transform_config": {
        "config_groups": {
            "u": {
                "head_dim": 64, "randomize": False,
                "apply": [
                    {"targets": ["Linear"], "location": "output", "inverse": True, "ignore": ["lm_head"]}
                ],
            }
        }
    },
    "kv_cache_scheme": None, "modules_to_not_convert": ["head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "int-quantized", "output_activations": None,
            "weights": {
                "num_bits": 8, "type": "int", "strategy": "block", "group_size": 128, "symmetric": True,
                "actorder": False, "block_structure": [128, 128],
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "group_size": 128,
                "symmetric": True, "scale_dtype": "torch.float32",
            },
        }
    },
}  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["head"], "ignore": ["head"], "has_zero_point": False,
    "modules_to_not_convert": ["head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"},
            "input_activations": {
                "num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group",
            },
        }
    },
}  # fmt: skip
NUMBERS = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
MODELOPT_GROUPS = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "config_groups": {
        "group_0": {
            "targets": ["up"],
            "weights": NUMBERS,
            "input_activations": {**NUMBERS, "strategy": "token"},
        }
    },
}
MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.up": {"quant_algo": "NVFP4", "group_size": 16}},
}  # fmt: skip
ROUNDED = {
    "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq", "backend": "auto", "sym": True,
    "data_type": "int", "act_bits": 16, "act_data_type": "float", "act_group_size": 128, "act_sym": True,
    "act_dynamic": True,
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", **ROUNDED, "rotation_config": None, "modules_to_not_convert": ["head"],
    "extra_config": {"model.up": ROUNDED},
}  # fmt: skip
COMFY = {
    "quant_method": "comfyui", "modules_to_not_convert": ["head"],
    "layers": {
        "model.up": {
            "format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256, "convrot": True,
            "num_experts": None, "params": None,
        }
    },
}  # fmt: skip
EXL2 = {
    "quant_method": "exl2", "version": "0.2", "bits": 4.5, "head_bits": 6, "calibration": {},
    "modules_to_not_convert": ["head"],
}  # fmt: skip
EXL3 = {
    "quant_method": "exl3", "version": "1.6.5", "bits": 4.8, "head_bits": 6, "codebook": "mcg",
    "modules_to_not_convert": ["head"],
}  # fmt: skip
QUANTO = {
    "quant_method": "quanto", "weights": "int4", "activations": None, "modules_to_not_convert": ["head"],
}  # fmt: skip
BITNET = {
    "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
    "use_rms_norm": False, "modules_to_not_convert": ["head"],
}  # fmt: skip
AQLM = {
    "quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "num_codebooks": 2,
    "nbits_per_codebook": 8, "linear_weights_not_to_quantize": ["head.weight"],
    "modules_to_not_convert": ["head"],
}  # fmt: skip
HQQ = {
    "quant_method": "hqq", "quant_config": {}, "skip_modules": ["head"],
    "modules_to_not_convert": ["head"],
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq_marlin": {**GPTQ, "quant_method": "gptq_marlin"},
    "awq": AWQ,
    "awq_marlin": {**AWQ, "quant_method": "awq_marlin"},
    "llm-awq": LLM_AWQ,
    "marlin": MARLIN,
    "gptq_marlin_24": {**MARLIN, "quant_method": "gptq_marlin_24", "is_marlin_24_format": True},
    "fp8": FP8,
    "mxfp8": MXFP8,
    "fbgemm_fp8": FBGEMM,
    "mistral": MISTRAL,
    "mlx": MLX,
    "metal": {**MLX, "quant_method": "metal"},
    "torchao": TORCHAO,
    "quark": QUARK,
    "bitsandbytes": BNB,
    "compressed-tensors": COMPRESSED,
    "modelopt": MODELOPT,
    "comfyui": COMFY,
    "modelopt groups": MODELOPT_GROUPS,
    "mixed": MIXED,
    "auto-round": AUTO_ROUND,
    "exl2": EXL2,
    "exl3": EXL3,
    "eetq": {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": ["head"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["head"]},
    "gguf": {"quant_method": "gguf"},
    "quanto": QUANTO,
    "quanto map": {
        "quant_method": "quanto", "modules": {"model.up": {"weights": "qint4", "activations": "none"}},
    },
    "bitnet": BITNET,
    "aqlm": AQLM,
    "hqq": HQQ,
}  # fmt: skip
# Values of a wrong type or out of range, in valid JSON.
WRONG: tuple[Any, ...] = ({"\1": [None]}, [[None]], "\1", -77, 1e99, True, "", [], {})
# Keys without invalid values.
INPUTS_OF_GROUP = "modelopt groups.config_groups.group_0.input_activations"
FREE = {"auto-round.rotation_config", f"{INPUTS_OF_GROUP}.strategy"}
LOOSE = ("modelopt.config_groups",)  # groups in addition to one algorithm for all; the algorithm applies
SAID_AS = {  # names of a key in the errors of a format
    "is_marlin_format": ("checkpoint_format",),
    "format": ("version", "sparsity_config"),
    "checkpoint_format": ("version",),
    "backend": ("packing_format",),
    "targets": ("target",),
    **dict.fromkeys(
        ("num_bits", "type", "strategy", "group_size"),
        ("config_groups.group_0.weights of", "config_groups.group_0.input_activations of"),
    ),
}
NAMES_BELOW = ("config_groups", "dynamic", "extra_config", "quantized_layers", "layers", "modules")
Path = tuple[str, ...]


TWINS = {  # two keys with one combined meaning
    ("format", "quantization_config.config_groups.group_0.weights.strategy"),
    ("config_groups", "quantization_config.quantized_layers"),
}


def found(section: Mapping[str, Any]) -> FoundConfig:
    return FoundConfig("config.json", "quantization_config", section)


def paths(section: Mapping[str, Any], lead: Path = ()) -> Iterator[Path]:
    """Yield the path of each key at each depth, without names of groups, layers and rules."""
    for key, value in section.items():
        if not lead or lead[-1] not in NAMES_BELOW:
            yield (*lead, key)
        if isinstance(value, dict):
            yield from paths(value, (*lead, key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from paths(value[0], (*lead, key, "0"))


def changed(section: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return the section with another value at a path."""
    twin = place = deepcopy(dict(section))
    for key in path[:-1]:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[path[-1]] = value
    return twin


EACH = [
    pytest.param(section, path, id=f"{method}.{'.'.join(path)}")
    for method, section in SECTIONS.items()
    for path in paths(section)
    if path != ("quant_method",)
]


def error_of(section: Mapping[str, Any]) -> ConfigError | UnsupportedFormatError | None:
    try:
        read_claims(found(section))
    except (ConfigError, UnsupportedFormatError) as error:
        return error
    return None


@pytest.mark.parametrize("method", SECTIONS)
def test_the_section_itself_is_read(method: str) -> None:
    assert read_claims(found(SECTIONS[method])).file == "config.json"


@pytest.mark.parametrize(("section", "path"), EACH)
def test_an_error_names_the_key_whose_value_is_wrong(
    section: dict[str, Any], path: Path, request: pytest.FixtureRequest
) -> None:
    key = ".".join(("quantization_config", *path))
    errors = [error for value in WRONG if (error := error_of(changed(section, path, value))) is not None]

    assert errors or request.node.callspec.id in FREE or request.node.callspec.id.startswith(LOOSE)
    for error in errors:
        if isinstance(error, ConfigError):  # if two spellings differ, either is wrong
            named = error.key == key or error.key.startswith(f"{key}.") or path[-1] in error.expected
            named |= (path[-1], error.key) in TWINS
            assert named, error
            assert error.file == "config.json"
        else:  # errors of an unknown name
            assert any(word in str(error) for word in (path[-1], *SAID_AS.get(path[-1], ()))), error


GROUP = "config_groups.group_0"
WEIGHTS, INPUTS = (("config_groups", "group_0", part) for part in ("weights", "input_activations"))
CONTRADICTIONS: list[Any] = [  # a section, its changes, the key
    (GPTQ, {("group_size",): 0}, "group_size"),
    (GPTQ, {("dynamic", "+:.*up", "group_size"): 0}, "dynamic.+:.*up.group_size"),
    (GPTQ, {("dynamic", "+:.*up", "format"): "gptq_v2"}, "dynamic.+:.*up.format"),
    (GPTQ, {("dynamic", "+:.*up", "checkpoint_format"): "gptq_v2"}, "dynamic.+:.*up.checkpoint_format"),
    (GPTQ, {("format",): "gptq_v2"}, "format"),
    (AWQ, {("group_size",): 0}, "group_size"),
    (AWQ, {("w_bit",): 8}, "w_bit"),
    (AWQ, {("q_group_size",): 32}, "q_group_size"),
    (LLM_AWQ, {("q_group_size",): 0}, "q_group_size"),
    (LLM_AWQ, {("w_bit",): 3}, "w_bit"),
    (MARLIN, {("group_size",): 0}, "group_size"),
    (MARLIN, {("format",): "gptq"}, "format"),
    (FP8, {("weight_scale_semantics",): None}, "weight_scale_semantics"),
    (FP8, {("weight_block_size",): None}, "weight_block_size"),
    (FP8, {("weight_scale_method",): "row"}, "weight_block_size"),
    (BNB, {("load_in_8bit",): True}, "load_in_4bit"),
    (BNB, {("_load_in_8bit",): True}, "_load_in_8bit"),
    (BNB, {("_load_in_4bit",): False}, "_load_in_4bit"),
    *[
        (COMPRESSED, {(*WEIGHTS, name): value}, f"{GROUP}.weights.{name}")
        for name, value in (
            ("num_bits", 9), ("type", "float"), ("strategy", "tensor_group"), ("block_structure", [128]),
            ("block_structure", "128x"),
        )
    ],
    (
        COMPRESSED,
        {
            (*WEIGHTS, "strategy"): "group",
            (*WEIGHTS, "group_size"): 0,
        },
        f"{GROUP}.weights.group_size",
    ),
    (
        COMPRESSED,
        {
            (*INPUTS, "strategy"): "group",
            (*INPUTS, "group_size"): 0,
        },
        f"{GROUP}.input_activations.group_size",
    ),
    (COMPRESSED, {("format",): None, ("config_groups", "group_0", "format"): None}, f"{GROUP}.format"),
    (COMPRESSED, {("config_groups",): {}, ("sparsity_config",): None}, "config_groups"),
    (MODELOPT, {("group_size",): 32}, "group_size"),
    (MODELOPT, {(*WEIGHTS, "num_bits"): 8}, f"{GROUP}.weights.num_bits"),
    (
        MODELOPT,
        {(*INPUTS, "num_bits"): 8},
        f"{GROUP}.input_activations.num_bits",
    ),
    (MIXED, {("quantized_layers",): {}}, "quantized_layers"),
    (MIXED, {("quantized_layers", "model.up", "group_size"): 32}, "quantized_layers.model.up.group_size"),
    (AUTO_ROUND, {("bits",): 5}, "bits"),
    (AUTO_ROUND, {("group_size",): 0}, "group_size"),
    (AUTO_ROUND, {("extra_config", "model.up", "bits"): 5}, "extra_config.model.up.bits"),
    (AUTO_ROUND, {("extra_config", "model.up", "group_size"): 0}, "extra_config.model.up.group_size"),
    (AUTO_ROUND, {("extra_config",): {"model.up": {"sym": True}}, ("bits",): 5}, "bits"),
    *[
        (AUTO_ROUND, {("packing_format",): "llm_compressor", ("extra_config",): None, **wrong}, key)
        for wrong, key in (
            ({("bits",): 11}, "bits"), ({("data_type",): "fp", ("bits",): 4}, "bits"),
            ({("data_type",): "nv_fp4", ("bits",): 4, ("sym",): False}, "sym"),
        )
    ],
]  # fmt: skip


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("section", "wrong", "key"),
    CONTRADICTIONS,
    ids=[f"{at}-{case[2]}" for at, case in enumerate(CONTRADICTIONS)],
)
def test_a_contradiction_names_its_key(section: dict[str, Any], wrong: dict[Path, Any], key: str) -> None:
    for path, value in wrong.items():
        section = changed(section, path, value)

    with pytest.raises(ConfigError) as caught:
        read_claims(found(section))

    assert caught.value.key == f"quantization_config.{key}"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({**LLM_AWQ, "w_bit": 8}, "w_bit"),
        ({**LLM_AWQ, "q_group_size": 32}, "q_group_size"),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, "bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "quant_method"),
        ({"method": "gptq", "bits": 4, "group_size": 64}, "method"),
    ],
)
def test_two_configs_that_disagree_name_the_key_of_the_second(other: dict[str, Any], key: str) -> None:
    storage = MemoryStorage({"up.qweight": torch.zeros(8, 8, dtype=torch.int32)})
    configs = [found(LLM_AWQ), FoundConfig("quant_config.json", "", other)]
    claims = effective_claims(configs[0], storage)
    assert claims is not None

    conflicts = compare_configs(configs, claims, storage)
    (error,) = (conflict for conflict in conflicts if isinstance(conflict, ConfigsDisagreeError))

    assert (error.file, error.key) == ("quant_config.json", key)


def aliases(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        yield from (map(str, alias.choices) if isinstance(alias, AliasChoices) else [str(alias or name)])


def test_each_key_of_each_reader_is_in_a_section() -> None:
    known = {path[-1] for section in SECTIONS.values() for path in paths(section)}
    for module in (*MODULES, *READERS):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseModel) and value is not bnb._State:
                assert {*aliases(value)} <= known, value

    assert {section["quant_method"] for section in SECTIONS.values()} == METHODS.keys()


def test_a_file_of_comfyui_may_be_below_stacks_of_experts() -> None:
    file, other = object.__new__(ComfyStorage), MemoryStorage({})
    stacks = ExpertStacks(other, (), {})
    assert not is_comfy(stacks)
    stacks.storage = file

    assert is_comfy(file)
    assert is_comfy(stacks)
    assert not is_comfy(other)
    assert not is_comfy(None)


@pytest.mark.parametrize(("method", "names_the_head"), [("compressed-tensors", True), ("modelopt", False)])
def test_a_group_of_linear_layers_includes_the_head(method: str, names_the_head: bool) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    config = FoundConfig(
        "config.json", "quantization_config", {"quant_method": method, "config_groups": {"g": group}}
    )

    assert (named_modules(config).entry("lm_head") is not None) == names_the_head
