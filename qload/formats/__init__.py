"""What is on disk and what it means: a file for each format, alike inside.

To add one: a module with a frozen config and a frozen weight that declares its tensors, one line in
`FORMATS` below, one line in the strategies for its config, one block worked by hand, and one fixture
from the tool that writes the format. The loader, the checks, the sharding laws, the contract tests
and a working linear come with the declaration.
"""

from qload.formats.awq import AWQConfig, AWQWeight
from qload.formats.gptq import GPTQConfig, GPTQWeight
from qload.formats.marlin import MarlinConfig, MarlinWeight
from qload.formats.marlin_24 import Marlin24Config, Marlin24Weight
from qload.formats.unquantized import UnquantizedConfig, UnquantizedWeight
from qload.spec import Role, Weight

FORMATS: tuple[type[Weight], ...] = (
    UnquantizedWeight,
    GPTQWeight,
    AWQWeight,
    MarlinWeight,
    Marlin24Weight,
)

# What a tensor is for, by the last part of its name.
ROLES: dict[str, Role] = {
    suffix.rpartition(".")[2]: spec.role
    for weight in reversed(FORMATS)  # so that of formats that share a name the first one has its say
    for spec in weight.tensors(weight.example)
    for suffix in spec.suffixes
}

__all__ = [
    "FORMATS",
    "ROLES",
    "AWQConfig",
    "AWQWeight",
    "GPTQConfig",
    "GPTQWeight",
    "Marlin24Config",
    "Marlin24Weight",
    "MarlinConfig",
    "MarlinWeight",
    "UnquantizedConfig",
    "UnquantizedWeight",
]
