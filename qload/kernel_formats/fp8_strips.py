"""FP8 weights in strips: bytes as 8-bit codes, and the checkpoint's scales in float32.

    qweight       int32        (N/64, K*16)   e4m3fn or e5m2 bytes in `layouts.strips`, as 8-bit codes
    scales        fp32         (N,)           one scale per output; or, in blocks,
                               (K/128, N/64)  one scale per tile of 64 outputs and 128 inputs
    weight_scale  fp32, ...    as stored      the checkpoint's own; `scales` are its values
    input_scale   fp32, ...    as stored      scale of the activations; optional

    w[n, k] = scales[n] * value(byte[n, k])    or    scales[k / 128, n / 64] * value(byte[n, k])

The kernels multiply the values of bytes, which are exact in float16 and bfloat16, and apply scales to sums in
float32: activations of either dtype need no conversion of the scales. K is padded to 128 and N to 64, with
bytes of 0.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.errors import RepackError
from qload.formats import Fp8Weight
from qload.kernel_formats import fp8_marlin
from qload.kernel_formats.strips import pack_bytes
from qload.layouts import ClippedCodes, strips
from qload.layouts.packing import byte_values
from qload.spec import Role, TensorSpec
from qload.spec.integers import record_origin

BITS = 8
DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODES: dict[torch.dtype, Any] = {dtype: codes for codes, dtype in DTYPES.items()}
MAX_SCALE_RATIO = 2.0**64  # of two scales of blocks: kernels keep sums in units of the last block's scale


@dataclass(frozen=True)
class Fp8StripsConfig(spec.Config):
    """Config of an FP8 weight in strips.

    Attributes
    ----------
    blocks
        Whether scales are per tile of 64 outputs and 128 inputs; False: one scale per output.
    codes
        "e4m3fn" or "e5m2": the bytes.

    Raises
    ------
    ArgumentError
        For other `codes`.
    """

    name: ClassVar[str] = "fp8_strips"

    blocks: bool = False
    codes: Literal["e4m3fn", "e5m2"] = "e4m3fn"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the bytes."""
        return DTYPES[self.codes]


