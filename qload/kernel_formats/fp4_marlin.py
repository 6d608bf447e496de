"""NVFP4 and MXFP4 in Marlin's order: e2m1 codes as 4-bit codes, and scales of one byte.

    qweight       int32           (K/16, 2*N)  e2m1 codes in `layouts.marlin`
    scales        e4m3fn, e8m0    (K/g, N)     in the order of the kernel's generation; NVFP4 (g = 16):
                                               s0e5m3 under the dtype e4m3fn; MXFP4 (g = 32): exponents
    global_scale  see below       (1,)         of NVFP4
    second_scale  fp32            () or (P,)   the checkpoint's own; global_scale was rounded from it
    input_scale   fp32            () or (P,)   scale of the activations, as stored; optional

    NVFP4:  w[n, k] = e2m1[code] * (s0e5m3[byte] * 2**-(7 + raised)) times or by second_scale
    MXFP4:  w[n, k] = e2m1[code] * 2**(byte - 127)

| | vLLM 0.11 | vLLM 0.33 |
|---|---|---|
| layout of `repack` | `marlin_vllm_0_11`, and `marlin` | `marlin_vllm_0_33` |
| scales | two groups share a row | each group has a row |
| global_scale | fp16 or bf16, as the activations | fp32 |
| scales raised for bf16 | by as little as the kernel needs | until the highest is above 224 |

The kernel shifts the bits of a code into an fp16 or bf16, which is then 2**14 or 2**126 too small. It
multiplies the sum by global_scale = second scale * 2**(14 - 7 - raised), or 2**(126 - 7 - raised).

s0e5m3 has no sign. It represents 2**7 times an e4m3fn scale exactly: for fp16 from 2**-9 to 448. For bf16 the
kernel takes the highest bit of s0e5m3 as the highest exponent bit, and reads only 0 and values of at least 2,
which is 2**-6 before the factor. Smaller scales are raised by a power of two if all scales then fit, else
refused. `raised` has no field: it follows from global_scale and second_scale, so that experts with equal
configs may differ in it. MXFP4 needs bf16; its exponent 0, 2**-127, is 0 in the kernel. K and N are padded as
in `kernel_formats.marlin`, with bytes of 0.

Every checkpoint format is converted to and from `Fp4`, so that the kernel's order is independent of the names
of tensors.

Source: the bytes of vLLM 0.11.0 and 0.33.0, and vLLM's maintainers on scales below the range of bf16 (pull
requests 34577 and 37502). Bytes are equal to vLLM's with these exceptions: 0.11 raises no scales; 0.33 writes
0 for scales below 2**-6, although its kernel reads them with fp16, and raises a share by its own highest
scale.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import frexp
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import devices, dtypes, spec
from qload.devices import LazyCodes
from qload.dtypes import STORED, TORCH
from qload.errors import ArgumentError, RepackError
from qload.formats import (
    CTMXFP4Weight,
    CTNVFP4Weight,
    GGUFWeight,
    MLXFloatWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    NVFP4Config,
    mx,
    nvfp4,
)
from qload.kernel_formats.marlin import pad_shape
from qload.layouts import ClippedCodes, Order, compressed_tensors, fp4, marlin, swizzle
from qload.layouts.packing import Packing
from qload.spec import Layer, Role, TensorSpec, Weight, named
from qload.spec.blocks import both_scales
from qload.spec.integers import Origin, pad_matrix, record_origin

FP4_BITS = 4
CODE_PACKING = compressed_tensors.rows(FP4_BITS, True)  # a word is four bytes of the checkpoint


@dataclass(frozen=True)
class Fp4TensorNames:
    """Group size and tensor names of a checkpoint format; "" for a tensor that the format lacks.

    `divides`: whether the second scale is a divisor. `ggml`: as in `Fp4MarlinConfig`.
    """

    group_size: int
    packed: str
    second_scale: str = ""
    input_scale: str = ""
    divides: bool = False
    scales: str = "weight_scale"
    ggml: bool = False


TENSOR_NAMES: dict[type[Weight], Fp4TensorNames] = {
    CTNVFP4Weight: Fp4TensorNames(
        nvfp4.GROUP, "weight_packed", "weight_global_scale", "input_global_scale", divides=True
    ),
    ModelOptNVFP4Weight: Fp4TensorNames(nvfp4.GROUP, "weight", "weight_scale_2", "input_scale"),
    CTMXFP4Weight: Fp4TensorNames(mx.GROUP, "weight_packed"),
}
MLX_TENSOR_NAMES = {  # by mode
    "mxfp4": Fp4TensorNames(mx.GROUP, "weight", scales="scales"),
    "nvfp4": Fp4TensorNames(nvfp4.GROUP, "weight", scales="scales"),
}
GGUF_TENSOR_NAMES = {  # by type; scales lie among the codes
    "MXFP4": Fp4TensorNames(mx.GROUP, "blocks", scales="mxfp4", ggml=True),
    "NVFP4": Fp4TensorNames(nvfp4.GROUP, "blocks", "scale", scales="nvfp4", ggml=True),
}


@dataclass(frozen=True, eq=False)
class Fp4:
    """w[n, k] = e2m1[code] * scales[n, k / group_size], times or by the second scale.

    Attributes
    ----------
    names
        Group size and tensor names of the checkpoint format.
    unpack
        Return the codes (K, N); not called by checks of what a layout supports.
    scales
        (N, G), float8_e4m3fn, or uint8 exponents (e8m0).
    second_scale, input_scale
        fp32; None: the checkpoint has none.
    layer
        The layer, with its `Origin`.
    """

    names: Fp4TensorNames
    unpack: Callable[[], LazyCodes | Tensor]
    scales: Tensor
    second_scale: Tensor | None
    input_scale: Tensor | None
    layer: Layer

    format: ClassVar[str] = "fp4"

    @property
    def source(self) -> str:
        """Format of the checkpoint weight, for messages."""
        assert isinstance(self.layer.origin, Origin)  # set by `read_checkpoint`
        return self.layer.origin.weight_type.format

    def full_name(self, name: str) -> str:
        """Return the name of a tensor with the layer's, for messages."""
        return named(self.layer.name or self.source, name)


