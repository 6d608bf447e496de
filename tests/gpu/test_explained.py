"""The kernels that a profile shows are those that explain names, of ten layers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import DeviceType
from torch.profiler import ProfilerActivity, profile

from qload import explain
from qload.detect import loader_from_config
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.bench.layers import checkpoint
from tests.bench.model import QUANTIZATION

pytestmark = pytest.mark.gpu

LAYER, TOKENS = "down_proj", (1, 8, 17, 64, 300)
SHAPES = ((256, 128), (1024, 4096), (4096, 1024), (2048, 2112), (14336, 512))  # K, N
OURS = {
    "decode": "decode_kernel", "many": "many_kernel", "mma": "mma_kernel",
    "large": "dequantize", "dequantize, then torch's product": "dequantize",
}  # fmt: skip


def ran(linear: Any, x: Tensor) -> set[str]:
    """Which of `OURS` a call launches, by what their names share."""
    linear(x)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as seen:
        linear(x)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
    return {each for each in OURS.values() if any(each in name for name in names)}


@pytest.mark.parametrize(("shape", "group"), list(product(SHAPES, (64, 128))), ids=str)
def test_the_kernel_that_is_told_is_the_one_that_runs(shape: tuple[int, int], group: int) -> None:
    (K, N), config = shape, QUANTIZATION | {"group_size": group}
    made = checkpoint(K, N, 4, group).fields()
    storage = MemoryStorage({f"{LAYER}.{name}": tensor.cpu() for name, tensor in made.items()})
    stored = Weights(storage, loader=loader_from_config(config))
    repacked = Weights(
        storage, loader=loader_from_config(config, target="auto"), device="cuda", dtype=torch.float16
    )

    (told,) = explain(stored, dtype=torch.float16, tokens=TOKENS).layers
    weight = repacked.get_weights(LAYER)
    linear = weight.get_linear()

    assert told.kernel_format == weight.format
    for choice in told.choices:
        x = torch.randn(choice.tokens, K, device="cuda").half()
        assert ran(linear, x) == {OURS[choice.kernel]}, choice
