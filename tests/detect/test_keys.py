"""Documented keys without an effect in any reader: a note, or an error for a change of values."""

from typing import Any

import pytest

from qload.configs import FoundConfig
from qload.detect import read_claims
from qload.errors import UnsupportedFormatError

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ_CLAIMS = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({**AUTO_ROUND, "super_bits": 6}, "super_bits"),
        ({**AUTO_ROUND, "super_group_size": 8}, "super_group_size"),
        ({**AUTO_ROUND, "extra_config": {"a.b": {"super_bits": 6}}}, "super_bits"),
    ],
)
def test_a_key_that_changes_what_values_mean_is_refused_by_name(section: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"quantization_config.*{key} of config.json"):
        read_claims(FoundConfig("config.json", "quantization_config", section))


@pytest.mark.parametrize(
    ("section", "notes"),
    [
        ({**GPTQ_CLAIMS, "adapter": {"type": "lora", "rank": 32}}, ["has adapter = "]),
        ({**GPTQ_CLAIMS, "adapter": None, "rotation": None, "damp_percent": 0.1, "anything": 7}, []),
        ({**GPTQ_CLAIMS, "rotation": "hadamard"}, ["has rotation = 'hadamard'"]),
        ({**GPTQ_CLAIMS, "dynamic": {"+:a": {"adapter": {"rank": 8}}}}, ["has dynamic.+:a.adapter = "]),
        ({**AUTO_ROUND, "static_kv_dtype": "fp8", "iters": 200, "super_bits": None}, ["has static_kv_dtype"]),
    ],
)
def test_a_key_with_a_meaning_beside_weights_is_a_note(section: dict[str, Any], notes: list[str]) -> None:
    found = read_claims(FoundConfig("config.json", "quantization_config", section)).notes

    assert len(found) == len(notes)
    assert all(part in note for part, note in zip(notes, found, strict=True))


@pytest.mark.parametrize("value", [None, False, "", "none", [], {}, "None", True, [0], {"rank": 8}], ids=repr)
def test_a_key_with_a_value_without_effect_is_no_note(value: Any) -> None:
    section = {**GPTQ_CLAIMS, "adapter": value}
    found = read_claims(FoundConfig("config.json", "quantization_config", section)).notes

    assert len(found) == (value in ("None", True, [0], {"rank": 8}))
