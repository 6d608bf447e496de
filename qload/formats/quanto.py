"""quanto: codes of 2 or 4 bits with a scale and a shift for each group.

On disk, for a layer of K inputs and N outputs, group size g (128, 96, 64, 32, or K), b bits:

    weight._data._data  uint8             (N*K/g*b/8, g)  codes of the matrix (N*K/g, g), in blocks of rows
    weight._scale       bf16, fp16, fp32  (N*K/g, 1)
    weight._shift       as the scale      (N*K/g, 1)      subtracted; or whole numbers, which are zero points

    w[n, k] = weight._scale[i] * code[n, k] - weight._shift[i],   i = (n * K + k) / g

The product and the difference are each rounded to the dtype of the scales. A single row of codes, of a layer
with one output, has scales and shifts (1, K). A byte has a code of each block of rows, the first in the low
bits (`layouts.row_blocks`). No tensor states N and K: they follow from the model's config. quanto's types of
8 bits are formats of other programs under quanto's names (`detect.methods.quanto`). Source: optimum-quanto
0.2.7, bit-equal to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from qload import devices, dtypes, spec
from qload.errors import RepackError, ShapeError, UnsupportedFormatError
from qload.layouts import RowBlocks
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.integers import (
    UNUSED_BITS,
    Integers,
    IntegerWeight,
    Origin,
    from_ordered_groups,
    record_origin,
)

BITS = (2, 4)
GROUP_SIZES = (128, 96, 64, 32)  # of layers with more inputs; other layers have one group for all inputs
SCALES = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
SHIFTS = (*SCALES, dtypes.uint8, dtypes.int8)
DATA, SCALE, SHIFT = "weight._data._data", "weight._scale", "weight._shift"
REMEDY = (
    "keep config.json and quanto_qmap.json with the file; "
    "for a layer that config.json does not describe, state QuantoConfig(bits, K=...)"
)


@dataclass(frozen=True)
class QuantoConfig(spec.Grouped, spec.Config):
    """Config of quanto's types of 2 and 4 bits.

    Attributes
    ----------
    bits
        2 or 4; 0: by the shapes.
    group_size
        Inputs that share a scale; -1: all inputs; 1: layers of one output. Known once a layer is described.
    K
        Inputs of the whole layer; 0: unknown, and taken from the shapes if these determine it.
    N
        Outputs of the whole layer; 0: unknown.
    """

    name: ClassVar[str] = "quanto"

    bits: int
    group_size: int = -1
    K: int = field(default=0, compare=False, repr=False)
    N: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check_bits(self.bits, 0, *BITS)
        self.check_group_size()

    def known(self) -> Mapping[str, int]:
        """Return N and K: no shape states them."""
        return {"N": self.N, "K": self.K} if self.K else {}

    def for_layer(self, headers: spec.LayerHeaders) -> QuantoConfig:
        """Derive bits, group size and N; UnsupportedFormatError if the shapes leave bits or K open."""
        shape = headers.shapes["weight"]
        one_row = headers.shapes["weight_scale"] == shape and shape[:1] == (1,) != shape[1:]
        groups = "N C" if one_row else "G 1"
        axes = zip(QuantoWeight.tensors(self), ("R C", groups, groups), strict=True)
        sizes = headers.sizes([replace(tensor, text=text) for tensor, text in axes])
        R, C, G = sizes["R"], sizes["C"], sizes.get("G", 1)
        fitting = [bits for bits in BITS if -(-G * bits // 8) == R]
        if self.bits not in (0, *fitting) or not fitting or not C:
            rows = " or ".join(str(-(-G * bits // 8)) for bits in ((self.bits,) if self.bits else BITS))
            raise self._wrong_shape(headers, f"({rows}, group size), for {G} scales")
        K = self.K or (C if one_row or C not in GROUP_SIZES else 0)
        if not K or (not self.bits and len(fitting) > 1):
            open_size = "bits" if K else "N and K"
            reason = f"{headers.names.full('weight')} has {R} rows of {C}, which leave {open_size} open"
            raise UnsupportedFormatError("quanto of unknown sizes", reason, remedy=REMEDY)
        N = G * C // K
        if self.N not in (0, N):
            raise self._wrong_shape(headers, f"{self.N} * {K} codes of a layer, as the model's config states")
        if K % C or G * C % K:
            raise self._wrong_shape(headers, f"groups of a layer with K = {K}: {G} groups of {C} are none")
        return QuantoConfig(self.bits or fitting[0], 1 if one_row else C if C < K else -1, K, N)

    def _wrong_shape(self, headers: spec.LayerHeaders, expected: str) -> ShapeError:
        names = headers.names
        return ShapeError(names.full("weight"), expected, headers.shapes["weight"], names.file("weight"))

    @property
    def packing(self) -> RowBlocks:
        """Packing of the codes."""
        columns = 0 if self.group_size in (-1, 1) else self.group_size
        return RowBlocks(self.bits, 8 // max(self.bits, 1), columns=columns)


@dataclass(frozen=True, eq=False, repr=False)
class QuantoWeight(IntegerWeight):
    """A layer of quanto's qint4 or qint2, or a share of one.

    w[n, k] = weight_scale[i] * code[n, k] - weight_shift[i], i = (n * K + k) / group_size, each step rounded
    to the dtype of the scales. Source: optimum-quanto, bit-equal to it.

    Attributes
    ----------
    weight
        Codes in blocks of rows: (ceil(N * K / group_size * bits / 8), group_size), uint8.
    weight_scale
        (N * K / group_size, 1), or (N, K) for groups of one input; bf16, fp16 or fp32.
    weight_shift
        Shape of the scale, a float, or a zero point of dtype uint8 or int8.
    """

    config: QuantoConfig
    weight: Tensor
    weight_scale: Tensor
    weight_shift: Tensor

    format: ClassVar[str] = "quanto"
    example: ClassVar[QuantoConfig] = QuantoConfig(bits=4)
    further: ClassVar[tuple[QuantoConfig, ...]] = (QuantoConfig(bits=4, group_size=128),)

    @classmethod
    def tensors(cls, config: QuantoConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups bind cuts of K, and a share has blocks of its own."""
        groups = {-1: "N 1", 1: "N K"}.get(config.group_size, f"(NK)/{config.group_size} 1")
        return (
            TensorSpec("weight", (dtypes.uint8,), "R C", Role.WORD, DATA, view="N K", packing=config.packing),
            TensorSpec("weight_scale", SCALES, groups, Role.SCALE, SCALE),
            TensorSpec("weight_shift", SHIFTS, groups, Role.SCALE, SHIFT, signed=True),
        )

    def codes(self) -> spec.Codes:
        """Return codes with offsets, or with zero points if the shifts are whole numbers."""
        dtype, (N, K) = self.weight_scale.dtype, self.shape
        scales, shifts = self.weight_scale.reshape(N, -1), self.weight_shift.reshape(N, -1)
        is_float = shifts.is_floating_point()
        return spec.Codes(
            bits=self.config.bits,
            codes=self.config.packing.unpack(self.weight, (N, K)),
            scales=scales.float(),
            zeros=None if is_float else shifts.int(),
            offsets=shifts.float() if is_float else None,
            rounding=dtype if is_float and dtype != torch.float32 else None,
            k_group=self.config.in_order(K, self.device),
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers; RepackError for scales and shifts of two dtypes of floats."""
        packing, shape, codes = self.config.packing, self.shape, self.codes()
        if packing.loses_bits(self.weight, codes.plain()):
            raise RepackError(self.layer.name or self.format, "integers", UNUSED_BITS)
        scales, shifts = (
            each.reshape(shape[0], -1).T.contiguous() for each in (self.weight_scale, self.weight_shift)
        )
        if not shifts.is_floating_point():
            integers = from_ordered_groups(self, lambda: codes.plain().T, scales, shifts.int())
            return replace(integers, layer=record_origin(self, stores_zeros=True, integer_dtype=shifts.dtype))
        return from_ordered_groups(
            self,
            lambda: codes.plain().T,
            scales,
            offset="weight",
            offsets=shifts,
            rounding=codes.rounding,
        )

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly; `origin`: the weight to restore."""
        assert origin is not None
        shifts = integers.offsets
        if shifts is None:
            shifts = integers.zeros.to(origin.integer_dtype)
        return cls(
            config=origin.config,
            weight=origin.config.packing.pack(devices.plain(integers.unpack()).T),
            weight_scale=integers.scales.T.flatten()[:, None],
            weight_shift=shifts.T.flatten()[:, None],
            layer=integers.layer,
        )

    @classmethod
    def sample_facts(cls, config: QuantoConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """No facts; sets the sizes of the stored codes, and raises K where the shapes would leave it open."""
        sizes["K"] += sizes["K"] in GROUP_SIZES
        sizes["R"], sizes["C"] = config.packing.stored_shape((sizes["N"], sizes["K"]))
        return {}


FORMATS = (QuantoWeight,)
METHODS = ()  # read by detect.methods
