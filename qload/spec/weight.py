"""Base classes of formats: frozen config, layer, codes, and typed weight with its dequantization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from qload import devices, dtypes
from qload.devices import CodeValues, LazyCodes, Stored
from qload.dtypes import STORED, TORCH, Dtype, DtypeLike
from qload.errors import (
    AmbiguousIndexError,
    ArgumentError,
    ConfigError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    check_call,
    check_fields,
    check_values,
    checked,
)
from qload.layouts import ZeroPoints, gptq
from qload.lazy_torch import Tensor, torch
from qload.spec.activations import ActivationScheme
from qload.spec.axis import PARTS, Axis
from qload.spec.casts import check_float, check_out, rounded
from qload.spec.tensor import (
    Fact,
    Names,
    Shape,
    TensorSpec,
    check_dtypes,
    check_index,
    check_permutation,
    named,
    solve,
)
from qload.spec.transforms import Transforms

LOW_RANK_ELEMENTS = 1 << 22  # elements of a low-rank term in float64 at once


class Grouped:
    """Mixin of configs with a `group_size`; -1: one group for all inputs (rows)."""

    name: ClassVar[str]
    group_size: int

    def check_group_size(self) -> None:
        """Raise ArgumentError for a group size other than -1 and at least 1."""
        if self.group_size != -1 and self.group_size < 1:
            raise ArgumentError(f"{self.name}: group_size", "-1 or at least 1", str(self.group_size))

    def one_group(self, K: int) -> Self:
        """Config for a layer of `K` inputs: group size -1 in place of `K`."""
        config: Any = self  # a frozen dataclass
        result: Self = replace(config, group_size=-1) if self.group_size == K else self
        return result

    def rows_of_a_group(self, K: int) -> int:
        """Rows per group; the last group of `K` rows may be shorter."""
        return max(K, 1) if self.group_size == -1 else self.group_size

    def groups(self, K: int) -> int:
        """Number of groups in `K` rows."""
        return 1 if self.group_size == -1 else -(-K // self.group_size)

    def in_order(self, K: int, device: torch.device | None = None) -> Tensor:
        """Group of each row for groups in order: int64 (`K`,) on `device`."""
        rows = min(self.rows_of_a_group(K), max(K, 1))  # the config may exceed an int64
        return torch.arange(K, device=device) // rows

    def _check_groups(
        self, headers: LayerHeaders, name: str, sizes: Mapping[str, int], *, outputs_first: bool = False
    ) -> None:
        """Raise ShapeError if scales `name`, (G, N) or (N, G), have other groups than K inputs."""
        N, K, G = (sizes[dim] for dim in "NKG")
        if self.groups(K) == G:
            return
        dims = [(self.groups(K), f"K/{self.rows_of_a_group(K)}^"), (N, "N")]
        if outputs_first:
            dims.reverse()
        expected, axes = zip(*dims, strict=True)
        hint = f"for K = {K} and a group size of {self.group_size} in the config"
        full, file = headers.names.full(name), headers.names.file(name)
        raise ShapeError(full, f"{expected} = ({', '.join(axes)})", headers.shapes[name], file, hint)

    def is_in_order(self, index: Fact, K: int) -> bool:
        """Return whether `index`, the group of each of `K` rows, is that of groups in order."""
        if not isinstance(index, np.ndarray):
            return bool((index == self.in_order(K, index.device)).all())
        return bool((index == np.arange(K) // min(self.rows_of_a_group(K), max(K, 1))).all())


@dataclass(frozen=True)
class ShareBounds:
    """Share of a layer: outputs [n0, n1) of N and inputs [k0, k1) of K."""

    n0: int
    n1: int
    k0: int
    k1: int
    N: int
    K: int

    @property
    def all_inputs(self) -> bool:
        """True if the share has all inputs."""
        return (self.k0, self.k1) == (0, self.K)

    def extent(self, axis: Axis) -> int:
        """Stored size of an axis (NK) in the share."""
        return axis.size((self.n1 - self.n0) * (self.k1 - self.k0)) or 0

    def positions(self, axis: Axis) -> Tensor:
        """Positions of the share's entries on an axis (NK) of the whole layer: int64 (extent,), CPU."""
        if self.all_inputs:
            start = axis.at(self.n0 * self.K, self.N * self.K)
            return torch.arange(start, start + self.extent(axis), device="cpu")
        row = axis.size(self.K) or 0
        positions = torch.arange(self.N * row, device="cpu").reshape(self.N, row)
        return positions[self.n0 : self.n1, axis.at(self.k0, self.K) : axis.at(self.k1, self.K)].flatten()


