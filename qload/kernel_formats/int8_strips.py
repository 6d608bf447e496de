"""Int8 weights with one scale per output in strips: bytes as 8-bit codes, and scales in float32.

    qweight           int32      (N/64, K*16)  codes + 128 in `layouts.strips`
    scales            fp32       (N,)          one scale per output, times the factor
    weight_scale      fp32, ...  as stored     the checkpoint's own; with a factor padded to N
    input_scale       fp32, ...  as stored     scale of the activations; optional
    input_zero_point  int8       as stored     zero point of the activations; optional

    w[n, k] = (weight_scale[n] * (byte[n, k] - 128)) * factor

Kernels multiply the differences, which are exact in float16 and bfloat16, and apply scales to sums in
float32: activations of either dtype need no conversion of the scales. K is padded to 128 and N to 64, with
codes of 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.errors import RepackError
from qload.formats import BNBWeight, CTIntWeight, EETQWeight
from qload.kernel_formats.strips import pack_bytes
from qload.layouts import ClippedCodes, eetq, strips
from qload.spec import Role, TensorSpec, Weight
from qload.spec.integers import Origin, record_origin
from qload.spec.weight import Layer

BITS = 8
ZERO = 2 ** (BITS - 1)  # byte of code 0


@dataclass(frozen=True, eq=False)
class Int8:
    """Intermediate form of int8 weights: bytes (N, K), codes + 128, with the checkpoint's scales.

    Attributes
    ----------
    codes
        Return the bytes, uint8.
    scales
        Scales (N,) in float32.
    weight_scale
        The same as the checkpoint stores them.
    factor
        Factor of all products, rounded separately.
    layer
        The layer, with its `Origin`.
    unsupported
        Reason why kernels cannot read the weight, or None.
    input_scale, input_zero_point
        Stored scale and zero point of the activations; None: not stored.
    """

    codes: Callable[[], Tensor]
    scales: Tensor
    weight_scale: Tensor
    factor: float
    layer: Layer
    unsupported: str | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None


@dataclass(frozen=True)
class Int8StripsConfig(spec.Config):
    """Config of an int8 weight in strips.

    Attributes
    ----------
    factor
        Factor of all products, rounded separately: 1 / 127 of bitsandbytes.
    """

    name: ClassVar[str] = "int8_strips"

    factor: float = 1.0


@dataclass(frozen=True, eq=False, repr=False)
class Int8StripsWeight(spec.Weight):
    """An int8 weight in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64.

    Attributes
    ----------
    qweight
        Codes + 128, as 8-bit codes of `qload.layouts.strips`: (N / 64, K * 16), int32.
    scales
        One per output, times `config.factor`: (N,), float32.
    weight_scale
        The checkpoint's own, as stored; with a factor padded to N.
    input_scale, input_zero_point
        Scale and zero point of the activations, as stored in the checkpoint; None: not stored.
    """

    config: Int8StripsConfig
    qweight: Tensor
    scales: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    format: ClassVar[str] = "int8_strips"
    example: ClassVar[Int8StripsConfig] = Int8StripsConfig()

    @classmethod
    def tensors(cls, config: Int8StripsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N, except the checkpoint's scales of any shape."""
        rows, columns = strips.TILE_K, strips.TILE_N
        specs = (
            TensorSpec("qweight", (dtypes.int32,), f"N/{columns} K@{rows}*{2 * BITS}", Role.WORD),
            TensorSpec("scales", (dtypes.float32,), f"N@{columns}", Role.SCALE),
            TensorSpec("weight_scale", (dtypes.float32,), f"N@{columns}", Role.SCALE),
        )
        return specs[:2] if config.factor == 1 else specs

    def codes(self) -> spec.Codes:
        """Return the bytes, zero points of 128, and the scale of each output, without padding."""
        N, K = self.shape
        packed = strips.rows(BITS).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        scales = self.scales if self.config.factor == 1 else self.weight_scale  # without one more rounding
        scales = scales[:N, None]
        return spec.Codes(
            bits=BITS,
            codes=codes.T,
            scales=scales,
            zeros=torch.full_like(scales, ZERO, dtype=torch.int32),
            k_group=None,
            factor=self.config.factor,
        )


