"""ModelOpt's AWQ (W4A16_AWQ): signed codes of four bits, two outputs a byte, inputs that may be scaled.

On disk, for a layer of K inputs and N outputs, group size g:

    weight           uint8             (N/2, K)  two outputs a byte, the even one in the low bits
    weight_scale     fp32, bf16, fp16  (N, K/g)
    pre_quant_scale  bf16, fp16, fp32  (K,)      what inputs are multiplied by; optional

    w[n, k] = weight_scale[n, k / g] * code[n, k],   -8 <= code < 8
    y = (x * pre_quant_scale) @ w.T

The scale of the inputs is no part of w: `dequantize` leaves it out, and `get_linear` applies it, as the tool
does. Of q, k, v, gate and up projections the tool folds it into the norm before them, and stores none.
Source: modelopt 0.47.0, bit-equal to it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredRows
from qload.errors import ShapeError
from qload.spec import Role, TensorSpec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = 8  # what makes a signed code unsigned


@dataclass(frozen=True)
class ModelOptAWQConfig(spec.Grouped, spec.Config):
    """What ModelOpt's config says of AWQ layers; ArgumentError for a size that no group has.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: all of them; 0, which no described layer has: the shape of its scales
        says.
    scaled_inputs
        Whether `pre_quant_scale` is stored; None where it may be.
    """

    name: ClassVar[str] = "modelopt_awq"

    group_size: int = 0
    scaled_inputs: bool | None = None

    def __post_init__(self) -> None:
        if self.group_size != 0:
            self.check_group_size()

    @property
    def groups_axis(self) -> str:
        """The axis of the groups; a free one as long as no shape was looked at."""
        return {0: "G", -1: "1"}.get(self.group_size, f"K/{self.group_size}")

    def for_layer(self, headers: spec.LayerHeaders) -> "ModelOptAWQConfig":
        """The size of a group, from the shape of the scales where nothing says it; ShapeError for none."""
        sizes = headers.sizes(ModelOptAWQWeight.tensors(self))
        K = sizes["K"]
        if self.group_size:
            return self.one_group(K)
        if not sizes["G"] or K % sizes["G"]:
            full, file = headers.names.full("weight_scale"), headers.names.file("weight_scale")
            expected = f"({sizes['N']}, G), where K = {K} is a multiple of G"
            raise ShapeError(full, expected, headers.shapes["weight_scale"], file)
        return replace(self, group_size=K // sizes["G"]).one_group(K)


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptAWQWeight(spec.Weight):
    """A layer as ModelOpt writes AWQ, or a share of one.

    w[n, k] = weight_scale[n, k / g] * code[n, k]; y = (x * pre_quant_scale) @ w.T, which `get_linear`
    computes, while `dequantize` is w alone. Source: the files of modelopt, to which it is bit-equal.

    Attributes
    ----------
    weight
        Two outputs a byte, the even one in the low bits, two's complement: (N / 2, K), uint8.
    weight_scale
        (N, K / g), fp32, bf16 or fp16.
    pre_quant_scale
        What inputs are multiplied by before the weight: (K,), bf16, fp16 or fp32; None: nothing.
    """

    config: ModelOptAWQConfig
    weight: Tensor
    weight_scale: Tensor
    pre_quant_scale: Tensor | None = None

    format: ClassVar[str] = "modelopt_awq"
    example: ClassVar[ModelOptAWQConfig] = ModelOptAWQConfig(128)

    @classmethod
    def tensors(cls, config: ModelOptAWQConfig) -> tuple[TensorSpec, ...]:
        """Two outputs a byte, and groups that follow K; layers are fused if their inputs are scaled alike."""
        optional = config.scaled_inputs is None
        specs = (
            TensorSpec("weight", (torch.uint8,), "N/2 K", Role.WORD),
            TensorSpec("weight_scale", FLOATS, f"N {config.groups_axis}", Role.SCALE),
            TensorSpec("pre_quant_scale", FLOATS, "K", Role.SCALE, fact=True, optional=optional),
        )
        return specs[:2] if config.scaled_inputs is False else specs

    @property
    def input_factors(self) -> Tensor | None:
        """(K,): what each input is multiplied by, `pre_quant_scale`; None: nothing."""
        return self.pre_quant_scale

    def stored(self) -> StoredRows:
        """As it lies: two outputs a byte."""
        run = self.config.rows_of_a_group(self.layer.K)
        run = min(run, max(self.layer.K, 1))
        return StoredRows(self.weight, self.weight_scale, 1, run, four_bits="int4", across=True)

    def codes(self) -> spec.Codes:
        """Codes that count from 0, with a zero point of 8: the sign bit turned."""
        rows = torch.stack([self.weight & 0xF, self.weight >> 4], dim=1)
        return spec.Codes(
            bits=4,
            codes=rows.reshape(self.shape) ^ HALF,
            scales=self.weight_scale.float(),
            zeros=torch.full_like(self.weight_scale, HALF, dtype=torch.int32),
            k_group=self.config.in_order(self.layer.K, self.device),
        )