# Functions of higher packages, by module and name.
LINEAR_FACTORY = ("qload.kernels.linear", "Linear")  # builds the module of a weight
EXPERTS_FACTORY = ("qload.kernels.experts", "experts_module")  # builds the module of a layer's experts
TARGET_LOADER = ("qload.repacking.loaders", "for_target")  # wraps a loader to repack for a kernel


def call_upward(function: tuple[str, str], *arguments: Any) -> Any:
    """Call a function of a higher package, which is imported at the call."""
    module, name = function
    return getattr(import_module(module), name)(*arguments)


@dataclass(frozen=True)
class Config:
    """Settings of a format, shared by many layers. Frozen, compared by value."""

    name: ClassVar[str]
    by_values: ClassVar[bool] = False  # whether `settled` depends on values
    deciding_field: ClassVar[str] = ""  # the tensor with these values

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        """Check the types of arguments against the fields; ArgumentError."""
        if arguments or keywords:
            check_call(cls.__init__, (None, *arguments), keywords, f"{cls.name}: ")
        return super().__new__(cls)

    def check_bits(self, bits: int, *allowed: int) -> None:
        """Raise ArgumentError for `bits` other than `allowed`."""
        if bits not in allowed:
            raise ArgumentError(f"{self.name}: bits", " or ".join(map(str, allowed)), str(bits))

    def known(self) -> Mapping[str, int]:
        """Sizes of the whole layer that follow from facts and from no shape."""
        return {}

    def for_layer(self, headers: LayerHeaders) -> Self:
        """Config of a layer, by the shapes and facts of `headers`; raises for a contradiction."""
        return self

    def notes(self, headers: LayerHeaders) -> tuple[str, ...]:
        """Notes on flags that contradict the tensors of `headers`; tensors take precedence."""
        return ()

    def settled(self, values: LayerValues) -> tuple[dict[str, Any], QloadError | None]:
        """Changes of this config by a layer's `values`, and the error if they contradict claims."""
        return {}, None

    def decides_alike(self, claims: LayerClaims, stacked: Tensor) -> bool:
        """Return whether `settled` decides as in this config for each layer of `stacked` (E, ...).

        `claims`: of all these layers; `stacked`: their tensors `deciding_field`. False: settle each layer.
        """
        return False

    def like(self, other: Config) -> Self:
        """This config with the convention of an `other`, if that changes no value of the layer."""
        return self

    @property
    def doubt(self) -> str:
        """Warning about an interpretation of a layer without evidence; "" without doubt."""
        return ""

    @property
    def denied(self) -> str:
        """Sentence on the claim that the values of a layer contradict; "" without one."""
        return ""


