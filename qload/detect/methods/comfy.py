"""Marks of ComfyUI's layers: the format of each, and the rotation of its inputs (ConvRot).

A mark is a JSON object with a `format`, read by `storage.comfy`. Other settings may lie below its key
`params`. `convrot_groupsize` states the size of the blocks of inputs that the layer multiplies by a regular
Hadamard matrix. Layers without a mark are plain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from qload import configs
from qload.errors import UnsupportedFormatError
from qload.formats import (
    ComfyAWQConfig,
    ComfyAWQWeight,
    ComfyW4A8Config,
    ComfyW4A8Weight,
    CTIntConfig,
    CTIntWeight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    ModelOptNVFP4ExtendedConfig,
    ModelOptNVFP4ExtendedWeight,
    ModelOptNVFP4Weight,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
)
from qload.loader import ConfiguredFormat
from qload.loader.transforms import TransformRule

VARIANTS = ("comfyui (float8, nvfp4, mxfp8, int8_tensorwise, convrot_w4a4, asym_w4a8_int8, awq_w4a16)",)
WAY_OUT = "ComfyUI runs it; take the model as its authors published it, or its plain safetensors"


class _Settings(configs.Entry):
    group_size: Annotated[int, Field(ge=1)] | None = None
    convrot_groupsize: Annotated[int, Field(ge=4, le=1 << 14)] | None = None
    convrot: bool | None = None


class _Mark(_Settings):
    format: str
    num_experts: int | None = None
    params: _Settings | None = None


class _Marks(configs.Section):
    layers: dict[str, _Mark]


@dataclass(frozen=True)
class NamedLayers:
    """Predicate on modules: True for the listed names."""

    names: frozenset[str]

    def __call__(self, module: str) -> bool:
        """Return whether a module has one of the names."""
        return module in self.names


FP8 = ConfiguredFormat(Fp8Weight, Fp8Config("tensor"))
FORMATS_OF_MARKS: Mapping[str, tuple[ConfiguredFormat, ...]] = {
    "float8_e4m3fn": (FP8,),
    "float8_e5m2": (FP8,),
    "scaled_fp8": (ConfiguredFormat(Fp8Weight, Fp8Config("tensor", stored_scale="scale_weight")),),
    "nvfp4": (
        ConfiguredFormat(ModelOptNVFP4Weight, NVFP4Config()),
        ConfiguredFormat(ModelOptNVFP4ExtendedWeight, ModelOptNVFP4ExtendedConfig(scaled_inputs=True)),
    ),
    "mxfp8": (ConfiguredFormat(MXFP8Weight, MXFP8Config()),),
    "int8_tensorwise": (ConfiguredFormat(CTIntWeight, CTIntConfig((1, -1), static=False)),),
    "convrot_w4a4": (ConfiguredFormat(CTPackWeight, CTPackConfig(4, -1, dense=True)),),
    "awq_w4a16": (ConfiguredFormat(ComfyAWQWeight, ComfyAWQConfig()),),
}
ROTATED_FORMATS = ("convrot_w4a4", "asym_w4a8_int8", "int8_tensorwise")
GROUP_SIZE, ROTATION_SIZE = 16, 256  # ComfyUI's, of a mark without sizes


def read_comfy(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of the marks of a file's layers; layers without a mark are plain."""
    section = configs.validate(_Marks, source)
    layers: dict[Any, list[str]] = {}
    rotated: dict[int, list[str]] = {}
    for name, mark in section.layers.items():
        layers.setdefault(_formats(source, name, mark), []).append(name)
        if size := _rotation(source, name, mark):
            rotated.setdefault(size, []).append(name)
    rules = [configs.ModuleRule(formats, NamedLayers(frozenset(names))) for formats, names in layers.items()]
    read = [formats for formats in layers if not isinstance(formats, UnsupportedFormatError)]
    return section.claims(
        source,
        "comfyui",
        "comfyui",
        *dict.fromkeys(fmt for formats in read for fmt in formats),
        rules=(*rules, configs.ModuleRule(())),
        transforms=tuple(
            TransformRule("", "inputs", False, size, NamedLayers(frozenset(names)))
            for size, names in rotated.items()
        ),
    )


def _formats(
    source: configs.FoundConfig, name: str, mark: _Mark
) -> tuple[ConfiguredFormat, ...] | UnsupportedFormatError:
    """Formats of a marked layer, or the error that its load raises."""
    if mark.num_experts is None and mark.format in FORMATS_OF_MARKS:
        return FORMATS_OF_MARKS[mark.format]
    if mark.num_experts is None and mark.format == "asym_w4a8_int8":
        config = ComfyW4A8Config(_setting(source, name, mark, "group_size") or GROUP_SIZE)
        return (ConfiguredFormat(ComfyW4A8Weight, config),)
    what = "a stack of experts" if mark.num_experts is not None else "a format without a reader"
    reason = f"a mark of {source.file} has {mark.format:.40}, {what}"
    return UnsupportedFormatError(f"ComfyUI's own layers ({mark.format:.40})", reason, VARIANTS, WAY_OUT)


def _rotation(source: configs.FoundConfig, name: str, mark: _Mark) -> int:
    """Block size of the rotation of the inputs, a power of 4; 0 without a rotation."""
    rotated = mark.format != "int8_tensorwise" or _setting(source, name, mark, "convrot")
    if mark.format not in ROTATED_FORMATS or not rotated:
        return 0
    size = _setting(source, name, mark, "convrot_groupsize") or ROTATION_SIZE
    if size & size - 1 or size.bit_length() % 2 == 0:
        raise source.error(f"layers.{name:.80}.convrot_groupsize", "a power of 4", str(size))
    return size


def _setting(source: configs.FoundConfig, name: str, mark: _Mark, key: str) -> int | None:
    """Value of a setting in a mark or its `params`; ConfigError for unequal values."""
    places = [place for place in (mark, mark.params) if place and key in place.model_fields_set]
    first, *others = [getattr(place, key) for place in places] or [None]
    if others and others[0] != first:
        expected = f"{first}, as {key} of the mark"
        raise source.error(f"layers.{name:.80}.params.{key}", expected, str(others[0]))
    value: int | None = first
    return value


METHODS = (
    configs.Method(
        names=("comfyui",),
        read=read_comfy,
        formats=(
            ComfyW4A8Weight,
            ComfyAWQWeight,
            Fp8Weight,
            ModelOptNVFP4Weight,
            ModelOptNVFP4ExtendedWeight,
            MXFP8Weight,
            CTIntWeight,
            CTPackWeight,
        ),
        variants=VARIANTS,
        exclusion_key="no mark for the module",
    ),
)
