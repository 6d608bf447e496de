"""The operator of experts, and the ways that it has, for tests on a device that takes them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.kernels.cuda import experts
from tests.gpu.expert_layers import Experts, Tokens

BITS = pytest.mark.parametrize("bits", [4, 8], ids=["4 bits", "8 bits"])
WAYS = pytest.mark.parametrize("way", experts.WAYS)


@pytest.fixture(autouse=True)
def _fits() -> None:
    reason = experts.why_not(torch.device("cuda"))
    if reason:
        pytest.skip(reason)


def multiply(held: Experts, chosen: Tokens, **options: Any) -> Tensor:
    """The operator."""
    read = chosen.x, chosen.ids, chosen.weights
    return experts.multiply(*read, held.gate_up, held.down, **held.gate.options, **options)
