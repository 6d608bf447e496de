"""Linears of other programs on a CPU, for the table of `tests.bench.cpu_linear`, where they are installed.

torchao and bitsandbytes as modules that their own functions make of a plain layer; llama.cpp by its
libraries. Each is given activations of bfloat16, and its weights lie in large pages as ours do.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload import native
from qload.devices import in_large_pages
from tests.bench.llama_cpp import Layers

GROUP = 128
Calls = list[Callable[[Tensor], Tensor]]


def copies(made: nn.Module, count: int, held: Callable[[nn.Module], Tensor]) -> Calls:
    """So many of a layer, whose codes `held` tells."""
    layers = [deepcopy(made).eval().requires_grad_(False) for _ in range(count)]
    for layer in layers:
        codes = held(layer)
        codes.set_(in_large_pages(torch.empty_like(codes)).copy_(codes))
    return list(layers)


def torchao_int4(K: int, N: int, count: int) -> Calls:
    """Its 4 bits for CPUs: groups of 128, zero points."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    made = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    quantize_(made, PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False))
    return copies(made, count, lambda layer: layer.weight.qdata)  # type: ignore[union-attr,return-value]


def torchao_int8(K: int, N: int, count: int) -> Calls:
    """Its 8 bits, a scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    quantize_(made, Int8WeightOnlyConfig(set_inductor_config=False))
    return copies(made, count, lambda layer: layer.weight.qdata)  # type: ignore[union-attr,return-value]


def bitsandbytes_nf4(K: int, N: int, count: int) -> Calls:
    """Its nf4, a scale for each 64 inputs, in the order that it brings codes to when it is first called."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    made: Any = Linear4bit(K, N, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    made.weight = Params4bit(torch.randn(N, K).bfloat16(), requires_grad=False, quant_type="nf4")
    made = made.to("cpu").eval()
    if made.weight.quant_state is None:
        made.weight = made.weight._quantize("cpu")
    made(torch.randn(1, K).bfloat16())
    return copies(made, count, lambda layer: layer.weight.data)  # type: ignore[union-attr,return-value]


def llama_cpp(kind: str, K: int, N: int, count: int) -> Calls:
    """llama.cpp's blocks of 32."""
    layers = Layers(kind, K, N, count, native.threads())
    return [partial(layers.multiply, copy) for copy in range(count)]


PEERS: dict[
    str, tuple[int, Callable[[int, int, int], Calls]]
] = {  # bits of a code, and layers of K, N, so many
    "torchao int4": (4, torchao_int4),
    "torchao int8": (8, torchao_int8),
    "bitsandbytes nf4": (4, bitsandbytes_nf4),
    "llama.cpp Q4_0": (4, partial(llama_cpp, "Q4_0")),
    "llama.cpp Q8_0": (8, partial(llama_cpp, "Q8_0")),
}
