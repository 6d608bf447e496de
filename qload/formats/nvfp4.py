"""NVFP4: four-bit floats, an FP8 scale for every 16 inputs, and a global scale for the tensor.

On disk, for a layer of K inputs and N outputs, written by compressed-tensors (nvfp4-pack-quantized), and by
ModelOpt with names of its own and the inverse as second scale:

    weight_packed        uint8   (N, K/2)    two e2m1 codes a byte, the first in the low bits
    weight_scale         e4m3fn  (N, K/16)
    weight_global_scale  fp32    () or (1,)
    input_global_scale   fp32    () or (1,)  of the activations; optional
    weight               uint8   (N, K/2)    likewise
    weight_scale_2       fp32    () or (1,)
    input_scale          fp32    () or (1,)  of the activations; optional

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] / weight_global_scale)
    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] * weight_scale_2)

`ModelOptNVFP4ExtendedWeight` adds factors of the inputs (NVFP4_AWQ), a low-rank term (NVFP4_SVD), or groups
of 32 inputs (W4A8_NVFP4_FP8):

    pre_quant_scale                     bf16, fp16, fp32  (K,)
    weight_quantizer._svdquant_lora_a   bf16, fp16, fp32  (R, K)
    weight_quantizer._svdquant_lora_b   bf16, fp16, fp32  (N, R)

Fused parts keep one second scale each. torchao has ModelOpt's tensors under its own names: `weight_scale`
may be swizzled (`layouts.swizzle`), and `weight_scale_2` is optional, 1 without it. Source:
compressed-tensors 0.20.0, modelopt 0.47.0 and torchao 0.18.0, bit-equal to all (to the first and the last
after one rounding).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from qload import dtypes, spec
from qload.errors import ArgumentError
from qload.layouts import NibblePairs, fp4, swizzle
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec
from qload.spec.blocks import both_scales

E4M3FN, GROUP = dtypes.float8_e4m3fn, 16
FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
LOW_RANK = ("weight_quantizer._svdquant_lora_a", "weight_quantizer._svdquant_lora_b")
SECOND = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class NVFP4Config(spec.Config):
    """Config of NVFP4.

    Attributes
    ----------
    swizzled
        Whether scales are in the order of tensor cores (`layouts.swizzle`).
    second
        Whether the second scale is required; False: optional, 1 without it.
    """

    name: ClassVar[str] = "nvfp4"

    swizzled: bool = field(default=False, repr=False, kw_only=True)
    second: bool = field(default=True, repr=False, kw_only=True)

    @property
    def inputs_per_scale(self) -> int:
        """Inputs of a group."""
        return GROUP

    def for_layer(self, headers: spec.LayerHeaders) -> NVFP4Config:
        """Check the shapes; ShapeError for several second scales of one tensor."""
        headers.check_single(SECOND)
        return self


@dataclass(frozen=True, eq=False, repr=False)
class _NVFP4Weight(spec.Weight):
    """Base of the dialects of NVFP4: names of codes and scales, and whether the second scale divides."""

    config: NVFP4Config
    example: ClassVar[NVFP4Config] = NVFP4Config()
    packed_field: ClassVar[str] = "weight"
    second_field: ClassVar[str] = "weight_scale_2"
    input_field: ClassVar[str] = "input_scale"
    divides: ClassVar[bool] = False

    @classmethod
    def tensors(cls, config: NVFP4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups of inputs."""
        scales = TensorSpec("weight_scale", (E4M3FN,), f"N K/{config.inputs_per_scale}", Role.SCALE)
        if config.swizzled:
            scales = replace(scales, **swizzle.scale_axes(config.inputs_per_scale))
        # The second scale is a divisor, or the inverse of one.
        second = TensorSpec(cls.second_field, (dtypes.float32,), "P", Role.SCALE, divides=True)
        return (
            TensorSpec(cls.packed_field, (dtypes.uint8,), "N K/2", Role.WORD),
            scales,
            replace(second, optional=not config.second),
            replace(second, name=cls.input_field, optional=True),
        )

    @property
    def plain_scales(self) -> Tensor:
        """Scales (N, K/16) in plain order, float8_e4m3fn."""
        stored = self.fields()["weight_scale"]
        N, groups = self.layer.N, self.layer.K // GROUP
        return swizzle.unswizzle_scales(stored, N, groups) if self.config.swizzled else stored

    def packed_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return bytes (N, K/2) of codes, and the product of both scales (N, K/16), float32."""
        fields, scales = self.fields(), self.plain_scales.float()
        second = fields.get(self.second_field)
        if second is not None:
            scales = both_scales(scales, second, self.layer.parts, divides=self.divides)
        return fields[self.packed_field], scales

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the product of both scales."""
        packed, scales = self.packed_and_scales()
        return spec.Codes(
            bits=4,
            codes=NibblePairs(packed, high_first=False),
            scales=scales,
            zeros=None,
            k_group=torch.arange(self.layer.K, device=packed.device) // self.config.inputs_per_scale,
            lookup=fp4.values(packed.device),
        )


