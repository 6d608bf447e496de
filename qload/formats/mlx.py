"""MLX: unsigned codes with a scale and a bias for each group, or small floats with a scale for each group.

On disk, for a layer of K inputs and N outputs, codes of b bits, group size g:

    weight  uint32            (N, K*b/32)  codes along K, the first in the low bits, across words
    scales  fp16, bf16, fp32  (N, K/g)     of either sign
    biases  as the scales     (N, K/g)     named `qbiases` by transformers (quant_method metal)

    w[n, k] = scales[n, k / g] * code[n, k] + biases[n, k / g]

in float32: the product is exact, and the sum is rounded. Modes of floats have no biases, and bytes as scales:

    mxfp4  4 bits (e2m1), groups of 32, scales e8m0
    mxfp8  8 bits (e4m3), groups of 32, scales e8m0
    nvfp4  4 bits (e2m1), groups of 16, scales e4m3, and no scale of the tensor

    w[n, k] = float(code[n, k]) * scales[n, k / g]

The config states `quantization` without a quant_method: group_size, bits, mode, and entries of modules.
Experts are stacked (E, N, K) under `switch_mlp`. Source: mlx 0.32.4 and mlx-lm 0.32.2, bit-equal to both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from qload import configs, dtypes, spec
from qload.layouts import NibblePairs, fp4
from qload.layouts.compressed_tensors import rows
from qload.layouts.packing import byte_values, pack_codes
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec
from qload.spec.integers import Integers, IntegerWeight, Origin, from_ordered_groups

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
FLOATS = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
Mode = Literal["mxfp4", "mxfp8", "nvfp4"]
MODES: Mapping[str, tuple[int, int]] = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, group
LARGEST_E4M3 = 0x7E  # the byte of 448; 0x7F is NaN
EXPERT = re.compile(r"\.(?:switch_mlp|experts)\.\d+\.")


@dataclass(frozen=True)
class MLXConfig(spec.Grouped, spec.Config):
    """Config of MLX's affine mode: `bits` of a code, and `group_size` inputs of a group."""

    name: ClassVar[str] = "mlx"

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()


