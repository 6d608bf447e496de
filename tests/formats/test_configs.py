"""Equality and text of configs: claims and forms of storage distinguish no layers, and are not shown."""

from dataclasses import replace
from typing import Any

import pytest

from qload import dtypes
from qload.errors import MismatchError
from qload.formats import (
    AWQConfig,
    BNB4Config,
    CTPackConfig,
    CTPackTensorConfig,
    Fp8Config,
    GPTQConfig,
    GPTQWeight,
    MXFP4Config,
    UnquantizedConfig,
)
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.spec.activations import ActivationScheme
from qload.spec.tensor import Names
from qload.spec.weight import LayerClaims
from qload.storage.protocol import TensorInfo

GPTQ = GPTQConfig(4, 128)
FORMAT = ConfiguredFormat(GPTQWeight, GPTQ)
LAYER = LayerDescription("a", FORMAT, (), {"N": 8}, {}, {}, Names())

# An object, fields of no meaning with other values, and which of these its text shows.
ALIKE = [
    (AWQConfig(128), {"claimed_bits": 8}, {"claimed_bits"}),
    (BNB4Config("nf4"), {"double_quant": True, "nested_blocksize": 256, "offset": 0.5, "N": 7}, set()),
    (CTPackConfig(4, 128), {"shape": (7, 9)}, {"shape"}),
    (CTPackTensorConfig(4), {"shape": (7, 9)}, {"shape"}),
    (Fp8Config(), {"axes": "N 1", "dtype": dtypes.float8_e5m2, "scale_bytes": True}, {"axes", "dtype"}),
    (
        GPTQ,
        {"desc_act": True, "indexed": None, "claimed_bits": 8, "evidence": "alike", "asymmetric": True},
        {"desc_act", "indexed", "claimed_bits"},
    ),
    (UnquantizedConfig(), {"unused_because": "why", "unused_axes": (1,)}, set()),
    (
        FORMAT,
        {"activations": ActivationScheme("int", 8, True, "token"), "claims": LayerClaims(bits=8)},
        {"activations"},
    ),
    (
        LAYER,
        {"cuts": {"share": 1}, "contradiction": MismatchError("a", "b", "c", "d")},
        {"contradiction"},
    ),
]
# Fields that distinguish layers and are not shown.
DISTINCT = [
    (Fp8Config(), {"stored_scale": "scale_inv"}),
    (
        MXFP4Config(),
        {"stored": ("a", "b"), "codes": dtypes.int8, "exponents": dtypes.float8_e8m0fnu},
    ),
    (UnquantizedConfig(), {"unused": ("weight_scale",)}),
]


@pytest.mark.parametrize(("config", "changes", "shown"), ALIKE, ids=lambda each: type(each).__name__)
def test_claims_and_storage_distinguish_no_configs(
    config: Any, changes: dict[str, Any], shown: set[str]
) -> None:
    for name, value in changes.items():
        assert getattr(config, name) != value
        assert replace(config, **{name: value}) == config, name
    assert {name for name in changes if f"{name}=" in repr(replace(config, **changes))} == shown


@pytest.mark.parametrize(("config", "changes"), DISTINCT, ids=lambda each: type(each).__name__)
def test_stored_names_and_dtypes_distinguish_configs_and_are_not_shown(
    config: Any, changes: dict[str, Any]
) -> None:
    for name, value in changes.items():
        assert replace(config, **{name: value}) != config, name
        assert f"{name}=" not in repr(replace(config, **{name: value}))


def test_the_bytes_of_a_tensor_follow_from_its_header_and_are_not_shown() -> None:
    info = TensorInfo(dtypes.float16, (3, 5), "a.safetensors", shared=True)

    assert info.nbytes == 30
    assert repr(info).endswith("shape=(3, 5), file='a.safetensors', shared=True)")
    assert info == TensorInfo(dtypes.float16, (3, 5), "a.safetensors", True)
    assert info != TensorInfo(dtypes.float16, (3, 5), "a.safetensors")
