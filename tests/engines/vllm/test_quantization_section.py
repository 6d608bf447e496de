"""What vLLM hands over of a checkpoint's config is the section that qload reads."""

from typing import Any

import pytest

from qload import loader_from_config
from qload.engines.vllm.checkpoint import section_and_settings
from qload.errors import ConfigError

MODELOPT = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
SAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"quantization": MODELOPT, "producer": {"name": "modelopt"}}, {"quant_method": "modelopt", **MODELOPT}),
    ({"bits": 4, "group_size": 32, "desc_act": True, "sym": True}, {"quant_method": "gptq"}),
    ({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "gemm"}, {"quant_method": "awq"}),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "version": "1"}, {"quant_method": "gptq"}),
]


@pytest.mark.parametrize(("handed", "wanted"), SAID)
def test_a_tools_own_file_is_read_as_if_it_named_its_method(
    handed: dict[str, Any], wanted: dict[str, Any]
) -> None:
    values, settings = section_and_settings(handed)

    whole = wanted if "quantization" in handed else {**handed, **wanted}
    assert values == whole
    assert repr(loader_from_config(values)) == repr(loader_from_config(whole))
    assert settings == {}


def test_a_section_of_groups_is_of_the_tool_that_writes_such() -> None:
    handed = {"config_groups": {}, "version": "0.9", "format": "pack-quantized"}

    assert section_and_settings(handed) == (handed, {})


@pytest.mark.parametrize("key", ["quant_method", "method", "config_groups"])
def test_a_section_that_names_its_method_is_read_as_it_is(key: str) -> None:
    handed = {"bits": 4, "group_size": 32, "desc_act": True, "sym": True, key: "gptq"}

    assert section_and_settings(handed) == (handed, {})


def test_settings_are_taken_out_of_the_section() -> None:
    said = {"target": "marlin", "activations": "unquantized"}

    assert section_and_settings({"quant_method": "awq", "qload": said}) == ({"quant_method": "awq"}, said)
    for wrong in ("marlin", {"kernel": "marlin"}):
        with pytest.raises(ConfigError, match=r"quantization_config\.qload"):
            section_and_settings({"quant_method": "awq", "qload": wrong})
