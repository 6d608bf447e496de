"""Exact conversion to FP8 in the layout of compressed-tensors (float-quantized)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qload.conversion.output_tensors import Item, of_tensors, stored_bytes
from qload.errors import RepackError
from qload.formats import Fp8Config, Fp8Weight, UnquantizedWeight
from qload.loader import FormatLoader, LayerDescription, Part
from qload.repacking.header_only import HeaderOnlySource
from qload.spec import ActivationScheme, Weight, named
from qload.weights import Weights

DTYPE = torch.float8_e4m3fn
BLOCK = (128, 128)  # (outputs, inputs)
LARGEST = (256, 288, 320, 352, 384, 416, 448, 240)  # codes of each significand, the largest there are
NEAR = 2  # units in the last place
SAMPLE = 64  # values of a unit that are looked at first
RUN = 1 << 20  # values that are looked at at once
CONFIGS = (Fp8Config("tensor"), Fp8Config("channel"), Fp8Config("block", BLOCK))


@dataclass(frozen=True)
class ExactScales:
    """Scales in the shape in which compressed-tensors stores them, and what shares one."""

    config: Fp8Config
    scales: Tensor

    def codes(self, values: Tensor) -> Tensor:
        """(N, K) plain -> (N, K) in float8_e4m3fn, some outputs at a time."""
        made = torch.empty(values.shape, dtype=DTYPE)
        for start, run in _runs(values):
            made[start : start + len(run)] = (run / self._spread(start, run)).to(DTYPE)
        return made

    def _spread(self, start: int, run: Tensor) -> Tensor:
        if self.config.per == "tensor":
            return self.scales
        if self.config.per == "channel":
            return self.scales[start : start + len(run)]
        n, k = (torch.arange(size) // by for size, by in zip(run.shape, BLOCK, strict=True))
        return self.scales[n[:, None] + start // BLOCK[0], k]


def exact_scales(values: Tensor) -> ExactScales | None:
    """The fewest scales that say (N, K) values, one of all, an output or a block; None: there are none."""
    for config in CONFIGS:
        found = _scales_of(values, config)
        if found is not None:
            return ExactScales(config, found)
    return None


def _scales_of(values: Tensor, config: Fp8Config) -> Tensor | None:
    if config.per == "tensor":
        found = _one_scale(values)
        return None if found is None else found.reshape(1)
    rows = []
    for _, run in _runs(values):
        units = run if config.per == "channel" else _blocks(run)
        scales = _unit_scales(units.flatten(0, -2))
        if scales is None:
            return None
        rows.append(scales.reshape(*units.shape[:-1], *([1] if config.per == "channel" else [])))
    return torch.cat(rows)


def _runs(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole blocks of outputs as float32, about RUN values at a time."""
    step = max(1, RUN // max(1, values.shape[1]) // BLOCK[0]) * BLOCK[0]
    for start in range(0, len(values), step):
        yield start, values[start : start + step].float()


def _blocks(run: Tensor) -> Tensor:
    """(N, K) -> (N / 128, K / 128, values of a block), the last of each filled up with zeros."""
    n, k = BLOCK
    N, K = run.shape
    whole = functional.pad(run, (0, -K % k, 0, -N % n))
    return whole.reshape(len(whole) // n, n, -1, k).transpose(1, 2).flatten(2)


def _one_scale(values: Tensor) -> Tensor | None:
    """One for all; each that is tried is tried run by run."""
    largest = max((run.abs().max() for _, run in _runs(values)), default=torch.zeros(()))
    sample = values[:1].float()
    for scale in _tried(largest.reshape(1)):
        if not bool(_says(sample, scale).all()):
            continue
        if all(bool(_says(run.reshape(1, -1), scale)) for _, run in _runs(values)):
            return scale
    return None


def _unit_scales(units: Tensor) -> Tensor | None:
    """One for each row, or None where a row has none."""
    found = torch.zeros(len(units))
    for scales in _tried(units.abs().amax(1)):
        left = torch.nonzero(found == 0)[:, 0]
        left = left[_says(units[left, :SAMPLE], scales[left])]
        left = left[_says(units[left], scales[left])]
        found[left] = scales[left]
        if bool(found.all()):
            return found
    return None


def _tried(largest: Tensor) -> Iterator[Tensor]:
    """What may be the scales of units with these largest values; 1 of a unit of zeros."""
    for code, steps in product(LARGEST, sorted(range(-NEAR, NEAR + 1), key=abs)):
        scales = (largest / code).view(torch.int32).add(steps).view(torch.float32)
        yield torch.where(largest == 0, 1.0, scales)


def _says(units: Tensor, scales: Tensor) -> Tensor:
    """Whether each row is codes times its scale, bit by bit but for what is zero."""
    codes = (units / scales[:, None]).to(DTYPE).float()
    return (codes * scales[:, None] == units).all(1)


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
