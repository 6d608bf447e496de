"""Quantizes plain layers to bitsandbytes, with the codes and scales of its CPU path, bit for bit.

4 bits, in blocks that lie flat over the weight:

    absmax[b] = max |w| of the block, float32
    code[e] = the entry of the table nearest to w[e] * (1 / absmax), in float32; of two as near, the lower

    A short last block divides by absmax instead, which is 1e-38 at least. FP4 has two zeros: code 8 for
    what is above 0, code 0 for the rest.

    double_quant: absmax minus its mean is quantized too, to 8 bits in runs of 256, by the same rule, and
    the typed weight holds what that means. (The CPU path searches on a grid there, and takes a neighbour
    in some 0.2 % of the scales.)

int8, an output at a time, of the weight in fp16:

    SCB[n] = max |w[n]|,   code[n, k] = w[n, k] * (127 / SCB[n]) in float32, rounded half to even

bitsandbytes on a GPU may choose the other of two as near. Source: bitsandbytes 0.50.2.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.errors import ArgumentError, check_fields
from qload.formats import BNB4Config, BNB4Weight, BNBConfig, BNBFP4Weight, BNBNF4Weight, BNBWeight
from qload.formats.bnb import TABLES, dynamic_map
from qload.quantize.values import floats
from qload.spec import Layer

WEIGHTS: dict[str, type[BNB4Weight]] = {"nf4": BNBNF4Weight, "fp4": BNBFP4Weight}
SMALLEST = 1e-38  # what a block is divided by at least
RUN = 256  # scales that share one
PLAIN = "leave this layer plain: bitsandbytes quantizes what float32 holds"
HALF = "leave this layer plain: bitsandbytes quantizes what fp16 holds"


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
        wide = floats(weight, torch.float32, layer.name, PLAIN)
        N, K = weight.shape
        table = _table(self.quant_type)
        absmax, scaled = _blocks(wide.flatten(), self.blocksize)
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
        half = floats(weight, torch.float16, layer.name, HALF)
        scales = half.abs().amax(1).float()
        steps = torch.where(scales > 0, 127.0 / scales, 0)  # an output of zeros is zeros
        codes = (half * steps[:, None]).round().to(torch.int8)
        return BNBWeight(config=BNBConfig(), weight=codes, SCB=scales, layer=layer)


def _blocks(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
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
    outer, scaled = _blocks(absmax - offset, RUN)
    values = table.to(absmax.device)[_nearest(scaled, table).long()]
    return values * outer.repeat_interleave(RUN)[: values.numel()] + offset


@cache
def _table(quant_type: str) -> Tensor:
    return torch.tensor(TABLES[quant_type])
