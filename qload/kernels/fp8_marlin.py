"""FP8 weights in Marlin's order: bytes where 8-bit codes would be, scales in one of two dialects.

    qweight       int32       (K/16, 4*N)  e4m3fn bytes in `layouts.marlin`, as 8-bit codes
    scales        fp16, bf16  (G, N)       permuted; one row is one scale a column; times 2**8 (fp16) or
                                           2**120 (bf16) where `exponent_bias`
    weight_scale  fp32, ...   as stored    the checkpoint's own scales, from which `scales` were rounded

    w[n, k] = scales[k / g, n] * 2**-bias * e4m3fn(byte[k, n])

The kernel shifts a byte's bits into an fp16 or bf16, which makes its value 2**8 or 2**120 too small. vLLM
multiplies the scales by that beforehand (`exponent_bias`), TGI's kernel does it itself. K and N are padded
as in `kernels.marlin`, with bytes and scales of 0. Source: formats.md section 4, byte-equal to both.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import ArgumentError, CastError, DtypeError, ShapeError
from qload.kernels.marlin_shapes import padded
from qload.layouts import marlin
from qload.spec import Layer, Role, TensorSpec

EXPONENT_BIAS = {torch.float16: 8, torch.bfloat16: 120}
STORED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FP8MarlinConfig(spec.Grouped, spec.Config):
    """`group_size` -1: one scale a column; else rows of a block. `exponent_bias`: see the module."""

    name: ClassVar[str] = "fp8_marlin"

    group_size: int
    exponent_bias: bool

    def __post_init__(self) -> None:
        self.check_group_size()


@dataclass(frozen=True, eq=False, repr=False)
class FP8MarlinWeight(spec.Weight):
    """An e4m3fn weight in the order Marlin's kernel reads."""

    config: FP8MarlinConfig
    qweight: Tensor
    scales: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "fp8_marlin"
    example: ClassVar[FP8MarlinConfig] = FP8MarlinConfig(group_size=-1, exponent_bias=True)

    @classmethod
    def tensors(cls, config: FP8MarlinConfig) -> tuple[TensorSpec, ...]:
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
        codes = marlin.rows(8).unpack(self.qweight)[:K, :N]
        return spec.Codes(
            bits=8,
            codes=codes.T,
            scales=(scales * 2.0**-bias).T,
            zeros=None,
            k_group=self.config.in_order(K, codes.device),
            lookup=torch.arange(256, device=codes.device).to(torch.uint8).view(torch.float8_e4m3fn).float(),
        )


def fp8_to_marlin(
    weight: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    exponent_bias: bool,
    block: tuple[int, int] | None = None,
    name: str = "",
) -> FP8MarlinWeight:
    """e4m3fn (N, K) and its multiplying scales -> Marlin's order; scales are rounded once to `dtype`.

    Parameters
    ----------
    scale
        One for all: () or (1,) or (1, 1); one an output: (N,), (N, 1) or (1, N); with `block`:
        (ceil(N / rows), ceil(K / columns)).
    dtype
        float16 or bfloat16, of the activations.
    exponent_bias
        True: scales as vLLM's kernel takes them; False: as TGI's does.
    block
        (outputs, inputs) that share a scale.

    CastError where a scale is too large for `dtype`.
    """
    name = name or "weight"
    if weight.dtype != torch.float8_e4m3fn:
        raise DtypeError(name, ["float8_e4m3fn"], str(weight.dtype).removeprefix("torch."))
    if dtype not in EXPONENT_BIAS:
        raise ArgumentError("dtype", "torch.float16 or torch.bfloat16", str(dtype))
    N, K = weight.shape
    rows = _per_group(name, scale, N, K, block)
    config = FP8MarlinConfig(-1 if rows.shape[0] == 1 else block[1] if block else -1, exponent_bias)
    Np, Kp = padded(N, K, config.group_size)
    wide = torch.zeros(Kp, Np, dtype=torch.uint8, device=weight.device)
    wide[:K, :N] = weight.view(torch.uint8).T
    scales = torch.zeros(config.groups(Kp), Np, dtype=dtype, device=weight.device)
    scales[: rows.shape[0], :N] = _rounded(name, rows, dtype, exponent_bias)
    return FP8MarlinWeight(
        config=config,
        qweight=marlin.rows(8).pack(wide),
        scales=marlin.scales(scales.shape[0]).apply(scales),
        weight_scale=scale.clone(),
        layer=Layer((N,), K, (N, K), name),
    )


def fp8_from_marlin(weight: FP8MarlinWeight) -> tuple[Tensor, Tensor]:
    """The e4m3fn (N, K) and the scales that `fp8_to_marlin` was given, bit for bit."""
    bytes_ = weight.codes().codes.to(torch.uint8).contiguous()
    return bytes_.view(torch.float8_e4m3fn), weight.weight_scale.clone()


def _per_group(name: str, scale: Tensor, N: int, K: int, block: tuple[int, int] | None) -> Tensor:
    """Scales (G, N), repeated from whatever they cover."""
    if scale.dtype not in STORED:
        got = str(scale.dtype).removeprefix("torch.")
        raise DtypeError(f"{name}_scale", ["float32", "bfloat16", "float16"], got)
    if block is not None:
        n, k = block
        want = (-(-N // n), -(-K // k))
        if tuple(scale.shape) != want:
            raise ShapeError(f"{name}_scale", f"{want} = (N/{n}^, K/{k}^)", tuple(scale.shape))
        return scale.T.repeat_interleave(n, 1)[:, :N]
    if scale.numel() == 1 and scale.ndim <= 2:
        return scale.reshape(1, 1).expand(1, N)
    if tuple(scale.shape) not in ((N,), (N, 1), (1, N)):
        expected = f"(), (1,), ({N},), ({N}, 1) or (1, {N}); blocks of scales need `block`"
        raise ShapeError(f"{name}_scale", expected, tuple(scale.shape))
    return scale.reshape(1, N)


def _rounded(name: str, scales: Tensor, dtype: torch.dtype, exponent_bias: bool) -> Tensor:
    """The factor first, while the scale is wide: a small scale would lose bits as a subnormal fp16."""
    factor = 2.0 ** EXPONENT_BIAS[dtype] if exponent_bias else 1.0
    exact = scales.double() * factor
    rounded = exact.to(dtype)
    lost = torch.isfinite(exact) & ~torch.isfinite(rounded)
    if lost.any():
        source, target = (str(kind).removeprefix("torch.") for kind in (scales.dtype, dtype))
        times = f" * 2**{EXPONENT_BIAS[dtype]}" if exponent_bias else ""
        remedy = "pack for bfloat16 activations, whose range is that of float32"
        raise CastError(
            f"{name}_scale{times}", source, target, float(exact[lost][0]), int(lost.sum()), remedy
        )
    return rounded
