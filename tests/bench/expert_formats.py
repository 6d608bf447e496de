"""Random experts in formats of checkpoints: the tensors of a matrix by suffix, and the quantization config.

Products are of the size of their inputs, so that a model of many layers has finite logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor

from tests.bench import folders
from tests.bench.model import QUANTIZATION

Suffixes = dict[str, Tensor]
DRAWS = 4  # matrices of a shape that differ
GROUP, BLOCK, GROUP_OF_MX, GROUP_OF_NV = 128, 128, 32, 16
E2M1 = 2.7  # root mean square of the values of e2m1


@dataclass(frozen=True)
class Format:
    """A format's `quantization_config`, and the draw of a matrix (N, K) on a device.

    `excludes`: the config's key with the names of layers that are not quantized; "": tensors say it.
    """

    config: Mapping[str, Any]
    draw: Callable[[int, int, str], Suffixes]
    excludes: str = ""

    def matrices(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Draw tensors of matrices (N, K) by name, on the host; some of a shape are the same."""
        device, drawn = "cuda" if torch.cuda.is_available() else "cpu", dict[Any, Suffixes]()
        tensors = dict[str, Tensor]()
        for number, (name, shape) in enumerate(shapes.items()):
            key = shape, number % DRAWS
            if key not in drawn:
                drawn[key] = {suffix: each.cpu() for suffix, each in self.draw(*shape, device).items()}
            tensors |= {f"{name}.{suffix}": each for suffix, each in drawn[key].items()}
        return tensors

    def without(self, layers: Sequence[str]) -> dict[str, Any]:
        """Return the config of a model with plain `layers`."""
        return {**self.config, self.excludes: list(layers)} if self.excludes else dict(self.config)


def gptq(N: int, K: int, device: str, group: int = GROUP) -> Suffixes:
    """4 bits in groups, in order, with zero points of 8."""
    spread = (16**2 / 12) ** 0.5
    return {
        "qweight": words((K // 8, N), device),
        "qzeros": torch.full((K // group, N // 8), -0x77777778, dtype=torch.int32, device=device),
        "scales": (torch.rand(K // group, N, device=device) + 0.5).mul(K**-0.5 / spread).half(),
        "g_idx": (torch.arange(K, device=device) // group).int(),
    }


def fp8(N: int, K: int, device: str) -> Suffixes:
    """e4m3 in blocks of 128 x 128."""
    codes = torch.randn(N, K, device=device).to(torch.float8_e4m3fn)
    blocks = torch.rand(-(-N // BLOCK), -(-K // BLOCK), device=device) + 0.5
    return {"weight": codes, "weight_scale_inv": blocks * K**-0.5}


def fp8_channel(N: int, K: int, device: str) -> Suffixes:
    """e4m3 with a scale for each output."""
    scales = (torch.rand(N, 1, device=device) + 0.5) * K**-0.5
    return {"weight": torch.randn(N, K, device=device).to(torch.float8_e4m3fn), "weight_scale": scales}


def mxfp4(N: int, K: int, device: str) -> Suffixes:
    """e2m1 with an exponent for 32 inputs."""
    exponent = 127 - round(log2(E2M1 * K**0.5))
    near = torch.randint(exponent - 1, exponent + 2, (N, K // GROUP_OF_MX), device=device)
    return {"weight_packed": noise((N, K // 2), device), "weight_scale": near.to(torch.uint8)}


def nvfp4(N: int, K: int, device: str) -> Suffixes:
    """e2m1 with an e4m3 scale for 16 inputs, and a divisor for all."""
    scales = (torch.rand(N, K // GROUP_OF_NV, device=device) + 0.5).to(torch.float8_e4m3fn)
    divisor = torch.tensor([E2M1 * K**0.5], device=device)
    return {
        "weight_packed": noise((N, K // 2), device),
        "weight_scale": scales,
        "weight_global_scale": divisor,
    }


def noise(shape: tuple[int, int], device: str) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def words(shape: tuple[int, int], device: str) -> Tensor:
    """Random words."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def expert_shapes(prefix: str, experts: int, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Shapes (N, K) of all experts' matrices by name."""
    each = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}.{e}.{name}": shape for e in range(experts) for name, shape in each.items()}


def _compressed(name: str, inputs: Mapping[str, Any] | None = None, **weights: Any) -> Mapping[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": name}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


OF_MX = {"strategy": "group", "group_size": GROUP_OF_MX, "scale_dtype": "torch.uint8"}
OF_NV = {"strategy": "tensor_group", "group_size": GROUP_OF_NV}
OF_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_CHANNEL = _compressed("float-quantized", OF_TOKENS, num_bits=8, strategy="channel")
FORMATS: Mapping[str, Format] = {
    "gptq": Format(QUANTIZATION, gptq),
    "gptq 32": Format({**QUANTIZATION, "group_size": 32}, partial(gptq, group=32)),
    "fp8": Format(folders.FP8, fp8, "modules_to_not_convert"),
    "fp8 channel": Format(FP8_CHANNEL, fp8_channel, "ignore"),
    "mxfp4": Format(_compressed("mxfp4-pack-quantized", **OF_MX), mxfp4, "ignore"),
    "nvfp4": Format(_compressed("nvfp4-pack-quantized", **OF_NV), nvfp4, "ignore"),
}
