"""FP8 weights in Marlin's order: bytes as 8-bit codes, and scales in one of two dialects.

    qweight       int32       (K/16, 4*N)  e4m3fn bytes in `layouts.marlin`, as 8-bit codes
    scales        fp16, bf16  (G, N)       permuted; one row is one scale per column; times 2**8 (fp16) or
                                           2**120 (bf16) with `exponent_bias`
    weight_scale  fp32, ...   as stored    the checkpoint's own; `scales` were rounded from them
    input_scale   fp32, ...   as stored    scale of the activations; optional

    w[n, k] = scales[k / g, n] * 2**-bias * e4m3fn(byte[k, n])

The kernel shifts the bits of a byte into an fp16 or bf16, which is then 2**8 or 2**120 too small. vLLM
multiplies the scales by this factor beforehand (`exponent_bias`); TGI's kernel applies it. K and N are padded
as in `kernel_formats.marlin`, with bytes and scales of 0.

Source: vLLM 0.11.0 and TGI db931fcf, byte-equal to both.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.errors import ArgumentError, RepackError
from qload.formats import Fp8Weight
from qload.kernel_formats.marlin import GROUP_SIZES, pad_shape
from qload.layouts import ClippedCodes, marlin
from qload.layouts.packing import byte_values
from qload.spec import Role, TensorSpec, named
from qload.spec.casts import check_cast
from qload.spec.integers import Origin, pad_matrix, record_origin

EXPONENT_BIAS = {torch.float16: 8, torch.bfloat16: 120}  # log2 of the factor that the kernel's values lack


@dataclass(frozen=True)
class Fp8MarlinConfig(spec.Grouped, spec.Config):
    """Config of an FP8 weight in Marlin's order.

    Attributes
    ----------
    group_size
        Rows of a block; -1: one scale per column.
    exponent_bias
        Whether the scales include the kernel's missing factor (vLLM), or the kernel applies it (TGI).
    """

    name: ClassVar[str] = "fp8_marlin"

    group_size: int
    exponent_bias: bool

    def __post_init__(self) -> None:
        self.check_group_size()


@dataclass(frozen=True, eq=False, repr=False)
class Fp8MarlinWeight(spec.Weight):
    """An FP8 (e4m3fn) weight in the order of Marlin's kernel.

    K and N are padded to whole thread blocks. Source: vLLM and TGI, byte-equal to their tensors.

    Attributes
    ----------
    qweight
        Bytes, as 8-bit codes of `qload.layouts.marlin`: (K / 16, 4 * N), int32.
    scales
        Permuted; times 2**8 (fp16) or 2**120 (bf16) with `config.exponent_bias`: (G, N), fp16 or bf16.
    weight_scale
        The checkpoint's own, as stored; `scales` were rounded from it.
    input_scale
        Scale of the activations, as stored in the checkpoint; None: not stored.
    """

    config: Fp8MarlinConfig
    qweight: Tensor
    scales: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None

    format: ClassVar[str] = "fp8_marlin"
    example: ClassVar[Fp8MarlinConfig] = Fp8MarlinConfig(group_size=-1, exponent_bias=True)

    @classmethod
    def tensors(cls, config: Fp8MarlinConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors for padded K and N, except the checkpoint's scales, of any shape."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        return (
            TensorSpec("qweight", (dtypes.int32,), "K/16 N@64*4", Role.WORD),
            TensorSpec("scales", (dtypes.float16, dtypes.bfloat16), f"{groups} N@64", Role.SCALE),
        )

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the scales as the kernel applies them, without padding."""
        N, K = self.shape
        groups = self.config.groups(K)
        scales = marlin.scales(self.scales.shape[0]).undo(self.scales)[:groups, :N].float()
        bias = EXPONENT_BIAS[self.scales.dtype] if self.config.exponent_bias else 0
        packed = marlin.rows(8).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        return spec.Codes(
            bits=8,
            codes=codes.T,
            scales=(scales * 2.0**-bias).T,
            zeros=None,
            k_group=self.config.in_order(K, self.device),
            lookup=byte_values(torch.float8_e4m3fn, self.device),
        )


