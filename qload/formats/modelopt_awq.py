"""ModelOpt's AWQ (W4A16_AWQ): signed four-bit codes, two outputs per byte, and an optional scale of inputs.

On disk, for a layer of K inputs and N outputs, group size g:

    weight           uint8             (N/2, K)  two outputs a byte, the even one in the low bits
    weight_scale     fp32, bf16, fp16  (N, K/g)
    pre_quant_scale  bf16, fp16, fp32  (K,)      factors of the inputs; optional
    weight_scale_2   fp32              ()        W4A8_AWQ alone: see below
    input_scale      fp32              ()        of the activations, W4A8_AWQ alone; optional

    w[n, k] = weight_scale[n, k / g] * code[n, k],   -8 <= code < 8
    y = (x * pre_quant_scale) @ w.T

The scale of the inputs is not part of w: `dequantize` ignores it, and `get_linear` applies it, as ModelOpt
does. For q, k, v, gate and up projections ModelOpt folds it into the preceding norm, and stores none.
W4A8_AWQ has FP8 inputs too. Its second scale is for kernels that cast weights to FP8, and no factor of w.
Source: modelopt 0.47.0, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.errors import ShapeError
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
SIGN_BIT = 8  # flips signed codes to unsigned


@dataclass(frozen=True)
class ModelOptAWQConfig(spec.Grouped, spec.Config):
    """Config of ModelOpt's AWQ layers; ArgumentError for an invalid group size.

    Attributes
    ----------
    group_size
        Inputs that share a scale; -1: all of them; 0: by the shape of the scales, until the layer is
        described.
    scaled_inputs
        Whether `pre_quant_scale` is stored; None: optional.
    fp8_inputs
        Whether the layer is one of W4A8_AWQ, with a second scale and a scale of the activations.
    """

    name: ClassVar[str] = "modelopt_awq"

    group_size: int = 0
    scaled_inputs: bool | None = None
    fp8_inputs: bool = False

    def __post_init__(self) -> None:
        if self.group_size != 0:
            self.check_group_size()

    @property
    def groups_axis(self) -> str:
        """Axis text of the groups; a free axis for an unknown group size."""
        return {0: "G", -1: "1"}.get(self.group_size, f"K/{self.group_size}")

    def for_layer(self, headers: spec.LayerHeaders) -> ModelOptAWQConfig:
        """Read an unknown group size from the shape of the scales; ShapeError if it has none."""
        headers.check_single(("weight_scale_2", "input_scale"))
        sizes = headers.sizes(ModelOptAWQWeight.tensors(self))
        K = sizes["K"]
        if self.group_size:
            return self.one_group(K)
        if not sizes["G"] or K % sizes["G"]:
            full, file = headers.names.full("weight_scale"), headers.names.file("weight_scale")
            expected = f"({sizes['N']}, G), with K = {K} a multiple of G"
            raise ShapeError(full, expected, headers.shapes["weight_scale"], file)
        return replace(self, group_size=K // sizes["G"]).one_group(K)


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptAWQWeight(spec.Weight):
    """An AWQ layer of ModelOpt, or a share of one.

    w[n, k] = weight_scale[n, k / g] * code[n, k]; y = (x * pre_quant_scale) @ w.T. `get_linear`
    computes y, `dequantize` w alone. Source: modelopt, bit-equal to its files.

    Attributes
    ----------
    weight
        Two outputs a byte, the even one in the low bits, two's complement: (N / 2, K), uint8.
    weight_scale
        (N, K / g), fp32, bf16 or fp16.
    pre_quant_scale
        Factors of the inputs: (K,), bf16, fp16 or fp32; None: nothing.
    input_scale
        Of the activations, W4A8_AWQ alone: () or (1,), or one per fused part, fp32; None: not stored.
    """

    config: ModelOptAWQConfig
    weight: Tensor
    weight_scale: Tensor
    pre_quant_scale: Tensor | None = None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "modelopt_awq"
    example: ClassVar[ModelOptAWQConfig] = ModelOptAWQConfig(128)

    @classmethod
    def tensors(cls, config: ModelOptAWQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; layers are fused only with equal factors of the inputs."""
        optional = config.scaled_inputs is None
        factors = TensorSpec("pre_quant_scale", FLOATS, "K", Role.SCALE, fact=True, optional=optional)
        of_fp8_inputs = (
            TensorSpec("weight_scale_2", (dtypes.float32,), "P", Role.SCALE, spent=True),
            TensorSpec("input_scale", (dtypes.float32,), "P", Role.SCALE, optional=True, divides=True),
        )
        return (
            TensorSpec("weight", (dtypes.uint8,), "N/2 K", Role.WORD),
            TensorSpec("weight_scale", FLOATS, f"N {config.groups_axis}", Role.SCALE),
            *(() if config.scaled_inputs is False else (factors,)),
            *(of_fp8_inputs if config.fp8_inputs else ()),
        )

    @property
    def input_factors(self) -> Tensor | None:
        """Factors of the inputs (K,), `pre_quant_scale`; None: no factors."""
        return self.pre_quant_scale

    def stored(self) -> StoredRows:
        """Describe the stored order for kernels: two outputs per byte."""
        run = self.config.rows_of_a_group(self.layer.K)
        run = min(run, max(self.layer.K, 1))
        return StoredRows(self.weight, self.weight_scale, 1, run, four_bits="int4", across=True)

    def codes(self) -> spec.Codes:
        """Return unsigned codes with zero points of 8: the sign bit is flipped."""
        rows = torch.stack([self.weight & 0xF, self.weight >> 4], dim=1)
        return spec.Codes(
            bits=4,
            codes=rows.reshape(self.shape) ^ SIGN_BIT,
            scales=self.weight_scale.float(),
            zeros=torch.full_like(self.weight_scale, SIGN_BIT, dtype=torch.int32),
            k_group=self.config.in_order(self.layer.K, self.device),
        )

    @classmethod
    def sample_facts(cls, config: ModelOptAWQConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Input factors for `sizes`, powers of two, if `config` has them."""
        factors = 2.0 ** (torch.arange(sizes["K"]) % 3 - 1)
        return {"pre_quant_scale": factors} if config.scaled_inputs else {}


FORMATS = (ModelOptAWQWeight,)
METHODS = ()  # read by detect.methods
