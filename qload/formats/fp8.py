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
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from qload import configs, dtypes, spec
from qload.configs.claims import NEUTRAL_VALUES
from qload.devices import StoredRows
from qload.dtypes import STORED, Dtype, DtypeLike
from qload.errors import ArgumentError, ConfigError, DtypeError, MismatchError, ShapeError
from qload.layouts.packing import byte_values
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme, Axis, Role, TensorSpec, named
from qload.spec.casts import check_cast

WEIGHTS = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.float8_e4m3fnuz)
ACTIVATIONS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
SCALES = (*ACTIVATIONS, dtypes.float8_e8m0fnu)
EXPONENTS = (dtypes.uint8, dtypes.float8_e8m0fnu)
NAMES = ("weight_scale", "weight_scale_inv")
MISTRAL_NAMES = ("qscale_weight", "qscale_act")
NEGATIVE_ZERO, NAN = 0x80, 0x7F  # bytes of e4m3fn; in e4m3fnuz they are NaN and 240

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
        names: tuple[str, ...] = (*NAMES, MISTRAL_NAMES[0])
        if config.per == "block":
            names = NAMES[::-1]
        if config.divide:
            names = NAMES[1:]
        if config.stored_scale is not None:
            names = (config.stored_scale,)
        specs = (
            TensorSpec("weight", WEIGHTS, "N K", Role.WORD),
            TensorSpec(
                "weight_scale",
                config.scale_dtypes,
                config.scale_axes,
                Role.SCALE,
                stored=names,
                divides=config.divide,
                view=config.scale_view,
            ),
            TensorSpec(
                "input_scale",
                ACTIVATIONS,
                "P",
                Role.SCALE,
                stored=("input_scale", "activation_scale", MISTRAL_NAMES[1]),
                optional=config.input_scale is None,
                divides=True,  # divides the activations
            ),
        )
        return specs[:2] if config.input_scale is False else specs

    @property
    def scales(self) -> Tensor:
        """Scales as floats, E8M0 included; exponents in uint8 are viewed as E8M0."""
        scale = self.weight_scale
        return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale

    def stored(self) -> StoredRows | None:
        """Describe the stored order for kernels; None for a scale per fused part, and for e4m3fnuz."""
        (N, K), block = self.shape, self.config.block
        if self.weight.dtype == torch.float8_e4m3fnuz or (
            block is None and self.config.per != "channel" and len(self.layer.parts) > 1
        ):
            return None
        scales = self.scales.reshape(-1, 1)
        n_run, k_run = (1, max(K, 1)) if self.config.per == "channel" else (max(N, 1), max(K, 1))
        if block is not None:
            scales = self.scales.reshape(self.weight_scale.shape[0], -1)
            n_run, k_run = min(block[0], max(N, 1)), min(block[1], max(K, 1))
        return StoredRows(self.weight, scales, n_run, k_run, divide=self.config.divide)

    def codes(self) -> spec.Codes:
        """Return the bytes, their values, and the scales of their blocks, outputs or parts."""
        device, scales = self.device, self.scales.float()
        n_group = k_group = None
        if self.config.block:
            scales = scales.reshape(scales.shape[0], -1)
            n_group, k_group = (
                torch.arange(size, device=device) // block
                for size, block in zip(self.shape, self.config.block, strict=True)
            )
        else:
            scales = scales.reshape(-1, 1)
            if self.config.per != "channel" and len(self.layer.parts) > 1:
                n_group = torch.tensor(self.layer.parts, device=device)
                n_group = torch.arange(len(n_group), device=device).repeat_interleave(n_group)
        return spec.Codes(
            bits=8,
            codes=self.weight.view(torch.uint8),
            scales=scales,
            zeros=None,
            k_group=k_group,
            lookup=byte_values(self.weight.dtype, device),
            n_group=n_group,
            divide=self.config.divide,
        )


def to_fnuz(weight: Fp8Weight) -> Fp8Weight:
    """Convert an e4m3fn weight to e4m3fnuz: values of bytes halve, -0 becomes 0, and scales double.

    NaN bytes of e4m3fn are refused, because they are 240 or -240 in e4m3fnuz. CastError if the dtype of a
    scale cannot represent its double, or the half of a dividing one.
    """
    name = weight.layer.name or "Fp8Weight"
    if weight.weight.dtype != torch.float8_e4m3fn:
        got = str(weight.weight.dtype).removeprefix("torch.")
        raise DtypeError(named(name, "weight"), ["float8_e4m3fn"], got)
    stored = weight.weight.view(torch.uint8)
    lost = int(((stored & NAN) == NAN).sum())
    if lost:
        what = "e4m3fnuz would read NaN as a number"
        raise MismatchError(named(name, "weight"), what, "no byte 0x7F or 0xFF", f"{lost} of them")
    bytes_ = torch.where(stored == NEGATIVE_ZERO, 0, stored).to(torch.uint8)
    times, limit = (0.5 if weight.config.divide else 2), weight.input_scale
    return replace(
        weight,
        weight=bytes_.view(torch.float8_e4m3fnuz),
        weight_scale=_scaled(named(name, "weight_scale"), weight.scales, times),
        input_scale=None if limit is None else _scaled(named(name, "input_scale"), limit, 2),
    )


def _scaled(name: str, scale: Tensor, times: float) -> Tensor:
    """Multiply a scale by a power of two in its own dtype; CastError if this is not exact."""
    exact = scale.double() * times
    cast = exact.to(scale.dtype)
    remedy = "keep this layer in e4m3fn, or store its scales in float32"
    check_cast(name, exact, cast, tiny=True, remedy=remedy, stored=scale.dtype)
    return cast


