"""torchao's own formats: signed integers of a byte (intx), and of 4 bits with floats as zero points (int4).

intx (`IntxUnpackedToInt8Tensor`), codes of 1 to 8 bits. On disk, for a layer of K inputs and N outputs, group
size g:

    _weight_qdata       int8              (N, K)
    _weight_scale       bf16, fp16, fp32  (N, K/g)
    _weight_zero_point  int8              (N, K/g)

    w[n, k] = _weight_scale[n, k / g] * (_weight_qdata[n, k] - _weight_zero_point[n, k / g])

int4 (`Int4Tensor`), two's complement:

    _weight_qdata       int8, uint8       (N, K/2)  two codes a byte, the first in the low bits
    _weight_scale       bf16, fp16, fp32  (K/g, N)
    _weight_zero_point  bf16, fp16, fp32  (K/g, N)  added

    w[n, k] = _weight_scale[k / g, n] * code[n, k] + _weight_zero_point[k / g, n]

in float32: torchao rounds to the dtype of the scales. The header of a file states class, bits and groups of
each layer; torchao's other classes are formats under its names (`detect.methods.torchao`). Source: torchao
0.18.0, bit-equal to it after one rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from qload import devices, dtypes, spec
from qload.errors import FieldValueError, RepackError
from qload.layouts import NibblePairs
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec, named
from qload.spec.integers import (
    Integers,
    IntegerWeight,
    Origin,
    from_ordered_groups,
    record_origin,
)

BITS = range(1, 9)
SCALES = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
NIBBLE_MIDDLE = 8
QDATA, SCALE, ZERO_POINT = "_weight_qdata", "_weight_scale", "_weight_zero_point"
SECOND_SCALE, INPUT_SCALE = "_weight_per_tensor_scale", "_weight_act_per_tensor_scale"
# Suffixes of the tensors of all classes on disk.
ROLES: Mapping[str, Role] = {
    QDATA: Role.WORD,
    SCALE: Role.SCALE,
    ZERO_POINT: Role.WORD,
    SECOND_SCALE: Role.SCALE,
    INPUT_SCALE: Role.SCALE,
}


@dataclass(frozen=True)
class TorchAOIntxConfig(spec.Grouped, spec.Config):
    """Config of intx: `bits` of a code, and `group_size` inputs of a group; -1: one group."""

    name: ClassVar[str] = "torchao_intx"

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> TorchAOIntxConfig:
        """Turn one group that covers all of K into -1: there is nothing to cut."""
        return self.one_group(headers.sizes(TorchAOIntxWeight.tensors(self)[:1])["K"])


@dataclass(frozen=True, eq=False, repr=False)
class TorchAOIntxWeight(IntegerWeight):
    """An intx layer of torchao, or a share of one; FieldValueError for a code that its bits do not have.

    w[n, k] = weight_scale[n, k / group_size] * (weight[n, k] - weight_zero_point[n, k / group_size]).
    Source: torchao, bit-equal to its files after one rounding.

    Attributes
    ----------
    weight
        Signed codes, a byte each: (N, K), int8.
    weight_scale
        (N, K / group_size), bf16, fp16 or fp32.
    weight_zero_point
        Signed, shape of the scale, int8.
    """

    config: TorchAOIntxConfig
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor

    format: ClassVar[str] = "torchao_intx"
    example: ClassVar[TorchAOIntxConfig] = TorchAOIntxConfig(bits=4, group_size=32)

    @classmethod
    def tensors(cls, config: TorchAOIntxConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups bind cuts of K."""
        groups = "N 1" if config.group_size == -1 else f"N K/{config.group_size}"
        half = 2 ** (config.bits - 1)
        codes = (-half, half - 1)
        return (
            TensorSpec("weight", (dtypes.int8,), "N K", Role.WORD, stored=QDATA, between=codes),
            TensorSpec("weight_scale", SCALES, groups, Role.SCALE, stored=SCALE),
            TensorSpec("weight_zero_point", (dtypes.int8,), groups, Role.WORD, ZERO_POINT, between=codes),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, suffix in (("weight", QDATA), ("weight_zero_point", ZERO_POINT)):
            self._check_range(getattr(self, field), named(self.layer.name or type(self).__name__, suffix))

    def _check_range(self, codes: Tensor, name: str) -> None:
        """Raise FieldValueError for a code out of range, with the first one and its place."""
        half = 2 ** (self.config.bits - 1)
        if codes.is_meta or not codes.numel():
            return
        least, most = map(int, torch.aminmax(codes))
        if -half <= least and most < half:
            return
        wrong = ((codes < -half) | (codes >= half)).nonzero()
        place = tuple(wrong[0].tolist())
        got = f"{int(codes[place])} at {place}; {len(wrong)} of {codes.numel()} are outside"
        what, expected = f"codes of {self.config.bits} bits out of range", f"{-half} to {half - 1}"
        raise FieldValueError(name, what, expected, got, "remedy   save the layer with its target_dtype")

    def codes(self) -> spec.Codes:
        """Return codes and zero points, counted from 0."""
        half = 2 ** (self.config.bits - 1)
        return spec.Codes(
            bits=self.config.bits,
            codes=self.weight.view(torch.uint8) + half,  # modulo 256: one byte per code
            scales=self.weight_scale.float(),
            zeros=self.weight_zero_point.int() + half,
            k_group=self.config.in_order(self.layer.K, self.device),
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers; RepackError for codes out of range."""
        half = 2 ** (self.config.bits - 1)
        outside = (self.weight < -half) | (self.weight >= half)
        if bool(outside.any()):
            reason = f"{int(outside.sum())} of its codes are outside of {-half} to {half - 1}"
            raise RepackError(self.layer.name or self.format, "other layouts", reason)
        codes, scales = self.codes(), self.weight_scale.T.contiguous()
        assert codes.zeros is not None
        zeros = codes.zeros.T.contiguous()
        return from_ordered_groups(self, lambda: devices.plain(codes.codes).T, scales, zeros)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError; `origin`: the weight to restore."""
        half, (lowest, highest) = 2 ** (integers.bits - 1), integers.span
        reason = integers.find_unordered_groups("torchao_intx")
        if reason is None and (lowest < 0 or highest >= 2 * half):
            reason = f"a zero point of {lowest if lowest < 0 else highest} does not fit {integers.bits} bits"
        integers.reject("torchao_intx", reason)
        size = -1 if integers.groups == 1 else integers.layer.K // integers.groups
        codes = devices.plain(integers.unpack()).T.to(torch.uint8)
        return cls(
            config=origin.config if origin else TorchAOIntxConfig(integers.bits, size),
            weight=(codes - half).view(torch.int8).contiguous(),
            weight_scale=integers.scales.T.contiguous(),
            weight_zero_point=(integers.zeros - half).T.to(torch.int8).contiguous(),
            layer=integers.layer,
        )


@dataclass(frozen=True)
class TorchAOInt4Config(spec.Grouped, spec.Config):
    """Config of int4; `group_size` -1: one group."""

    name: ClassVar[str] = "torchao_int4"
    bits: ClassVar[int] = 4

    group_size: int

    def __post_init__(self) -> None:
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> TorchAOInt4Config:
        """Turn one group that covers all of K into -1: there is nothing to cut."""
        return self.one_group(headers.sizes(TorchAOInt4Weight.tensors(self)[:1])["K"])


@dataclass(frozen=True, eq=False, repr=False)
class TorchAOInt4Weight(IntegerWeight):
    """An int4 layer of torchao, or a share of one: its zero points are floats.

    w[n, k] = weight_scale[k / group_size, n] * code[n, k] + weight_zero_point[k / group_size, n]. Source:
    torchao, bit-equal to its files after one rounding.

    Attributes
    ----------
    weight
        Two's complement codes, two a byte, the first in the low bits: (N, K / 2), int8 or uint8.
    weight_scale, weight_zero_point
        (K / group_size, N), bf16, fp16 or fp32.
    """

    config: TorchAOInt4Config
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor

    format: ClassVar[str] = "torchao_int4"
    codes_field: ClassVar[str] = "weight"
    example: ClassVar[TorchAOInt4Config] = TorchAOInt4Config(group_size=128)

    @classmethod
    def tensors(cls, config: TorchAOInt4Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups bind cuts of K."""
        groups = "1 N" if config.group_size == -1 else f"K/{config.group_size} N"
        return (
            TensorSpec("weight", (dtypes.int8, dtypes.uint8), "N K/2", Role.WORD, stored=QDATA),
            TensorSpec("weight_scale", SCALES, groups, Role.SCALE, stored=SCALE),
            TensorSpec("weight_zero_point", SCALES, groups, Role.SCALE, stored=ZERO_POINT, signed=True),
        )

    def codes(self) -> spec.Codes:
        """Return codes counted from 0, with offsets in float32."""
        scales = self.weight_scale.T.float()
        return spec.Codes(
            bits=4,
            codes=NibblePairs(self.weight.view(torch.uint8) ^ 0x88, high_first=False),
            scales=scales,
            zeros=torch.full_like(scales, NIBBLE_MIDDLE, dtype=torch.int32),
            offsets=-self.weight_zero_point.T.float(),
            k_group=self.config.in_order(self.layer.K, self.device),
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers with offsets; RepackError for scales and zero points of two dtypes."""
        codes, scales = self.codes().codes, self.weight_scale
        integers = from_ordered_groups(
            self,
            lambda: devices.plain(codes).T,
            scales,
            torch.full_like(scales, NIBBLE_MIDDLE, dtype=torch.int32),
            offset="weight",
            offsets=-self.weight_zero_point,
        )
        origin = record_origin(self, stores_zeros=True, integer_dtype=self.weight.dtype)
        return replace(integers, layer=origin)

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` with offsets exactly; `origin`: the weight to restore."""
        assert integers.offsets is not None
        assert origin is not None
        assert origin.integer_dtype is not None
        codes = devices.plain(integers.unpack()).T.to(torch.uint8)
        return cls(
            config=origin.config,
            weight=((codes[:, ::2] | codes[:, 1::2] << 4) ^ 0x88).view(origin.integer_dtype),
            weight_scale=integers.scales.contiguous(),
            weight_zero_point=-integers.offsets.contiguous(),
            layer=integers.layer,
        )


FORMATS = (TorchAOIntxWeight, TorchAOInt4Weight)
METHODS = ()  # read by detect.methods
