"""FP8 from plain weights, and FP8 parts brought to one scale."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.errors import ArgumentError, MismatchError, check_type, checked
from qload.formats import Fp8Config, Fp8Weight
from qload.quantize.values import floats
from qload.spec import Layer, named

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
