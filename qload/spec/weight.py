"""The contract of a format: a frozen config, and a typed weight that says what it means."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from qload import devices
from qload.devices import CodeValues, LazyCodes, Stored
from qload.errors import (
    ArgumentError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    check_call,
    check_fields,
    check_values,
    checked,
)
from qload.spec.activations import ActivationScheme
from qload.spec.axis import PARTS, Axis
from qload.spec.casts import check_float, check_out
from qload.spec.tensor import (
    Names,
    Shape,
    TensorSpec,
    check_dtypes,
    check_index,
    check_permutation,
    named,
    solve,
)

if TYPE_CHECKING:
    from torch import nn


class Grouped:
    """A config with a `group_size`; -1: one group for all rows."""

    name: ClassVar[str]
    group_size: int

    def check_group_size(self) -> None:
        """Refuses a group size that is neither -1 nor at least 1: ArgumentError."""
        if self.group_size != -1 and self.group_size < 1:
            raise ArgumentError(f"{self.name}: group_size", "-1 or at least 1", str(self.group_size))

    def check_bits(self, bits: int, *allowed: int) -> None:
        """Refuses `bits` that are none of those `allowed`: ArgumentError."""
        if bits not in allowed:
            raise ArgumentError(f"{self.name}: bits", " or ".join(map(str, allowed)), str(bits))

    def one_group(self, K: int) -> Self:
        """This config for a layer of `K` inputs: a group that covers them all is -1 from here on."""
        config: Any = self  # a frozen dataclass, as every config is
        whole: Self = replace(config, group_size=-1) if self.group_size == K else self
        return whole

    def rows_of_a_group(self, K: int) -> int:
        """How many rows share a scale; the last group of `K` rows may be short."""
        return max(K, 1) if self.group_size == -1 else self.group_size

    def groups(self, K: int) -> int:
        """How many groups `K` rows have."""
        return 1 if self.group_size == -1 else -(-K // self.group_size)

    def in_order(self, K: int, device: torch.device | None = None) -> Tensor:
        """The group of each row on `device`, int64 (`K`,), where groups follow each other."""
        rows = min(self.rows_of_a_group(K), max(K, 1))  # a config may say more than an int64 holds
        return torch.arange(K, device=device) // rows


@dataclass(frozen=True)
class ShareBounds:
    """Outputs [n0, n1) and inputs [k0, k1) of a layer of N outputs and K inputs."""

    n0: int
    n1: int
    k0: int
    k1: int
    N: int
    K: int

    @property
    def all_inputs(self) -> bool:
        """Whether every input is here."""
        return (self.k0, self.k1) == (0, self.K)

    def extent(self, axis: Axis) -> int:
        """Stored entries of an axis of all elements that are here."""
        return axis.size((self.n1 - self.n0) * (self.k1 - self.k0)) or 0

    def positions(self, axis: Axis) -> Tensor:
        """Where in the whole layer the entries here of an axis of all elements lie, int64."""
        if self.all_inputs:
            start = axis.at(self.n0 * self.K, self.N * self.K)
            return torch.arange(start, start + self.extent(axis))
        row = axis.size(self.K) or 0
        whole = torch.arange(self.N * row).reshape(self.N, row)
        return whole[self.n0 : self.n1, axis.at(self.k0, self.K) : axis.at(self.k1, self.K)].flatten()


LINEAR_FACTORY = ("qload.kernels.linear", "linear_of")  # makes a module of a weight
EXPERTS_FACTORY = ("qload.kernels.experts", "experts_module")  # makes a module of the experts of a layer
TARGET_LOADER = ("qload.repacking.loaders", "for_target")  # makes a loader repack for a kernel


def call_upward(function: tuple[str, str], *arguments: Any) -> Any:
    """The result of a function that is named by its module and itself."""
    module, name = function
    return getattr(import_module(module), name)(*arguments)


@dataclass(frozen=True)
class Config:
    """What a format's files leave to be said once for many layers. Frozen, compares by value."""

    name: ClassVar[str]
    by_values: ClassVar[bool] = False  # whether `settled` depends on values

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """What it is made of has the types that its fields say, or ArgumentError."""
        if arguments or named:
            check_call(cls.__init__, (None, *arguments), named, f"{cls.name}: ")
        return super().__new__(cls)

    def known(self) -> Mapping[str, int]:
        """Sizes of the whole layer that only its facts tell, and no shape."""
        return {}

    def for_layer(self, headers: "LayerHeaders") -> Self:
        """This layer's own config, from the shapes and facts of `headers`, or the error they call for."""
        return self

    def notes(self, headers: "LayerHeaders") -> tuple[str, ...]:
        """Where a flag of the config disagrees with the tensors of `headers`, which are believed."""
        return ()

    def settled(self, values: "LayerValues") -> tuple[dict[str, Any], QloadError | None]:
        """Changes of this config by a layer's `values`, and the error if they contradict claims."""
        return {}, None

    def like(self, other: "Config") -> Self:
        """This config with the convention of an `other`, if that changes no value of the layer."""
        return self

    @property
    def doubt(self) -> str:
        """Warning about a reading of a layer without evidence; "" without doubt."""
        return ""

    @property
    def denied(self) -> str:
        """Which claim the values of a layer deny, as a sentence; "" where they deny none."""
        return ""