@dataclass(frozen=True)
class LayerHeaders:
    """Tensors of a layer before any weight is read: shapes and dtypes by field, and whole facts."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, Dtype]
    facts: Mapping[str, Fact]
    names: Names

    def sizes(self, specs: Sequence[TensorSpec], known: Mapping[str, int] | None = None) -> dict[str, int]:
        """Dimensions of the layer; raises for dtypes, shapes and indices that contradict a declaration.

        `known`: sizes that follow from no shape.
        """
        check_dtypes(specs, self.dtypes, self.names)
        sizes = solve(specs, self.shapes, self.names, known)
        for spec in specs:
            if spec.index_of and spec.name in self.facts:
                check_index(spec, self.facts[spec.name], sizes, self.names)
            if spec.permutation and spec.name in self.facts:
                check_permutation(spec, self.facts[spec.name], self.names)
        return sizes

    def check_single(self, names: Iterable[str]) -> None:
        """Raise ShapeError for the first stored tensor of `names` with more or less than one element."""
        for name in names:
            if self.shapes.get(name, (1,)) != (1,):
                raise ShapeError(
                    self.names.full(name), "() or (1,)", self.shapes[name], self.names.file(name)
                )

    def ambiguous_index(self, name: str, sizes: Mapping[str, int], unit: str, meaning: str) -> QloadError:
        """Build the error for an index of zeros with several groups; `meaning`: readings of zeros."""
        expected = f"the group of each {unit}, 0 to {sizes['G'] - 1}"
        got, remedy = f"0 for all {sizes['K']} {unit}s", f"remedy   write the groups out: {meaning}"
        return AmbiguousIndexError(
            self.names.full(name), "all zero, with two readings", expected, got, remedy
        )

    def value_error(self, name: str, key: str, expected: str, got: str) -> ConfigError:
        """Build the error for the value of `key` in a fact, with the name of its file."""
        file = self.names.file(name)
        return ConfigError(
            self.names.full(name), key, expected, f"{got:.60}", f"in       {file}" if file else ""
        )


@dataclass(frozen=True)
class LayerClaims:
    """Claims of a config about a layer: of the entry for its module, else of the base config.

    Attributes
    ----------
    bits, group_size, sym, desc_act
        Values of the config; None for a missing claim.
    source
        Dotted path of the entry, such as `dynamic.+:.*down_proj`; "" for the base config.
    convention
        Key that sets the convention of zero points, by its value or its absence.
    writer
        Name of the quantizer in the config, such as `gptqmodel:7.7.0`; "" without a name.
    """

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    source: str = ""
    convention: str = ""
    writer: str = ""

    def says(self, key: str) -> str:
        """Claim with its place in the config: `sym is true in dynamic.+:.*down_proj`."""
        value = getattr(self, key)
        stated = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{key} is {stated}" + (f" in {self.source:.160}" if self.source else "")

    def place(self, file: str) -> str:
        """Place of the claims: `dynamic.+:.*down_proj of config.json`."""
        return f"{self.source:.160} of {file}" if self.source else file


class LayerValues(Protocol):
    """Values of a layer on the CPU, as evidence for its config; a rank of an engine may have only a part."""

    @property
    def claims(self) -> LayerClaims:
        """Claims of the config about the layer."""

    @property
    def names(self) -> Names:
        """Full names of tensors, for messages."""

    @property
    def rows_of_a_group(self) -> int:
        """Inputs per group; the last group may be shorter."""

    @property
    def compare_codes(self) -> bool:
        """True to compare codes with zero points without a claim."""

    def readable(self, field: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part of a tensor along each axis; None without one."""

    def read(self, field: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read elements of a tensor of the layer."""

    def group_of_rows(self, start: int, stop: int) -> Tensor:
        """Group of each input in [start, stop): int64."""

    @property
    def shared(self) -> dict[str, Any]:
        """Results shared by all layers of the checkpoint, by name."""

    def layers(self, field: str) -> Iterator[tuple[Config, LayerValues]]:
        """Yield the layers of the checkpoint with a field, in order, this one included."""


@dataclass(frozen=True)
class Layer:
    """Identity of a weight's layer and share.

    Attributes
    ----------
    parts
        Outputs of each part in this share.
    K
        Inputs of this share.
    whole
        (N, K) of the whole layer.
    name
        Prefix of the layer.
    origin
        Config before repacking, for `restore`; None for a weight as stored.
    activations
        Quantization of the inputs; its stored scale is a field of the weight. None: inputs are not quantized.
    transforms
        Transforms of inputs and outputs when the layer runs; codes are of the transformed weight. None: no
        transforms.
    """

    parts: tuple[int, ...]
    K: int
    whole: tuple[int, int]
    name: str = ""
    origin: Config | None = None
    activations: ActivationScheme | None = None
    transforms: Transforms | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def N(self) -> int:
        """Outputs of all parts."""
        return sum(self.parts)

    def with_origin(self, origin: Config | None, activations: ActivationScheme | None) -> Layer:
        """Copy with another `origin` and other `activations`, without checks."""
        return Layer.unchecked(self.__dict__ | {"origin": origin, "activations": activations})

    @classmethod
    def unchecked(cls, values: Mapping[str, Any]) -> Self:
        """Create a layer from `values` of all fields without checks, as of checked descriptions."""
        layer = object.__new__(cls)
        layer.__dict__.update(values)
        return layer


UNPLACED = Layer((), 0, (0, 0))  # for a weight constructed from tensors alone, which determine the layer


@dataclass(frozen=True)
class Codes(CodeValues):
    """A weight as codes: w = (code - zero) * scale[n_group, k_group] * factor - offset[n_group, k_group].

    Attributes
    ----------
    bits, codes
        Bits per code, and codes (N, K), possibly packed.
    scales, zeros
        Scales and zero points (Gn, Gk); without `n_group`, Gn is N or 1. `zeros` None: no zero points.
    n_group, k_group
        Group of each output (N,) and of each input (K,), int64; None: one group per output, and one group of
        all inputs.
    lookup
        Value of each code, for codes that are the bits of a small float.
    divide
        True to divide by the scale, for formats with inverse scales.
    factor
        Factor of all scales, for formats that round this product separately.
    row_factors
        Factor of each output in the same place, (N, 1); None: no such factors.
    offsets
        Offsets, shaped like the scales, for formats that subtract after the products; None: no offsets.
    rounding
        Dtype that difference, product and result are each rounded to, for formats that compute in it; None:
        float32.
    low_rank
        Factors A (R, K) and B (N, R) of a term B @ A, added to the product of codes and scales; None: no such
        term.
    """

    low_rank: tuple[Tensor, Tensor] | None = None

    def plain(self) -> Tensor:
        """Codes as numbers (N, K), of an integer dtype."""
        return devices.plain(self.codes)

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Weight (N, K): integer difference, times (divided by) scale, times factor, less offset, in float32.

        Rounded once to `dtype`, or to the dtype of `out`, a tensor to write to. A low-rank term is summed and
        added in float64, and the sum is rounded to float32 first.
        """
        if out is not None:
            check_out(out, tuple(self.codes.shape), self.scales.device)
        else:
            check_float(dtype)
            out = torch.empty(self.codes.shape, dtype=TORCH[dtype], device=self.scales.device)
            out = devices.in_large_pages(out)
        if self.low_rank is None:
            devices.dequantize(self, out)
            return out
        down, up = (factor.double() for factor in self.low_rank)
        coded = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        devices.dequantize(self, coded)
        step = max(1, LOW_RANK_ELEMENTS // max(1, out.shape[1]))
        for rows in (slice(start, start + step) for start in range(0, out.shape[0], step)):
            out[rows] = (coded[rows] + up[rows] @ down).float()
        return out


def expand_parts(values: Tensor, parts: Sequence[int]) -> Tensor:
    """Expand one value of a layer, or one per fused part, to one per output: (N,)."""
    each = values.reshape(-1)
    if each.numel() == 1:
        return each.expand(sum(parts))
    return torch.cat([value.expand(width) for value, width in zip(each, parts, strict=True)])


def symmetric(bits: int, codes: Tensor | LazyCodes, scales: Tensor, k_group: Tensor) -> Codes:
    """Codes of a symmetric type, with zero points 2**(bits - 1), by codes (K, N) and scales (G, N)."""
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
    return Codes(bits=bits, codes=codes.T, scales=scales.float().T, zeros=zeros.T, k_group=k_group)


def has_middle_zeros(words: Tensor, bits: int, zeros: ZeroPoints) -> bool:
    """Return whether every zero point in words (..., G, W) is 2**(bits - 1); unpacks nothing."""
    row = _middle_row(bits, zeros, words.shape[-1])
    if type(words) is Tensor and words.device.type == "cpu":  # numpy: one thread suffices for few words
        return bool((words.numpy() == row.numpy()).all())
    return bool((words == row.to(words.device)).all())


@lru_cache(64)
def _middle_row(bits: int, zeros: ZeroPoints, width: int) -> Tensor:
    """A row of words with all zero points in the middle."""
    middle = torch.full((1, width * 32 // bits), 2 ** (bits - 1), device="cpu")
    return zeros.write(middle, gptq.columns(bits))


@dataclass(frozen=True, eq=False)
class Weight(ABC):
    """Base of typed weights: a quantized weight of logical shape (N, K), with tensors as on disk.

    The constructor checks every dtype, shape and index against the format's declaration: MissingTensorError,
    DtypeError, ShapeError, IndexValueError, MismatchError. A format implements `tensors`, and `codes` with
    the values of the format's own tools. `config`: settings of the format; `layer`: the share of the layer,
    by default all of it.
    """

    config: Any = field(kw_only=True)
    layer: Layer = field(default=UNPLACED, kw_only=True)

    format: ClassVar[str]
    plain: ClassVar[bool] = False  # whether its tensors are not quantized
    padded_to: ClassVar[int] = 1  # multiple that its writers round N and K up to
    example: ClassVar[Config]  # config for examples of the declaration
    further: ClassVar[tuple[Config, ...]] = ()  # further examples, with other valid cuts

    @classmethod
    @abstractmethod
    def tensors(cls, config: Any) -> tuple[TensorSpec, ...]:
        """Declarations of the tensors of a layer with this `config`."""

    @abstractmethod
    def codes(self) -> Codes:
        """Weight as integer codes, scales and zero points in plain order."""

    def __post_init__(self) -> None:
        check_fields(self)
        tensors = self.fields()
        names, specs = FieldNames(self.layer.name or type(self).__name__), self.tensors(self.config)
        for spec in specs:
            if not (spec.optional or spec.spent) and spec.name not in tensors:
                raise MissingTensorError(names.full(spec.name))
            tensor = tensors.get(spec.name)
            if tensor is not None and not tensor.ndim and spec.is_per_part:
                tensors[spec.name] = tensor.reshape(1)
                object.__setattr__(self, spec.name, tensors[spec.name])
        headers = LayerHeaders(
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            dtypes={name: STORED[tensor.dtype] for name, tensor in tensors.items()},
            facts={spec.name: tensors[spec.name] for spec in specs if spec.fact and spec.name in tensors},
            names=names,
        )
        unplaced = not self.layer.parts
        if unplaced:
            object.__setattr__(self, "config", self.config.for_layer(headers))
        known = self.config.known() if unplaced else {"N": self.layer.N, "K": self.layer.K}
        specs = tuple(spec for spec in self.tensors(self.config) if not spec.spent)
        sizes = headers.sizes(specs, known)
        parts = len(self.layer.parts) or 1
        for spec in specs:
            if sizes.get(PARTS, parts) != parts and any(axis.dim == PARTS for axis in spec.axes):
                raise MismatchError(
                    names.full(spec.name), "scales of fused parts", f"{parts}, one a part", str(sizes[PARTS])
                )
        if unplaced:
            N, K = sizes["N"], sizes.get("K", 1)
            object.__setattr__(self, "layer", replace(self.layer, parts=(N,), K=K, whole=(N, K)))

    def fields(self) -> dict[str, Tensor]:
        """Tensors by field name, as on disk, without missing optional ones."""
        tensors: dict[str, Tensor] = {}
        for name in tensor_names(type(self)):
            if isinstance(tensor := getattr(self, name), Tensor):
                tensors[name] = tensor
        return tensors

    @classmethod
    def resolve(cls, config: Any, tensors: Mapping[str, Tensor], bounds: ShareBounds) -> dict[str, Tensor]:
        """Convert one part's `tensors`, sliced to `bounds`, to the fields of a weight of `config`.

        Spent tensors are no fields.
        """
        spent = {spec.name for spec in cls.tensors(config) if spec.spent}
        return {name: tensor for name, tensor in tensors.items() if name not in spent}

    @classmethod
    def sample_facts(cls, config: Any, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Facts by field for a random layer of `config`, as far as the declaration leaves them open.

        `sizes`: by letter. The sizes of free axes may be set, and N and K raised.
        """
        return {}

    @classmethod
    def pad(cls, *sizes: int) -> tuple[int, ...]:
        """Round the `sizes` of a layer up to multiples of `padded_to`."""
        return tuple(-(-size // cls.padded_to) * cls.padded_to for size in sizes)

    @classmethod
    def keeps_tensors(cls) -> bool:
        """Return whether a weight has the stored tensors themselves: `resolve` only drops spent ones."""
        return getattr(cls.resolve, "__func__", None) is Weight.__dict__["resolve"].__func__

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K): out_features and in_features of this share."""
        return (self.layer.N, self.layer.K)

    @property
    def input_factors(self) -> Tensor | None:
        """Factors (K,) of the inputs, applied before the weight and not part of it; None without factors."""
        return None

    @property
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Factors A (R, K) and B (N, R) of a term B @ A of the weight; None without the term."""
        return None

    @property
    def codes_are_transformed(self) -> bool:
        """Return whether transforms lie between `codes` and the weight."""
        return self.layer.transforms is not None

    def without_low_rank(self) -> Self:
        """Weight without its low-rank term, over the same memory."""
        return self

    def without_transforms(self) -> Self:
        """Weight of the codes, without the transforms of its layer, over the same memory."""
        weight = self.holding({})
        layer = Layer.unchecked(self.layer.__dict__ | {"transforms": None})
        object.__setattr__(weight, "layer", layer)
        return weight

    def check_values(self) -> None:
        """Raise ArgumentError, with the name of a tensor, for a weight on device "meta"."""
        for name, tensor in self.fields().items():
            check_values(named(self.layer.name or type(self).__name__, name), tensor)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.fields().values())).device

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize to (N, K) in float32, the reference, rounded once to any other `dtype`.

        Transforms of the layer are undone, with sums in float64. `out`: a tensor (N, K) to write to, in its
        dtype.
        """
        if out is not None:
            check_out(out, self.shape, self.device, *self.fields().values())
        check_float(dtype)
        if self.layer.transforms is not None:
            coded = self.without_transforms().dequantize()
            return rounded(self.layer.transforms.restore(coded).float(), dtype, out)
        stored = self.stored() if devices.reads_stored(*self.fields().values()) else None
        if stored is not None:
            result = torch.empty(self.shape, dtype=TORCH[dtype], device=self.device) if out is None else out
            if devices.dequantize_stored(stored, result):
                return result
            del result
        return self.codes().dequantize(dtype, out)

    def stored(self) -> Stored | None:
        """Codes, scales and zero points as stored, for devices that read this order; None: no device does."""
        return None

    @checked
    def to(self, device: torch.device | str) -> Self:
        """Copy to another `device`, without a change of dtype. A weight without values stays on "meta"."""
        if torch.device(device).type != "meta":
            self.check_values()
        return self.holding({name: tensor.to(device) for name, tensor in self.fields().items()})

    @classmethod
    def unchecked(cls, config: Config, layer: Layer, tensors: Mapping[str, Tensor | None]) -> Self:
        """Construct a weight of checked `config`, `layer` and `tensors`, without checks or device syncs."""
        weight = object.__new__(cls)
        weight.__dict__.update(tensors, config=config, layer=layer)
        return weight

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy with these `tensors` in place of equal ones, without checks."""
        copy = object.__new__(type(self))
        for attribute in fields(self):
            value = tensors.get(attribute.name, getattr(self, attribute.name))
            object.__setattr__(copy, attribute.name, value)
        return copy

    @property
    def activations(self) -> ActivationScheme | None:
        """Quantization of the inputs before the product; None: inputs are not quantized."""
        return self.layer.activations

    @checked
    def get_linear(
        self,
        bias: Tensor | None = None,
        *,
        activations: Literal["declared", "unquantized"] = "declared",
        maximum: Callable[[Tensor], Tensor] | Literal["own"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.nn.Module:
        """Build a module that maps (..., K) to (..., N) in the dtype of its input.

        Parameters
        ----------
        bias
            Tensor (N,).
        activations
            "declared": quantize inputs as in `self.activations`; "unquantized": use inputs unchanged.
        maximum
            Reduction of maxima over all ranks, for a share along K and a scheme with a scale over all inputs:
            `maximum_over` of a process group, or "own" for the maxima of each rank alone, as in engines.
        dtype
            Dtype of the activations: torch.float16, bfloat16 or float32. Kernels multiply them by scales of
            the same 16-bit dtype, so that scales in a kernel's order are converted once, with a relative
            error of at most 2**-8 in bfloat16 and 2**-11 in float16; `bias` and plain weights are cast. None:
            no conversion; activations of another dtype than the scales' use a slower path, with a log entry.

        Raises
        ------
        ArgumentError
            `maximum` is missing, or the scheme has no quantizer.
        CastError
            A scale would lose more bits, or the weight, rounded to the dtype of its scales for many tokens,
            has infinite elements.
        """
        module: torch.nn.Module = call_upward(LINEAR_FACTORY, self, bias, activations, maximum, dtype)
        return module

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self.fields().items())
        return f"{type(self).__name__}({self.layer.name or 'layer'}, {self.shape}, {self.config}, {shapes})"


@cache
def tensor_names(weight_type: type[Weight]) -> tuple[str, ...]:
    """Fields of a type of weight for tensors, including optional ones."""
    names = [attribute.name for attribute in fields(weight_type)]
    return tuple(name for name in names if name not in ("config", "layer"))


@dataclass(frozen=True)
class FieldNames(Names):
    """Names of a layer's fields in messages: prefix, dot, field."""

    prefix: str

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return named(self.prefix, field)
