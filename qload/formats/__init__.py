"""Checkpoint formats, a module each: `MODULES` is their list.

A module has a config, a weight with declared tensors and `codes`, and the reader of its `quant_method`. From
it follow the loader, checks, cuts, detection, repacking, contract tests and a linear layer. `FORMATS` of a
module are its types of weights, `METHODS` its methods; `dialects`, if it has one, recognises layers that no
config names.
"""

from qload.configs import Method
from qload.formats import (
    aqlm,
    awq,
    bitnet,
    bnb,
    bnb_int8,
    comfy,
    compressed_tensors,
    eetq,
    exl2,
    exl3,
    fp8,
    gguf,
    gptq,
    hqq,
    marlin,
    marlin_24,
    mlx,
    modelopt_awq,
    modelopt_int8,
    mx,
    mxfp8,
    nvfp4,
    quanto,
    quark,
    torchao,
    unquantized,
)
from qload.formats.aqlm import AQLMConfig, AQLMWeight
from qload.formats.awq import AWQConfig, AWQWeight
from qload.formats.bitnet import BitNetConfig, BitNetWeight
from qload.formats.bnb import BNB4Config, BNB4Weight, BNBFP4Weight, BNBNF4Weight
from qload.formats.bnb_int8 import BNBConfig, BNBWeight
from qload.formats.comfy import ComfyAWQConfig, ComfyAWQWeight, ComfyW4A8Config, ComfyW4A8Weight
from qload.formats.compressed_tensors import (
    CTIntConfig,
    CTIntWeight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
)
from qload.formats.eetq import EETQConfig, EETQWeight
from qload.formats.exl2 import Exl2Config, Exl2Weight
from qload.formats.exl3 import Exl3Config, Exl3Weight
from qload.formats.fp8 import Fp8Config, Fp8Weight
from qload.formats.gguf import GGUFConfig, GGUFWeight
from qload.formats.gptq import GPTQConfig, GPTQWeight
from qload.formats.hqq import HQQConfig, HQQWeight
from qload.formats.marlin import MarlinConfig, MarlinWeight
from qload.formats.marlin_24 import Marlin24Config, Marlin24Weight
from qload.formats.mlx import MLXConfig, MLXFloatConfig, MLXFloatWeight, MLXWeight
from qload.formats.modelopt_awq import ModelOptAWQConfig, ModelOptAWQWeight
from qload.formats.modelopt_int8 import ModelOptInt8Config, ModelOptInt8Weight
from qload.formats.mx import CTMXFP4Weight, MXFP4Config, MXFP4ExpertsWeight
from qload.formats.mxfp8 import MXFP8Config, MXFP8Weight
from qload.formats.nvfp4 import (
    CTNVFP4Weight,
    ModelOptNVFP4ExtendedConfig,
    ModelOptNVFP4ExtendedWeight,
    ModelOptNVFP4Weight,
    NVFP4Config,
)
from qload.formats.quanto import QuantoConfig, QuantoWeight
from qload.formats.quark import QuarkInt4Config, QuarkInt4Weight, QuarkMXFP6Config, QuarkMXFP6Weight
from qload.formats.torchao import (
    TorchAOInt4Config,
    TorchAOInt4Weight,
    TorchAOIntxConfig,
    TorchAOIntxWeight,
)
from qload.formats.unquantized import UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat
from qload.spec import Role, Weight

MODULES = (
    unquantized,
    gptq,
    awq,
    marlin,
    marlin_24,
    exl2,
    exl3,
    eetq,
    fp8,
    bnb_int8,
    bnb,
    compressed_tensors,
    nvfp4,
    mx,
    mxfp8,
    modelopt_awq,
    modelopt_int8,
    gguf,
    mlx,
    comfy,
    torchao,
    quark,
    quanto,
    bitnet,
    aqlm,
    hqq,
)

FORMATS: tuple[type[Weight], ...] = tuple(fmt for module in MODULES for fmt in module.FORMATS)
METHODS: tuple[Method, ...] = tuple(method for module in MODULES for method in module.METHODS)


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """Formats that the tensors of a layer define without a config, in order of preference.

    `formats`: those of the config, whose settings the result takes over.
    """
    modules = [module for module in reversed(MODULES) if hasattr(module, "dialects")]
    return tuple(fmt for module in modules for fmt in module.dialects(formats))


# Role of a tensor by the last part of its name.
ROLES: dict[str, Role] = {
    suffix.rpartition(".")[2]: spec.role
    for weight in reversed(FORMATS)  # the first format with a name decides
    for config in (weight.example, *weight.further)
    for spec in weight.tensors(config)
    for suffix in spec.suffixes
} | dict(torchao.ROLES)

__all__ = [
    "FORMATS",
    "METHODS",
    "MODULES",
    "ROLES",
    "AQLMConfig",
    "AQLMWeight",
    "AWQConfig",
    "AWQWeight",
    "BNB4Config",
    "BNB4Weight",
    "BNBConfig",
    "BNBFP4Weight",
    "BNBNF4Weight",
    "BNBWeight",
    "BitNetConfig",
    "BitNetWeight",
    "CTIntConfig",
    "CTIntWeight",
    "CTMXFP4Weight",
    "CTNVFP4Weight",
    "CTPackConfig",
    "CTPackTensorConfig",
    "CTPackTensorWeight",
    "CTPackWeight",
    "ComfyAWQConfig",
    "ComfyAWQWeight",
    "ComfyW4A8Config",
    "ComfyW4A8Weight",
    "EETQConfig",
    "EETQWeight",
    "Exl2Config",
    "Exl2Weight",
    "Exl3Config",
    "Exl3Weight",
    "Fp8Config",
    "Fp8Weight",
    "GGUFConfig",
    "GGUFWeight",
    "GPTQConfig",
    "GPTQWeight",
    "HQQConfig",
    "HQQWeight",
    "MLXConfig",
    "MLXFloatConfig",
    "MLXFloatWeight",
    "MLXWeight",
    "MXFP4Config",
    "MXFP4ExpertsWeight",
    "MXFP8Config",
    "MXFP8Weight",
    "Marlin24Config",
    "Marlin24Weight",
    "MarlinConfig",
    "MarlinWeight",
    "ModelOptAWQConfig",
    "ModelOptAWQWeight",
    "ModelOptInt8Config",
    "ModelOptInt8Weight",
    "ModelOptNVFP4ExtendedConfig",
    "ModelOptNVFP4ExtendedWeight",
    "ModelOptNVFP4Weight",
    "NVFP4Config",
    "QuantoConfig",
    "QuantoWeight",
    "QuarkInt4Config",
    "QuarkInt4Weight",
    "QuarkMXFP6Config",
    "QuarkMXFP6Weight",
    "TorchAOInt4Config",
    "TorchAOInt4Weight",
    "TorchAOIntxConfig",
    "TorchAOIntxWeight",
    "UnquantizedConfig",
    "UnquantizedWeight",
    "dialects",
]
