"""Table of formats for all contract tests: one line per format with a strategy for its config."""

from math import gcd, lcm

import pytest
import torch
from hypothesis import strategies as st

from qload.formats import (
    FORMATS,
    AQLMConfig,
    AQLMWeight,
    AWQConfig,
    AWQWeight,
    BitNetConfig,
    BitNetWeight,
    BNB4Config,
    BNBConfig,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    ComfyAWQConfig,
    ComfyAWQWeight,
    ComfyW4A8Config,
    ComfyW4A8Weight,
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    EETQConfig,
    EETQWeight,
    Exl2Config,
    Exl2Weight,
    Exl3Config,
    Exl3Weight,
    Fp8Config,
    Fp8Weight,
    GGUFConfig,
    GGUFWeight,
    GPTQConfig,
    GPTQWeight,
    HQQConfig,
    HQQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    MLXConfig,
    MLXFloatConfig,
    MLXFloatWeight,
    MLXWeight,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
    ModelOptInt8Config,
    ModelOptInt8Weight,
    ModelOptNVFP4ExtendedConfig,
    ModelOptNVFP4ExtendedWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
    QuantoConfig,
    QuantoWeight,
    QuarkInt4Config,
    QuarkInt4Weight,
    QuarkMXFP6Config,
    QuarkMXFP6Weight,
    TorchAOInt4Config,
    TorchAOInt4Weight,
    TorchAOIntxConfig,
    TorchAOIntxWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOnePerField, StoredMinusOneUnmasked
from qload.spec import Config, Weight
from qload.storage import BLOCK_TYPES

LEGACY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
YES = st.booleans()
SHARED = [(2, 3), (64, 128)]
BLOCKS = st.sampled_from([*SHARED, (1, 128)])
ZEROS = st.sampled_from([STORED_MINUS_ONE, Stored(), StoredMinusOnePerField(), StoredMinusOneUnmasked()])
GROUPS = st.sampled_from([-1, 32, 48, 128])


class ConfigStrategies(dict[type[Weight], st.SearchStrategy[Config]]):
    """Strategies of configs by format; a format without one fails with a sentence."""

    def __missing__(self, weight_type: type[Weight]) -> st.SearchStrategy[Config]:
        raise AssertionError(f"{weight_type.__name__} has no line in CONFIGS of tests/format_cases.py")


CONFIGS = ConfigStrategies({
    UnquantizedWeight: st.just(UnquantizedConfig()),
    GPTQWeight: st.builds(
        lambda bits, group, zeros: GPTQConfig(bits, group, zeros, positional=group != -1),
        st.sampled_from([2, 3, 4, 8]), GROUPS, ZEROS,
    ),
    AWQWeight: st.builds(AWQConfig, GROUPS, st.sampled_from([4, 8])),
    MarlinWeight: st.builds(MarlinConfig, GROUPS, st.sampled_from([4, 8])),
    Marlin24Weight: st.builds(Marlin24Config, GROUPS, st.sampled_from([4, 8]), compressed=YES),
    Exl2Weight: st.just(Exl2Config()),
    Exl3Weight: st.builds(
        Exl3Config, st.sampled_from([1, 1.5, 4, 8]), st.just("mul1"), st.sampled_from(["suh", "su"]),
        st.sampled_from(["svh", "sv"]),
    ) | st.builds(Exl3Config, st.integers(1, 8), st.sampled_from(["mcg", "3inst"])),
    EETQWeight: st.just(EETQConfig()),
    Fp8Weight: st.one_of(
        st.builds(Fp8Config, st.sampled_from(["tensor", "channel"]), divide=YES, input_scale=YES),
        st.builds(Fp8Config, st.just("block"), BLOCKS, divide=YES, input_scale=YES),
    ),
    BNBNF4Weight: st.builds(BNB4Config, st.just("nf4"), st.sampled_from([32, 64]), double_quant=YES),
    BNBFP4Weight: st.builds(BNB4Config, st.just("fp4"), st.sampled_from([32, 64]), double_quant=YES),
    BNBWeight: st.just(BNBConfig()),
    CTPackWeight: st.builds(
        lambda bits, group, symmetric, act_order: CTPackConfig(
            bits, group, symmetric, act_order, dense=bits != 7,
            groups_lie="in order" if not act_order else "anywhere" if group == -1 else "positional",
        ),
        st.integers(2, 8), GROUPS, YES, YES,
    ),
    CTPackTensorWeight: st.builds(
        lambda bits, symmetric: CTPackTensorConfig(bits, symmetric, dense=bits != 7), st.integers(2, 8), YES,
    ),
    CTIntWeight: st.builds(
        CTIntConfig, st.sampled_from([None, (1, -1), (1, 48), *SHARED]), st.integers(2, 8), YES, YES,
    ),
    CTNVFP4Weight: st.just(NVFP4Config()),
    ModelOptNVFP4Weight: st.just(NVFP4Config()),
    CTMXFP4Weight: st.just(MXFP4Config()),
    MXFP4ExpertsWeight: st.just(MXFP4Config()),
    MXFP8Weight: st.just(MXFP8Config()),
    ModelOptAWQWeight: st.builds(ModelOptAWQConfig, GROUPS, YES),
    ModelOptInt8Weight: st.builds(ModelOptInt8Config, YES),
    ModelOptNVFP4ExtendedWeight: st.builds(
        ModelOptNVFP4ExtendedConfig, st.sampled_from([16, 32]), YES, YES
    ),
    GGUFWeight: st.builds(GGUFConfig, st.sampled_from([*BLOCK_TYPES])),
    MLXWeight: st.builds(MLXConfig, st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 128])),
    ComfyW4A8Weight: st.builds(ComfyW4A8Config, st.sampled_from([16, 32]), YES),
    ComfyAWQWeight: st.builds(ComfyAWQConfig, st.sampled_from([32, 64])),
    MLXFloatWeight: st.just(MLXFloatConfig("mxfp4")),  # words of others may hold NaN
    TorchAOIntxWeight: st.builds(TorchAOIntxConfig, st.integers(1, 8), GROUPS),
    TorchAOInt4Weight: st.builds(TorchAOInt4Config, GROUPS),
    QuarkInt4Weight: st.builds(QuarkInt4Config, GROUPS, YES, YES),
    QuarkMXFP6Weight: st.builds(QuarkMXFP6Config, st.sampled_from(["e2m3", "e3m2"])),
    QuantoWeight: st.builds(QuantoConfig, st.sampled_from([2, 4])),  # groups need the inputs of a layer
    BitNetWeight: st.builds(BitNetConfig, YES),
    AQLMWeight: st.builds(
        AQLMConfig, st.sampled_from([1, 2]), st.sampled_from([4, 8, 9]), st.sampled_from([4, 8]),
        st.sampled_from([1, 2]),
    ),
    HQQWeight: st.builds(
        lambda bits, group, axis: HQQConfig(bits, group if axis or group == -1 else 16, axis),
        st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([-1, 32, 64]), st.sampled_from([0, 1]),
    ),
})  # fmt: skip