def _shape(axes: str, sizes: dict[str, int]) -> tuple[int | None, ...]:
    axes_ = (Axis(text) for text in axes.split())
    return tuple(axis.size(axis.logical(sizes) or 0) for axis in axes_)


FP8_DTYPES = {
    "e4m3": dtypes.float8_e4m3fn,
    "float8_e4m3fn": dtypes.float8_e4m3fn,
    "e5m2": dtypes.float8_e5m2,
    "float8_e5m2": dtypes.float8_e5m2,
}
DEFAULT_BLOCK = (128, 128)  # for a config without a block
UNUSED_SCALE = "weight_scale_inv"  # transformers also stores it for weights that are not in blocks
FP8_GRANULARITIES: dict[str, Per] = {"tensor": "tensor", "row": "channel", "block": "block"}


class _FP8(configs.Section):
    activation_scheme: Literal["dynamic", "static"] | None = None
    weight_block_size: configs.Block | None = None
    fmt: Literal["e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    bits: Annotated[int, configs.one_of(8)] | None = None
    format: Literal["fp8"] | None = None
    weight_scale_method: Literal["tensor", "row", "block"] | None = None
    weight_scale_semantics: Literal["inverse"] | None = None
    ignored_layers: configs.NameList | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


class _FBGEMM(configs.Section):
    activation_scale_ub: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def read_fp8(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of FP8; without a claim the shape of the scale tells its granularity."""
    section: configs.Section
    if configs.agree(source, "quant_method", "method") == "fbgemm_fp8":
        section = limited = configs.validate(_FBGEMM, source)
        limit = limited.activation_scale_ub
        config = Fp8Config("channel", activation_scale_ub=limit)
        tokens = ActivationScheme("float", 8, True, "token", upper_bound=limit, owner="fbgemm")
        fmt = ConfiguredFormat(Fp8Weight, config, tokens)
    else:
        section = stated = configs.validate(_FP8, source)
        config = _fp8_config(source, stated)
        fmt = ConfiguredFormat(Fp8Weight, config, _fp8_activations(stated))
    name = "fp8_inverse" if config.divide else "fp8"
    return section.claims(source, "fp8", name, fmt, bits=8, sym=True, unused=(UNUSED_SCALE,))


class _Mistral(configs.Section):
    qformat_weight: Literal["fp8_e4m3"]
    qscheme_act: Literal["TENSOR", "NO_SCALES"] | None = None


def read_mistral(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of the `quantization` of a params.json; inputs have a stored scale by default."""
    section = configs.validate(_Mistral, source)
    static = section.qscheme_act != "NO_SCALES"
    config = Fp8Config(input_scale=True if static else None, dtype=dtypes.float8_e4m3fn)
    stated = _FP8(activation_scheme="static" if static else "dynamic")
    fmt = ConfiguredFormat(Fp8Weight, config, _fp8_activations(stated))
    return section.claims(source, "mistral", "fp8", fmt, bits=8, sym=True)


def _fp8_activations(section: _FP8) -> ActivationScheme | None:
    """Activation scheme of FP8.

    A stored scale applies to the tensor. A dynamic scale applies to a block's number of inputs for weights in
    blocks, and to a token for other weights, as in transformers 5.23.0 and, with CUTLASS, in vLLM 0.11.0.
    With powers of two as scales of blocks, the scales of inputs are powers of two.
    """
    if section.activation_scheme is None:
        return None
    if section.activation_scheme == "static":
        return ActivationScheme("float", 8, False, "tensor", scale="input_scale", owner="transformers")
    if section.weight_block_size is None:
        return ActivationScheme("float", 8, True, "token", owner="transformers")
    group_size, powers = section.weight_block_size[1], section.scale_fmt == "ue8m0"
    dynamic = ActivationScheme("float", 8, True, "group", group_size, owner="transformers")
    return replace(dynamic, scale_type="e8m0") if powers else dynamic


def _fp8_config(source: configs.FoundConfig, section: _FP8) -> Fp8Config:
    method, size = section.weight_scale_method, section.weight_block_size
    if method and section.weight_scale_semantics is None:
        # GPTQModel alone states a method, and its scales divide: without the semantics it is ambiguous.
        key = source.key("weight_scale_semantics")
        raise ConfigError(source.file, key, "'inverse', with weight_scale_method", "nothing")
    if method and (method == "block") != (size is not None):
        expected = "[outputs, inputs]" if method == "block" else "nothing"
        key = source.key("weight_block_size")
        raise ConfigError(source.file, key, f"{expected}, with weight_scale_method {method}", str(size))
    return Fp8Config(
        FP8_GRANULARITIES[method] if method else "block" if size else None,
        (size[0], size[1]) if size else None,
        divide=section.weight_scale_semantics == "inverse",
        input_scale=True if section.activation_scheme == "static" else None,
        dtype=FP8_DTYPES[section.fmt] if section.fmt else None,
    )


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
METHODS = (
    configs.Method(
        names=("fp8",),
        read=read_fp8,
        formats=(Fp8Weight,),
        variants=("fp8 (multiplying, or weight_scale_semantics inverse)",),
        activation_key="activation_scheme",
        ignored={
            "expert_dtype": configs.IgnoredKey(
                "states the dtype of experts; qload reads them by their tensors",
                neutral=(*NEUTRAL_VALUES, "fp8"),
            ),
        },
    ),
    configs.Method(
        names=("mistral",),
        read=read_mistral,
        formats=(Fp8Weight,),
        variants=("mistral (params.json with qformat_weight fp8_e4m3)",),
        activation_key="qscheme_act",
    ),
    configs.Method(
        names=("fbgemm_fp8",),
        read=read_fp8,
        formats=(Fp8Weight,),
        variants=("fbgemm_fp8",),
        activation_key="activation_scale_ub",
    ),
)