@dataclass(frozen=True, eq=False, repr=False)
class MLXWeight(IntegerWeight):
    """A layer of MLX's affine mode, or a share of one.

    w[n, k] = scales[n, k / group_size] * code + biases[n, k / group_size]. Source: mlx, bit-equal to it.

    Attributes
    ----------
    weight
        Codes in words: (N, K * bits / 32), uint32.
    scales, biases
        (N, K / group_size), bf16, fp16 or fp32.
    """

    config: MLXConfig
    weight: Tensor
    scales: Tensor
    biases: Tensor

    format: ClassVar[str] = "mlx"
    codes_field: ClassVar[str] = "weight"
    example: ClassVar[MLXConfig] = MLXConfig(bits=4, group_size=64)

    @classmethod
    def tensors(cls, config: MLXConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups."""
        groups = f"N K/{config.group_size}"
        return (
            TensorSpec("weight", (dtypes.uint32,), f"N K*{config.bits}/32", Role.WORD),
            TensorSpec("scales", FLOATS, groups, Role.SCALE, signed=True),
            TensorSpec("biases", FLOATS, groups, Role.SCALE, stored=("biases", "qbiases"), signed=True),
        )

    def codes(self) -> spec.Codes:
        """Return the codes in their words, with scales and offsets in float32."""
        return spec.Codes(
            bits=self.config.bits,
            codes=rows(self.config.bits, dense=True).packed(self.weight.view(torch.int32)),
            scales=self.scales.float(),
            zeros=None,
            offsets=-self.biases.float(),
            k_group=self.config.in_order(self.layer.K, self.device),
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers with offsets; RepackError for scales and biases of two dtypes."""
        packed = rows(self.config.bits, dense=True).packed(self.weight.view(torch.int32))
        scales, biases = self.scales.T.contiguous(), self.biases.T.contiguous()
        return from_ordered_groups(self, lambda: packed.T, scales, offset="weight", offsets=-biases)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` with offsets exactly; `origin`: not needed."""
        assert integers.offsets is not None
        words = pack_codes(rows(integers.bits, dense=True), integers.unpack().T)
        return cls(
            config=MLXConfig(integers.bits, integers.layer.K // integers.groups),
            weight=words.view(torch.uint32),
            scales=integers.scales.T.contiguous(),
            biases=-integers.offsets.T.contiguous(),
            layer=integers.layer,
        )


@dataclass(frozen=True)
class MLXFloatConfig(spec.Config):
    """Config of MLX's modes of floats: `mode` is mxfp4, mxfp8 or nvfp4."""

    name: ClassVar[str] = "mlx_float"

    mode: Mode

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return MODES[self.mode][0]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return MODES[self.mode][1]


@dataclass(frozen=True, eq=False, repr=False)
class MLXFloatWeight(spec.Weight):
    """A layer of MLX's modes mxfp4, mxfp8 and nvfp4, or a share of one.

    w[n, k] = float(code[n, k]) * scales[n, k / group_size]. Source: mlx, bit-equal to its files.

    Attributes
    ----------
    weight
        Codes in words: (N, K * bits / 32), uint32.
    scales
        Bytes of e8m0, in nvfp4 of e4m3: (N, K / group_size), uint8.
    """

    config: MLXFloatConfig
    weight: Tensor
    scales: Tensor

    format: ClassVar[str] = "mlx_float"
    example: ClassVar[MLXFloatConfig] = MLXFloatConfig("mxfp4")

    @classmethod
    def tensors(cls, config: MLXFloatConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups."""
        groups = f"N K/{config.group_size}"
        scales = TensorSpec("scales", (dtypes.uint8,), groups, Role.SCALE)
        if config.mode == "nvfp4":  # no exponents
            scales = TensorSpec("scales", (dtypes.uint8,), groups, Role.WORD, between=(0, LARGEST_E4M3))
        return TensorSpec("weight", (dtypes.uint32,), f"N K*{config.bits}/32", Role.WORD), scales

    def codes(self) -> spec.Codes:
        """Return the codes, their values, and the decoded scales."""
        stored, device = self.weight.view(torch.uint8), self.device
        is_e4m3 = self.config.mode == "nvfp4"
        return spec.Codes(
            bits=self.config.bits,
            codes=NibblePairs(stored, high_first=False) if self.config.bits == 4 else stored,
            scales=self.scales.view(torch.float8_e4m3fn).float() if is_e4m3 else fp4.e8m0(self.scales),
            zeros=None,
            k_group=torch.arange(self.layer.K, device=device) // self.config.group_size,
            lookup=fp4.values(device) if self.config.bits == 4 else byte_values(torch.float8_e4m3fn, device),
        )


class _Entry(configs.Entry):
    group_size: Annotated[int, configs.one_of(16, *GROUP_SIZES)]
    bits: Annotated[int, configs.one_of(*BITS)]
    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"] = "affine"


class _Section(_Entry, configs.Section):
    pass


@dataclass(frozen=True)
class EntryModules:
    """Predicate of the modules of some entries; an expert has the entry of its stack."""

    names: frozenset[str]

    def __call__(self, module: str) -> bool:
        """Return whether a module has one of the entries."""
        return module in self.names or EXPERT.sub(".switch_mlp.", module) in self.names


def is_section(values: Mapping[str, Any]) -> bool:
    """Return whether a section without a method is of MLX: settings of all modules, and of single ones."""
    if values.get("quant_method") or not {"group_size", "bits"} <= values.keys():
        return False
    others = values.keys() - {"group_size", "bits", "mode", "quant_method"}
    entries = all(isinstance(values[name], dict | bool) for name in others)
    named = all("." in name or isinstance(values[name], dict) or name == "lm_head" for name in others)
    return entries and named


def with_method(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section with its quant_method, which MLX does not write."""
    return {**values, "quant_method": "mlx"} if is_section(values) else values


def read_mlx(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of a `quantization` of MLX, or of quant_method metal."""
    section = configs.validate(_Section, source)
    default = _format(source, section)
    modules: dict[tuple[ConfiguredFormat, ...], list[str]] = {}
    for name, value in source.values.items():
        if isinstance(value, dict):
            entry = configs.FoundConfig(source.file, source.key(name), value)
            modules.setdefault((_format(entry, configs.validate(_Entry, entry)),), []).append(name)
        elif value is False:
            modules.setdefault((), []).append(name)
    rules = [
        configs.ModuleRule(formats, EntryModules(frozenset(names))) for formats, names in modules.items()
    ]
    last = configs.ModuleRule((default,), exclusions=section.exclusions())
    return section.claims(
        source,
        "mlx",
        section.mode,
        default,
        bits=section.bits,
        group_size=section.group_size,
        rules=(*rules, last) if rules else (),
    )


def _format(source: configs.FoundConfig, entry: _Entry) -> ConfiguredFormat:
    """Format of an entry; ConfigError for bits or a group size that its mode does not have."""
    if entry.mode == "affine":
        if entry.group_size not in GROUP_SIZES:
            raise source.error("group_size", "32, 64 or 128 in mode affine", str(entry.group_size))
        return ConfiguredFormat(MLXWeight, MLXConfig(entry.bits, entry.group_size))
    for key, expected in zip(("bits", "group_size"), MODES[entry.mode], strict=True):
        if getattr(entry, key) != expected:
            raise source.error(key, f"{expected} in mode {entry.mode}", str(getattr(entry, key)))
    return ConfiguredFormat(MLXFloatWeight, MLXFloatConfig(entry.mode))


FORMATS = (MLXWeight, MLXFloatWeight)
METHODS = (
    configs.Method(
        names=("mlx", "metal"),
        read=read_mlx,
        formats=FORMATS,
        variants=("mlx (affine, mxfp4, mxfp8, nvfp4)", "metal"),
        exclusion_key="an entry false for the module",
    ),
)
