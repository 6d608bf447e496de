"""What models are asked, and layers whose inputs nothing quantizes."""

from typing import Any

import torch
from torch import Tensor, nn

from qload.experts import ExpertsWeight
from qload.kernels.declared import Maximum
from qload.spec import Weight

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def as_it_comes(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
    """A layer whose inputs nothing quantizes."""
    module: nn.Module = weight.get_linear(bias, activations="unquantized", dtype=torch.float32)
    return module


def experts_as_they_come(weight: ExpertsWeight, maximum: Maximum) -> nn.Module:
    """Experts whose inputs nothing quantizes."""
    return weight.get_linear(activations="unquantized")


UNQUANTIZED: dict[str, Any] = {"make": as_it_comes, "make_experts": experts_as_they_come}
