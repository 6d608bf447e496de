"""What layers of a made checkpoint are stored as: a format's config, and what a config.json says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.loader import ConfiguredFormat

GROUP, WIDE = 32, 64  # inputs of a group; of random codes nearly every wide one reaches an end of their range
LEFT_OUT = ("lm_head", "gate", "router", "shared_expert_gate")  # which quantizers leave as they are


@dataclass(frozen=True)
class Dialect:
    """A dialect of a format.

    `said`: the `quantization_config`; None: there is none. `middle`: the code that every zero point is stored
    as; None: zero points are any code, or none are stored. `act_order`: whether rows of groups are exchanged.
    """

    format: ConfiguredFormat
    said: Mapping[str, Any] | None
    middle: int | None = None
    act_order: bool = False


def _gptq(bits: int = 4, version: str = "gptq", act_order: bool = False) -> Dialect:
    zeros = Stored() if version == "gptq_v2" else STORED_MINUS_ONE
    size = WIDE if act_order else GROUP
    said = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": act_order,
        "sym": True,
        "checkpoint_format": version,
        "lm_head": False,
    }
    middle = 2 ** (bits - 1) - (version == "gptq")
    own = GPTQConfig(bits, size, zeros, positional=True)
    return Dialect(ConfiguredFormat(GPTQWeight, own), said, middle, act_order)


def _awq() -> Dialect:
    said = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": list(LEFT_OUT[1:]),
    }
    return Dialect(ConfiguredFormat(AWQWeight, AWQConfig(GROUP, 4)), said)


def _packed(bits: int) -> Dialect:
    arguments = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        "ignore": ["lm_head", *(f"re:.*\\.{name}$" for name in LEFT_OUT[1:])],
    }
    return Dialect(ConfiguredFormat(CTPackWeight, CTPackConfig(bits, GROUP)), said)


def _fp8() -> Dialect:
    block = (128, 128)
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(LEFT_OUT),
    }
    return Dialect(ConfiguredFormat(Fp8Weight, Fp8Config("block", block)), said)


RECIPES: Mapping[str, Dialect] = {
    "plain": Dialect(ConfiguredFormat(UnquantizedWeight, UnquantizedConfig()), None),
    "gptq": _gptq(),
    "gptq-v2": _gptq(version="gptq_v2"),
    "gptq-act-order": _gptq(act_order=True),
    "gptq-8bit": _gptq(bits=8),
    "awq": _awq(),
    "compressed-tensors": _packed(4),
    "compressed-tensors-8bit": _packed(8),
    "fp8-block": _fp8(),
}