@dataclass(frozen=True)
class LayerHeaders:
    """A layer's tensors before any weight is read: shapes and dtypes by field, facts whole."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    facts: Mapping[str, Tensor]
    names: Names

    def sizes(self, specs: Sequence[TensorSpec], known: Mapping[str, int] | None = None) -> dict[str, int]:
        """The layer's dimensions, where dtypes, shapes and index values fit a declaration.

        `known`: what no shape tells.
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
        """ShapeError for the first of the `names` that is stored and has other than one element."""
        for name in names:
            if self.shapes.get(name, (1,)) != (1,):
                raise ShapeError(
                    self.names.full(name), "() or (1,)", self.shapes[name], self.names.file(name)
                )


@dataclass(frozen=True)
class LayerClaims:
    """Claims of a config about a layer: of the entry for its module, else of the base config.

    Attributes
    ----------
    bits, group_size, sym, desc_act
        As the config states them; None if it does not.
    source
        Dotted path of the entry, such as `dynamic.+:.*down_proj`; "" for the base config.
    convention
        Key that sets the convention of zero points, by its value or its absence.
    writer
        Quantizer named in the config, such as `gptqmodel:7.7.0`; "" without a name.
    """

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    source: str = ""
    convention: str = ""
    writer: str = ""

    def says(self, key: str) -> str:
        """`sym is true in dynamic.+:.*down_proj`: a claim with its place in the config."""
        value = getattr(self, key)
        stated = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{key} is {stated}" + (f" in {self.source:.160}" if self.source else "")

    def place(self, file: str) -> str:
        """`dynamic.+:.*down_proj of config.json`: where a claim is changed."""
        return f"{self.source:.160} of {file}" if self.source else file


