"""Quantizers of plain weights: FP8, EETQ and bitsandbytes."""

from dataclasses import dataclass, replace
from functools import cache
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
from qload.formats.bnb import TABLES, dynamic_map
from qload.layouts import eetq
from qload.spec import Layer, Weight, named
from qload.spec.casts import check_cast


@runtime_checkable
class Quantizer(Protocol):
    """Turns one plain layer, or one part of a fused one, into a typed weight.

    An implementer promises that the same values give the same weight, on every rank.

    per_share
        Outputs are quantized one by one: a share of them, quantized alone, is that share of the quantized
        whole. Then a large layer is quantized in runs of outputs, which takes less memory at once.
    """

    @property
    def format(self) -> str:
        """The name of the format it makes."""

    @property
    def per_share(self) -> bool:
        """Whether outputs are quantized one by one; see above."""

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Weight:
        """A float (N, K) as a typed weight that has this layer, which has one part.

        `dtype` is that of the activations, for a format that keeps scales in it. What cannot be
        quantized is refused with a QloadError that names `layer.name`: see `check_finite`. The typed
        weight's own config declares no tensor that the weight does not hold, unless it is optional.
        """


def check_finite(weight: Tensor, name: str) -> None:
    """No NaN and no infinity, or MismatchError: neither has a scale."""
    wrong = (~torch.isfinite(weight)).nonzero()
    if wrong.numel():
        n, k = wrong[0].tolist()
        raise MismatchError(
            named(name, "weight"),
            "cannot be quantized",
            "finite values",
            f"{weight[n, k]:g} at ({n}, {k}) ({wrong.shape[0]} in all)",
        )


def floats(weight: Tensor, dtype: torch.dtype, name: str, remedy: str) -> Tensor:
    """A weight (N, K) in the float that it is quantized from.

    What has no elements, no finite values, or values that `dtype` cannot hold is refused; so is an output
    that would be nothing but zeros, and is not.
    """
    full = named(name, "weight")
    if 0 in weight.shape:
        raise ShapeError(full, "(N, K), each at least 1, to be quantized", weight.shape)
    check_values(full, weight)
    check_values(full, weight)
    check_finite(weight, name)
    made = weight.to(dtype)
    if torch.promote_types(weight.dtype, dtype) != dtype:
        check_cast(full, weight, made, tiny=False, remedy=remedy)
        check_outputs(full, weight.abs().amax(1), made.abs().amax(1), remedy)
    return made


def check_outputs(tensor: str, before: Tensor, after: Tensor, remedy: str) -> None:
    """CastError where the size of an output, one entry each, was above 0 and is 0 now."""
    lost = before[(before > 0) & (after == 0)]
    if lost.numel():
        source, target = (str(each.dtype).removeprefix("torch.") for each in (before, after))
        raise CastError(tensor, source, target, float(lost[0]), lost.numel(), remedy)


