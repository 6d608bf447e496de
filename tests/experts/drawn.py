"""Experts of random numbers, plain and in four formats, for the tests of the module over them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qload.formats import (
    CTMXFP4Weight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    MXFP4Config,
    UnquantizedWeight,
)
from qload.kernel_formats import repack
from qload.kernels.bounds import Bounded, exact
from qload.layouts import Stored
from qload.spec import Layer, Weight
from tests.experts.bounds import Matrices

Draw = Callable[[Layer, torch.Generator], Weight]


def plain(layer: Layer, chance: torch.Generator) -> Weight:
    return UnquantizedWeight(weight=torch.randn(layer.N, layer.K, generator=chance) / 4, layer=layer)


def gptq(layer: Layer, chance: torch.Generator) -> Weight:
    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=chance).int()

    N, K, G = layer.N, layer.K, layer.K // 32
    return GPTQWeight(
        config=GPTQConfig(4, 32, zeros=Stored()),
        qweight=words(K // 8, N),
        qzeros=words(G, N // 8),
        scales=(torch.rand(G, N, generator=chance) / 16).half(),
        g_idx=(torch.arange(K) // 32).int(),
        layer=layer,
    )


def panels(layer: Layer, chance: torch.Generator) -> Weight:
    return repack(gptq(layer, chance), "panels")


def fp8(layer: Layer, chance: torch.Generator) -> Weight:
    numbers = torch.randn(layer.N, layer.K, generator=chance)
    scale = torch.rand(layer.N, 1, generator=chance)
    return Fp8Weight(
        config=Fp8Config("channel"), weight=numbers.to(torch.float8_e4m3fn), weight_scale=scale, layer=layer
    )


def mxfp4(layer: Layer, chance: torch.Generator) -> Weight:
    def bytes_(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=chance).to(torch.uint8)

    return CTMXFP4Weight(
        config=MXFP4Config(),
        weight_packed=bytes_(0, 256, layer.N, layer.K // 2),
        weight_scale=bytes_(122, 128, layer.N, layer.K // 32),
        layer=layer,
    )


FORMATS: Mapping[str, Draw] = {
    "plain": plain,
    "gptq": gptq,
    "panels": panels,
    "fp8": fp8,
    "mxfp4": mxfp4,
}


def gate_up(draw: Draw, count: int, H: int, inner: int, chance: torch.Generator) -> list[Weight]:
    """Gate and up of `count` experts, two parts of one layer each."""
    name = "mlp.experts.{}.gate_up_proj".format
    return [draw(Layer((inner, inner), H, (2 * inner, H), name(e)), chance) for e in range(count)]


def down(draw: Draw, count: int, H: int, inner: int, chance: torch.Generator) -> list[Weight]:
    name = "mlp.experts.{}.down_proj".format
    return [draw(Layer((H,), inner, (H, inner), name(e)), chance) for e in range(count)]


def choices(tokens: int, experts: int, k: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids of k different experts for each token, in any order, and weights."""
    ids = torch.stack([torch.randperm(experts, generator=chance)[:k] for _ in range(tokens)])
    return ids, torch.rand(tokens, k, generator=chance)


def what_is_exact(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Mapping[int, Matrices],
    side: str,
    kind: str,
    alpha: float | None = None,
    limit: float | None = None,
) -> Bounded:
    """(T, H): the sum over the experts of each token that are here, in float64, with its bound."""
    tokens, rounded = [], x.dtype if x.dtype == torch.bfloat16 else None
    for token, row in enumerate(ids.tolist()):
        total = exact(torch.zeros_like(x[token]))
        for slot, expert in enumerate(row):
            if expert not in matrices:
                continue
            weight, one = exact(weights[token, slot]), exact(x[token])
            on_input = side == "input"
            out = matrices[expert](one * weight if on_input else one, kind, alpha, limit, rounded)
            total = total + (out if on_input else out * weight)
        tokens.append(total)
    return Bounded(torch.stack([t.value for t in tokens]), torch.stack([t.error for t in tokens]))