def from_fp8(
    weight: Fp8Weight, *, dtype: Any, exponent_bias: Any, whole: Fp8Weight | None = None
) -> Fp8MarlinWeight:
    """Convert to Marlin's order with padding, scales rounded once to `dtype`.

    `dtype`: float16 or bfloat16, of the activations. `exponent_bias`: True for vLLM's kernel, False for
    TGI's. `whole`: the whole layer if this is a share of it, checked first. RepackError for other types or
    blocks; CastError for a scale that overflows `dtype`, or loses bits as a subnormal.
    """
    reason = find_unsupported(whole or weight)
    if reason:
        raise RepackError("fp8", "marlin", reason)
    if not isinstance(dtype, torch.dtype) or dtype not in EXPONENT_BIAS:
        raise ArgumentError("dtype", "torch.float16 or torch.bfloat16, as the activations", str(dtype))
    if not isinstance(exponent_bias, bool):
        expected = "True: scales include the factor of the exponent; False: the kernel applies it"
        raise ArgumentError("exponent_bias", expected, str(exponent_bias))
    if whole is not None:
        _round_scales(whole, dtype, exponent_bias)
    (N, K), block = weight.shape, weight.config.block
    rounded = _round_scales(weight, dtype, exponent_bias)
    config = Fp8MarlinConfig(-1 if block is None or rounded.shape[0] == 1 else block[1], exponent_bias)
    Np, Kp = pad_shape(N, K, config.group_size)
    codes = pad_matrix(weight.weight.view(torch.uint8).T.contiguous(), Kp, Np)
    scales = pad_matrix(rounded, config.groups(Kp), Np)
    return Fp8MarlinWeight(
        config=config,
        qweight=marlin.rows(8).pack(codes),
        scales=marlin.scales(scales.shape[0]).apply(scales),
        weight_scale=weight.weight_scale,
        input_scale=weight.input_scale,
        layer=record_origin(weight),
    )


def to_fp8(weight: Any) -> Fp8Weight:
    """Restore the FP8 weight of a kernel's order, with bytes of e4m3fn; RepackError without an origin."""
    origin = weight.layer.origin
    if not isinstance(origin, Origin):
        reason = "it was built by hand, so that the outputs and inputs of each stored scale are unknown"
        raise RepackError(weight.format, "fp8", reason)
    stored = weight.codes().plain().to(torch.uint8).contiguous()
    return Fp8Weight(
        config=origin.config,
        weight=stored.view(torch.float8_e4m3fn),
        weight_scale=weight.weight_scale,
        input_scale=weight.input_scale,
        layer=weight.layer,
    )


def find_unsupported(weight: Fp8Weight) -> str | None:
    """Return the reason if Marlin's kernel cannot read a weight, else None."""
    if weight.weight.dtype != torch.float8_e4m3fn:
        return f"Marlin's kernel reads float8_e4m3fn, got {str(weight.weight.dtype).removeprefix('torch.')}"
    block, K = weight.config.block, weight.layer.K
    if block is not None and block[1] < K and block[1] not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        return f"Marlin's kernel reads blocks of {sizes} inputs or one of all, got {block[1]}"
    return None


def _round_scales(weight: Fp8Weight, dtype: torch.dtype, exponent_bias: bool) -> Tensor:
    """Return scales (G, N), expanded to all outputs and rounded once.

    The factor is applied in float64, before the rounding: a small scale would lose bits as a subnormal fp16.
    """
    codes, N = weight.codes(), weight.layer.N
    stored = (codes.scales.expand(N, -1) if codes.n_group is None else codes.scales[codes.n_group]).T.double()
    exact = stored.reciprocal() if codes.divide else stored
    exact = exact * 2.0 ** (EXPONENT_BIAS[dtype] if exponent_bias else 0)
    rounded = exact.to(dtype)
    times = f" * 2**{EXPONENT_BIAS[dtype]}" if exponent_bias else ""
    name = named(weight.layer.name or "Fp8Weight", f"weight_scale{times}")
    remedy, source = _suggest_remedy(dtype, exponent_bias), weight.weight_scale.dtype
    check_cast(name, exact, rounded, tiny=True, remedy=remedy, stored=source)
    return rounded


def _suggest_remedy(dtype: torch.dtype, exponent_bias: bool) -> str:
    if dtype == torch.float16:
        return "pack for bfloat16 activations, whose range is that of float32"
    if exponent_bias:
        return "pack with exponent_bias=False, for a kernel that applies the factor"
    return "leave this layer as it is stored: no scale of Marlin's has this range"
