"""Quantizers of plain weights: FP8, EETQ and bitsandbytes.

EETQ, bit for bit as EETQ 465e972 quantizes an fp16 weight:

    s[n] = fp16(max |w[n]| / 128)
    code[n, k] = w[n, k] / (max |w[n]| / 128) in float32, rounded half away from zero, within -128 and 127

    A small scale loses bits, as in EETQ. An output with a scale of 0 is refused unless it is all zeros.

bitsandbytes, bit for bit as the CPU path of version 0.50.2. In 4 bits, in blocks of the flattened weight:

    absmax[b] = max |w| of the block, float32
    code[e] = the entry of the table nearest to w[e] * (1 / absmax), in float32; the lower of two nearest

    A short last block divides by absmax instead, with a minimum of 1e-38. FP4 has two zeros: code 8 for
    values above 0, code 0 for the rest.

    double_quant: absmax minus its mean is quantized too, to 8 bits in blocks of 256, by the same rule, and
    the typed weight has the dequantized scales. (The CPU path searches on a grid, and takes a neighbour in
    some 0.2 % of the scales.)

In int8, per output, from the weight in fp16:

    SCB[n] = max |w[n]|,   code[n, k] = w[n, k] * (127 / SCB[n]) in float32, rounded half to even

bitsandbytes on a GPU may choose the other of two nearest codes.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.errors import (
    ArgumentError,
    CastError,
    MismatchError,
    ShapeError,
    check_fields,
    check_type,
    check_values,
    checked,
)
from qload.formats import (
    BNB4Config,
    BNB4Weight,
    BNBConfig,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    EETQConfig,
    EETQWeight,
    Fp8Config,
    Fp8Weight,
)
from qload.layouts import eetq
from qload.layouts.bnb import TABLES, dynamic_map
from qload.spec import Layer, Weight, named
from qload.spec.casts import check_cast

E4M3FN = torch.float8_e4m3fn
EETQ_LEVELS = 128
BNB4_WEIGHTS: dict[str, type[BNB4Weight]] = {"nf4": BNBNF4Weight, "fp4": BNBFP4Weight}
BNB4_MIN_ABSMAX = 1e-38
BNB4_SCALES_PER_BLOCK = 256  # of scales that are quantized too
FP8_REMEDY = "leave this layer plain: its values are beyond float32"
EETQ_REMEDY = "leave this layer plain: its largest or its smallest outputs have no scale in fp16"
BNB4_REMEDY = "leave this layer plain: bitsandbytes quantizes from float32"
BNB_INT8_REMEDY = "leave this layer plain: bitsandbytes quantizes from fp16"


@runtime_checkable
class Quantizer(Protocol):
    """Quantizer of one plain layer, or one part of a fused one, into a typed weight.

    Equal values have to give equal weights, on every rank.

    per_share
        Outputs are quantized one by one, so that a share of outputs, quantized alone, is the share of the
        quantized whole. A large layer is then quantized in blocks of outputs, which takes less memory.
    """

    @property
    def format(self) -> str:
        """Name of the format."""

    @property
    def per_share(self) -> bool:
        """True if each output is quantized independently of the others, as described in the class."""

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Weight:
        """Quantize a float `weight` (N, K) as a typed weight of `layer`, which has one part.

        `dtype` is that of the activations, for a format with scales in it. A weight that cannot be quantized
        is refused with a QloadError that names `layer.name`: see `check_finite`. The config of the result
        declares no tensor that the result lacks, except optional ones.
        """


def check_finite(weight: Tensor, name: str) -> None:
    """Raise MismatchError for NaN and infinity in the weight of layer `name`: neither has a scale."""
    wrong = (~torch.isfinite(weight)).nonzero()
    if wrong.numel():
        n, k = wrong[0].tolist()
        got = f"{weight[n, k]:g} at ({n}, {k}) ({wrong.shape[0]} in all)"
        raise MismatchError(named(name, "weight"), "cannot be quantized", "finite values", got)


def _checked_cast(weight: Tensor, dtype: torch.dtype, name: str, remedy: str) -> Tensor:
    """Cast a weight (N, K) to the float type that it is quantized from.

    Refuses an empty weight, values that are not finite or overflow, and outputs that would become zeros.
    """
    full = named(name, "weight")
    if 0 in weight.shape:
        raise ShapeError(full, "(N, K), each at least 1, to be quantized", weight.shape)
    check_values(full, weight)
    check_finite(weight, name)
    cast = weight.to(dtype)
    if torch.promote_types(weight.dtype, dtype) != dtype:
        check_cast(full, weight, cast, tiny=False, remedy=remedy)
        _check_underflow(full, weight.abs().amax(1), cast.abs().amax(1), remedy)
    return cast


def _check_underflow(tensor: str, before: Tensor, after: Tensor, remedy: str) -> None:
    """Raise CastError if the magnitude of an output, one entry each, became 0."""
    lost = before[(before > 0) & (after == 0)]
    if lost.numel():
        source, target = (str(dtype).removeprefix("torch.") for dtype in (before.dtype, after.dtype))
        raise CastError(tensor, source, target, float(lost[0]), lost.numel(), remedy)


@dataclass(frozen=True)
class Fp8Quantizer:
    """Quantizer to FP8 (e4m3fn) by absolute maxima: scale = absmax / 448 in float32, at least 2**-126.

    Attributes
    ----------
    per
        Granularity of the scales: the "tensor", a "channel" (one output), or a "block".
    block
        (outputs, inputs) of a block; the last one may be short.
    activation_scale_ub
        Upper bound of activation scales, recorded in the weight's config.

    Examples
    --------
    >>> import torch
    >>> from qload import Fp8Quantizer
    >>> from qload.spec import Layer
    >>> plain = torch.tensor([[448.0, 1.0], [3.0, -7.0]])
    >>> weight = Fp8Quantizer().quantize(plain, Layer((2,), 2, (2, 2), "up"), torch.bfloat16)
    >>> weight.weight_scale
    tensor([[1.0000],
            [0.0156]])
    >>> weight.dequantize()
    tensor([[448.,   1.],
            [  3.,  -7.]])
    """

    per: Literal["tensor", "channel", "block"] = "channel"
    block: tuple[int, int] | None = None
    activation_scale_ub: float | None = None

    format: ClassVar[str] = Fp8Weight.format

    def __post_init__(self) -> None:
        check_type("fp8: per", self.per, str)
        self.config()  # checks the block

    @property
    def per_share(self) -> bool:
        """True if each output has a scale of its own."""
        return self.per == "channel"

    def config(self) -> Fp8Config:
        """Return the config of the quantized weights."""
        return Fp8Config(self.per, self.block, activation_scale_ub=self.activation_scale_ub)

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Fp8Weight:
        """Quantize a float `weight` (N, K) as a typed weight of `layer`.

        Scales are float32 for any `dtype`. NaN and infinity are refused, see `check_finite`.
        """
        values = _checked_cast(weight, torch.float32, layer.name, FP8_REMEDY)
        N, K = values.shape
        rows, columns = {"tensor": (N, K), "channel": (1, K)}.get(self.per) or self.block or (1, 1)
        blocks = pad(values.abs(), (0, -K % columns, 0, -N % rows))
        absmax = blocks.reshape(-(-N // rows), rows, -(-K // columns), columns).amax((1, 3))
        scale = (absmax / torch.finfo(E4M3FN).max).clamp(min=torch.finfo(torch.float32).tiny)
        scale_of_each = scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
        quantized = Fp8Weight(
            config=self.config(),
            weight=saturated(values / scale_of_each, E4M3FN),
            weight_scale=scale.reshape(1) if self.per == "tensor" else scale,
        )
        return replace(quantized, layer=layer)


class Requantized(NamedTuple):
    """A weight, and its largest absolute change in each part, float32."""

    weight: Fp8Weight
    error: Tensor


@checked
def requantize(weight: Fp8Weight) -> Requantized:
    """Requantize all fused parts with the largest of their scales, for kernels that take one scale.

    Parts with a smaller scale lose bits, which `error` reports. No load does this by itself.
    """
    weight.check_values()
    config, parts = weight.config, weight.layer.parts
    if config.per not in ("tensor", "parts"):
        raise ArgumentError("weight", "an Fp8Weight with one scale a part", f"one scale a {config.per}")
    scales = weight.weight_scale.float().flatten()
    size = 1 / scales.abs() if config.divide else scales.abs()
    if not bool((torch.isfinite(scales) & torch.isfinite(size) & (size > 0)).all()):
        name = named(weight.layer.name or "Fp8Weight", "weight_scale")
        raise MismatchError(
            name, "there is no largest scale", "finite scales, none of them 0", str(scales.tolist())
        )
    largest = int(size.argmax())
    before = weight.dequantize()
    codes = before * scales[largest] if config.divide else before / scales[largest]
    requantized = replace(
        weight,
        weight=saturated(codes, weight.weight.dtype),
        weight_scale=weight.weight_scale[largest].expand_as(weight.weight_scale).clone(),
    )
    change = (requantized.dequantize() - before).abs().nan_to_num(nan=0, posinf=torch.inf)
    return Requantized(requantized, torch.stack([part.max() for part in torch.split(change, list(parts))]))


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest float8, and to the largest beyond it; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


@dataclass(frozen=True)
class EETQQuantizer:
    """Quantizer to EETQ: 8 bits, one scale per output."""

    format: ClassVar[str] = "eetq"
    per_share: ClassVar[bool] = True

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype = torch.float16) -> EETQWeight:
        """Quantize a float `weight` (N, K) as a weight of `layer`; ShapeError unless 64 divides N and K.

        Scales are fp16 for any `dtype`, as the kernel takes no other.
        """
        _check_tiles(tuple(weight.shape), layer)
        values = _checked_cast(weight, torch.float32, layer.name, EETQ_REMEDY)
        steps = values.abs().amax(1) / EETQ_LEVELS
        scales, name = steps.half(), named(layer.name, "weight_scales")
        check_cast(name, steps, scales, tiny=False, remedy=EETQ_REMEDY)
        _check_underflow(name, steps, scales, EETQ_REMEDY)
        codes = _round_half_away(values / steps.where(steps > 0, 1)[:, None])
        codes = codes.clamp(-EETQ_LEVELS, EETQ_LEVELS - 1)
        return EETQWeight(
            config=EETQConfig(),
            weight=eetq.pack((codes + EETQ_LEVELS).to(torch.int32)),
            weight_scales=scales,
            layer=layer,
        )


def _check_tiles(shape: tuple[int, ...], layer: Layer) -> None:
    """Raise ShapeError unless the layer consists of whole tiles, and its share too, with a remedy."""
    remedy = f"remedy   cut {layer.whole} into fewer shares, or leave this layer plain"
    for size, hint in ((layer.whole, ""), (shape, remedy)):
        if any(length % eetq.TILE for length in size):
            expected = f"(N, K), both multiples of {eetq.TILE}, for EETQ"
            raise ShapeError(named(layer.name, "weight"), expected, size, hint=hint)


def _round_half_away(values: Tensor) -> Tensor:
    """Round 0.5 to 1 and -0.5 to -1; adding one half would round 0.49999997 up."""
    truncated = values.trunc()
    return truncated + torch.where((values - truncated).abs() >= 0.5, values.sign(), 0)


@dataclass(frozen=True)
class BNB4Quantizer:
    """Quantizer to 4 bits of bitsandbytes, with float32 scales; the quant state records the dtype.

    ArgumentError for another value of an attribute.

    Attributes
    ----------
    quant_type
        "nf4" or "fp4".
    blocksize
        Number of elements, row by row, that share a scale: at least 1.
    double_quant
        Whether the scales are quantized too, to 8 bits in blocks of 256.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    blocksize: int = 64
    double_quant: bool = False

    per_share: ClassVar[bool] = False  # blocks may span outputs

    def __post_init__(self) -> None:
        check_fields(self)
        if self.blocksize < 1:
            raise ArgumentError("blocksize", "a whole number, at least 1", repr(self.blocksize))

    @property
    def format(self) -> str:
        """`bnb_nf4` or `bnb_fp4`."""
        return BNB4_WEIGHTS[self.quant_type].format

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> BNB4Weight:
        """Quantize a float `weight` (N, K) as a typed weight of `layer`; `dtype` goes to the quant state.

        NaN and infinity are refused, see `check_finite`.
        """
        values = _checked_cast(weight, torch.float32, layer.name, BNB4_REMEDY)
        N, K = weight.shape
        table = torch.tensor(TABLES[self.quant_type])
        absmax, scaled = _scaled_blocks(values.flatten(), self.blocksize)
        codes = _nearest_codes(pad(scaled, (0, N * K % 2)), table)
        return BNB4_WEIGHTS[self.quant_type](
            config=BNB4Config(self.quant_type, self.blocksize, dtype, N=N, K=K),
            weight=(codes[::2] << 4 | codes[1::2])[:, None],
            absmax=_double_quantized(absmax) if self.double_quant else absmax,
            quant_map=table.to(weight.device),
            layer=layer,
        )