@dataclass(frozen=True, eq=False, repr=False)
class Fp8StripsWeight(spec.Weight):
    """An FP8 weight in strips of 64 columns, qload's order for its CUDA kernels.

    K is padded to a multiple of 128 and N to one of 64.

    Attributes
    ----------
    qweight
        Bytes, as 8-bit codes of `qload.layouts.strips`: (N / 64, K * 16), int32.
    scales
        One per output: (N,), float32; with `config.blocks` one per tile: (K / 128, N / 64).
    weight_scale
        The checkpoint's own, as stored; `scales` are its values.
    input_scale
        Scale of the activations, as stored in the checkpoint; None: not stored.
    """

    config: Fp8StripsConfig
    qweight: Tensor
    scales: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None

    format: ClassVar[str] = "fp8_strips"
    example: ClassVar[Fp8StripsConfig] = Fp8StripsConfig()
    further: ClassVar[tuple[Fp8StripsConfig, ...]] = (
        Fp8StripsConfig(blocks=True),
        Fp8StripsConfig(codes="e5m2"),
    )

    @classmethod
    def tensors(cls, config: Fp8StripsConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N, except the checkpoint's scales, of any shape."""
        rows, columns = strips.TILE_K, strips.TILE_N
        scales = f"K/{rows} N/{columns}" if config.blocks else f"N@{columns}"
        return (
            TensorSpec("qweight", (dtypes.int32,), f"N/{columns} K@{rows}*{2 * BITS}", Role.WORD),
            TensorSpec("scales", (dtypes.float32,), scales, Role.SCALE),
        )

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(N, K) with the padding."""
        return self.qweight.shape[0] * strips.TILE_N, self.qweight.shape[1] // (2 * BITS)

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the scales of outputs or tiles, without padding."""
        (N, K), device = self.shape, self.device
        packed = strips.rows(BITS).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        n_group = k_group = None
        scales = self.scales[:N, None]
        if self.config.blocks:
            n_group = torch.arange(N, device=device) // strips.TILE_N
            k_group = torch.arange(K, device=device) // strips.TILE_K
            scales = self.scales.T
        return spec.Codes(
            bits=BITS,
            codes=codes.T,
            scales=scales,
            zeros=None,
            k_group=k_group,
            lookup=byte_values(self.config.dtype, device),
            n_group=n_group,
        )


def from_fp8(weight: Fp8Weight, *, whole: Fp8Weight | None = None) -> Fp8StripsWeight:
    """Convert exactly, with padding, or raise RepackError; `whole`: the layer, if this is a share of it."""
    reason = find_unsupported(whole or weight)
    if reason:
        raise RepackError("fp8", "strips", reason)
    Np = -(-weight.layer.N // strips.TILE_N) * strips.TILE_N
    scales = _scales_of_tiles(weight) if _has_blocks(weight) else _scales_of_outputs(weight, Np)
    return Fp8StripsWeight(
        config=Fp8StripsConfig(_has_blocks(weight), CODES[weight.weight.dtype]),
        qweight=pack_bytes(weight.weight.view(torch.uint8)),
        scales=scales.contiguous(),
        weight_scale=weight.weight_scale,
        input_scale=weight.input_scale,
        layer=record_origin(weight),
    )


def to_fp8(weight: Fp8StripsWeight) -> Fp8Weight:
    """Invert `from_fp8`, bit for bit; RepackError without an origin."""
    restored = fp8_marlin.to_fp8(weight)
    return replace(restored, weight=restored.weight.view(weight.config.dtype))


def find_unsupported(weight: Fp8Weight) -> str | None:
    """Return the reason if strips cannot represent a weight, else None; reads scales, and no bytes."""
    if weight.weight.dtype not in CODES:
        got = str(weight.weight.dtype).removeprefix("torch.")
        return f"strips have float8_e4m3fn or float8_e5m2, got {got}"
    if weight.config.divide:
        return "scales of strips multiply, and these divide"
    if not _has_blocks(weight):
        return None
    (N, K), (outputs, inputs) = weight.shape, weight.config.block or (1, 1)
    if (outputs % strips.TILE_N and outputs < N) or (inputs % strips.TILE_K and inputs < K):
        tiles = f"{strips.TILE_N} outputs and {strips.TILE_K} inputs"
        return f"strips have blocks of multiples of {tiles}, got {outputs} and {inputs}"
    return _find_unsupported_range(weight.scales.float())


def _has_blocks(weight: Fp8Weight) -> bool:
    """Return whether a weight has blocks of some of its inputs."""
    block = weight.config.block
    return block is not None and block[1] < weight.layer.K


def _find_unsupported_range(scales: Tensor) -> str | None:
    """Return the reason if the scales of blocks are too far apart for one unit of sums."""
    if not scales.numel():
        return None
    least, largest = (float(size) for size in torch.stack(torch.aminmax(scales.abs())))
    if least > 0 and largest <= least * MAX_SCALE_RATIO and largest < torch.inf:
        return None
    return (
        f"strips have blocks with scales other than 0 and at most 2**64 apart, got {least:g} to {largest:g}"
    )


def _scales_of_outputs(weight: Fp8Weight, padded: int) -> Tensor:
    """Return the scales (N,) of all outputs in float32, padded with zeros."""
    codes, N = weight.codes(), weight.layer.N
    stored = codes.scales[:, 0]
    each = stored.expand(N) if codes.n_group is None else stored[codes.n_group]
    return torch.nn.functional.pad(each, (0, padded - N))


def _scales_of_tiles(weight: Fp8Weight) -> Tensor:
    """Return the scales (K / 128, N / 64) of all tiles in float32."""
    codes = weight.codes()
    assert codes.n_group is not None
    assert codes.k_group is not None
    return codes.scales[codes.n_group[:: strips.TILE_N]][:, codes.k_group[:: strips.TILE_K]].T
