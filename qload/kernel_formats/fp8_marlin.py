"""FP8 weights in Marlin's order: bytes where 8-bit codes would be, scales in one of two dialects.

    qweight       int32       (K/16, 4*N)  e4m3fn bytes in `layouts.marlin`, as 8-bit codes
    scales        fp16, bf16  (G, N)       permuted; one row is one scale a column; times 2**8 (fp16) or
                                           2**120 (bf16) where `exponent_bias`
    weight_scale  fp32, ...   as stored    the checkpoint's own scales, from which `scales` were rounded
    input_scale   fp32, ...   as stored    of the activations; absent where the checkpoint has none

    w[n, k] = scales[k / g, n] * 2**-bias * e4m3fn(byte[k, n])

The kernel shifts a byte's bits into an fp16 or bf16, which makes its value 2**8 or 2**120 too small. vLLM
multiplies the scales by that beforehand (`exponent_bias`), TGI's kernel does it itself. K and N are padded
as in `kernel_formats.marlin`, with bytes and scales of 0. Source: vLLM 0.11.0 and
TGI db931fcf, byte-equal to both.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import ArgumentError, RepackError
from qload.formats import Fp8Weight
from qload.formats.fp8 import E4M3FN
from qload.kernel_formats.marlin import GROUP_SIZES, padded
from qload.kernel_formats.plain_integers import Origin, with_origin
from qload.layouts import ClippedCodes, marlin
from qload.spec import Role, TensorSpec, named
from qload.spec.casts import check_cast

EXPONENT_BIAS = {torch.float16: 8, torch.bfloat16: 120}


@dataclass(frozen=True)
class Fp8MarlinConfig(spec.Grouped, spec.Config):
    """What is to be known of an FP8 weight in Marlin's order.

    Attributes
    ----------
    group_size
        Rows of a block; -1: one scale a column.
    exponent_bias
        Whether scales carry the factor that the kernel's way to read a byte takes away (vLLM), or the kernel
        applies it (TGI).
    """

    name: ClassVar[str] = "fp8_marlin"

    group_size: int
    exponent_bias: bool

    def __post_init__(self) -> None:
        self.check_group_size()


@dataclass(frozen=True, eq=False, repr=False)
class Fp8MarlinWeight(spec.Weight):
    """An FP8 (e4m3fn) weight in the order Marlin's kernel reads.

    K and N are padded to what the kernel's thread blocks divide. Source: vLLM and TGI, to whose tensors it is
    byte-equal.

    Attributes
    ----------
    qweight
        Bytes, as 8-bit codes of `qload.layouts.marlin`: (K / 16, 4 * N), int32.
    scales
        Permuted; times 2**8 (fp16) or 2**120 (bf16) where `config.exponent_bias`: (G, N), fp16 or bf16.
    weight_scale
        The checkpoint's own, from which scales were rounded, as it is stored.
    input_scale
        The checkpoint's own, as it is stored; None: not stored.
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
        """Of the padded K and N; the checkpoint's scales have a shape of their own."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        return (
            TensorSpec("qweight", (torch.int32,), "K/16 N@64*4", Role.WORD),
            TensorSpec("scales", tuple(EXPONENT_BIAS), f"{groups} N@64", Role.SCALE),
        )

    def codes(self) -> spec.Codes:
        """Bytes, and the scales as the kernel applies them, without the padding."""
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
            lookup=torch.arange(256, device=self.device).to(torch.uint8).view(torch.float8_e4m3fn).float(),
        )


def write(
    weight: Fp8Weight, *, dtype: Any, exponent_bias: Any, whole: Fp8Weight | None = None
) -> Fp8MarlinWeight:
    """Bytes and scales in Marlin's order, scales rounded once to `dtype`; RepackError with the reason.

    `dtype`: float16 or bfloat16, of the activations. `exponent_bias`: True: scales as vLLM's kernel takes
    them; False: as TGI's does. `whole`: the layer that this is a share of, looked at first.
    CastError where a scale is too large for `dtype`, or so small that it would be 0 or lose bits.
    """
    reason = why_not(whole or weight)
    if reason:
        raise RepackError("fp8", "marlin", reason)
    if not isinstance(dtype, torch.dtype) or dtype not in EXPONENT_BIAS:
        raise ArgumentError("dtype", "torch.float16 or torch.bfloat16, as the activations", str(dtype))
    if not isinstance(exponent_bias, bool):
        expected = "True: scales carry the factor of the exponent; False: the kernel applies it"
        raise ArgumentError("exponent_bias", expected, str(exponent_bias))
    if whole is not None:
        _rounded(whole, dtype, exponent_bias)
    (N, K), rounded, block = weight.shape, _rounded(weight, dtype, exponent_bias), weight.config.block
    config = Fp8MarlinConfig(-1 if block is None or rounded.shape[0] == 1 else block[1], exponent_bias)
    Np, Kp = padded(N, K, config.group_size)
    wide = torch.zeros(Kp, Np, dtype=torch.uint8, device=weight.device)
    wide[:K, :N] = weight.weight.view(torch.uint8).T
    scales = torch.zeros(config.groups(Kp), Np, dtype=dtype, device=weight.device)
    scales[: rounded.shape[0], :N] = rounded
    return Fp8MarlinWeight(
        config=config,
        qweight=marlin.rows(8).pack(wide),
        scales=marlin.scales(scales.shape[0]).apply(scales),
        weight_scale=weight.weight_scale,
        input_scale=weight.input_scale,
        layer=with_origin(weight),
    )


def read(weight: Fp8MarlinWeight) -> Fp8Weight:
    """The inverse of `write`, bit for bit."""
    origin = weight.layer.origin
    if not isinstance(origin, Origin):
        reason = "it was made by hand, and nothing says what the stored scales cover"
        raise RepackError("fp8_marlin", "fp8", reason)
    bytes_ = weight.codes().plain().to(torch.uint8).contiguous()
    return Fp8Weight(
        config=origin.config,
        weight=bytes_.view(E4M3FN),
        weight_scale=weight.weight_scale,
        input_scale=weight.input_scale,
        layer=weight.layer,
    )


def why_not(weight: Fp8Weight) -> str | None:
    """Why Marlin's kernel cannot read a weight, or None; of a whole layer, the same on every rank."""
    if weight.weight.dtype != E4M3FN:
        return f"Marlin's kernel reads float8_e4m3fn, got {str(weight.weight.dtype).removeprefix('torch.')}"
    block, K = weight.config.block, weight.layer.K
    if block is not None and block[1] < K and block[1] not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        return f"Marlin's kernel reads blocks of {sizes} inputs or one of all, got {block[1]}"
    return None