def from_int8(integers: Int8) -> Int8StripsWeight:
    """Convert exactly, with padding, or raise RepackError."""
    origin = integers.layer.origin
    if integers.unsupported and isinstance(origin, Origin):
        raise RepackError(origin.weight_type.format, "strips", integers.unsupported)
    padding = 0, -integers.layer.N % strips.TILE_N
    scales, weight_scale = torch.nn.functional.pad(integers.scales, padding), integers.weight_scale
    if integers.factor != 1:
        weight_scale, scales = scales, scales * integers.factor
    return Int8StripsWeight(
        config=Int8StripsConfig(integers.factor),
        qweight=pack_bytes(integers.codes(), ZERO),
        scales=scales,
        weight_scale=weight_scale,
        input_scale=integers.input_scale,
        input_zero_point=integers.input_zero_point,
        layer=integers.layer,
    )


def to_int8(weight: Int8StripsWeight) -> Int8:
    """Invert `from_int8`, bit for bit; RepackError without an origin."""
    if not isinstance(weight.layer.origin, Origin):
        reason = "it was built by hand, so that the format of its stored scales is unknown"
        raise RepackError("int8_strips", "int8", reason)
    weight_scale, N = weight.weight_scale, weight.layer.N
    return Int8(
        codes=lambda: weight.codes().plain().to(torch.uint8).contiguous(),
        scales=weight.scales[:N],
        weight_scale=weight_scale if weight.config.factor == 1 else weight_scale[:N].contiguous(),
        factor=weight.config.factor,
        layer=weight.layer,
        input_scale=weight.input_scale,
        input_zero_point=weight.input_zero_point,
    )


def read_bnb(weight: BNBWeight) -> Int8:
    """Read an int8 weight of bitsandbytes."""
    factor = weight.codes().factor
    return Int8(lambda: _unsigned(weight.weight), weight.SCB, weight.SCB, factor, record_origin(weight))


def read_eetq(weight: EETQWeight) -> Int8:
    """Read a weight of EETQ."""
    scales = weight.weight_scales
    return Int8(
        lambda: devices.plain(weight.codes().codes), scales.float(), scales, 1.0, record_origin(weight)
    )


def read_ct_int(weight: CTIntWeight) -> Int8:
    """Read an int-quantized weight of compressed-tensors."""
    scales, N = weight.weight_scale, weight.layer.N
    unsupported = _find_unsupported(weight)
    each = scales.new_zeros(N) if unsupported else scales.reshape(-1).expand(N)
    return Int8(
        lambda: _unsigned(weight.weight),
        each.float(),
        scales,
        1.0,
        record_origin(weight),
        unsupported,
        weight.input_scale,
        weight.input_zero_point,
    )


def _find_unsupported(weight: CTIntWeight) -> str | None:
    """Return the reason if strips cannot represent an int-quantized weight, else None."""
    config = weight.config
    if config.bits != BITS:
        return f"strips of int8 have 8 bits, got {config.bits}"
    if weight.weight_zero_point is not None:
        return "strips of int8 have no zero points"
    if config.block not in (None, (1, -1)) or (config.block is None and weight.weight_scale.numel() > 1):
        return "strips of int8 have one scale for the tensor or one an output"
    return None


def restore_bnb(integers: Int8, origin: Origin) -> Weight:
    """Restore the int8 weight of bitsandbytes."""
    return _restored(
        BNBWeight, integers, origin, {"weight": _signed(integers.codes()), "SCB": integers.weight_scale}
    )


def restore_eetq(integers: Int8, origin: Origin) -> Weight:
    """Restore the weight of EETQ."""
    tensors = {"weight": eetq.pack(integers.codes()), "weight_scales": integers.weight_scale}
    return _restored(EETQWeight, integers, origin, tensors)


def restore_ct_int(integers: Int8, origin: Origin) -> Weight:
    """Restore the int-quantized weight of compressed-tensors."""
    tensors = {
        "weight": _signed(integers.codes()),
        "weight_scale": integers.weight_scale,
        "input_scale": integers.input_scale,
        "input_zero_point": integers.input_zero_point,
    }
    return _restored(CTIntWeight, integers, origin, tensors)


def _restored(
    weight_type: Any, integers: Int8, origin: Origin, tensors: Mapping[str, Tensor | None]
) -> Weight:
    restored: Weight = weight_type(config=origin.config, layer=integers.layer, **tensors)
    return restored


def _unsigned(codes: Tensor) -> Tensor:
    """Bytes of signed codes."""
    return torch.bitwise_xor(codes.view(torch.uint8), ZERO)


def _signed(stored: Tensor) -> Tensor:
    """Signed codes of bytes."""
    return torch.bitwise_xor(stored, ZERO).view(torch.int8)
