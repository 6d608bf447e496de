"""ModelOpt's SmoothQuant (W8A8_SQ_PER_CHANNEL): int8 with a scale per output, and scaled int8 inputs.

On disk, for a layer of K inputs and N outputs:

    weight           int8              (N, K)
    weight_scale     fp32, bf16, fp16  (N,)
    pre_quant_scale  bf16, fp16, fp32  (K,)        factors of the inputs; optional
    input_scale      fp32              () or (1,)  of the activations; optional

    w[n, k] = weight_scale[n] * weight[n, k]
    y = (x * pre_quant_scale) @ w.T

As in `modelopt_awq`, the factors of the inputs are not part of w. Source: the export of modelopt 0.47.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
ZERO = 128  # of codes that count from 0


@dataclass(frozen=True)
class ModelOptInt8Config(spec.Config):
    """Config of ModelOpt's SmoothQuant layers; `scaled_inputs`: see `ModelOptAWQConfig`."""

    name: ClassVar[str] = "modelopt_int8"

    scaled_inputs: bool | None = None

    def for_layer(self, headers: spec.LayerHeaders) -> ModelOptInt8Config:
        """Check the shapes; ShapeError for several input scales of one layer."""
        headers.check_single(("input_scale",))
        return self


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptInt8Weight(spec.Weight):
    """A SmoothQuant layer of ModelOpt, or a share of one.

    w[n, k] = weight_scale[n] * weight[n, k]; y = (x * pre_quant_scale) @ w.T. `get_linear` computes y,
    `dequantize` w alone. Source: the export of modelopt.

    Attributes
    ----------
    weight
        Signed codes: (N, K), int8.
    weight_scale
        (N,), fp32, bf16 or fp16.
    pre_quant_scale
        Factors of the inputs: (K,), bf16, fp16 or fp32; None: no factors.
    input_scale
        Of the activations: () or (1,), or one per fused part, fp32; None: not stored.
    """

    config: ModelOptInt8Config
    weight: Tensor
    weight_scale: Tensor
    pre_quant_scale: Tensor | None = None
    input_scale: Tensor | None = None

    format: ClassVar[str] = "modelopt_int8"
    example: ClassVar[ModelOptInt8Config] = ModelOptInt8Config()

    @classmethod
    def tensors(cls, config: ModelOptInt8Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; layers are fused only with equal factors of the inputs."""
        optional = config.scaled_inputs is None
        factors = TensorSpec("pre_quant_scale", FLOATS, "K", Role.SCALE, fact=True, optional=optional)
        return (
            TensorSpec("weight", (dtypes.int8,), "N K", Role.WORD),
            TensorSpec("weight_scale", FLOATS, "N", Role.SCALE),
            *(() if config.scaled_inputs is False else (factors,)),
            TensorSpec("input_scale", (dtypes.float32,), "P", Role.SCALE, optional=True, divides=True),
        )

    @property
    def input_factors(self) -> Tensor | None:
        """Factors of the inputs (K,), `pre_quant_scale`; None: no factors."""
        return self.pre_quant_scale

    def stored(self) -> StoredRows:
        """Describe the stored order for kernels."""
        return StoredRows(self.weight, self.weight_scale[:, None], 1, max(self.layer.K, 1))

    def codes(self) -> spec.Codes:
        """Return codes that count from 0, with zero points of 128."""
        scales = self.weight_scale.float()[:, None]
        return spec.Codes(
            bits=8,
            codes=self.weight.view(torch.uint8) + ZERO,  # modulo 256
            scales=scales,
            zeros=torch.full_like(scales, ZERO, dtype=torch.int32),
            k_group=None,
        )

    @classmethod
    def sample_facts(cls, config: ModelOptInt8Config, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Input factors for `sizes`, powers of two, if `config` has them."""
        return {"pre_quant_scale": 2.0 ** (torch.arange(sizes["K"]) % 3 - 1)} if config.scaled_inputs else {}


FORMATS = (ModelOptInt8Weight,)
METHODS = ()  # read by detect.methods