every_format = pytest.mark.parametrize("weight_type", FORMATS, ids=lambda weight_type: weight_type.format)


def lawful(config: Config, dim: str, size: int, world: int, K: int) -> bool:
    """Return whether every cut of `dim` for `world` ranks is permitted, by the tools and not by qload.

    A format without a branch in this function permits any cut.
    """
    if size % world:
        return False
    share = size // world
    if isinstance(config, GPTQConfig):
        word, group = (32 if config.bits == 3 else 32 // config.bits), config.group_size
        free = config.indexed is not False or dim == "N" or group == -1 or group >= K
        return share % word == 0 and (free or share % group == 0)
    if isinstance(config, BNB4Config):
        block = lcm(2 * config.storage.itemsize, config.blocksize)
        return share * K % block == 0 if dim == "N" else share % block == K % block == 0
    if isinstance(config, Fp8Config):
        return config.block is None or share % config.block[dim == "K"] == 0
    if isinstance(config, CTPackConfig):
        word, group = (32 // gcd(config.bits, 32) if config.dense else 32 // config.bits), config.group_size
        if dim == "N":
            return config.symmetric or share % word == 0
        return share % word == 0 and (config.act_order or group == -1 or group >= K or share % group == 0)
    if isinstance(config, CTPackTensorConfig):
        return dim == "N" or share % (32 // gcd(config.bits, 32) if config.dense else 32 // config.bits) == 0
    if isinstance(config, ModelOptAWQConfig):
        group = config.group_size
        return share % 2 == 0 if dim == "N" else group in (-1, size) or share % group == 0
    if isinstance(config, CTIntConfig):
        rows, columns = config.block or (1, -1)
        block = rows if dim == "N" else 1 if columns == -1 or (rows == 1 and columns >= K) else columns
        return share % block == 0
    if isinstance(config, GGUFConfig):
        block = {"Q1_0": 128, "NVFP4": 64, "Q2_0": 64, "MXFP4": 32, "IQ4_NL": 32}.get(config.type)
        return dim == "N" or share % (block or (32 if config.type in LEGACY_GGUF else 256)) == 0
    if isinstance(config, ModelOptNVFP4ExtendedConfig):
        return dim == "N" or share % config.group_size == 0
    if isinstance(config, NVFP4Config | MXFP4Config | MXFP8Config):
        group = (16 if isinstance(config, NVFP4Config) else 32) * (4 if config.swizzled else 1)
        return share % (group if dim == "K" else 128 if config.swizzled else 1) == 0
    if isinstance(config, ComfyW4A8Config | ComfyAWQConfig):
        return dim == "N" or share % config.group_size == 0
    if isinstance(config, BitNetConfig):
        return dim == "K" or share % 4 == 0
    if isinstance(config, AQLMConfig):
        return share % (config.out_group if dim == "N" else config.in_group) == 0
    if isinstance(config, HQQConfig) and config.group_size != -1:
        group = config.group_size
        if config.axis == 0:
            return dim == "K" or group == size
        if group == K:
            return True
        return share * K % group == 0 if dim == "N" else K % group == share % group == 0
    if isinstance(config, QuarkMXFP6Config):
        return dim == "N" or share % 32 == 0
    if isinstance(config, TorchAOIntxConfig | TorchAOInt4Config):
        nibbles = 2 if isinstance(config, TorchAOInt4Config) else 1
        group = config.group_size if config.group_size not in (-1, K) else 1
        return dim == "N" or share % lcm(nibbles, group) == 0
    if isinstance(config, MLXConfig | MLXFloatConfig):
        return dim == "N" or share % config.group_size == 0
    if isinstance(config, Exl2Config):
        return dim == "N" and share % 32 == 0
    if isinstance(config, EETQConfig):
        return share % 64 == 0
    if isinstance(config, Exl3Config):
        return share % 128 == 0
    granules = {
        AWQConfig: (32 // getattr(config, "bits", 4), 1),
        QuarkInt4Config: (8, 1),
        MarlinConfig: (64, 16),
        Marlin24Config: (64, 32),
    }
    if type(config) in granules:
        N, K = granules[type(config)]
        if dim == "N":
            return share % N == 0
        return share % K == 0 and (config.group_size in (-1, size) or share % config.group_size == 0)
    return True


def head_size(weight_type: type[Weight]) -> int:
    """Return the outputs of a head between whose heads every layer of a format may be cut."""
    return 128 if weight_type is Exl3Weight else 64


def small_integers(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw integers from -2 to 2, for exact products and sums in float32."""
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).reshape(shape).float()