@dataclass(frozen=True)
class BNBInt8Quantizer:
    """Quantizer to int8 of bitsandbytes, one scale per output."""

    format: ClassVar[str] = BNBWeight.format
    per_share: ClassVar[bool] = True

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> BNBWeight:
        """Quantize a float `weight` (N, K) as a typed weight of `layer`; `dtype` has no effect.

        Values that overflow fp16 are refused, as are outputs that would become zeros.
        """
        half = _checked_cast(weight, torch.float16, layer.name, BNB_INT8_REMEDY)
        scales = half.abs().amax(1).float()
        steps = torch.where(scales > 0, 127.0 / scales, 0)  # an output of zeros stays zeros
        codes = (half * steps[:, None]).round().to(torch.int8)
        return BNBWeight(config=BNBConfig(), weight=codes, SCB=scales, layer=layer)


def _scaled_blocks(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the absmax of each block, and all elements divided by it, within -1 and 1."""
    full = flat.numel() // size * size
    blocks, rest = flat[:full].reshape(-1, size), flat[full:]
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax.clamp(min=BNB4_MIN_ABSMAX))[:, None]).flatten()
    if rest.numel():
        last = rest.abs().amax().clamp(min=BNB4_MIN_ABSMAX)
        absmax, scaled = torch.cat([absmax, last[None]]), torch.cat([scaled, rest / last])
    return absmax, scaled.clamp(-1, 1)


def _nearest_codes(values: Tensor, table: Tensor) -> Tensor:
    """Return the codes of the nearest entries of the table, uint8."""
    ordered, codes = table.to(values.device).sort(stable=True)
    return codes[torch.bucketize(values, (ordered[:-1] + ordered[1:]) / 2)].to(torch.uint8)


def _double_quantized(absmax: Tensor) -> Tensor:
    """Return scales after quantization to 8 bits, float32."""
    offset, table = absmax.mean(), torch.tensor(dynamic_map())
    outer, scaled = _scaled_blocks(absmax - offset, BNB4_SCALES_PER_BLOCK)
    values = table.to(absmax.device)[_nearest_codes(scaled, table).long()]
    return values * outer.repeat_interleave(BNB4_SCALES_PER_BLOCK)[: values.numel()] + offset


# Quantizers by format.
QUANTIZERS: dict[str, type] = {
    "fp8": Fp8Quantizer,
    "eetq": EETQQuantizer,
    "bnb_nf4": BNB4Quantizer,
    "bnb_fp4": BNB4Quantizer,
    "bnb_int8": BNBInt8Quantizer,
}
