"""HQQ: codes of 1 to 8 bits in blocks of rows, with a scale and a zero point, both floats, for each group.

On disk, for a layer of K inputs and N outputs, group size g, and the matrix M = (N*K/g, g), or (g, N*K/g) on
axis 0:

    W_q    uint8, int32      (rows/blocks, columns)  codes of M in blocks of rows, the first in the high bits
    scale  fp16, bf16, fp32  (N*K/g, 1)              (1, N*K/g) on axis 0
    zero   as the scale      as the scale
    shape          int64 (2,)   N and K
    nbits          int32, fp32  bits of a code; 1.58 is stored as 2
    axis           int32        0 or 1
    group_size     int32        missing without groups
    packing        uint8        ASCII bytes, as 4bit_u8
    compute_dtype  uint8        ASCII bytes, as torch.float16
    view_as_float  uint8        1: W_q has a dtype of floats
    channel_wise   uint8        0, one scale of the tensor, is refused
    quant_scale    uint8        1, quantized scales, is refused
    quant_zero     uint8        1, quantized zero points, is refused

    w = ((code - zero) * scale).reshape(N, K)

Each step is rounded to compute_dtype. A word has 8, 4, 2 or 1 codes of 1, 2, 4 or more bits, or 10 codes of 3
bits (`layouts.row_blocks`). Without a group size, M is the weight. On axis 0 a group has outputs at equal
distances, so that only inputs are cut. Source: hqq 0.2.8, bit-equal to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from qload import devices, dtypes, spec
from qload.dtypes import STORED, TORCH, DtypeLike
from qload.errors import ArgumentError, MissingTensorError, RepackError, ShapeError
from qload.formats.hqq.settings import (
    BITS,
    CODES,
    FLOATS,
    GROUP_SIZE,
    SETTINGS,
    WORDS,
    read_settings,
    sample_settings,
)
from qload.layouts import OneRow, RowBlocks
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.blocks import part_index
from qload.spec.integers import (
    UNUSED_BITS,
    Integers,
    IntegerWeight,
    Origin,
    from_ordered_groups,
)

BLOCKS = {1: 8, 2: 4, 3: 10, 4: 2}


@dataclass(frozen=True)
class HQQConfig(spec.Grouped, spec.Config):
    """Config of HQQ, from the settings of each layer; ArgumentError for other bits, groups and axes.

    Attributes
    ----------
    bits
        1, 2, 3, 4, 5, 6 or 8; 0: by the settings of the layer.
    group_size
        Elements that share a scale; -1: all inputs, or on axis 0 all outputs.
    axis
        1: a group has neighbouring elements; 0: elements at equal distances.
    compute_dtype
        Dtype that each step is rounded to.
    stored
        Dtype of the stored codes: that of words, or a float of the same bytes.
    whole
        Whether no share is a layer of its own: groups of axis 0 have several inputs.
    N, K
        Outputs and inputs of the whole layer.
    """

    name: ClassVar[str] = "hqq"

    bits: int = 0
    group_size: int = -1
    axis: int = 1
    compute_dtype: DtypeLike = dtypes.float16
    stored: DtypeLike = dtypes.uint8
    whole: bool = False
    N: int = field(default=0, compare=False, repr=False)
    K: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check_bits(self.bits, 0, *BITS)
        self.check_group_size()
        if self.axis not in (0, 1):
            raise ArgumentError("hqq: axis", "0 or 1", str(self.axis))
        for name in ("compute_dtype", "stored"):
            object.__setattr__(self, name, STORED[getattr(self, name)])

    def known(self) -> Mapping[str, int]:
        """Return N and K: no shape states them."""
        return {"N": self.N, "K": self.K} if self.K else {}

    def for_layer(self, headers: spec.LayerHeaders) -> HQQConfig:
        """Read the settings; ShapeError, MissingTensorError or ArgumentError for contradictions."""
        config = self
        if "shape_setting" in headers.facts:
            spec.check_dtypes(HQQWeight.tensors(config), headers.dtypes, headers.names)
            config = HQQConfig(**read_settings(headers))
        if not (config.bits and config.N and config.K):
            raise ArgumentError("hqq: bits, N and K", "their values, without settings", repr(self))
        stored, one = headers.shapes, config.scale_shape
        is_grouped = stored["scale"] == stored["zero"] and max(stored["scale"], default=0) > max(one)
        if config.group_size == -1 and is_grouped and headers.facts and GROUP_SIZE not in headers.facts:
            raise MissingTensorError(headers.names.full(GROUP_SIZE))
        weight = config.packing.stored_shape((config.N, config.K))
        for name, shape in (("weight", weight), ("scale", one), ("zero", one)):
            if stored[name] != shape:
                expected = f"{shape}, for {config.bits} bits on axis {config.axis}"
                raise ShapeError(headers.names.full(name), expected, stored[name], headers.names.file(name))
        return config

    @property
    def packing(self) -> RowBlocks:
        """Packing of the codes."""
        size, bits = max(self.group_size, 0), self.bits if self.bits in BLOCKS else 8
        word = dtypes.int32 if bits == 3 else dtypes.uint8
        rows, columns = (0, size) if self.axis else (size, 0)
        return RowBlocks(bits, BLOCKS.get(bits, 1), rows, columns, True, word, STORED[self.stored])

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of scales and zero points of the whole layer."""
        if self.group_size == -1:
            return (self.N, 1) if self.axis else (1, self.K)
        count = self.N * self.K // self.group_size
        return (count, 1) if self.axis else (1, count)