E4M3FN = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Quantizer:
    """FP8 (e4m3fn) by absolute maxima: scale = absmax / 448 in float32, at least the smallest normal.

    Attributes
    ----------
    per
        What shares a scale: the "tensor", a "channel" (one output), or a "block".
    block
        (outputs, inputs) of a block; the last may be short.
    activation_scale_ub
        Kept in the weight's config, for whoever quantizes activations.

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
        self.config()  # refuses a block where none is asked for, and the other way round

    @property
    def per_share(self) -> bool:
        """An output that has a scale of its own is quantized alone."""
        return self.per == "channel"

    def config(self) -> Fp8Config:
        """Of the weights it makes."""
        return Fp8Config(self.per, self.block, activation_scale_ub=self.activation_scale_ub)

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Fp8Weight:
        """The float `weight` (N, K) in FP8, as a typed weight of `layer`.

        Its scales are float32 whatever `dtype` is. NaN and infinity are refused, see `check_finite`.
        """
        wide = floats(
            weight, torch.float32, layer.name, "leave this layer plain: its values are beyond float32"
        )
        N, K = wide.shape
        rows, columns = {"tensor": (N, K), "channel": (1, K)}.get(self.per) or self.block or (1, 1)
        blocks = pad(wide.abs(), (0, -K % columns, 0, -N % rows))
        absmax = blocks.reshape(-(-N // rows), rows, -(-K // columns), columns).amax((1, 3))
        scale = (absmax / torch.finfo(E4M3FN).max).clamp(min=torch.finfo(torch.float32).tiny)
        spread = scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
        made = Fp8Weight(
            config=self.config(),
            weight=saturated(wide / spread, E4M3FN),
            weight_scale=scale.reshape(1) if self.per == "tensor" else scale,
        )
        return replace(made, layer=layer)


class Requantized(NamedTuple):
    """A weight, and by how much its values changed: the largest absolute change in each part, float32."""

    weight: Fp8Weight
    error: Tensor


@checked
def requantize(weight: Fp8Weight) -> Requantized:
    """Every fused part in the largest of their scales, for a kernel that takes one scale for all.

    Parts whose scale is smaller lose bits, which `error` reports; nothing in qload asks for this by itself.
    """
    weight.check_values()
    config, parts = weight.config, weight.layer.parts
    if config.per not in ("tensor", "parts"):
        raise ArgumentError("weight", "an Fp8Weight with one scale a part", f"one scale a {config.per}")
    scales = weight.weight_scale.float().flatten()
    size = 1 / scales.abs() if config.divide else scales.abs()
    if not bool((torch.isfinite(scales) & torch.isfinite(size) & (size > 0)).all()):
        name = named(weight.layer.name or "Fp8Weight", "weight_scale")
        expected = "finite scales, none of them 0"
        raise MismatchError(name, "there is no largest", expected, str(scales.tolist()))
    place = int(size.argmax())
    before = weight.dequantize()
    codes = before * scales[place] if config.divide else before / scales[place]
    made = replace(
        weight,
        weight=saturated(codes, weight.weight.dtype),
        weight_scale=weight.weight_scale[place].expand_as(weight.weight_scale).clone(),
    )
    change = (made.dequantize() - before).abs().nan_to_num(nan=0, posinf=torch.inf)
    return Requantized(made, torch.stack([part.max() for part in torch.split(change, list(parts))]))


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the nearest value of a float8, what is beyond its largest to that; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


WEIGHTS: dict[str, type[BNB4Weight]] = {"nf4": BNBNF4Weight, "fp4": BNBFP4Weight}
SMALLEST = 1e-38  # what a block is divided by at least
SCALES_PER_RUN = 256  # scales that share one
BNB4_REMEDY = "leave this layer plain: bitsandbytes quantizes what float32 holds"
BNB_INT8_REMEDY = "leave this layer plain: bitsandbytes quantizes what fp16 holds"


@dataclass(frozen=True)
class BNB4Quantizer:
    """Plain layers to bitsandbytes' 4 bits; scales are float32 whatever the dtype is, which the state keeps.

    ArgumentError where an attribute is none of these.

    Attributes
    ----------
    quant_type
        "nf4" or "fp4".
    blocksize
        How many elements, row by row, share a scale: any number, at least 1.
    double_quant
        Whether the scales are quantized too, to 8 bits in runs of 256.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    blocksize: int = 64
    double_quant: bool = False

    per_share: ClassVar[bool] = False  # a block does not end with an output

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quant_type not in WEIGHTS:
            raise ArgumentError("quant_type", " or ".join(WEIGHTS), repr(self.quant_type))
        if type(self.blocksize) is not int or self.blocksize < 1:
            raise ArgumentError("blocksize", "a whole number, at least 1", repr(self.blocksize))

    @property
    def format(self) -> str:
        """`bnb_nf4` or `bnb_fp4`."""
        return WEIGHTS[self.quant_type].format

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> BNB4Weight:
        """The float `weight` (N, K) in 4 bits, as a weight of `layer`; `dtype`: what its owner rounds to.

        NaN and infinity are refused, see `check_finite`.
        """
        wide = floats(weight, torch.float32, layer.name, BNB4_REMEDY)
        N, K = weight.shape
        table = _table(self.quant_type)
        absmax, scaled = _scaled_blocks(wide.flatten(), self.blocksize)
        codes = _nearest(pad(scaled, (0, N * K % 2)), table)
        return WEIGHTS[self.quant_type](
            config=BNB4Config(self.quant_type, self.blocksize, dtype, N=N, K=K),
            weight=(codes[::2] << 4 | codes[1::2])[:, None],
            absmax=_quantized(absmax) if self.double_quant else absmax,
            quant_map=table.to(weight.device),
            layer=layer,
        )


