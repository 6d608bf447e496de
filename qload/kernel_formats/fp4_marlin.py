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

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import frexp
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import devices, spec
from qload.devices import LazyCodes
from qload.errors import ArgumentError, RepackError
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight, MXFP4Config, mx, nvfp4
from qload.kernel_formats.marlin import padded
from qload.kernel_formats.plain_integers import Origin, with_origin
from qload.layouts import ClippedCodes, Order, compressed_tensors, fp4, marlin
from qload.spec import Layer, Role, TensorSpec, Weight, named

FP4_BITS = 4
WORDS = compressed_tensors.rows(FP4_BITS, True)  # four bytes are a word, whose eight codes lie as theirs


@dataclass(frozen=True)
class Fp4Names:
    """What a type of weight calls its tensors; "" where it has no such one.

    `divides`: whether the second scale is the inverse of a factor.
    """

    group_size: int
    packed: str
    second: str = ""
    inputs: str = ""
    divides: bool = False


NAMES: dict[type[Weight], Fp4Names] = {
    CTNVFP4Weight: Fp4Names(
        nvfp4.GROUP, "weight_packed", "weight_global_scale", "input_global_scale", divides=True
    ),
    ModelOptNVFP4Weight: Fp4Names(nvfp4.GROUP, "weight", "weight_scale_2", "input_scale"),
    CTMXFP4Weight: Fp4Names(mx.GROUP, "weight_packed"),
}


@dataclass(frozen=True, eq=False)
class Fp4:
    """w[n, k] = e2m1[code] * scales[n, k / group_size], times or by the second scale.

    `unpack` makes the codes (K, N), which whoever only asks what fits does not need. `scales` (N, G) are
    float8_e4m3fn, or uint8 exponents (e8m0); `second` and `inputs`, of the activations, fp32 or None.
    """

    names: Fp4Names
    unpack: Callable[[], LazyCodes | Tensor]
    scales: Tensor
    second: Tensor | None
    inputs: Tensor | None
    layer: Layer

    format: ClassVar[str] = "fp4"

    @property
    def source(self) -> str:
        """The format it was read from, at first, for messages."""
        assert isinstance(self.layer.origin, Origin)  # every reader says
        return self.layer.origin.weight_type.format

    def full(self, name: str) -> str:
        """A tensor's name in messages."""
        return named(self.layer.name or self.source, name)


def read_fp4(weight: Weight) -> Fp4:
    """A checkpoint's layer."""
    names, held = NAMES[type(weight)], weight.fields()
    return Fp4(
        names,
        lambda: WORDS.packed(_in_words(held[names.packed])).T,
        weight.exponents if isinstance(weight, CTMXFP4Weight) else held["weight_scale"],
        held.get(names.second),
        held.get(names.inputs),
        with_origin(weight),
    )


def restore_fp4(meant: Fp4, origin: Origin) -> Weight:
    """As the checkpoint had it."""
    names, config = NAMES[origin.weight_type], origin.config
    codes, scales = torch.uint8, meant.scales
    if isinstance(config, MXFP4Config):
        codes, scales = config.codes, scales.view(config.exponents)
    tensors = {
        names.packed: WORDS.pack(meant.unpack().T).view(codes),
        "weight_scale": scales,
        names.second: meant.second,
        names.inputs: meant.inputs,
    }
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return origin.weight_type(config=origin.config, layer=meant.layer, **held)


def packed_name(weight: Weight) -> str:
    """The tensor of codes, which decide nothing."""
    return NAMES[type(weight)].packed


def _in_words(packed: Tensor) -> Tensor:
    """Bytes (N, K / 2) as int32 words (N, K / 8); groups fill whole words."""
    dense = packed.contiguous()
    aligned = dense if dense.storage_offset() % torch.int32.itemsize == 0 else dense.clone()
    return aligned.view(torch.int32)


