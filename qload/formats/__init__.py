"""Formats on disk and their meaning, a module for each.

A new format is a module with a frozen config and a frozen weight with declared tensors, one line in
`FORMATS` below, one line in the strategies for its config, one block computed by hand, and one fixture
from a tool of the format. The declaration brings the loader, the checks, the sharding laws, the contract
tests and a working linear layer.
"""

from qload.configs import Method
from qload.formats import (
    awq,
    bnb,
    compressed_tensors,
    eetq,
    exl2,
    fp8,
    gptq,
    marlin,
    modelopt_awq,
    mx,
    nvfp4,
    unquantized,
)
from qload.formats.awq import AWQConfig, AWQWeight
from qload.formats.bnb import BNB4Config, BNB4Weight, BNBConfig, BNBFP4Weight, BNBNF4Weight, BNBWeight
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
from qload.formats.fp8 import Fp8Config, Fp8Weight
from qload.formats.gptq import GPTQConfig, GPTQWeight
from qload.formats.marlin import Marlin24Config, Marlin24Weight, MarlinConfig, MarlinWeight
from qload.formats.modelopt_awq import ModelOptAWQConfig, ModelOptAWQWeight
from qload.formats.mx import CTMXFP4Weight, MXFP4Config, MXFP4ExpertsWeight, MXFP8Config, MXFP8Weight
from qload.formats.nvfp4 import CTNVFP4Weight, ModelOptNVFP4Weight, NVFP4Config
from qload.formats.unquantized import UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat
from qload.spec import Role, Weight

# The list of formats: a new one is a module here. The first module with a name of a tensor decides its role.
MODULES = (unquantized, gptq, awq, marlin, exl2, eetq, fp8, bnb, compressed_tensors, nvfp4, mx, modelopt_awq)

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
    for spec in weight.tensors(weight.example)
    for suffix in spec.suffixes
}

__all__ = [
    "FORMATS",
    "METHODS",
    "ROLES",
    "AWQConfig",
    "AWQWeight",
    "BNB4Config",
    "BNB4Weight",
    "BNBConfig",
    "BNBFP4Weight",
    "BNBNF4Weight",
    "BNBWeight",
    "CTIntConfig",
    "CTIntWeight",
    "CTMXFP4Weight",
    "CTNVFP4Weight",
    "CTPackConfig",
    "CTPackTensorConfig",
    "CTPackTensorWeight",
    "CTPackWeight",
    "EETQConfig",
    "EETQWeight",
    "Exl2Config",
    "Exl2Weight",
    "Fp8Config",
    "Fp8Weight",
    "GPTQConfig",
    "GPTQWeight",
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
    "ModelOptNVFP4Weight",
    "NVFP4Config",
    "UnquantizedConfig",
    "UnquantizedWeight",
    "dialects",
]