@dataclass(frozen=True, eq=False, repr=False)
class CTNVFP4Weight(_NVFP4Weight):
    """An NVFP4 layer of compressed-tensors, or a share of one: the global scale divides.

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] / weight_global_scale). Source:
    compressed-tensors, bit-equal to its files after one rounding.

    Attributes
    ----------
    weight_packed
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8.
    weight_scale
        (N, K / 16), float8_e4m3fn.
    weight_global_scale
        () or (1,), or one per fused part, fp32.
    input_global_scale
        Of the activations, same shape, fp32; None: not stored.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor
    input_global_scale: Tensor | None = None

    format: ClassVar[str] = "ct_nvfp4"
    packed_field: ClassVar[str] = "weight_packed"
    second_field: ClassVar[str] = "weight_global_scale"
    input_field: ClassVar[str] = "input_global_scale"
    divides: ClassVar[bool] = True


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptNVFP4Weight(_NVFP4Weight):
    """An NVFP4 layer of ModelOpt, or a share of one: the second scale multiplies.

    w[n, k] = e2m1[code] * (weight_scale[n, k / 16] * weight_scale_2). Source: modelopt,
    bit-equal to its files.

    Attributes
    ----------
    weight
        Two e2m1 codes a byte, the first in the low bits: (N, K / 2), uint8.
    weight_scale
        (N, K / 16), float8_e4m3fn; in the order of tensor cores if `config.swizzled`.
    weight_scale_2
        () or (1,), or one per fused part, fp32; None: 1.
    input_scale
        Of the activations, same shape, fp32; None: not stored.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor | None = None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "modelopt_nvfp4"


@dataclass(frozen=True)
class ModelOptNVFP4ExtendedConfig(NVFP4Config):
    """Config of `ModelOptNVFP4ExtendedWeight`; ArgumentError for another group size.

    Attributes
    ----------
    group_size
        Inputs that share a scale: 16 or 32.
    low_rank
        Whether the factors of a low-rank term are stored.
    scaled_inputs
        Whether `pre_quant_scale` is stored; None: optional.
    """

    name: ClassVar[str] = "modelopt_nvfp4_extended"

    group_size: int = GROUP
    low_rank: bool = False
    scaled_inputs: bool | None = None

    def __post_init__(self) -> None:
        if self.group_size not in (GROUP, 2 * GROUP):
            raise ArgumentError(f"{self.name}: group_size", "16 or 32", str(self.group_size))

    @property
    def inputs_per_scale(self) -> int:
        """Inputs of a group, `group_size`."""
        return self.group_size


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptNVFP4ExtendedWeight(_NVFP4Weight):
    """An NVFP4 layer of ModelOpt with factors of the inputs, a low-rank term or groups of 32.

    w[n, k] = e2m1[code] * (weight_scale[n, k / g] * weight_scale_2) + (lora_b @ lora_a)[n, k]; y = (x *
    pre_quant_scale) @ w.T. `get_linear` computes y, `dequantize` w alone, with sums in float64. Source: the
    export of modelopt.

    Attributes
    ----------
    weight, weight_scale, weight_scale_2, input_scale
        See `ModelOptNVFP4Weight`.
    pre_quant_scale
        Factors of the inputs: (K,), bf16, fp16 or fp32; None: no factors.
    lora_a, lora_b
        Factors of the low-rank term: (R, K) and (N, R), bf16, fp16 or fp32; None: no term.
    """

    config: ModelOptNVFP4ExtendedConfig
    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None

    format: ClassVar[str] = "modelopt_nvfp4_extended"
    example: ClassVar[NVFP4Config] = ModelOptNVFP4ExtendedConfig(low_rank=True)

    @classmethod
    def tensors(cls, config: NVFP4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; layers are fused only with equal input factors and `lora_a`."""
        assert isinstance(config, ModelOptNVFP4ExtendedConfig)
        optional = config.scaled_inputs is None
        factors = TensorSpec("pre_quant_scale", FLOATS, "K", Role.SCALE, fact=True, optional=optional)
        terms = (
            TensorSpec("lora_a", FLOATS, "R K", Role.SCALE, stored=LOW_RANK[0], fact=True, signed=True),
            TensorSpec("lora_b", FLOATS, "N R", Role.SCALE, stored=LOW_RANK[1], signed=True),
        )
        return (
            *super().tensors(config),
            *(() if config.scaled_inputs is False else (factors,)),
            *(terms if config.low_rank else ()),
        )

    @property
    def input_factors(self) -> Tensor | None:
        """Factors of the inputs (K,), `pre_quant_scale`; None: no factors."""
        return self.pre_quant_scale

    @property
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Factors of the low-rank term, `lora_a` and `lora_b`; None without the term."""
        return None if self.lora_a is None or self.lora_b is None else (self.lora_a, self.lora_b)

    def without_low_rank(self) -> Self:
        """Weight of the codes alone, over the same memory."""
        return replace(self, config=replace(self.config, low_rank=False), lora_a=None, lora_b=None)

    def codes(self) -> spec.Codes:
        """Return the codes, their values, the product of both scales, and the low-rank term."""
        return replace(super().codes(), low_rank=self.low_rank)

    @classmethod
    def sample_facts(cls, config: Any, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Input factors and A of the low-rank term for `sizes`, powers of two, if `config` has them."""
        K = sizes["K"]
        facts = {"pre_quant_scale": 2.0 ** (torch.arange(K) % 3 - 1)} if config.scaled_inputs else {}
        if config.low_rank:
            sizes["R"] = 2
            facts["lora_a"] = 2.0 ** (torch.arange(2 * K) % 5 - 2).reshape(2, K)
        return facts


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """Both dialects of NVFP4."""
    return tuple(ConfiguredFormat(weight_type, NVFP4Config()) for weight_type in FORMATS[:2])


FORMATS = (CTNVFP4Weight, ModelOptNVFP4Weight, ModelOptNVFP4ExtendedWeight)
METHODS = ()  # read by detect.methods