def find_tensor_names(weight_type: type[Weight], config: Any) -> Fp4TensorNames:
    """Return group size and tensor names of a checkpoint format with a config."""
    if weight_type is GGUFWeight:
        return GGUF_TENSOR_NAMES[config.type]
    return MLX_TENSOR_NAMES[config.mode] if weight_type is MLXFloatWeight else TENSOR_NAMES[weight_type]


def read_checkpoint(weight: Weight) -> Fp4:
    """Convert a weight of a checkpoint format."""
    names, tensors = TENSOR_NAMES[type(weight)], weight.fields()
    assert isinstance(weight, CTNVFP4Weight | ModelOptNVFP4Weight | CTMXFP4Weight)
    if weight.config.swizzled:
        N, K = weight.shape
        reason = swizzle.find_padding(weight.weight_scale, N, K // names.group_size)
        if reason:
            raise RepackError(weight.format, "other layouts", reason)
    second = tensors.get(names.second_scale)
    if second is None and names.second_scale:
        second = torch.ones(1, device=weight.device)
    return Fp4(
        names,
        lambda: CODE_PACKING.packed(_view_as_words(tensors[names.packed])).T,
        weight.exponents if isinstance(weight, CTMXFP4Weight) else weight.plain_scales,
        second,
        tensors.get(names.input_scale),
        record_origin(weight),
    )


def restore_checkpoint(floats: Fp4, origin: Origin) -> Weight:
    """Restore the checkpoint weight."""
    names, config = TENSOR_NAMES[origin.weight_type], origin.config
    code_dtype, scales = torch.uint8, floats.scales
    if isinstance(config, MXFP4Config):
        code_dtype, scales = TORCH[config.codes], scales.view(TORCH[config.exponents])
    scales = swizzle.swizzle_scales(scales) if config.swizzled else scales
    stores_second = not isinstance(config, NVFP4Config) or config.second
    optional = {
        names.second_scale: floats.second_scale if stores_second else None,
        names.input_scale: floats.input_scale,
    }
    return origin.weight_type(
        config=config,
        layer=floats.layer,
        **{names.packed: CODE_PACKING.pack(floats.unpack().T).view(code_dtype), "weight_scale": scales},
        **{name: tensor for name, tensor in optional.items() if tensor is not None},
    )


def find_packed_tensor(weight: Weight) -> str:
    """Return the name of the tensor of codes of a checkpoint weight."""
    return TENSOR_NAMES[type(weight)].packed


def _view_as_words(packed: Tensor) -> Tensor:
    """View bytes (N, K / 2) as int32 words (N, K / 8); groups fill whole words."""
    dense = packed.contiguous()
    aligned = dense if dense.storage_offset() % torch.int32.itemsize == 0 else dense.clone()
    return aligned.view(torch.int32)


EXPONENT_BIAS = {torch.float16: 14, torch.bfloat16: 126}  # log2 of the factor that the kernel's codes lack
FLOAT32_BIAS = 127
SCALE_SHIFT = 7  # log2 of s0e5m3 by e4m3fn; normal values of e4m3fn then have the highest bit of s0e5m3
MAX_RAISE_POWER = 17  # from the lowest scale of e4m3fn, 2**-9, to below 448
MIN_BF16_SCALE, BF16_SCALE_LIMIT = 2.0**-6, 2.0**9
MAX_E4M3FN = 448.0
E4M3FN_SIGN, E4M3FN_NAN, E8M0_NAN = 0x80, 0x7F, 0xFF


@dataclass(frozen=True)
class Generation:
    """A generation of vLLM's Marlin kernel, by its order of FP4 scales and its global scale.

    Attributes
    ----------
    layout
        Name of the layout in `repack`.
    scale_order
        Order of the bytes of scales.
    groups_per_row
        Number of groups in a row of that order.
    global_scale_dtype
        Dtype of the global scale of NVFP4; None: that of the activations.
    raises_fully
        Whether NVFP4 scales are raised for bfloat16 as far as the range allows, or as little as needed.
    """

    layout: str
    scale_order: Order
    groups_per_row: int
    global_scale_dtype: torch.dtype | None
    raises_fully: bool


VLLM_0_11 = Generation("marlin_vllm_0_11", marlin.SCALES_OF_A_BYTE_PAIRED, 2, None, raises_fully=False)
VLLM_0_33 = Generation("marlin_vllm_0_33", marlin.SCALES_OF_A_BYTE, 1, torch.float32, raises_fully=True)


def find_unsupported(floats: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    """Return the reason if Marlin's kernel cannot read a layer with activations of `dtype`, else None.

    Codes are not read, so that every rank can check the whole layer.
    """
    if floats.second_scale is None:
        if dtype != torch.bfloat16:
            return "Marlin's kernel reads scales that are powers of two with bfloat16 alone, got float16"
        return describe_invalid_scales(floats)
    return (
        describe_invalid_scales(floats)
        or _find_range_conflict(floats, dtype, generation)
        or _find_global_scale_conflict(floats, floats.second_scale, dtype, generation)
    )


def choose_raise(floats: Fp4, dtype: torch.dtype, generation: Generation) -> int:
    """Return the power of two by which scales must be raised for the kernel to read them with `dtype`.

    It is 0 if the second scale is 0: all weights are 0, and the global scale could not encode the power.
    """
    if (
        dtype != torch.bfloat16
        or floats.second_scale is None
        or not bool(floats.second_scale.count_nonzero())
    ):
        return 0
    span = _find_scale_range(floats)
    if span is None:
        return 0
    lowest, highest = span
    needed = max(0, 1 - frexp(lowest / MIN_BF16_SCALE)[1])
    return max(needed, frexp(MAX_E4M3FN / highest)[1] - 1) if generation.raises_fully else needed


def compute_global_scale(
    floats: Fp4, dtype: torch.dtype, raised: int, generation: Generation
) -> Tensor | None:
    """Return the second scale times the factor that the kernel lacks, rounded once: (1,); None for MXFP4."""
    if floats.second_scale is None:
        return None
    exact = add_kernel_factor(floats.second_scale, floats.names.divides, dtype)[:1] * 2.0**-raised
    return exact.to(generation.global_scale_dtype or dtype)


def undo_raise(
    scales: Tensor, global_scale: Tensor, second_scale: Tensor, divides: bool, dtype: torch.dtype
) -> Tensor:
    """Convert s0e5m3 values (float32) back to NVFP4's stored `scales`.

    The ratio of second scale and global scale contains the power of two that raised them. `dtype`: of the
    activations.
    """
    ratio = add_kernel_factor(second_scale, divides, dtype)[:1] / global_scale.double()
    power = ratio.log2().round().nan_to_num(0, 0, 0).clamp(0, MAX_RAISE_POWER).long()
    bits = (FLOAT32_BIAS - SCALE_SHIFT - power).to(
        torch.int32
    ) << fp4.MANTISSA  # a power of two, without a sync
    return scales * bits.view(torch.float32)


def add_kernel_factor(second_scale: Tensor, divides: bool, dtype: torch.dtype) -> Tensor:
    """Multiply each part's second scale by the kernel's factor, as if no scale was raised; float64."""
    wide = second_scale.flatten().double()
    return (wide.reciprocal() if divides else wide) * 2.0 ** (EXPONENT_BIAS[dtype] - SCALE_SHIFT)


def _find_scale_range(floats: Fp4) -> tuple[float, float] | None:
    """Return the lowest and highest nonzero scale of NVFP4; None if all are 0."""
    scales = floats.scales.float()
    nonzero = scales[scales > 0]
    return (float(nonzero.min()), float(nonzero.max())) if nonzero.numel() else None


def _find_range_conflict(floats: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    span, name = _find_scale_range(floats), floats.full_name(floats.names.scales)
    if span is None or span[1] * 2.0 ** choose_raise(floats, dtype, generation) < BF16_SCALE_LIMIT:
        return None
    return (
        f"{name} goes from {span[0]:g} to {span[1]:g}; with bfloat16 Marlin's kernel reads scales from "
        f"{MIN_BF16_SCALE:g} to below {BF16_SCALE_LIMIT:g}, and no power of two brings all of them into this "
        "range: repack for float16 activations"
    )


def _find_global_scale_conflict(
    floats: Fp4, second_scale: Tensor, dtype: torch.dtype, generation: Generation
) -> str | None:
    """Return the reason if a global scale would need more than one rounding, or parts differ; else None."""
    second, name, divides = (
        second_scale.flatten(),
        floats.full_name(floats.names.second_scale),
        floats.names.divides,
    )
    power, target = choose_raise(floats, dtype, generation), generation.global_scale_dtype or dtype
    exact = add_kernel_factor(second, divides, dtype) * 2.0**-power
    rounded, unit = exact.to(target), torch.finfo(target).eps / 2
    valid = torch.isfinite(rounded) & ((rounded.double() - exact).abs() <= unit * exact.abs())
    if not bool(valid.all()):
        factor, short = f"2**{EXPONENT_BIAS[dtype] - SCALE_SHIFT - power}", str(target).removeprefix("torch.")
        term = f"1 / {name}" if divides else name
        return f"{term} of {float(second[~valid][0]):g} times {factor} overflows or loses bits as {short}"
    if bool((second != second[:1]).any()):
        values = ", ".join(f"{value:g}" for value in second.tolist())
        return f"{name} differs between fused parts ({values}), and Marlin's kernel reads one for all"
    return None


def describe_invalid_scales(floats: Fp4) -> str | None:
    """Return the reason against scales that are NaN or negative, else None."""
    stored, scales, names = floats.scales, floats.scales.view(torch.uint8), floats.names
    name = floats.full_name(names.scales)
    if floats.second_scale is None:
        nan = "2**127 in GGUF, and NaN in kernels" if names.ggml else "NaN"
        return describe_scales(name, stored, scales == E8M0_NAN, nan)
    nan = "0 in GGUF, and NaN in kernels" if names.ggml else "NaN"
    return describe_scales(name, stored, (scales & E4M3FN_NAN) == E4M3FN_NAN, nan) or describe_scales(
        name, stored, scales >= E4M3FN_SIGN, "negative, and the kernel's have no sign"
    )


def describe_scales(name: str, scales: Tensor, selected: Tensor, property_: str) -> str | None:
    """Report the number of `selected` scales (N, G) and the first of them; None if there are none."""
    indices = selected.nonzero()
    if not indices.numel():
        return None
    n, group = indices[0].tolist()
    count, value = f"{indices.shape[0]} of {selected.numel()}", float(scales[n, group].float())
    return (
        f"{count} scales of {name} are {property_}: the first, of output {n} and group {group}, is {value:g}"
    )


SCALE_DTYPES = {nvfp4.GROUP: nvfp4.E4M3FN, mx.GROUP: dtypes.float8_e8m0fnu}


@dataclass(frozen=True)
class Fp4MarlinConfig(spec.Grouped, spec.Config):
    """Config of four-bit floats in the order of vLLM 0.11's Marlin kernel; ArgumentError for other groups.

    Attributes
    ----------
    group_size
        Inputs that share a scale: 16 (NVFP4) or 32 (MXFP4).
    divides
        Whether NVFP4's second scale divides (compressed-tensors) or multiplies (ModelOpt).
    ggml
        Whether weights round as in ggml: the second scale multiplies products of code and scale, and no zero
        has a sign.
    """

    name: ClassVar[str] = "fp4_marlin_vllm_0_11"

    group_size: int
    divides: bool = False
    ggml: bool = field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.group_size not in SCALE_DTYPES:
            expected = "16 (NVFP4) or 32 (MXFP4)"
            raise ArgumentError(f"{self.name}: group_size", expected, str(self.group_size))


@dataclass(frozen=True)
class Fp4MarlinVllm033Config(Fp4MarlinConfig):
    """Config of four-bit floats in the order of vLLM 0.33's Marlin kernel; ArgumentError for other values.

    The further attributes are those of `Fp4MarlinConfig`.

    Attributes
    ----------
    dtype
        Dtype of the activations, float16 or bfloat16; scales and global scale depend on it.
    """

    name: ClassVar[str] = "fp4_marlin_vllm_0_33"

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in EXPONENT_BIAS:
            raise ArgumentError(f"{self.name}: dtype", "torch.float16 or torch.bfloat16", str(self.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class Fp4MarlinWeight(spec.Weight):
    """An NVFP4 or MXFP4 weight in the order of vLLM 0.11's Marlin kernel.

    K and N are padded to whole thread blocks. vLLM 0.12 and later use the order of
    `Fp4MarlinVllm033Weight`.

    Attributes
    ----------
    qweight
        e2m1 codes in the order `qload.layouts.marlin`: (K / 16, 2 * N), int32.
    scales
        Permuted bytes: (K / group_size, N), s0e5m3 under the dtype float8_e4m3fn (NVFP4), or float8_e8m0fnu
        (MXFP4).
    global_scale
        Factor of the kernel, rounded from the second scale: (1,), fp16 or bf16; None: MXFP4.
    second_scale
        The checkpoint's own, used by `dequantize`: () or (1,), or one per fused part, fp32; None: MXFP4.
    input_scale
        Scale of the activations, as stored in the checkpoint; None: not stored.
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
        """Declare the tensors for padded K and N."""
        fp32, generation = (dtypes.float32,), cls.generation
        specs = (TensorSpec("qweight", (dtypes.int32,), "K/16 N@64*2", Role.WORD), cls.scale_spec(config))
        if config.group_size == mx.GROUP:
            return specs
        of_activations = (dtypes.float16, dtypes.bfloat16)
        one = generation.global_scale_dtype
        global_dtypes = of_activations if one is None else (STORED[one],)
        return (
            *specs,
            TensorSpec("global_scale", global_dtypes, "1", Role.SCALE),
            TensorSpec("second_scale", fp32, "P", Role.SCALE, divides=True),  # a divisor or its inverse
            TensorSpec("input_scale", fp32, "P", Role.SCALE, optional=True, divides=True),
        )

    @classmethod
    def scale_spec(cls, config: Fp4MarlinConfig) -> TensorSpec:
        """Declare the scales for a `config`; paired groups are never cut apart."""
        group = config.group_size
        pair = cls.generation.groups_per_row * group
        if pair == group:
            return TensorSpec("scales", (SCALE_DTYPES[group],), f"K/{group} N@64", Role.WORD)
        axes, view = f"K@{pair}/{group} N@64!", f"K@{pair}/{pair} N@64*{pair // group}"
        return TensorSpec("scales", (SCALE_DTYPES[group],), axes, Role.WORD, view=view)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the activations that the scales were written for."""
        return torch.bfloat16 if self.global_scale is None else self.global_scale.dtype

    def plain_scales(self) -> Tensor:
        """Bytes (N, K / group_size) in plain order, without padding."""
        (N, K), stored, per_row = self.shape, self.scales.view(torch.uint8), self.generation.groups_per_row
        rows = stored.reshape(stored.shape[0] // per_row, per_row * stored.shape[1])
        return self.generation.scale_order.undo(rows)[: self.config.groups(K), :N].T

    def group_scales(self) -> Tensor:
        """Stored scales of NVFP4 (N, K / 16), float32, before any raise."""
        assert self.global_scale is not None
        assert self.second_scale is not None
        stored, divides = fp4.from_s0e5m3(self.plain_scales()), self.config.divides
        return undo_raise(stored, self.global_scale, self.second_scale, divides, self.activation_dtype)

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the product of both scales, without padding."""
        if self.second_scale is None:
            return as_fp4_codes(self, marlin.rows(FP4_BITS), fp4.e8m0(self.plain_scales()))
        return as_fp4_codes(self, marlin.rows(FP4_BITS), self.group_scales(), self.second_scale)


@dataclass(frozen=True, eq=False, repr=False)
class Fp4MarlinVllm033Weight(Fp4MarlinWeight):
    """An NVFP4 or MXFP4 weight in the order of vLLM 0.33's Marlin kernel.

    The other attributes are those of `Fp4MarlinWeight`.

    Attributes
    ----------
    scales
        Permuted bytes, one group per row: (K / group_size, N), s0e5m3 under the dtype float8_e4m3fn (NVFP4),
        or float8_e8m0fnu (MXFP4).
    global_scale
        Factor of the kernel, rounded from the second scale: (1,), fp32; None: MXFP4.
    """

    config: Fp4MarlinVllm033Config

    format: ClassVar[str] = "fp4_marlin_vllm_0_33"
    generation: ClassVar[Generation] = VLLM_0_33
    example: ClassVar[Fp4MarlinVllm033Config] = Fp4MarlinVllm033Config(nvfp4.GROUP)
    further: ClassVar[tuple[Fp4MarlinVllm033Config, ...]] = (Fp4MarlinVllm033Config(mx.GROUP),)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the activations that the scales were written for."""
        return self.config.dtype


def as_codes(weight: Any, packing: Packing, scales: Tensor, lookup: Tensor) -> spec.Codes:
    """Return the 4-bit codes of a `weight` in the order of `packing`, without padding; `scales`: (N, G)."""
    N, K = weight.shape
    packed = packing.packed(weight.qweight)
    codes = packed if packed.shape == (K, N) else ClippedCodes(packed, (K, N))
    return spec.Codes(
        bits=FP4_BITS,
        codes=codes.T,
        scales=scales,
        zeros=None,
        k_group=weight.config.in_order(K, weight.device),
        lookup=lookup,
    )


def as_fp4_codes(
    weight: Any, packing: Packing, scales: Tensor, second_scale: Tensor | None = None
) -> spec.Codes:
    """Return e2m1 codes in the order of `packing`, without padding, by one scale or both."""
    config, parts, lookup = weight.config, weight.layer.parts, fp4.values(weight.device)
    if config.ggml:
        codes = as_codes(weight, packing, scales, lookup + 0.0)  # -0 becomes 0
        factors = None if second_scale is None else spec.expand_parts(second_scale, parts)[:, None]
        return replace(codes, row_factors=factors)
    if second_scale is not None:
        scales = both_scales(scales, second_scale, parts, divides=config.divides)
    return as_codes(weight, packing, scales, lookup)


def from_fp4(
    floats: Fp4,
    *,
    dtype: Any,
    whole: Fp4 | None = None,
    weight_type: type[Fp4MarlinWeight] = Fp4MarlinWeight,
) -> Fp4MarlinWeight:
    """Convert exactly, with padding, or raise RepackError.

    `dtype`: float16 or bfloat16, of the activations. `whole`: the whole layer if this is a share of it; it
    decides refusals and the raise. `weight_type`: that of the kernel's generation.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in EXPONENT_BIAS:
        raise ArgumentError("dtype", "torch.float16 or torch.bfloat16, as the activations", str(dtype))
    generation, layer = weight_type.generation, whole or floats
    reason = find_unsupported(layer, dtype, generation)
    if reason:
        raise RepackError(floats.source, generation.layout, reason)
    (N, K), names = (floats.layer.N, floats.layer.K), floats.names
    power = choose_raise(layer, dtype, generation)
    config = replace(weight_type.example, group_size=names.group_size, divides=names.divides, ggml=names.ggml)
    if isinstance(config, Fp4MarlinVllm033Config):
        config = replace(config, dtype=dtype)
    Np, Kp = pad_shape(N, K, names.group_size)
    codes = floats.unpack()
    if (Np, Kp) != (N, K):
        codes = pad_matrix(devices.plain(codes), Kp, Np)
    return weight_type(
        config=config,
        qweight=marlin.rows(FP4_BITS).pack(codes),
        scales=_order_scales(floats, power, (config.groups(Kp), Np), generation),
        global_scale=compute_global_scale(layer, dtype, power, generation),
        second_scale=floats.second_scale,
        input_scale=floats.input_scale,
        layer=floats.layer,
    )


def to_fp4(weight: Any) -> Fp4:
    """Convert a weight of a kernel's order back, bit for bit; RepackError without an origin."""
    origin = weight.layer.origin
    if not isinstance(origin, Origin):
        reason = "it was built by hand, so that the tensor names of its checkpoint are unknown"
        raise RepackError(weight.format, "fp4", reason)
    codes = weight.codes().codes.T
    if weight.second_scale is None:
        scales = weight.plain_scales().contiguous()
    else:
        scales = weight.group_scales().to(TORCH[nvfp4.E4M3FN]).contiguous()
    names, layer = find_tensor_names(origin.weight_type, origin.config), weight.layer
    return Fp4(names, lambda: codes, scales, weight.second_scale, weight.input_scale, layer)


def _order_scales(floats: Fp4, raised: int, shape: tuple[int, int], generation: Generation) -> Tensor:
    """Return the bytes of scales (G, N), padded to `shape`, in the kernel's order."""
    stored = floats.scales
    if floats.second_scale is not None:
        stored = fp4.s0e5m3((floats.scales.float() * 2.0 ** (SCALE_SHIFT + raised)).half())
    padded = pad_matrix(stored.T, *shape)
    return (
        generation.scale_order.apply(padded).reshape(shape).view(TORCH[SCALE_DTYPES[floats.names.group_size]])
    )