EXPONENT_BIAS = {torch.float16: 14, torch.bfloat16: 126}  # by which the kernel reads a code too small
EXPONENT = 127  # of 1 in float32
SHIFT = 7  # of a scale, so that what is normal in e4m3fn has the highest bit of s0e5m3
MAX_RAISE = 17  # powers of two, from the lowest scale of e4m3fn, 2**-9, to below 448
LOWEST, BEYOND = 2.0**-6, 2.0**9  # scales that bf16 reads: from the one up to the other
HIGHEST = 448.0  # of e4m3fn, up to which vLLM 0.33 raises the highest scale of a layer
SIGN, NAN = 0x80, 0x7F  # bytes of e4m3fn
NO_EXPONENT = 0xFF  # NaN of e8m0


@dataclass(frozen=True)
class Generation:
    """A generation of vLLM's Marlin kernel, and how it reads the scales of four-bit floats.

    Attributes
    ----------
    layout
        The id of the order, as `repack` takes it.
    scale_order
        Where the byte of each scale lies.
    paired_groups
        Groups of inputs that share a row of the order.
    global_dtype
        The dtype of NVFP4's global scale; None: that of the activations.
    raises_all
        Whether NVFP4's scales are raised for bfloat16 as far as their range allows, or as far as they need.
    """

    layout: str
    scale_order: Order
    paired_groups: int
    global_dtype: torch.dtype | None
    raises_all: bool


VLLM_0_11 = Generation("marlin_vllm_0_11", marlin.SCALES_OF_A_BYTE_PAIRED, 2, None, raises_all=False)
VLLM_0_33 = Generation("marlin_vllm_0_33", marlin.SCALES_OF_A_BYTE, 1, torch.float32, raises_all=True)


