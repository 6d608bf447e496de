"""FP8 of every dialect as compressed-tensors stores it: the same bytes, and scales that multiply."""

from typing import Any

import torch
from torch import Tensor

from qload.conversion.exact_fp8 import DTYPE, exact_scales
from qload.conversion.items import Item, of_tensors, stored_bytes
from qload.errors import RepackError
from qload.formats import Fp8Config, Fp8Weight, UnquantizedWeight
from qload.loader import FormatLoader, LayerDescription, Part
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import ActivationScheme, Weight, named
from qload.weights import Weights

NAME = "fp8"
INEXACT = (
    "no scale of all, of each output or of each block of 128 x 128 says its values in float8_e4m3fn to the "
    "bit, and nothing is quantized"
)
DYNAMIC = ("token", "group")  # strategies of inputs whose scales are found as they come
E8M0 = torch.float8_e8m0fnu


def fp8_item(weights: Weights, loader: FormatLoader, layer: LayerDescription) -> Item:
    """A layer as it will stand in a file; RepackError where the format cannot say it."""
    reason = why_not(layer)
    if reason:
        raise RepackError(layer.format.weight_type.format, NAME, reason)

    outline = stored(loader.load(HeaderOnlySource.without_codes(weights, layer), [Part(layer.prefix)], None))
    return of_tensors(
        outline,
        stored_bytes(weights, layer),
        lambda: stored(loader.load(weights, [Part(layer.prefix)], None)),
    )


def plain_item(weights: Weights, loader: FormatLoader, layer: LayerDescription) -> tuple[Item, Fp8Config]:
    """A plain layer whose values FP8 says to the bit, and its config; RepackError for any other."""

    def values() -> Tensor:
        held = loader.load(weights, [Part(layer.prefix)], None)
        assert isinstance(held, UnquantizedWeight)
        return held.weight

    found = exact_scales(values()) if set(layer.sizes) == {"N", "K"} else None
    if found is None:
        raise RepackError(layer.format.weight_type.format, NAME, INEXACT)
    name, scale = named(layer.prefix, "weight"), named(layer.prefix, "weight_scale")
    outline = {name: torch.zeros((), dtype=DTYPE).expand(layer.N, layer.K), scale: found.scales}
    made = of_tensors(
        outline, stored_bytes(weights, layer), lambda: {name: found.codes(values()), scale: found.scales}
    )
    return made, found.config


def why_not(layer: LayerDescription) -> str | None:
    """Why compressed-tensors' float-quantized cannot say a layer, or None."""
    config, dtype = layer.format.config, layer.dtypes.get("weight")
    if not isinstance(config, Fp8Config):
        return f"{layer.format.weight_type.format} is no FP8 with scales, and nothing is quantized"
    if dtype != torch.float8_e4m3fn:
        return f"needs weights in float8_e4m3fn, got {str(dtype).removeprefix('torch.')}"
    if config.divide:
        return "its scales divide, and none that multiply are the same in every bit"
    if config.per not in ("tensor", "channel", "block"):
        return "its fused parts have a scale each, for which there is no place"
    return _why_not_inputs(layer.format.activations)


def _why_not_inputs(scheme: ActivationScheme | None) -> str | None:
    if scheme is None:
        return None
    plain = scheme.symmetric and scheme.upper_bound is None and scheme.scale_type == "float32"
    found = scheme.dynamic is True and scheme.strategy in DYNAMIC
    given = scheme.dynamic is False and scheme.strategy == "tensor"
    if (scheme.type, scheme.bits) == ("float", 8) and plain and (found or given):
        return None
    bound = "" if scheme.upper_bound is None else f", at most {scheme.upper_bound:g}"
    return f"its inputs are quantized ({scheme}{bound}), which {NAME} does not say"


def stored(weight: Weight) -> dict[str, Tensor]:
    """The tensors of a layer by name: (N, K); a scale (1,), (N, 1) or one a block; (1,) of inputs."""
    assert isinstance(weight, Fp8Weight)
    N, scale, config = weight.layer.N, weight.scales, weight.config
    scale = scale.float() if scale.dtype == E8M0 else scale  # a power of two stays what it is
    shapes = {"tensor": (1,), "channel": (N, 1), "block": (scale.shape[0] if scale.ndim else 1, -1)}
    found = {"weight": weight.weight, "weight_scale": scale.reshape(shapes[config.per or "tensor"])}
    if weight.input_scale is not None and _is_given(weight.activations):
        found["input_scale"] = weight.input_scale.reshape(1)
    return {named(weight.layer.name, name): tensor for name, tensor in found.items()}


def _is_given(scheme: ActivationScheme | None) -> bool:
    return scheme is not None and scheme.dynamic is False


def scheme_of_weights(per: str, block: tuple[int, int] | None) -> dict[str, Any]:
    """What a config says of weights."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": per,
        "block_structure": None if block is None else list(block),
        "group_size": None,
        "dynamic": False,
    }


def scheme_of_inputs(scheme: ActivationScheme | None) -> dict[str, Any] | None:
    """What a config says of inputs; None: they are not quantized."""
    if scheme is None:
        return None
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": scheme.strategy,
        "group_size": scheme.group_size,
        "dynamic": scheme.dynamic,
    }