@dataclass(frozen=True)
class BNBInt8Quantizer:
    """Plain layers to bitsandbytes' int8, one scale an output."""

    format: ClassVar[str] = BNBWeight.format
    per_share: ClassVar[bool] = True

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> BNBWeight:
        """The float `weight` (N, K) in int8, as a typed weight of `layer`; `dtype` says nothing here.

        What fp16 cannot hold is refused, as are outputs that would be zeros.
        """
        half = floats(weight, torch.float16, layer.name, BNB_INT8_REMEDY)
        scales = half.abs().amax(1).float()
        steps = torch.where(scales > 0, 127.0 / scales, 0)  # an output of zeros is zeros
        codes = (half * steps[:, None]).round().to(torch.int8)
        return BNBWeight(config=BNBConfig(), weight=codes, SCB=scales, layer=layer)


def _scaled_blocks(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The scale of each block, and all elements over them, within -1 and 1."""
    full = flat.numel() // size * size
    blocks, rest = flat[:full].reshape(-1, size), flat[full:]
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax.clamp(min=SMALLEST))[:, None]).flatten()
    if rest.numel():
        last = rest.abs().amax().clamp(min=SMALLEST)
        absmax, scaled = torch.cat([absmax, last[None]]), torch.cat([scaled, rest / last])
    return absmax, scaled.clamp(-1, 1)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """The codes of the nearest entries, uint8."""
    ordered, codes = table.to(values.device).sort(stable=True)
    return codes[torch.bucketize(values, (ordered[:-1] + ordered[1:]) / 2)].to(torch.uint8)


def _quantized(absmax: Tensor) -> Tensor:
    """Scales as they are after they were quantized too, float32."""
    offset, table = absmax.mean(), torch.tensor(dynamic_map())
    outer, scaled = _scaled_blocks(absmax - offset, SCALES_PER_RUN)
    values = table.to(absmax.device)[_nearest(scaled, table).long()]
    return values * outer.repeat_interleave(SCALES_PER_RUN)[: values.numel()] + offset


@cache
def _table(quant_type: str) -> Tensor:
    return torch.tensor(TABLES[quant_type])


LEVELS = 128
EETQ_REMEDY = "leave this layer plain: its largest or its smallest outputs have no scale in fp16"


@dataclass(frozen=True)
class EETQQuantizer:
    """Plain layers to EETQ: 8 bits, one scale an output."""

    format: ClassVar[str] = "eetq"
    per_share: ClassVar[bool] = True  # outputs know nothing of each other

    def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype = torch.float16) -> EETQWeight:
        """The float `weight` (N, K) as an EETQWeight of `layer`, N and K multiples of 64, or ShapeError.

        Scales are fp16 whatever `dtype` is: the kernel takes no other.
        """
        _check_tiles(tuple(weight.shape), layer)
        wide = floats(weight, torch.float32, layer.name, EETQ_REMEDY)
        steps = wide.abs().amax(1) / LEVELS
        scales, name = steps.half(), named(layer.name, "weight_scales")
        check_cast(name, steps, scales, tiny=False, remedy=EETQ_REMEDY)
        check_outputs(name, steps, scales, EETQ_REMEDY)
        codes = _round_half_away(wide / steps.where(steps > 0, 1)[:, None]).clamp(-LEVELS, LEVELS - 1)
        return EETQWeight(
            config=EETQConfig(),
            weight=eetq.pack((codes + LEVELS).to(torch.int32)),
            weight_scales=scales,
            layer=layer,
        )


def _check_tiles(shape: tuple[int, ...], layer: Layer) -> None:
    """A share may fill no tiles where the layer does: the world size is at fault then."""
    remedy = f"remedy   cut {layer.whole} into fewer shares, or leave this layer plain"
    for size, hint in ((layer.whole, ""), (shape, remedy)):
        if any(length % eetq.TILE for length in size):
            needs = f"(N, K), both multiples of {eetq.TILE}, which EETQ needs"
            raise ShapeError(named(layer.name, "weight"), needs, size, hint=hint)


def _round_half_away(values: Tensor) -> Tensor:
    """0.5 -> 1, -0.5 -> -1; exact, where adding one half would round 0.49999997 up."""
    whole = values.trunc()
    return whole + torch.where((values - whole).abs() >= 0.5, values.sign(), 0)
