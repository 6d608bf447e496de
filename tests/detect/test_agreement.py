"""Checkpoints with two configs in contradiction."""

from typing import Any

import pytest
import torch

from qload.configs import FoundConfig
from qload.detect import compare_configs
from qload.detect.config_reader import read_claims
from qload.errors import ConfigsDisagreeError
from qload.storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("seen_texts")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
RULES = {"dynamic": {"+:.*down.*": {"bits": 8}}}
PLAIN = {"a.weight": torch.ones(2, 2)}
QUANTIZED = {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)}


def test_a_method_that_is_a_guess_contradicts_nothing() -> None:
    found = [
        FoundConfig("config.json", "quantization_config", GPTQ),
        FoundConfig("quantize_config.json", "", {"bits": 4, "group_size": 128, "version": "gemm"}),
    ]
    claims, named = read_claims(found[0]), FoundConfig("a.json", "", {**found[1].values, "method": "awq"})

    assert read_claims(found[1]).method == "awq"  # by the key `version`
    note = "format is 'gemm', config.json says 'gptq' and is believed"
    assert [*compare_configs(found, claims, MemoryStorage(QUANTIZED))] == [f"quantize_config.json: {note}"]
    conflict, *notes = compare_configs([found[0], named], claims, MemoryStorage(QUANTIZED))
    assert notes == [f"a.json: {note}"]
    assert isinstance(conflict, ConfigsDisagreeError)


@pytest.mark.parametrize(
    ("first", "second", "tensors", "wrong"),
    [
        ({}, {}, PLAIN, False),
        ({}, {}, QUANTIZED, True),
        (RULES, {}, PLAIN, True),  # module names alone do not determine the modules of a rule
        ({}, RULES, PLAIN, True),
    ],
)
def test_other_bits_are_an_error_where_something_could_be_read_by_them(
    first: dict[str, Any], second: dict[str, Any], tensors: dict[str, Any], wrong: bool
) -> None:
    found = [
        FoundConfig("config.json", "quantization_config", {**GPTQ, **first}),
        FoundConfig("quantize_config.json", "", {**GPTQ, **second, "bits": 8}),
    ]
    claims, storage = read_claims(found[0]), MemoryStorage(tensors)

    conflicts = list(compare_configs(found, claims, storage))
    errors = [str(conflict) for conflict in conflicts if isinstance(conflict, ConfigsDisagreeError)]
    notes = [conflict for conflict in conflicts if isinstance(conflict, str)]

    assert [("quantize_config.json: bits" in error, "4 as in config.json" in error) for error in errors] == (
        [(True, True)] if wrong else []
    )
    assert notes == ([] if wrong else ["quantize_config.json: bits is 8, config.json says 4 and is believed"])