@dataclass(frozen=True, eq=False, repr=False)
class HQQWeight(IntegerWeight):
    """A layer of HQQ, or a share of one: w = ((code - zero) * scale).reshape(N, K), each step rounded.

    Attributes
    ----------
    weight
        Codes in blocks of rows of the matrix of groups, uint8 or int32, or these bytes as floats (`W_q`).
    scale, zero
        (N * K / group_size, 1), or (1, N * K / group_size) on axis 0; fp16, bf16 or fp32.
    """

    config: HQQConfig
    weight: Tensor
    scale: Tensor
    zero: Tensor

    format: ClassVar[str] = "hqq"
    example: ClassVar[HQQConfig] = HQQConfig(bits=4, group_size=64)
    further: ClassVar[tuple[HQQConfig, ...]] = (HQQConfig(bits=4, group_size=64, axis=0),)

    @classmethod
    def tensors(cls, config: HQQConfig) -> tuple[TensorSpec, ...]:
        """Declare codes, scales and settings; groups bind cuts, and a share has blocks of its own."""
        ratio = STORED[config.stored].itemsize // config.packing.word.itemsize
        view = f"N K@{ratio}" if ratio > 1 and config.group_size == -1 else "N K"
        scales = _scale_axes(config)
        return (
            TensorSpec(
                "weight", (*WORDS, *FLOATS), "R C", Role.WORD, CODES, view=view, packing=config.packing
            ),
            TensorSpec("scale", FLOATS, **scales, role=Role.SCALE),
            TensorSpec("zero", FLOATS, **scales, role=Role.SCALE, signed=True),
            *SETTINGS,
        )

    def codes(self) -> spec.Codes:
        """Return codes, scales, and zero points in float32."""
        config, (N, K), size = self.config, self.shape, self.config.group_size
        scales, zeros = self.scale.float(), self.zero.float()
        k_group = torch.arange(K, device=self.device)
        groups: Tensor | None = k_group
        n_group: Tensor | None = None
        if size == -1:
            groups = None if config.axis else k_group
            n_group = None if config.axis else part_index(self.layer, self.device)
        elif config.axis == 1 and K % size == 0:
            scales, zeros = (values.reshape(N, K // size) for values in (scales, zeros))
            groups = k_group // size
        elif config.axis == 0 and not config.whole:
            scales, zeros = (values.reshape(N // size, K) for values in (scales, zeros))
            starts, start = [], 0
            for part in self.layer.parts:
                starts.append(start + torch.arange(part, device=self.device) % (part // size))
                start += part // size
            n_group = torch.cat(starts)
        else:
            spread = Tensor.repeat_interleave if config.axis else Tensor.repeat
            scales, zeros = (spread(values.reshape(-1), size).reshape(N, K) for values in (scales, zeros))
        dtype = torch.promote_types(TORCH[config.compute_dtype], self.scale.dtype)
        return spec.Codes(
            bits=config.bits,
            codes=config.packing.unpack(self.weight, (N, K)),
            scales=scales,
            zeros=zeros,
            n_group=n_group,
            k_group=groups,
            rounding=None if dtype == torch.float32 else dtype,
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers; RepackError for groups that cross outputs."""
        config, (N, K), codes, name = self.config, self.shape, self.codes(), self.layer.name or self.format
        if K % max(config.group_size, 1):
            reason = f"its groups of {config.group_size} elements cross outputs, as K is {K}"
            raise RepackError(name, "integers", reason)
        if config.packing.loses_bits(self.weight, codes.plain()):
            raise RepackError(name, "integers", UNUSED_BITS)
        scales, zeros = (each.reshape(N, -1).T.contiguous() for each in (self.scale, self.zero))
        return from_ordered_groups(
            self, lambda: codes.plain().T, scales, offset="code", offsets=zeros, rounding=codes.rounding
        )

    @classmethod
    def describe_unsupported(cls, config: HQQConfig) -> str | None:
        """Return the reason why no weight of a `config` with axis 0 is repacked; None for axis 1."""
        return None if config.axis else "its groups run along the outputs (axis 0)"

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` with float zero points exactly; `origin`: the weight to restore."""
        assert integers.offsets is not None
        assert origin is not None
        return cls(
            config=origin.config,
            weight=origin.config.packing.pack(devices.plain(integers.unpack()).T),
            scale=integers.scales.T.flatten()[:, None],
            zero=integers.offsets.T.flatten()[:, None],
            layer=integers.layer,
        )

    @classmethod
    def sample_facts(cls, config: HQQConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Settings of a layer of `sizes`, which are raised to whole groups."""
        dim, size = "NK"[config.axis], config.group_size
        if size != -1:
            sizes[dim] = -(-sizes[dim] // size) * size
        shape = sizes["N"], sizes["K"]
        sizes["R"], sizes["C"] = config.packing.stored_shape(shape)
        sizes["G"] = shape[0] * shape[1] // max(size, 1)
        return sample_settings(
            config.bits, config.axis, -1 if size == sizes[dim] else size, sizes, config.compute_dtype
        )


def _scale_axes(config: HQQConfig) -> dict[str, Any]:
    """Axis text of scales and zero points, with the view of their cuts."""
    size = config.group_size
    if size == -1:
        return {"text": "N 1"} if config.axis else {"text": "P K"}
    if config.axis:
        return {"text": f"(NK)/{size} 1"}
    if config.whole:
        return {"text": f"1 (NK)/{size}!"}
    return {"text": "1 G", "view": f"N/{size}! K", "packing": OneRow()}
