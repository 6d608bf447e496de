"""Every scheme that a config can declare: the fixture that its owner's code made, or why there is none."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from qload.detect import loader_from_config
from qload.detect.methods import METHODS
from qload.formats import FORMATS
from qload.kernels.declared import why_no_quantizer
from qload.spec import ActivationScheme
from tests.kernels.activation_cases import FOLDERS, read

TRITON = "transformers multiplies FP8 by kernels for GPUs alone; the arithmetic is that of {}"
GROUP = {"group": 32, "tensor_group": 16}
# Declared, and no owner's code on a CPU quantizes so: why, and which fixture has the same arithmetic.
WITHOUT: dict[tuple[str, str, str], str] = {
    ("transformers", "float8 tensor static", "float32"): TRITON.format("fp8_tensor_static"),
    ("transformers", "float8 token dynamic", "float32"): TRITON.format("fp8_token_dynamic"),
    ("transformers", "float8 group of 128 dynamic", "float32"): TRITON.format("fp8_block_group_dynamic"),
    ("transformers", "float8 group of 128 dynamic", "e8m0"): TRITON.format("modelopt_mxfp8_dynamic"),
}


def compressed(fmt: str, weights: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"a": group}}


def integers() -> list[dict[str, Any]]:
    """All that compressed-tensors lets a config say of inputs as whole numbers."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    ways = [("token", True), ("tensor", True), ("tensor", False), ("group", True)]
    return [
        compressed(
            "int-quantized", weights,
            num_bits=bits, type="int", strategy=strategy, dynamic=dynamic, symmetric=symmetric,
            group_size=GROUP.get(strategy),
        )
        for bits, (strategy, dynamic), symmetric in product((8, 4), ways, (True, False))
    ]  # fmt: skip


def floats() -> list[dict[str, Any]]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    mx = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    nv = {**mx, "strategy": "tensor_group", "group_size": 16}
    fp8: dict[str, Any] = {"num_bits": 8, "type": "float"}
    fp4: dict[str, Any] = {"num_bits": 4, "type": "float"}
    local = {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    of_32 = {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"}
    return [
        compressed("float-quantized", weights, **fp8, strategy="token", dynamic=True),
        compressed("float-quantized", weights, **fp8, strategy="tensor", dynamic=True),
        compressed("float-quantized", weights, **fp8, strategy="tensor", dynamic=False),
        compressed("float-quantized", weights, **fp8, strategy="group", group_size=128, dynamic=True),
        compressed("nvfp4-pack-quantized", nv, **fp4, **local),
        compressed("nvfp4-pack-quantized", nv, **fp4, **local, scale_dtype="torch.float8_e4m3fn"),
        compressed("mxfp4-pack-quantized", mx, **fp4, **of_32),
        compressed("mxfp4-pack-quantized", mx, **fp8, **of_32),
        compressed("mxfp4-pack-quantized", mx, **fp4, **{**of_32, "scale_dtype": None}),
    ]


def others() -> list[dict[str, Any]]:
    fp8: dict[str, Any] = {"quant_method": "fp8"}
    dynamic = {**fp8, "activation_scheme": "dynamic"}
    rounded = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "group_size": 32}
    four, eight = {"bits": 4, "act_bits": 4}, {"bits": 8, "act_bits": 8}
    return [
        {**fp8, "activation_scheme": "static"},
        dynamic,
        {**dynamic, "weight_block_size": [128, 128]},
        {**dynamic, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0},
        *(
            {"quant_method": "modelopt", "quant_algo": algorithm}
            for algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8")
        ),
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:fp8_static",
            "bits": 8,
            "group_size": -1,
        },
        {**rounded, **four, "data_type": "nv_fp"},
        {**rounded, **four, "data_type": "mx_fp"},
        {**rounded, **eight, "data_type": "int", "act_group_size": -1},
        {**rounded, **eight, "data_type": "int", "act_group_size": 0},
        {**rounded, **eight, "data_type": "int", "act_group_size": 32, "act_sym": False},
        {**rounded, **eight, "data_type": "int", "act_dynamic": False},
    ]


def key(scheme: ActivationScheme) -> tuple[str, str, str]:
    bound = "" if scheme.upper_bound is None else f" up to {scheme.upper_bound}"
    return scheme.owner, f"{scheme}{bound}", scheme.scale_type


HELD = {key(read(folder).scheme) for folder in FOLDERS}
CONFIGS = [*integers(), *floats(), *others()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["quant_method"])
def test_a_declared_scheme_has_a_quantizer_and_its_owners_word_or_a_reason(config: dict[str, Any]) -> None:
    scheme = loader_from_config(config).formats[0].activations
    assert scheme is not None
    assert why_no_quantizer(scheme) is None

    found = key(scheme)
    if scheme.type == "int" and scheme.bits == 4:  # the arithmetic of int8, with limits that a fixture has
        assert key(replace(scheme, bits=8)) in HELD
        found = (scheme.owner, "int4 token dynamic", scheme.scale_type)
    assert (found in HELD) != (found in WITHOUT), f"{found}: {WITHOUT.get(found, 'no fixture')}"


def test_each_reason_is_of_a_scheme_that_is_declared() -> None:
    declared = {loader_from_config(config).formats[0].activations for config in CONFIGS}

    assert set(WITHOUT) <= {key(scheme) for scheme in declared if scheme is not None}


def test_the_table_says_yes_of_the_formats_whose_layers_declare_a_scheme() -> None:
    """By the configs above and the fixtures, not by the table that `qload formats` reads."""
    loaders = [
        *(loader_from_config(config) for config in CONFIGS),
        *(read(folder).loader for folder in FOLDERS),
    ]
    declaring = {
        fmt.weight_type for loader in loaders for fmt in loader.formats if fmt.activations is not None
    }
    said = {each for method in METHODS.values() for each in method.formats_with_activations}

    assert declaring <= said <= set(FORMATS)
