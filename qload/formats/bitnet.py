"""BitNet: ternary codes in blocks of rows, and one scale, which multiplies or divides.

On disk, for a layer of K inputs and N outputs:

    weight        uint8             (N/4, K)  codes + 1; bits 2i of row r are output i * N/4 + r
    weight_scale  bf16, fp16, fp32  (1,)

    w[n, k] = code[n, k] / weight_scale     linear_class bitlinear
    w[n, k] = code[n, k] * weight_scale     linear_class autobitlinear, quantization_mode offline

autobitlinear offline also stores plain codes -1, 0, 1 as floats (N, K). quantization_mode online stores plain
weights, which transformers quantizes when the model runs. Source: transformers 5.23.0, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from qload import configs, dtypes, spec
from qload.errors import FieldValueError, UnsupportedFormatError
from qload.layouts import RowBlocks
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec, named

BITS, BLOCKS = 2, 4
FLOATS = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
PACKING = RowBlocks(BITS, BLOCKS)
FIELDS = 0x55  # the low bit of each code of a byte
TERNARY = tuple(high << BITS | low for high in range(3) for low in range(3))  # four bits: two codes


@dataclass(frozen=True)
class BitNetConfig(spec.Config):
    """Config of BitNet.

    Attributes
    ----------
    divide
        Whether the scale divides (bitlinear).
    packed
        Whether four codes share a byte; by the dtype of the codes once a layer is described.
    """

    name: ClassVar[str] = "bitnet"

    divide: bool
    packed: bool = True

    def for_layer(self, headers: spec.LayerHeaders) -> BitNetConfig:
        """Tell packed codes from floats by the dtype; ShapeError for several scales."""
        headers.check_single(("weight_scale",))
        return replace(self, packed=self.divide or headers.dtypes["weight"] not in FLOATS)


@dataclass(frozen=True, eq=False, repr=False)
class BitNetWeight(spec.Weight):
    """A layer of BitNet, or a share of one; FieldValueError for a code other than -1, 0 and 1.

    w[n, k] = code[n, k] * weight_scale, or code[n, k] / weight_scale. Source: transformers, bit-equal to it.

    Attributes
    ----------
    weight
        Codes + 1 in blocks of rows: (N / 4, K), uint8; or the codes: (N, K), bf16, fp16 or fp32.
    weight_scale
        () or (1,), one for each fused part, bf16, fp16 or fp32.
    """

    config: BitNetConfig
    weight: Tensor
    weight_scale: Tensor

    format: ClassVar[str] = "bitnet"
    example: ClassVar[BitNetConfig] = BitNetConfig(divide=True)

    @classmethod
    def tensors(cls, config: BitNetConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; a share has blocks of its own, four of them."""
        scale = TensorSpec("weight_scale", FLOATS, "P", Role.SCALE, divides=config.divide)
        if not config.packed:
            return TensorSpec("weight", FLOATS, "N K", Role.WORD), scale
        codes = (dtypes.uint8,) if config.divide else (dtypes.uint8, *FLOATS)
        weight = TensorSpec("weight", codes, "N/4 K", Role.WORD, nibbles=TERNARY, view="N K", packing=PACKING)
        return weight, scale

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.weight
        if weight.is_meta:
            return
        wrong = weight & weight >> 1 & FIELDS != 0 if self.config.packed else (weight.abs() - 1) * weight != 0
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            got = f"{weight[place].item()} at {place}; {int(wrong.sum())} of {weight.numel()} have one"
            name = named(self.layer.name or type(self).__name__, "weight")
            expected = "codes of 0, 1 and 2 in two bits" if self.config.packed else "-1, 0 or 1"
            raise FieldValueError(name, "not a ternary code", expected, got)

    def codes(self) -> spec.Codes:
        """Return codes counted from 0, with zero points of 1."""
        scales = spec.expand_parts(self.weight_scale.float(), self.layer.parts)[:, None]
        weight = self.weight
        return spec.Codes(
            bits=BITS,
            codes=PACKING.unpack(weight, self.shape) if self.config.packed else (weight + 1).to(torch.uint8),
            scales=scales,
            zeros=torch.ones_like(scales, dtype=torch.int32),
            k_group=None,
            divide=self.config.divide,
        )


VARIANTS = ("bitnet (bitlinear, autobitlinear)",)
ONLINE = "online: transformers quantizes weights when the model runs, and qload takes them as they are"
INPUTS = "transformers quantizes inputs of bitnet to 8 bits a token; linears of qload take them as they are"


class _BitNet(configs.Section):
    linear_class: Literal["bitlinear", "autobitlinear"] = "bitlinear"
    quantization_mode: Literal["online", "offline"] = "offline"
    use_rms_norm: bool = False


def read_bitnet(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: bitnet`; UnsupportedFormatError for layers with a norm."""
    section = configs.validate(_BitNet, source)
    if section.use_rms_norm:
        raise UnsupportedFormatError(
            "bitnet with use_rms_norm",
            f"{source.file} adds a norm before each layer, which is no part of the weight",
            VARIANTS,
            "transformers loads it; or apply the norms outside, and state use_rms_norm false",
        )
    divides = section.linear_class == "bitlinear"
    notes = [INPUTS]
    if not divides and section.quantization_mode == "online":
        key = f"{source.file} has quantization_mode {ONLINE}"
        return section.claims(source, "bitnet", "online", notes=(key, *notes))
    fmt = ConfiguredFormat(BitNetWeight, BitNetConfig(divides))
    return section.claims(source, "bitnet", section.linear_class, fmt, bits=BITS, notes=tuple(notes))


FORMATS = (BitNetWeight,)
METHODS = (configs.Method(names=("bitnet",), read=read_bitnet, formats=FORMATS, variants=VARIANTS),)
