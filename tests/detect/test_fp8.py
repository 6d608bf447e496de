"""`quant_method: fp8`, `fbgemm_fp8` and GPTQModel's dialect: claims, and malformed sections."""

from typing import Any

import pytest
import torch

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.dtypes import STORED
from qload.errors import ConfigError
from qload.formats import Fp8Config

pytestmark = pytest.mark.usefixtures("seen_texts")

INVERSE = {"quant_method": "fp8", "format": "fp8", "bits": 8, "weight_scale_semantics": "inverse"}


def found(**values: Any) -> FoundConfig:
    return FoundConfig("config.json", "quantization_config", {"quant_method": "fp8", **values})


@pytest.mark.parametrize(
    ("section", "config"),
    [
        pytest.param({}, Fp8Config(), id="what shares a scale is not said"),
        pytest.param({"weight_block_size": [128, 64]}, Fp8Config("block", (128, 64)), id="blocks"),
        pytest.param({"activation_scheme": "dynamic"}, Fp8Config(), id="dynamic"),
        pytest.param({"activation_scheme": "static"}, Fp8Config(input_scale=True), id="static"),
        pytest.param({"ignored_layers": ["lm_head"], "scale_fmt": "ue8m0"}, Fp8Config(), id="other keys"),
        pytest.param(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            Fp8Config("channel", activation_scale_ub=1200.0), id="fbgemm",
        ),
        pytest.param(
            {**INVERSE, "weight_scale_method": "tensor", "weight_block_size": None},
            Fp8Config("tensor", divide=True), id="gptqmodel, tensor",
        ),
        pytest.param(
            {**INVERSE, "weight_scale_method": "row"}, Fp8Config("channel", divide=True), id="gptqmodel, row"
        ),
        pytest.param(
            {**INVERSE, "weight_scale_method": "block", "weight_block_size": [64, 128]},
            Fp8Config("block", (64, 128), divide=True), id="gptqmodel, block",
        ),
    ],
)  # fmt: skip
def test_a_section_says_what_shares_a_scale_and_which_way_it_works(
    section: dict[str, Any], config: Fp8Config
) -> None:
    claims = read_claims(found(**section))

    assert claims.formats[0].config == config
    assert (claims.method, claims.bits, claims.sym) == ("fp8", 8, True)
    assert claims.format == ("fp8_inverse" if config.divide else "fp8")


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("e4m3", torch.float8_e4m3fn),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
    ],
)
def test_the_type_is_a_claim_that_does_not_make_configs_differ(fmt: str, dtype: torch.dtype) -> None:
    config = read_claims(found(fmt=fmt)).formats[0].config

    assert config == Fp8Config()
    assert config.dtype is STORED[dtype]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        pytest.param({"weight_block_size": [128]}, "weight_block_size", id="one side"),
        pytest.param({"weight_block_size": [128, 0]}, "weight_block_size.1", id="no inputs"),
        pytest.param({"weight_block_size": [128, 128.0]}, "weight_block_size.1", id="a fraction"),
        pytest.param({"weight_block_size": 128}, "weight_block_size", id="a number"),
        pytest.param({"activation_scheme": "sometimes"}, "activation_scheme", id="scheme"),
        pytest.param({"fmt": "e3m4"}, "fmt", id="type"),
        pytest.param({"bits": 4}, "bits", id="bits"),
        pytest.param({"weight_scale_semantics": "reverse"}, "weight_scale_semantics", id="semantics"),
        pytest.param({"weight_scale_method": "row"}, "weight_scale_semantics", id="a method, no semantics"),
        pytest.param({**INVERSE, "weight_scale_method": "block"}, "weight_block_size", id="no size"),
        pytest.param(
            {**INVERSE, "weight_scale_method": "row", "weight_block_size": [1, 128]}, "weight_block_size",
            id="a size of no blocks",
        ),
        pytest.param(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": "1200"}, "activation_scale_ub", id="text"
        ),
        pytest.param({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "activation_scale_ub", id="0"),
    ],
)  # fmt: skip
def test_a_malformed_section_is_refused_by_its_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_claims(found(**section))

    assert caught.value.key == f"quantization_config.{key}"


def test_a_loader_of_fp8_reads_plain_layers_too() -> None:
    loader = loader_from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})

    assert [fmt.weight_type.format for fmt in loader.formats] == ["fp8", "unquantized"]


@pytest.mark.parametrize(
    ("section", "names", "key"),
    [
        ({"modules_to_not_convert": ["lm_head"]}, ("lm_head",), "modules_to_not_convert"),
        ({"ignored_layers": ["lm_head"]}, ("lm_head",), "ignored_layers"),
        (
            {"modules_to_not_convert": ["a"], "ignored_layers": ["b"]},
            ("a", "b"),
            "modules_to_not_convert or ignored_layers",
        ),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["a"]}, ("a",), "modules_to_not_convert"),
    ],
    ids=["transformers", "vllm", "both", "fbgemm"],
)
def test_modules_are_left_out_under_two_keys(
    section: dict[str, Any], names: tuple[str, ...], key: str
) -> None:
    exclusions = read_claims(found(**section)).exclusions

    assert (exclusions.names, exclusions.key) == (names, key)