class LayerValues(Protocol):
    """Values of a layer on the CPU, as evidence for its config.

    A rank of an engine may have a part of them. `rows_of_a_group`: inputs per scale. `compare_codes`: compare
    codes with zero points that no claim fixes.
    """

    @property
    def claims(self) -> LayerClaims:
        """Claims of the config about the layer."""

    @property
    def names(self) -> Names:
        """Full names of tensors, for messages."""

    @property
    def rows_of_a_group(self) -> int:
        """Inputs of a group; the last group may be shorter."""

    @property
    def compare_codes(self) -> bool:
        """True to compare codes with zero points."""

    def readable(self, field: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part of a tensor along each axis; None: nothing."""

    def read(self, field: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Elements of a tensor of the layer."""

    def group_of_rows(self, start: int, stop: int) -> Tensor:
        """The group of each input from `start` to `stop`: int64."""

    @property
    def shared(self) -> dict[str, Any]:
        """Results shared by all layers of the checkpoint, by name."""

    def layers(self, field: str) -> "Iterator[tuple[Config, LayerValues]]":
        """Yield the layers of the checkpoint with a field, in order, this one included."""


@dataclass(frozen=True)
class Layer:
    """Which layer a weight is (`name`) and which share: N of its `parts` and `K` of a `whole` (N, K).

    `origin`: what `restore` goes back to, for a weight that was repacked; else None. `activations`: how its
    inputs are quantized, whose stored scale is a field of the weight; None: not at all.
    """

    parts: tuple[int, ...]
    K: int
    whole: tuple[int, int]
    name: str = ""
    origin: Config | None = None  # what `restore` goes back to, for a weight that was repacked
    activations: ActivationScheme | None = None  # goes along wherever a weight goes

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def N(self) -> int:
        """Outputs of all parts together."""
        return sum(self.parts)

    def with_origin(self, origin: Config | None, activations: ActivationScheme | None) -> "Layer":
        """This layer, made from another `origin`, whose inputs are quantized by `activations`."""
        twin = object.__new__(Layer)
        twin.__dict__.update(self.__dict__, origin=origin, activations=activations)
        return twin


UNPLACED = Layer((), 0, (0, 0))  # of a weight made by hand, whose tensors tell the rest


@dataclass(frozen=True)
class Codes(CodeValues):
    """A weight as codes: w = (code - zero) * scale[n_group, k_group] * factor.

    `codes` (N, K) integers of `bits` bits, or still packed; `scales` and `zeros` (Gn, Gk), with Gn = N or 1
    where n_group is None; `n_group` (N,) and `k_group` (K,) int64, or None: one output after another, one
    group; `zeros` None where the type has none. `lookup`: the value of each code, where a code is no integer
    but the bits of a small float. `divide`: by the scale, which some owners store the other way round.
    `factor`: of all scales, where the owner rounds its product on its own.
    """

    def plain(self) -> Tensor:
        """The codes as numbers (N, K), of an integer dtype."""
        return devices.plain(self.codes)

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(N, K): the integer difference, times (or by) the scale in float32, times the factor.

        Rounded once to `dtype`, or to that of `out`, a tensor to write to.
        """
        if out is not None:
            check_out(out, tuple(self.codes.shape), self.scales.device)
            wide = out
        else:
            check_float(dtype)
            made = torch.empty(self.codes.shape, dtype=dtype, device=self.scales.device)
            wide = devices.in_large_pages(made)
        devices.dequantize(self, wide)
        return wide


def symmetric(bits: int, codes: Tensor | LazyCodes, scales: Tensor, k_group: Tensor) -> Codes:
    """Codes (K, N) and scales (G, N) of a type whose every zero point is 2**(bits - 1)."""
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
    return Codes(bits=bits, codes=codes.T, scales=scales.float().T, zeros=zeros.T, k_group=k_group)


@dataclass(frozen=True, eq=False)
class Weight(ABC):
    """A quantized weight of logical shape (N, K): its tensors as they are on disk, config and layer.

    Constructing one checks every dtype, shape and index against the format's declaration: MissingTensorError,
    DtypeError, ShapeError, IndexValueError, MismatchError. A format promises `tensors`, and `codes` that mean
    what its owner's tools read. `config`: what the tensors mean; `layer`: which share it is, else all of it.
    """

    config: Any = field(kw_only=True)
    layer: Layer = field(default=UNPLACED, kw_only=True)

    format: ClassVar[str]
    plain: ClassVar[bool] = False  # whether its tensors are not quantized at all
    example: ClassVar[Config]  # a config to show the declaration with
    further: ClassVar[tuple[Config, ...]] = ()  # others, whose layers are cut otherwise

    @classmethod
    @abstractmethod
    def tensors(cls, config: Any) -> tuple[TensorSpec, ...]:
        """The declaration of every tensor a layer of this format has, for this `config`."""

    @abstractmethod
    def codes(self) -> Codes:
        """The weight as integer codes, scales and zero points in plain order."""

    def __post_init__(self) -> None:
        check_fields(self)
        held = self.fields()
        names, specs = FieldNames(self.layer.name or type(self).__name__), self.tensors(self.config)
        for spec in specs:
            if not (spec.optional or spec.spent) and spec.name not in held:
                raise MissingTensorError(names.full(spec.name))
        headers = LayerHeaders(
            shapes={name: tuple(tensor.shape) for name, tensor in held.items()},
            dtypes={name: tensor.dtype for name, tensor in held.items()},
            facts={spec.name: held[spec.name] for spec in specs if spec.fact and spec.name in held},
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
        """The tensors by field name, as they are on disk; an absent optional one is left out."""
        names = tensor_names(type(self))
        return {name: held for name in names if isinstance(held := getattr(self, name), Tensor)}

    @classmethod
    def resolve(cls, config: Any, tensors: Mapping[str, Tensor], bounds: ShareBounds) -> dict[str, Tensor]:
        """One part's `tensors`, sliced to `bounds`, as a weight of `config` has them: none that is spent."""
        spent = {spec.name for spec in cls.tensors(config) if spec.spent}
        return {name: tensor for name, tensor in tensors.items() if name not in spent}

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K): out_features, in_features of this share."""
        return (self.layer.N, self.layer.K)

    @property
    def input_factors(self) -> Tensor | None:
        """(K,): what each input is multiplied by before the weight, and no part of it; None: nothing."""
        return None

    def check_values(self) -> None:
        """Refuse a weight on device "meta": ArgumentError with the name of a tensor."""
        for name, tensor in self.fields().items():
            check_values(named(self.layer.name or type(self).__name__, name), tensor)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return next(iter(self.fields().values())).device

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(N, K): what the weight means in float32, the reference; rounded once to another `dtype`.

        `out`: a tensor (N, K) to write to, whose dtype it takes.
        """
        if out is not None:
            check_out(out, self.shape, self.device, *self.fields().values())
        check_float(dtype)
        stored = self.stored() if devices.reads_stored(*self.fields().values()) else None
        if stored is not None:
            wide = torch.empty(self.shape, dtype=dtype, device=self.device) if out is None else out
            if devices.dequantize_stored(stored, wide):
                return wide
            del wide
        return self.codes().dequantize(dtype, out)

    def stored(self) -> Stored | None:
        """Codes, scales and zero points as they lie, for devices that read them so; None: no device does."""
        return None

    @checked
    def to(self, device: torch.device | str) -> Self:
        """The same weight on another `device`; no dtype changes. A weight without values stays on "meta"."""
        if torch.device(device).type != "meta":
            self.check_values()
        return self.holding({name: tensor.to(device) for name, tensor in self.fields().items()})

    @classmethod
    def unchecked(cls, config: Config, layer: Layer, tensors: Mapping[str, Tensor | None]) -> Self:
        """A weight of `config`, `layer` and `tensors` that were checked before: no device is waited for."""
        made = object.__new__(cls)
        for name, held in {"config": config, "layer": layer, **tensors}.items():
            object.__setattr__(made, name, held)
        return made

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same weight holding these `tensors`, which are taken to be equal and not checked again."""
        twin = object.__new__(type(self))
        for each in fields(self):
            object.__setattr__(twin, each.name, tensors.get(each.name, getattr(self, each.name)))
        return twin

    @property
    def activations(self) -> ActivationScheme | None:
        """How inputs are quantized before the weight multiplies them; None: not at all."""
        return self.layer.activations

    @checked
    def get_linear(
        self,
        bias: Tensor | None = None,
        *,
        activations: Literal["declared", "unquantized"] = "declared",
        maximum: Callable[[Tensor], Tensor] | Literal["own"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "nn.Module":
        """A module that maps (..., K) to (..., N) in the dtype of its input; `bias` is (N,).

        `activations`: whether inputs are quantized as `self.activations` declares, or taken as they come.
        `maximum`: of a share along K whose scheme finds a scale over all inputs, what makes largest values
        those of all ranks, as `maximum_over` of a process group does, or "own", with which each rank looks
        at its own inputs, as engines do. ArgumentError where that is missing, or a scheme has no quantizer.

        `dtype`: the type of the activations, torch.float16, bfloat16 or float32. Kernels multiply them by
        scales of the same 16-bit type, so those of a kernel's order are converted here, once, each to within
        2**-8 of itself in bfloat16 and 2**-11 in float16; `bias` and plain weights are cast. None: all stays,
        and activations of another type than the scales' take a slower way, which is logged. CastError where a
        scale would lose more, or where the weight, rounded to the type of its scales for many tokens, has
        infinite elements.
        """
        module: nn.Module = call_upward(LINEAR_FACTORY, self, bias, activations, maximum, dtype)
        return module

    def __repr__(self) -> str:
        held = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self.fields().items())
        return f"{type(self).__name__}({self.layer.name or 'layer'}, {self.shape}, {self.config}, {held})"


@cache
def tensor_names(weight_type: type[Weight]) -> tuple[str, ...]:
    """The fields of a type of weights that hold a tensor each, or None where that is optional."""
    return tuple(each.name for each in fields(weight_type) if each.name not in ("config", "layer"))


@dataclass(frozen=True)
class FieldNames(Names):
    """Names of a layer's fields: its prefix, a dot, the field."""

    prefix: str

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return named(self.prefix, field)