def _rounded(weight: Fp8Weight, dtype: torch.dtype, exponent_bias: bool) -> Tensor:
    """Scales (G, N), each written out for its outputs and rounded.

    The factor first, while the scale is wide: a small scale would lose bits as a subnormal fp16.
    """
    codes, N = weight.codes(), weight.layer.N
    stored = (codes.scales.expand(N, -1) if codes.n_group is None else codes.scales[codes.n_group]).T.double()
    exact = stored.reciprocal() if codes.divide else stored
    exact = exact * 2.0 ** (EXPONENT_BIAS[dtype] if exponent_bias else 0)
    rounded = exact.to(dtype)
    times = f" * 2**{EXPONENT_BIAS[dtype]}" if exponent_bias else ""
    name = named(weight.layer.name or "Fp8Weight", f"weight_scale{times}")
    remedy, source = _remedy(dtype, exponent_bias), weight.weight_scale.dtype
    check_cast(name, exact, rounded, tiny=True, remedy=remedy, stored=source)
    return rounded


def _remedy(dtype: torch.dtype, exponent_bias: bool) -> str:
    if dtype == torch.float16:
        return "pack for bfloat16 activations, whose range is that of float32"
    if exponent_bias:
        return "pack with exponent_bias=False, for a kernel that applies the factor itself"
    return "leave this layer as it is stored: no scale of Marlin's holds the value"