def why_not(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    """Why Marlin's kernel cannot read a layer with activations of `dtype`, or None.

    Codes are not looked at, so that all ranks can be asked of the whole layer.
    """
    scales = meant.scales.view(torch.uint8)
    if meant.second is None:
        if dtype != torch.bfloat16:
            return "Marlin's kernel reads scales that are powers of two with bfloat16 alone, got float16"
        return _found(meant, scales == NO_EXPONENT, "NaN")
    return (
        _found(meant, (scales & NAN) == NAN, "NaN")
        or _found(meant, scales >= SIGN, "negative, and Marlin's have no sign")
        or _why_not_raised(meant, dtype, generation)
        or _why_no_global_scale(meant, dtype, generation)
    )


def raised(meant: Fp4, dtype: torch.dtype, generation: Generation) -> int:
    """The power of two by which scales are raised, so that `dtype` reads all that are not 0.

    0 where the second scale is 0: such a global scale tells no power of two, and all weights are 0.
    """
    if dtype != torch.bfloat16 or meant.second is None or not bool(meant.second.count_nonzero()):
        return 0
    span = _span(meant)
    if span is None:
        return 0
    lowest, highest = span
    needed = max(0, 1 - frexp(lowest / LOWEST)[1])
    return max(needed, frexp(HIGHEST / highest)[1] - 1) if generation.raises_all else needed


def global_scale(meant: Fp4, dtype: torch.dtype, raised: int, generation: Generation) -> Tensor | None:
    """The second scale times the factor that the kernel leaves out, rounded once: (1,)."""
    if meant.second is None:
        return None
    exact = lacking(meant.second, meant.names.divides, dtype)[:1] * 2.0**-raised
    return exact.to(generation.global_dtype or dtype)


def unraised(
    scales: Tensor, global_scale: Tensor, second: Tensor, divides: bool, dtype: torch.dtype
) -> Tensor:
    """Return s0e5m3 values (float32) as NVFP4's `scales` were stored.

    The power of two that raised them is missing in the global scale. `dtype`: of the activations.
    """
    ratio = lacking(second, divides, dtype)[:1] / global_scale.double()
    power = ratio.log2().round().nan_to_num(0, 0, 0).clamp(0, MAX_RAISE).long()
    bits = (EXPONENT - SHIFT - power).to(torch.int32) << fp4.MANTISSA  # a power of two, made on the device
    return scales * bits.view(torch.float32)


def lacking(second: Tensor, divides: bool, dtype: torch.dtype) -> Tensor:
    """The second scale of each part times what the kernel lacks, before any scale is raised: float64."""
    wide = second.flatten().double()
    return (wide.reciprocal() if divides else wide) * 2.0 ** (EXPONENT_BIAS[dtype] - SHIFT)


def _span(meant: Fp4) -> tuple[float, float] | None:
    """The lowest and the highest of NVFP4's scales that are not 0; None: all are 0."""
    scales = meant.scales.float()
    held = scales[scales > 0]
    return (float(held.min()), float(held.max())) if held.numel() else None


def _why_not_raised(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    span = _span(meant)
    if span is None or span[1] * 2.0 ** raised(meant, dtype, generation) < BEYOND:
        return None
    return (
        f"{meant.full('weight_scale')} goes from {span[0]:g} to {span[1]:g}; with bfloat16 Marlin's kernel "
        f"reads scales from {LOWEST:g} to below {BEYOND:g}, and one power of two does not bring all of them "
        "there: repack for float16 activations"
    )


def _why_no_global_scale(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    """A value that costs more than one rounding, or parts that differ."""
    assert meant.second is not None
    second, name = meant.second.flatten(), meant.full(meant.names.second)
    power, rounded_to = raised(meant, dtype, generation), generation.global_dtype or dtype
    exact = lacking(meant.second, meant.names.divides, dtype) * 2.0**-power
    got, unit = exact.to(rounded_to), torch.finfo(rounded_to).eps / 2
    held = torch.isfinite(got) & ((got.double() - exact).abs() <= unit * exact.abs())
    if not bool(held.all()):
        times, short = f"2**{EXPONENT_BIAS[dtype] - SHIFT - power}", str(rounded_to).removeprefix("torch.")
        what = f"1 / {name}" if meant.names.divides else name
        return f"{what} of {float(second[~held][0]):g} times {times} overflows or loses bits as {short}"
    if bool((second != second[:1]).any()):
        told = ", ".join(f"{value:g}" for value in second.tolist())
        return f"{name} differs between fused parts ({told}), and Marlin's kernel reads one for all"
    return None


def _found(meant: Fp4, wrong: Tensor, what: str) -> str | None:
    """How many scales are wrong, and the first of them."""
    places = wrong.nonzero()
    if not places.numel():
        return None
    n, group = places[0].tolist()
    count, name = f"{places.shape[0]} of {wrong.numel()}", meant.full("weight_scale")
    value = float(meant.scales[n, group].float())
    return f"{count} scales of {name} are {what}: the first, of output {n} and group {group}, is {value:g}"


SCALES = {nvfp4.GROUP: nvfp4.E4M3FN, mx.GROUP: torch.float8_e8m0fnu}


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
    further: ClassVar[tuple[Fp4MarlinConfig, ...]] = (Fp4MarlinConfig(mx.GROUP),)

    @classmethod
    def tensors(cls, config: Fp4MarlinConfig) -> tuple[TensorSpec, ...]:
        """Of the padded K and N."""
        fp32, generation = (torch.float32,), cls.generation
        specs = (TensorSpec("qweight", (torch.int32,), "K/16 N@64*2", Role.WORD), cls.scale_spec(config))
        if config.group_size == mx.GROUP:
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
        packed = marlin.rows(FP4_BITS).packed(self.qweight)
        codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
        if self.second_scale is None:
            scales = fp4.e8m0(self.plain_scales())
        else:
            parts, divides = self.layer.parts, self.config.divides
            scales = nvfp4.both_scales(self.group_scales(), self.second_scale, parts, divides=divides)
        return spec.Codes(
            bits=FP4_BITS,
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
    further: ClassVar[tuple[Fp4MarlinVllm033Config, ...]] = (Fp4MarlinVllm033Config(mx.GROUP),)

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
        qweight=marlin.rows(FP4_BITS).pack(codes),
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
