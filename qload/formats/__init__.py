"""Formats on disk and their meaning, a module for each.

A new format is a module with a frozen config and a frozen weight with declared tensors, one line in
`FORMATS` below, one line in the strategies for its config, one block computed by hand, and one fixture
from a tool of the format. The declaration brings the loader, the checks, the sharding laws, the contract
tests and a working linear layer.
"""

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
from qload.spec import Role, Weight

FORMATS: tuple[type[Weight], ...] = (
    UnquantizedWeight,
    GPTQWeight,
    AWQWeight,
    MarlinWeight,
    Marlin24Weight,
    Exl2Weight,
    EETQWeight,
    Fp8Weight,
    BNBNF4Weight,
    BNBFP4Weight,
    BNBWeight,
    CTPackWeight,
    CTPackTensorWeight,
    CTIntWeight,
    CTNVFP4Weight,
    ModelOptNVFP4Weight,
    CTMXFP4Weight,
    MXFP4ExpertsWeight,
    MXFP8Weight,
    ModelOptAWQWeight,
)

# Role of a tensor by the last part of its name.
ROLES: dict[str, Role] = {
    suffix.rpartition(".")[2]: spec.role
    for weight in reversed(FORMATS)  # the first format with a name decides
    for spec in weight.tensors(weight.example)
    for suffix in spec.suffixes
}

__all__ = [
    "FORMATS",
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
]
