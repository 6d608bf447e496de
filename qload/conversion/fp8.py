"""Exact conversion to FP8 in the layout of compressed-tensors (float-quantized).

FP8 weights of any dialect keep their bytes; their scales are stored as multipliers. A plain weight, and one
of MXFP4 or NVFP4, becomes FP8 if every value is exactly a code times a scale. Candidate scales map the
largest value of a unit to one of the largest codes, of each significand one; twice the scale halves the
codes, and fewer of the small codes are exact. Rounding may have moved a scale by a few units in its last
place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qload import dtypes
from qload.conversion.output_files import (
    OutputItem,
    item_from_tensors,
    layer_bytes,
    load_header,
    load_layer,
)
from qload.errors import RepackError
from qload.formats import Fp8Config, Fp8Weight, UnquantizedWeight
from qload.loader import LayerDescription
from qload.spec import ActivationScheme, Weight, named
from qload.verify.checkpoint import VerifiedCheckpoint

NAME = "fp8"
DTYPE = torch.float8_e4m3fn
BLOCK_SHAPE = (128, 128)  # (outputs, inputs)
LARGEST_CODES = (256, 288, 320, 352, 384, 416, 448, 240)  # the largest code with each significand
MAX_SCALE_ULPS = 2  # distance of a candidate from the quotient, in units in the last place
SAMPLE_VALUES = 64  # of each unit, compared before the rest
BLOCK_VALUES = 1 << 20  # values in memory at once, as float32
CONFIGS = (Fp8Config("tensor"), Fp8Config("channel"), Fp8Config("block", BLOCK_SHAPE))
INEXACT = (
    "no scale per tensor, output or block of 128 x 128 represents its values in float8_e4m3fn exactly, and "
    "convert does not quantize"
)
NUMBERS: Mapping[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}  # of a config's entry
DYNAMIC_STRATEGIES = ("token", "group")  # of activations whose scales are computed at run time


@dataclass(frozen=True)
class ExactScales:
    """Scales of a plain weight in the shape of compressed-tensors, with the config of their granularity."""

    config: Fp8Config
    scales: Tensor

    def codes(self, values: Tensor) -> Tensor:
        """(N, K) plain values -> (N, K) codes in float8_e4m3fn."""
        codes = torch.empty(values.shape, dtype=DTYPE)
        for start, rows in _row_blocks(values):
            codes[start : start + len(rows)] = (rows / self._scale_of_each(start, rows)).to(DTYPE)
        return codes

    def _scale_of_each(self, start: int, rows: Tensor) -> Tensor:
        if self.config.per == "tensor":
            return self.scales
        if self.config.per == "channel":
            return self.scales[start : start + len(rows)]
        n, k = (torch.arange(size) // block for size, block in zip(rows.shape, BLOCK_SHAPE, strict=True))
        return self.scales[n[:, None] + start // BLOCK_SHAPE[0], k]


def exact_scales(values: Tensor) -> ExactScales | None:
    """Return the fewest scales that represent (N, K) values exactly: per tensor, output or block; or None."""
    for config in CONFIGS:
        scales = _scales_for(values, config)
        if scales is not None:
            return ExactScales(config, scales)
    return None


def _scales_for(values: Tensor, config: Fp8Config) -> Tensor | None:
    if config.per == "tensor":
        return _tensor_scale(values)
    rows_of_scales = []
    for _, rows in _row_blocks(values):
        units = rows if config.per == "channel" else _split_into_blocks(rows)
        scales = _unit_scales(units.flatten(0, -2))
        if not bool(scales.all()):
            return None
        rows_of_scales.append(scales.reshape(*units.shape[:-1], *([1] if config.per == "channel" else [])))
    return torch.cat(rows_of_scales)


def _row_blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of outputs as float32, in multiples of a scale block, of about `BLOCK_VALUES` values."""
    step = max(1, BLOCK_VALUES // max(1, values.shape[1]) // BLOCK_SHAPE[0]) * BLOCK_SHAPE[0]
    for start in range(0, len(values), step):
        yield start, values[start : start + step].float()


def _split_into_blocks(rows: Tensor) -> Tensor:
    """(N, K) -> (N / 128, K / 128, 128 * 128), padded with zeros at both ends."""
    n, k = BLOCK_SHAPE
    N, K = rows.shape
    padded = functional.pad(rows, (0, -K % k, 0, -N % n))
    return padded.reshape(len(padded) // n, n, -1, k).transpose(1, 2).flatten(2)


def _tensor_scale(values: Tensor) -> Tensor | None:
    """Return one scale (1,) for all values, or None."""
    largest = max((rows.abs().max() for _, rows in _row_blocks(values)), default=torch.zeros(()))
    sample = values[:1].float()
    for scale in _candidate_scales(largest.reshape(1)):
        if not bool(_are_exact(sample, scale).all()):
            continue
        if all(bool(_are_exact(rows.reshape(1, -1), scale)) for _, rows in _row_blocks(values)):
            return scale
    return None


def _unit_scales(units: Tensor) -> Tensor:
    """(units, values) -> (units,) scales; 0 for a unit without one."""
    scales = torch.zeros(len(units))
    for candidates in _candidate_scales(units.abs().amax(1)):
        missing = torch.nonzero(scales == 0)[:, 0]
        missing = missing[_are_exact(units[missing, :SAMPLE_VALUES], candidates[missing])]
        missing = missing[_are_exact(units[missing], candidates[missing])]
        scales[missing] = candidates[missing]
        if bool(scales.all()):
            break
    return scales


def _candidate_scales(largest: Tensor) -> Iterator[Tensor]:
    """Yield candidate scales for units with these largest magnitudes; 1 for a unit of zeros."""
    for code, ulps in product(LARGEST_CODES, sorted(range(-MAX_SCALE_ULPS, MAX_SCALE_ULPS + 1), key=abs)):
        scales = (largest / code).view(torch.int32).add(ulps).view(torch.float32)
        yield torch.where(largest == 0, 1.0, scales)


def _are_exact(units: Tensor, scales: Tensor) -> Tensor:
    """Return for each row whether every value equals its FP8 code times the scale of the row."""
    codes = (units / scales[:, None]).to(DTYPE).float()
    return (codes * scales[:, None] == units).all(1)


def fp8_item(source: VerifiedCheckpoint, layer: LayerDescription) -> OutputItem:
    """Return an item with an FP8 layer; RepackError if compressed-tensors cannot represent it."""
    reason = why_not(layer)
    if reason:
        raise RepackError(layer.format.weight_type.format, NAME, reason)
    outline, source_bytes = fp8_tensors(load_header(source, layer)), layer_bytes(source.weights, layer)
    return item_from_tensors(outline, source_bytes, lambda: fp8_tensors(load_layer(source, layer.prefix)))


def plain_item(source: VerifiedCheckpoint, layer: LayerDescription) -> tuple[OutputItem, Fp8Config]:
    """Return an item with a plain layer in FP8, and its config; RepackError if that is not exact."""

    def load_values() -> Tensor:
        stored = load_layer(source, layer.prefix)
        return stored.weight if isinstance(stored, UnquantizedWeight) else stored.dequantize()

    if set(layer.sizes) != {"N", "K"}:
        reason = f"it has the axes {', '.join(layer.sizes)}, and only a matrix (N, K) has scales in {NAME}"
        raise RepackError(layer.format.weight_type.format, NAME, reason)
    values = load_values()
    exact = exact_scales(values)
    if exact is None:
        raise RepackError(layer.format.weight_type.format, NAME, f"{INEXACT}{_describe_first(values)}")
    weight, scale = named(layer.prefix, "weight"), named(layer.prefix, "weight_scale")

    def read_tensors() -> dict[str, Tensor]:
        return {weight: exact.codes(load_values()), scale: exact.scales}

    outline = {weight: torch.zeros((), dtype=DTYPE).expand(layer.N, layer.K), scale: exact.scales}
    return item_from_tensors(outline, layer_bytes(source.weights, layer), read_tensors), exact.config


def _describe_first(values: Tensor) -> str:
    """Name the first block without a scale; "" if all blocks have one."""
    columns = -(-values.shape[1] // BLOCK_SHAPE[1])
    for start, rows in _row_blocks(values):
        missing = (_unit_scales(_split_into_blocks(rows).flatten(0, -2)) == 0).nonzero()
        if missing.numel():
            n, k = divmod(int(missing[0]), columns)
            place = f"output {start + n * BLOCK_SHAPE[0]} and input {k * BLOCK_SHAPE[1]}"
            return f"; the first block without one is at {place}"
    return ""


def why_not(layer: LayerDescription) -> str | None:
    """Return why compressed-tensors (float-quantized) cannot represent a layer, or None."""
    config, dtype = layer.format.config, layer.dtypes.get("weight")
    if layer.transforms is not None:
        return f"it transforms its {layer.transforms} at run time, which {NAME} cannot express"
    if not isinstance(config, Fp8Config):
        return f"{layer.format.weight_type.format} is not FP8 with scales, and convert does not quantize"
    if dtype is not dtypes.float8_e4m3fn:
        return f"needs weights in float8_e4m3fn, got {str(dtype).removeprefix('torch.')}"
    if config.divide:
        return "its scales divide, and the reciprocals are not exact"
    if config.per not in ("tensor", "channel", "block"):
        return "each of its fused parts has its own scale, which the format cannot store"
    return _why_not_activations(layer.format.activations)


def _why_not_activations(scheme: ActivationScheme | None) -> str | None:
    if scheme is None:
        return None
    plain = scheme.symmetric and scheme.upper_bound is None and scheme.scale_type == "float32"
    dynamic = scheme.dynamic is True and scheme.strategy in DYNAMIC_STRATEGIES
    static = scheme.dynamic is False and scheme.strategy == "tensor"
    if (scheme.type, scheme.bits) == ("float", 8) and plain and (dynamic or static):
        return None
    bound = "" if scheme.upper_bound is None else f", at most {scheme.upper_bound:g}"
    return f"its inputs are quantized ({scheme}{bound}), which {NAME} cannot express"


def fp8_tensors(weight: Weight) -> dict[str, Tensor]:
    """Return the stored tensors of an FP8 layer by full name.

    weight (N, K) float8_e4m3fn; weight_scale (1,), (N, 1) or one per block; input_scale (1,) if static.
    """
    assert isinstance(weight, Fp8Weight)
    N, scale, config = weight.layer.N, weight.scales, weight.config
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.float()  # powers of two are exact in float32
    shapes = {"tensor": (1,), "channel": (N, 1), "block": (scale.shape[0] if scale.ndim else 1, -1)}
    tensors = {"weight": weight.weight, "weight_scale": scale.reshape(shapes[config.per or "tensor"])}
    scheme = weight.activations
    input_scale = weight.input_scale if scheme is not None and scheme.dynamic is False else None
    if input_scale is not None:
        tensors["input_scale"] = input_scale.reshape(1)
    return {named(weight.layer.name, name): tensor for name, tensor in tensors.items()}


def weights_scheme(per: str, block: tuple[int, int] | None) -> dict[str, Any]:
    """Return the entry `weights` of a config group."""
    return {
        **NUMBERS,
        "strategy": per,
        "block_structure": None if block is None else list(block),
        "group_size": None,
        "dynamic": False,
    }


def activations_scheme(scheme: ActivationScheme | None) -> dict[str, Any] | None:
    """Return the entry `input_activations` of a config group; None if inputs are not quantized."""
    if scheme is None:
        return None
    return {
        **NUMBERS,
        "strategy": scheme.strategy,
        "group_size": scheme.group_size,
        "dynamic": scheme.dynamic,
    }
