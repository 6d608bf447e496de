"""FP8: one byte per element, and a scale for the tensor, each output, or each block.

On disk, for a layer of K inputs and N outputs:

    weight        e4m3fn, e5m2            (N, K)
    weight_scale  fp32, bf16, fp16, e8m0  see below; also named `weight_scale_inv`. Scales of blocks may be
                  or uint8                exponents in bytes (e8m0)
    input_scale   fp32, bf16, fp16        () or (1,), of the activations; optional, also `activation_scale`

    w[n, k] = weight[n, k] * weight_scale

There is one scale for the tensor, () or (1,) or (1, 1); one per output, (N,) or (N, 1) or (1, N); or one per
block of bn outputs and bk inputs, (ceil(N / bn), ceil(K / bk)). ModelOpt writes the latter as
(ceil(N / bn), 1, ceil(K / bk), 1), and as () for a single block. A layer stored fused may have one per part,
(P,). DeepSeek V4 calls the scales of blocks `scale`; Mistral has `qscale_weight` and `qscale_act`.
Every name multiplies; only GPTQModel's dialect divides by `weight_scale_inv`. Source: transformers 5.23.0,
sglang 0.5.23, vLLM 0.11.0, compressed-tensors 0.20.0, modelopt 0.47.0 and gptqmodel 7.7.0, bit-equal to all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, Literal

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.dtypes import STORED, Dtype, DtypeLike
from qload.errors import ArgumentError, ShapeError
from qload.layouts.packing import byte_values
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Axis, Role, TensorSpec
from qload.spec.blocks import block_groups, block_rows

WEIGHTS = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float8_e4m3fnuz)
ACTIVATIONS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
SCALES = (*ACTIVATIONS, dtypes.float8_e8m0fnu)
EXPONENTS = (dtypes.uint8, dtypes.float8_e8m0fnu)
NAMES = ("weight_scale", "weight_scale_inv")
MISTRAL_NAMES = ("qscale_weight", "qscale_act")
INPUT_NAMES = ("input_scale", "activation_scale", MISTRAL_NAMES[1])

Per = Literal["tensor", "parts", "channel", "block"]
AXES: dict[str, Per] = {"P": "tensor", "P 1": "tensor", "N": "channel", "N 1": "channel", "1 N": "channel"}


def _is_block(block: object) -> bool:
    return isinstance(block, tuple) and len(block) == 2 and all(type(b) is int and b >= 1 for b in block)


@dataclass(frozen=True)
class Fp8Config(spec.Config):
    """Config of all FP8 layers of a checkpoint; ArgumentError for an invalid combination.

    Attributes
    ----------
    per
        Extent of a scale: "tensor", "parts" (each fused part), "channel" (an output) or "block"; None: by its
        shape.
    block
        (outputs, inputs) of a block; None: no blocks.
    divide
        Whether the scale divides instead of multiplying, as in GPTQModel's dialect.
    input_scale
        Whether the activations' scale is stored; None: optional.
    axes
        Axes of the scale of a described layer; "P" beforehand if a single block may have a scale for the
        tensor.
    activation_scale_ub
        Largest absolute activation used for scales; None: no limit.
    dtype
        Claimed dtype of the weight; the tensor decides.
    stored_scale
        Name of the scale on disk; None: one of the usual names.
    scale_bytes
        Whether the scales of blocks are exponents in uint8; set once a layer is described.
    """

    name: ClassVar[str] = "fp8"

    per: Per | None = None
    block: tuple[int, int] | None = None
    divide: bool = False
    input_scale: bool | None = None
    axes: str = field(default="", compare=False)  # shape only, same meaning
    activation_scale_ub: float | None = None
    dtype: DtypeLike | None = field(default=None, compare=False)  # only a claim
    stored_scale: str | None = field(default=None, repr=False)
    scale_bytes: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", STORED[self.dtype])
        if (self.per == "block") != (self.block is not None):
            raise ArgumentError("fp8: block", "(outputs, inputs) if per='block', else None", str(self.block))
        if self.block is not None and not _is_block(self.block):
            expected = "(outputs, inputs), whole numbers, each at least 1"
            raise ArgumentError("fp8: block", expected, repr(self.block))
        limit = self.activation_scale_ub
        if limit is not None and not (type(limit) in (int, float) and 0 < limit < inf):
            raise ArgumentError("fp8: activation_scale_ub", "None or a number above 0", repr(limit))

    @property
    def grid(self) -> str:
        """Axis text of block scales."""
        return "N/{}^ K/{}^".format(*self.block or (1, 1))

    @property
    def modelopt_grid(self) -> str:
        """Axis text of ModelOpt's block scales, with one more axis per block dimension."""
        return "N/{}^ 1 K/{}^ 1".format(*self.block or (1, 1))

    @property
    def scale_axes(self) -> str:
        """Axis text of the scale: of the layer, or by default of the claimed scheme."""
        return self.axes or {"block": self.grid, "channel": "N 1"}.get(self.per or "", "P")

    @property
    def scale_dtypes(self) -> tuple[Dtype, ...]:
        """Valid dtypes of the scale."""
        if self.scale_bytes:
            return EXPONENTS
        return (*SCALES, dtypes.uint8) if self.per == "block" and not self.divide else SCALES

    @property
    def scale_view(self) -> str | None:
        """Axis text for joining the parts of a scale that is not of blocks, in the shape of the first."""
        if self.per == "block":
            return self.grid if self.axes == self.modelopt_grid else None
        return "N" if self.per == "channel" else "P"

    def for_layer(self, headers: spec.LayerHeaders) -> Fp8Config:
        """Read the extent of a scale from its shape; ShapeError if it contradicts the claim."""
        sizes = {**headers.sizes(Fp8Weight.tensors(self)[:1]), "P": 1}
        shape, config = headers.shapes["weight_scale"], self
        if self.per == "block" and headers.dtypes["weight_scale"] is dtypes.uint8:
            config = replace(self, scale_bytes=True)
        stored: dict[str, Per] = AXES
        if self.per == "block":
            stored = {self.grid: "block", self.modelopt_grid: "block"}
            if self.axes == "P" and shape == (1,) == tuple(set(_shape(self.grid, sizes))):
                return replace(config, per="tensor", block=None, axes="P")
        fitting = [
            (axes, per)
            for axes, per in stored.items()
            if self.per in (None, per) and _shape(axes, sizes) == shape
        ]
        if not fitting and self.per in (None, "parts") and len(shape) == 1:
            fitting = [("P", "parts")]
        if not fitting:
            raise self._shape_error(headers, sizes)
        axes, per = fitting[0]
        if per != "parts":
            headers.check_single(("input_scale",))
        return replace(config, per=per, axes=axes)

    def _shape_error(self, headers: spec.LayerHeaders, sizes: dict[str, int]) -> ShapeError:
        N, hint = sizes["N"], "" if self.per else "blocks of scales need weight_block_size in the config"
        expected = {
            "tensor": "() or (1,), one for the tensor",
            "parts": "(P,), one a fused part",
            "channel": f"({N},), ({N}, 1) or (1, {N}), one an output",
            "block": f"{_shape(self.grid, sizes)} = ({self.grid.replace(' ', ', ')})",
            None: f"() or (1,) for the tensor; ({N},), ({N}, 1) or (1, {N}) for its outputs",
        }[self.per]
        full, file = headers.names.full("weight_scale"), headers.names.file("weight_scale")
        return ShapeError(full, expected, headers.shapes["weight_scale"], file, hint)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Note on a claimed dtype that the tensor contradicts."""
        got = headers.dtypes["weight"]
        claim, is_ = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, got))
        return () if self.dtype in (None, got) else (f"the config says {claim}, the weight is {is_}",)


@dataclass(frozen=True, eq=False, repr=False)
class Fp8Weight(spec.Weight):
    """An FP8 layer, or a share of one; fused parts keep a scale each.

    w[n, k] = weight[n, k] * weight_scale, or divided by it if `config.divide`. Source: transformers,
    sglang, vLLM, compressed-tensors and gptqmodel, bit-equal to their files.

    Attributes
    ----------
    weight
        (N, K), float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
    weight_scale
        One for the tensor, () or (1,) or (1, 1); per output, (N,) or (N, 1) or (1, N); per fused part,
        (P,); or per block of bn outputs and bk inputs, (ceil(N / bn), ceil(K / bk)) or
        (ceil(N / bn), 1, ceil(K / bk), 1); fp32, bf16, fp16 or e8m0, for blocks also uint8.
    input_scale
        Of the activations, unused by `dequantize`: () or (1,), fp32, bf16 or fp16; None: not
        stored.

    Examples
    --------
    >>> import torch
    >>> from qload import Fp8Config, Fp8Weight
    >>> stored = torch.tensor([[1.0, 448.0], [-2.0, 0.0]]).to(torch.float8_e4m3fn)
    >>> weight = Fp8Weight(config=Fp8Config(), weight=stored, weight_scale=torch.tensor([0.5, 2.0]))
    >>> weight.config.per
    'channel'
    >>> weight.dequantize()
    tensor([[  0.5000, 224.0000],
            [ -4.0000,   0.0000]])
    """

    config: Fp8Config
    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None = None

    format: ClassVar[str] = "fp8"
    example: ClassVar[Fp8Config] = Fp8Config()
    further: ClassVar[tuple[Fp8Config, ...]] = (Fp8Config("block", (128, 128)),)

    @classmethod
    def tensors(cls, config: Fp8Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; blocks bind cuts and the seams of fused layers."""
        names: tuple[str, ...] = NAMES[::-1] if config.per == "block" else (*NAMES, MISTRAL_NAMES[0])
        if config.divide:
            names = NAMES[1:]
        scale, axes, view = config.stored_scale or names, config.scale_axes, config.scale_view
        scales = TensorSpec("weight_scale", config.scale_dtypes, axes, Role.SCALE, scale, view=view)
        inputs = TensorSpec("input_scale", ACTIVATIONS, "P", Role.SCALE, INPUT_NAMES, divides=True)
        return (
            TensorSpec("weight", WEIGHTS, "N K", Role.WORD),
            replace(scales, divides=config.divide),
            *(() if config.input_scale is False else (replace(inputs, optional=config.input_scale is None),)),
        )

    @property
    def scales(self) -> Tensor:
        """Scales as floats, E8M0 included; exponents in uint8 are viewed as E8M0."""
        scale = self.weight_scale
        return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale

    @property
    def block(self) -> tuple[int, int] | None:
        """(outputs, inputs) per scale, -1 for all inputs; None: one scale per fused part."""
        return (1, -1) if self.config.per == "channel" else self.config.block

    def stored(self) -> StoredRows | None:
        """Describe the stored order for kernels; None for a scale per fused part, and for e4m3fnuz."""
        if self.weight.dtype == torch.float8_e4m3fnuz:
            return None
        scales = self._matrix(self.scales)
        return block_rows(self.layer, self.weight, scales, self.block, divide=self.config.divide)

    def _matrix(self, scales: Tensor) -> Tensor:
        """Scales with an axis of outputs and an axis of inputs."""
        return scales.reshape(scales.shape[0] if self.config.block else -1, -1 if self.config.block else 1)

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the scales of their blocks, outputs or parts."""
        n_group, k_group = block_groups(self.layer, self.block, self.device)
        return spec.Codes(
            bits=8,
            codes=self.weight.view(torch.uint8),
            scales=self._matrix(self.scales.float()),
            zeros=None,
            k_group=k_group,
            lookup=byte_values(self.weight.dtype, self.device),
            n_group=n_group,
            divide=self.config.divide,
        )


def _shape(axes: str, sizes: dict[str, int]) -> tuple[int | None, ...]:
    axes_ = (Axis(text) for text in axes.split())
    return tuple(axis.size(axis.logical(sizes) or 0) for axis in axes_)


DEFAULT_BLOCK = (128, 128)  # for a config without a block


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """FP8 with one scale per tensor, block or output, in this order of preference."""
    fp8 = [(fmt.config, fmt) for fmt in formats if isinstance(fmt.config, Fp8Config)]
    stated = Fp8Config(
        divide=any(config.divide for config, _ in fp8),
        input_scale=True if any(config.input_scale for config, _ in fp8) else None,
    )
    blocks = dict.fromkeys([*(config.block for config, _ in fp8 if config.block), DEFAULT_BLOCK])
    in_blocks = [replace(stated, per="block", block=block) for block in blocks]
    readings = [
        replace(stated, per="tensor"),
        *in_blocks,
        *(replace(config, stored_scale="scale") for config in in_blocks if not stated.divide),
        replace(stated, per="channel"),
    ]
    inputs = next((fmt.activations for _, fmt in fp8), None)
    return tuple(ConfiguredFormat(Fp8Weight, config, inputs) for config in readings)


FORMATS = (Fp8Weight,)
METHODS = ()  # read by detect.methods
