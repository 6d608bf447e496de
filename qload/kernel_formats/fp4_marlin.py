"""NVFP4 and MXFP4 in Marlin's order: e2m1 codes where 4-bit integers would be, scales of one byte.

    qweight       int32           (K/16, 2*N)  e2m1 codes in `layouts.marlin`
    scales        e4m3fn, e8m0    (K/g, N)     in the order of the kernel's generation; of NVFP4 (g = 16)
                                               s0e5m3 bytes, e4m3fn in name alone; of MXFP4 (g = 32) exponents
    global_scale  see below       (1,)         of NVFP4
    second_scale  fp32            () or (P,)   the checkpoint's own, from which global_scale was rounded
    input_scale   fp32            () or (P,)   of the activations, as it is stored; absent where it is not

    NVFP4:  w[n, k] = e2m1[code] * (s0e5m3[byte] * 2**-(7 + raised)) times or by second_scale
    MXFP4:  w[n, k] = e2m1[code] * 2**(byte - 127)

| | vLLM 0.11 | vLLM 0.33 |
|---|---|---|
| layout of `repack` | `marlin_vllm_0_11`, and `marlin` | `marlin_vllm_0_33` |
| scales | two groups share a row | each group has a row |
| global_scale | fp16 or bf16, as the activations | fp32 |
| scales raised for bf16 | by as little as the kernel needs | until the highest is above 224 |

The kernel shifts a code's bits into an fp16 or bf16, which makes it 2**14 or 2**126 too small, and multiplies
a sum by global_scale = second scale * 2**(14 - 7 - raised), or 2**(126 - 7 - raised). It takes the highest
bit of s0e5m3 for the highest of a bf16's exponent, so that below 2 a byte says nothing there but 0: such
scales are raised by a power of two, where all of them fit, and else refused. No field says `raised`: the
global scale beside the second one does, so that experts of one config may differ. MXFP4 is read with bf16
alone, and an exponent of 0, 2**-127, is 0 in the kernel. K and N are padded as in `kernel_formats.marlin`,
with bytes of 0.

Source: vLLM 0.11.0 and 0.33.0. Bytes are equal to theirs, but: 0.11 raises no scales; 0.33 writes 0 for
scales below 2**-6, which its kernel reads with fp16, and raises a share by its own highest scale.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import devices, spec
from qload.errors import ArgumentError, RepackError
from qload.formats import mxfp4, nvfp4
from qload.kernel_formats.fp4 import BITS, NAMES, Fp4
from qload.kernel_formats.fp4_scales import (
    EXPONENT_BIAS,
    SHIFT,
    VLLM_0_11,
    VLLM_0_33,
    Generation,
    global_scale,
    raised,
    unraised,
    why_not,
)
from qload.kernel_formats.integers import Origin
from qload.kernel_formats.marlin_shapes import padded
from qload.layouts import ClippedCodes, fp4, marlin
from qload.spec import Role, TensorSpec

SCALES = {nvfp4.GROUP: nvfp4.E4M3FN, mxfp4.GROUP: torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Fp4MarlinConfig(spec.Grouped, spec.Config):
    """Config of four-bit floats in the order of vLLM 0.11's Marlin kernel; ArgumentError for other groups.

    Attributes
    ----------
    group_size
        Inputs that share a scale: 16 (NVFP4) or 32 (MXFP4).
    divides
        Whether NVFP4's second scale divides, as compressed-tensors', or multiplies, as ModelOpt's.
    """

    name: ClassVar[str] = "fp4_marlin_vllm_0_11"

    group_size: int
    divides: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in SCALES:
            expected = "16 (NVFP4) or 32 (MXFP4)"
            raise ArgumentError(f"{self.name}: group_size", expected, str(self.group_size))


@dataclass(frozen=True)
class Fp4MarlinVllm033Config(Fp4MarlinConfig):
    """Config of four-bit floats in the order of vLLM 0.33's Marlin kernel; ArgumentError for other values.

    The further attributes are those of `Fp4MarlinConfig`.

    Attributes
    ----------
    dtype
        Of the activations: float16 or bfloat16, for which the scales and the global scale were written.
    """

    name: ClassVar[str] = "fp4_marlin_vllm_0_33"

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in EXPONENT_BIAS:
            raise ArgumentError(f"{self.name}: dtype", "torch.float16 or torch.bfloat16", str(self.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class Fp4MarlinWeight(spec.Weight):
    """An NVFP4 or MXFP4 weight in the order that vLLM 0.11's Marlin kernel reads.

    K and N are padded to whole thread blocks of the kernel. vLLM 0.12 and later read another order:
    `Fp4MarlinVllm033Weight`.

    Attributes
    ----------
    qweight
        e2m1 codes in the order `qload.layouts.marlin`: (K / 16, 2 * N), int32.
    scales
        Permuted bytes: (K / group_size, N), float8_e4m3fn by name and s0e5m3 by meaning (NVFP4), or
        float8_e8m0fnu (MXFP4).
    global_scale
        What the kernel multiplies by, rounded from the second scale: (1,), fp16 or bf16; None: MXFP4.
    second_scale
        The checkpoint's own, by which `dequantize` goes: () or (1,), or one a fused part, fp32; None: MXFP4.
    input_scale
        The checkpoint's own, as it is stored; None: not stored.
    """

    config: Fp4MarlinConfig
    qweight: Tensor
    scales: Tensor
    global_scale: Tensor | None = None
    second_scale: Tensor | None = None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "fp4_marlin_vllm_0_11"
    generation: ClassVar[Generation] = VLLM_0_11
    example: ClassVar[Fp4MarlinConfig] = Fp4MarlinConfig(nvfp4.GROUP)
    further: ClassVar[tuple[Fp4MarlinConfig, ...]] = (Fp4MarlinConfig(mxfp4.GROUP),)

    @classmethod
    def tensors(cls, config: Fp4MarlinConfig) -> tuple[TensorSpec, ...]:
        """Of the padded K and N."""
        fp32, generation = (torch.float32,), cls.generation
        specs = (TensorSpec("qweight", (torch.int32,), "K/16 N@64*2", Role.WORD), cls.scale_spec(config))
        if config.group_size == mxfp4.GROUP:
            return specs
        global_dtypes = (generation.global_dtype,) if generation.global_dtype else tuple(EXPONENT_BIAS)
        return (
            *specs,
            TensorSpec("global_scale", global_dtypes, "1", Role.SCALE),
            TensorSpec("second_scale", fp32, "P", Role.SCALE, divides=True),  # or is the inverse of one
            TensorSpec("input_scale", fp32, "P", Role.SCALE, optional=True, divides=True),
        )

    @classmethod
    def scale_spec(cls, config: Fp4MarlinConfig) -> TensorSpec:
        """The declaration of the scales for a `config`: columns of paired groups follow each other, uncut."""
        group = config.group_size
        pair = cls.generation.paired_groups * group
        if pair == group:
            return TensorSpec("scales", (SCALES[group],), f"K/{group} N@64", Role.WORD)
        axes, view = f"K@{pair}/{group} N@64!", f"K@{pair}/{pair} N@64*{pair // group}"
        return TensorSpec("scales", (SCALES[group],), axes, Role.WORD, view=view)

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the activations for which scales were written."""
        return torch.bfloat16 if self.global_scale is None else self.global_scale.dtype

    def plain_scales(self) -> Tensor:
        """Bytes (N, K / group_size) in plain order, without the padding."""
        (N, K), stored, paired = self.shape, self.scales.view(torch.uint8), self.generation.paired_groups
        rows = stored.reshape(stored.shape[0] // paired, paired * stored.shape[1])
        return self.generation.scale_order.undo(rows)[: self.config.groups(K), :N].T

    def group_scales(self) -> Tensor:
        """NVFP4's scales (N, K / 16) as they were before they were raised, float32."""
        assert self.global_scale is not None
        assert self.second_scale is not None
        stored, divides = fp4.from_s0e5m3(self.plain_scales()), self.config.divides
        return unraised(stored, self.global_scale, self.second_scale, divides, self.activation_dtype)

    def codes(self) -> spec.Codes:
        """The bits of each float, what they mean, and the product of both scales, without the padding."""
        N, K = self.shape
        packed = marlin.rows(BITS).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        if self.second_scale is None:
            scales = fp4.e8m0(self.plain_scales())
        else:
            parts, divides = self.layer.parts, self.config.divides
            scales = nvfp4.both_scales(self.group_scales(), self.second_scale, parts, divides=divides)
        return spec.Codes(
            bits=BITS,
            codes=codes.T,
            scales=scales,
            zeros=None,
            k_group=self.config.in_order(K, self.device),
            lookup=fp4.values(self.device),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Fp4MarlinVllm033Weight(Fp4MarlinWeight):
    """An NVFP4 or MXFP4 weight in the order that vLLM 0.33's Marlin kernel reads.

    The attributes are those of `Fp4MarlinWeight`, but for:

    Attributes
    ----------
    scales
        Permuted bytes, each group in a row of its own: (K / group_size, N), float8_e4m3fn by name and s0e5m3
        by meaning (NVFP4), or float8_e8m0fnu (MXFP4).
    global_scale
        The factor of the kernel, rounded from the second scale: (1,), fp32; None: MXFP4.
    """

    config: Fp4MarlinVllm033Config

    format: ClassVar[str] = "fp4_marlin_vllm_0_33"
    generation: ClassVar[Generation] = VLLM_0_33
    example: ClassVar[Fp4MarlinVllm033Config] = Fp4MarlinVllm033Config(nvfp4.GROUP)
    further: ClassVar[tuple[Fp4MarlinVllm033Config, ...]] = (Fp4MarlinVllm033Config(mxfp4.GROUP),)

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of the activations for which scales were written."""
        return self.config.dtype


def write(meant: Fp4, *, dtype: Any, whole: Fp4 | None = None) -> Fp4MarlinWeight:
    """Codes and scales in the order of vLLM 0.11's kernel; exact, or RepackError with the reason.

    `dtype`: float16 or bfloat16, of the activations. `whole`: the layer that this is a share of, which
    decides what is refused and raised.
    """
    return _write(meant, dtype, whole, Fp4MarlinWeight)


def write_vllm_0_33(meant: Fp4, *, dtype: Any, whole: Fp4 | None = None) -> Fp4MarlinWeight:
    """Codes and scales in the order of vLLM 0.33's kernel, as `write`."""
    return _write(meant, dtype, whole, Fp4MarlinVllm033Weight)


def _write(meant: Fp4, dtype: Any, whole: Fp4 | None, weight_type: type[Fp4MarlinWeight]) -> Fp4MarlinWeight:
    if not isinstance(dtype, torch.dtype) or dtype not in EXPONENT_BIAS:
        raise ArgumentError("dtype", "torch.float16 or torch.bfloat16, as the activations", str(dtype))
    generation, decides = weight_type.generation, whole or meant
    reason = why_not(decides, dtype, generation)
    if reason:
        raise RepackError(meant.source, generation.layout, reason)
    (N, K), names = (meant.layer.N, meant.layer.K), meant.names
    power = raised(decides, dtype, generation)
    config = replace(weight_type.example, group_size=names.group_size, divides=names.divides)
    if isinstance(config, Fp4MarlinVllm033Config):
        config = replace(config, dtype=dtype)
    Np, Kp = padded(N, K, names.group_size)
    codes = meant.unpack()
    if (Np, Kp) != (N, K):
        wide = torch.zeros(Kp, Np, dtype=torch.uint8, device=meant.scales.device)
        wide[:K, :N] = devices.plain(codes)
        codes = wide
    return weight_type(
        config=config,
        qweight=marlin.rows(BITS).pack(codes),
        scales=_scales(meant, power, (config.groups(Kp), Np), generation),
        global_scale=global_scale(decides, dtype, power, generation),
        second_scale=meant.second,
        input_scale=meant.inputs,
        layer=meant.layer,
    )


def read(weight: Fp4MarlinWeight) -> Fp4:
    """The inverse of `write`, bit for bit."""
    origin = weight.layer.origin
    if not isinstance(origin, Origin):
        reason = "it was made by hand, and nothing says which checkpoint's names it had"
        raise RepackError(weight.format, "fp4", reason)
    codes = weight.codes().codes.T
    if weight.second_scale is None:
        scales = weight.plain_scales().contiguous()
    else:
        scales = weight.group_scales().to(nvfp4.E4M3FN).contiguous()
    names, layer = NAMES[origin.weight_type], weight.layer
    return Fp4(names, lambda: codes, scales, weight.second_scale, weight.input_scale, layer)


def _scales(meant: Fp4, raised: int, shape: tuple[int, int], generation: Generation) -> Tensor:
    """The bytes (G, N) of the padded `shape` in the kernel's order."""
    bytes_ = meant.scales
    if meant.second is not None:
        bytes_ = fp4.s0e5m3((meant.scales.float() * 2.0 ** (SHIFT + raised)).half())
    wide = torch.zeros(shape, dtype=torch.uint8, device=bytes_.device)
    wide[: bytes_.shape[1], : bytes_.shape[0]] = bytes_.T
    return generation.scale_order.apply(wide).reshape(shape).view(SCALES[meant.names.group_size])
