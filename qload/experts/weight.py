"""Typed weights of experts: `Stack`, `StackedWeight` and `ExpertsWeight`, one axis E more than a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from qload import devices, dtypes, kernel_formats
from qload.dtypes import TORCH, DtypeLike
from qload.errors import (
    ArgumentError,
    MismatchError,
    RepackError,
    ShapeError,
    UnsupportedFormatError,
    check_fields,
    checked,
)
from qload.experts.activation import ExpertFacts
from qload.experts.expert_parallel import LocalExperts
from qload.formats import UnquantizedConfig
from qload.layouts import ZeroPoints
from qload.lazy_torch import Tensor, torch
from qload.loader.description import configs_apart
from qload.spec import Codes, Config, Layer, TensorSpec, Weight, check_out
from qload.spec.casts import check_float
from qload.spec.weight import EXPERTS_FACTORY, call_upward


@dataclass(frozen=True, eq=False)
class Stack:
    """E layers of one format, config and shape: of each tensor a stack (E, ...).

    ShapeError where the tensors are not all of as many experts as `names` has.

    Attributes
    ----------
    weight_type, config, layer
        Of each expert; the layer's own name is that of all experts together.
    names
        Of the E layers, one an expert.
    tensors
        By field, (E, ...) each: entry e is that tensor of expert e as it is stored.
    """

    weight_type: type[Weight]
    config: Any
    layer: Layer
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_fields(self)
        for field, tensor in self.tensors.items():
            if tensor.shape[:1] != (len(self.names),):
                expected = f"({len(self.names)}, ...), one for each expert"
                raise ShapeError(f"{self.layer.name}: {field}", expected, tuple(tensor.shape))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Weight]:
        return (self._view(index) for index in range(len(self)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K): experts, outputs and inputs on this rank."""
        return len(self), self.layer.N, self.layer.K

    @property
    def format(self) -> str:
        """The name of the experts' format."""
        return self.weight_type.format

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.tensors.values())).device

    @property
    def is_k_full(self) -> bool:
        """True if input i is in group i / group_size, counted from the first input of this share.

        False of a share of the inputs whose groups lie in act order, or straddle two ranks: it has the scales
        of all groups, and the index says which.
        """
        _, whole = self.layer.whole
        if whole == self.layer.K:
            return True
        said = getattr(self.config, "is_k_full", None)
        return said if isinstance(said, bool) else not any(self._groups_of_others())

    def fields(self) -> dict[str, Tensor]:
        """The stacked tensors by field name; an absent optional one is left out."""
        return dict(self.tensors)

    @checked
    def expert(self, index: int) -> Weight:
        """Layer (N, K) of the expert `index` on this rank: a view, no copy.

        ArgumentError where there is no such expert.
        """
        if not 0 <= index < len(self):
            raise ArgumentError("index", f"an expert that is here, 0 to {len(self) - 1}", str(index))
        return self._view(index)

    def dequantize(self, index: int, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize the expert `index` to (N, K), as `Weight.dequantize` with this `dtype` or `out`."""
        return self.expert(index).dequantize(dtype, out)

    @checked
    def to(self, device: torch.device | str) -> Self:
        """The same stack on another `device`; no dtype changes."""
        return self.holding({field: tensor.to(device) for field, tensor in self.tensors.items()})

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy with these `tensors` in place of equal ones, without checks."""
        return replace(
            self, tensors={field: tensors.get(field, held) for field, held in self.tensors.items()}
        )

    def _view(self, index: int) -> Weight:
        held = {field: tensor[index] for field, tensor in self.tensors.items()}
        layer = replace(self.layer, name=self.names[index])
        return self.weight_type.unchecked(self.config, layer, held)

    def _groups_of_others(self) -> Iterator[bool]:
        """Yield, for each axis with an index into it, True if it has groups of other ranks' inputs."""
        specs = [spec for spec in self.weight_type.tensors(self.config) if spec.name in self.tensors]
        letters, sizes = {spec.index_of for spec in specs} - {None}, {"N": self.layer.N, "K": self.layer.K}
        for spec in specs:
            for axis, size in zip(spec.axes, self.tensors[spec.name].shape[1:], strict=True):
                if letters & {axis.free, axis.dim}:
                    own = axis.size(axis.logical(sizes) or 0) if axis.free else 1
                    yield size not in (1, own)

    def __repr__(self) -> str:
        held = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"Stack({self.layer.name or 'experts'}, {self.shape}, {self.format}, {self.config}, {held})"


class Stacking:
    """Builder of the stack `name` of `count` experts.

    MismatchError, with its name, for an expert unlike the first.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._first: Weight | None = None
        self._names: list[str] = []
        self._tensors: dict[str, Tensor] = {}

    @property
    def first(self) -> Weight | None:
        """The first expert, over its rows; None before it."""
        return self._first

    def places(self) -> dict[str, Tensor]:
        """Rows of the next expert, by field; empty before the first."""
        at = len(self._names)
        return {field: tensor[at] for field, tensor in self._tensors.items()}

    def put(self, weight: Weight) -> None:
        """Add the next expert; tensors in `places` are not copied."""
        if self._first is None:
            self._tensors = {field: self._empty(tensor) for field, tensor in weight.fields().items()}
            self._first = type(weight).unchecked(weight.config, weight.layer, self.places())
        self._check(weight)
        for field, place in self.places().items():
            held = weight.fields()[field]
            if held.data_ptr() != place.data_ptr() or not held.numel():
                place.copy_(held)
        self._names.append(weight.layer.name)

    def rows(self, count: int) -> dict[str, Tensor]:
        """Rows of the next `count` experts, by field, after the first one."""
        at = len(self._names)
        return {field: tensor[at : at + count] for field, tensor in self._tensors.items()}

    def add_rows(self, names: Sequence[str]) -> None:
        """Count the next experts after a write to their `rows`."""
        self._names += names

    def put_stack(self, stack: Stack) -> None:
        """Add the next experts, after the first one."""
        self._check(stack.expert(0))
        for field, rows in self.rows(len(stack)).items():
            rows.copy_(stack.tensors[field])
        self._names += stack.names

    def stack(self) -> Stack:
        """Return the complete stack; ArgumentError for a missing expert."""
        if self._first is None or len(self._names) != self._count:
            raise ArgumentError(self._name, f"{self._count} experts, at least 1", str(len(self._names)))
        first = self._first
        layer = replace(first.layer, name=self._name)
        return Stack(type(first), first.config, layer, tuple(self._names), self._tensors)

    def _check(self, weight: Weight) -> None:
        """Compare an expert with the first; their conventions of zero points become one."""
        assert self._first is not None
        first, weight = _like(self._first, weight), _like(weight, self._first)
        check_alike(first, weight)
        self._first = first

    def _empty(self, tensor: Tensor) -> Tensor:
        shape = (self._count, *tensor.shape)
        return devices.in_large_pages(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))


def stacked(name: str, count: int, weights: Iterable[Weight]) -> Stack:
    """Stack `count` typed weights, each built after the one before was copied; MismatchError."""
    stacking = Stacking(name, count)
    for weight in weights:
        stacking.put(weight)
        del weight  # before the next one is made
    return stacking.stack()


def _like(weight: Weight, other: Weight) -> Weight:
    """Give a weight the zero-point convention of `other`, if no value changes."""
    config, origin = weight.config.like(other.config), weight.layer.origin
    if origin is not None and other.layer.origin is not None:
        origin = origin.like(other.layer.origin)
    return type(weight).unchecked(config, replace(weight.layer, origin=origin), weight.fields())


def check_alike(first: Weight, other: Weight) -> None:
    """Compare format, config, shape and tensors of two experts; MismatchError with the other's name."""
    for what, a, b in (
        ("format", first.format, other.format),
        ("config", *configs_apart(first.config, other.config)),
        ("(N, K)", first.shape, other.shape),
        ("layer", replace(first.layer, name=""), replace(other.layer, name="")),
        ("tensors", _described(first), _described(other)),
    ):
        if a != b:
            raise differing_experts(other.layer.name, what, str(a), first.layer.name, str(b))


def differing_experts(name: str, what: str, expected: str, first: str, got: str) -> MismatchError:
    """Error for an expert `name` unlike the `first` in one property."""
    return MismatchError(
        name,
        f"experts of one layer differ in {what}",
        f"{expected} as in {first}",
        got,
        "remedy   load them without a target, and repack them: RepackError says what is in the way",
    )


def _described(weight: Weight) -> str:
    return ", ".join(
        f"{field} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for field, tensor in weight.fields().items()
    )


def repacked(stack: Stack, layout: str, whole: Stack | None, **options: Any) -> Stack:
    """Repack every expert by `qload.repack`; `whole`: the stack before it was cut."""
    meant = [None] * len(stack) if whole is None else whole
    pairs = zip(stack, meant, strict=True)
    made = (_repacked(weight, layout, whole=each, **options) for weight, each in pairs)
    return stacked(stack.layer.name, len(stack), made)


def restored(stack: Stack) -> Stack:
    """Restore every expert by `qload.restore`."""
    return stacked(stack.layer.name, len(stack), map(kernel_formats.restore, stack))


def _repacked(weight: Weight, layout: str, **options: Any) -> Weight:
    """One expert; RepackError with its name."""
    try:
        return kernel_formats.repack(weight, layout, **options)
    except RepackError as error:
        raise RepackError(f"{weight.layer.name}: {weight.format}", layout, error.reason) from error


@dataclass(frozen=True, eq=False, repr=False)
class StackedWeight(Weight):
    """One matrix of all experts, or a share of each expert: (E, N, K).

    It cannot multiply; `expert` gives a layer that can. Joined gate and up are one layer, the gate's outputs
    first.

    Attributes
    ----------
    stack
        The layers.
    """

    stack: Stack

    format: ClassVar[str] = "stack"
    example: ClassVar[Config] = UnquantizedConfig()

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def tensors(cls, config: Any) -> tuple[TensorSpec, ...]:
        """No tensors of its own: the experts' tensors have one axis more here."""
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K): experts, outputs, inputs of this share."""
        return self.stack.shape

    def fields(self) -> dict[str, Tensor]:
        """The stacked tensors by field name, (E, ...) each."""
        return self.stack.fields()

    def expert(self, index: int) -> Weight:
        """The layer of the expert `index`: a view, no copy. ArgumentError for an index of no expert."""
        return self.stack.expert(index)

    def codes(self) -> Codes:
        """Raise UnsupportedFormatError: each expert has codes of its own."""
        raise UnsupportedFormatError(
            f"{self.layer.name}: {self.stack.format} of several experts",
            "codes are those of one layer",
            remedy="take expert(index).codes()",
        )

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize all experts to (E, N, K) in a `dtype`, or into `out` in its dtype."""
        if out is not None:
            check_out(out, self.shape, self.device)
        made = out
        if made is None:
            check_float(dtype)
            made = torch.empty(self.shape, dtype=TORCH[dtype], device=self.device)
        for index, place in enumerate(made):
            self.stack.dequantize(index, out=place)
        return made

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another `device`; no dtype changes."""
        return replace(self, stack=self.stack.to(device))

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """Copy with these `tensors` in place of equal ones, without checks."""
        return replace(self, stack=self.stack.holding(tensors))

    def __repr__(self) -> str:
        return f"StackedWeight({self.stack!r})"


class Expert(NamedTuple):
    """The matrices of one expert: gate and up as one (2 I, H), or up (I, H), and down (H, I)."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    """Experts of a layer on this rank, or its share of each: E experts, H inputs, I in between.

    ShapeError and MismatchError for parts that are not of the same experts.

    Attributes
    ----------
    gate_up
        (E, 2 I, H): of each expert its gate's outputs, then its up's, two parts of one fused layer. Of
        experts without a gate (E, I, H): its up's, one part.
    down
        (E, H, I).
    facts
        The activation between, and where the routing weight goes; None: unknown.
    local
        Which experts of the layer are here.
    gate_up_bias
        (E, 2 I), as `gate_up`; None: there is none.
    down_bias
        (E, H), of the first of the ranks that cut the same experts, whose outputs are summed; None on the
        others, and where there is none.

    Examples
    --------
    >>> import torch
    >>> from qload import ExpertFacts, MemoryStorage, Weights, loader_from_config
    >>> from qload.experts import GatedActivation
    >>> names = [f"experts.{e}.{matrix}.weight" for e in range(3) for matrix in ("w1", "w3", "w2")]
    >>> storage = MemoryStorage({name: torch.full((4, 4), at + 1.0) for at, name in enumerate(names)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> experts = weights.get_experts("experts", facts=ExpertFacts(GatedActivation("silu")))
    >>> experts.shape, experts.gate_up.shape
    ((3, 4, 4), (3, 8, 4))
    >>> gate_up, down = experts.dequantize(2)
    >>> gate_up[:, 0], down[:, 0]
    (tensor([7., 7., 7., 7., 8., 8., 8., 8.]), tensor([9., 9., 9., 9.]))
    """

    gate_up: Stack
    down: Stack
    facts: ExpertFacts | None
    local: LocalExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        E, H, inner = self.shape
        parts, name = self.gate_up.layer.parts, self.gate_up.layer.name
        if (len(self.gate_up), len(self.local)) != (E, E):
            counts = f"{len(self.gate_up)} of gate and up, {len(self.local)} local"
            raise MismatchError(name, "experts of a layer", f"{E}, as of down", counts)
        joined = (inner, inner) if self.facts is not None or len(parts) == 2 else (inner,)
        if (parts, self.gate_up.layer.K) != (joined, H):
            expected = f"({E}, {inner} + {inner}, {H}) = (E, I + I, H), as down is (E, H, I)"
            raise ShapeError(f"{name}: gate_up", expected, self.gate_up.shape)
        for field, bias, size in (
            ("gate_up_bias", self.gate_up_bias, sum(joined)),
            ("down_bias", self.down_bias, H),
        ):
            if bias is not None and tuple(bias.shape) != (E, size):
                raise ShapeError(f"{name}: {field}", f"({E}, {size})", tuple(bias.shape))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, H, I): experts on this rank, their inputs, and their share of the outputs of gate."""
        return self.down.shape

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.down.device

    def fields(self) -> dict[str, Tensor]:
        """All tensors: `gate_up.qweight` and so on, and the biases."""
        held = {
            f"{name}.{f}": t for name in ("gate_up", "down") for f, t in getattr(self, name).fields().items()
        }
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return held | {name: bias for name, bias in biases.items() if bias is not None}

    @checked
    def expert(self, index: int) -> Expert:
        """Matrices of the expert `index` on this rank: views, no copies.

        ArgumentError where there is no such expert.
        """
        return Expert(self.gate_up.expert(index), self.down.expert(index))

    @checked
    def dequantize(self, index: int, dtype: DtypeLike = dtypes.float32) -> tuple[Tensor, Tensor]:
        """Dequantize gate and up (2 I, H), and down (H, I), of the expert `index` to a `dtype`."""
        return self.gate_up.dequantize(index, dtype), self.down.dequantize(index, dtype)

    @checked
    def to(self, device: torch.device | str) -> Self:
        """The same experts on another `device`; no dtype changes."""
        biases = (self.gate_up_bias, self.down_bias)
        gate_up, down = (None if bias is None else bias.to(device) for bias in biases)
        return replace(
            self,
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
            gate_up_bias=gate_up,
            down_bias=down,
        )

    @checked
    def repack(
        self,
        layout: str,
        *,
        zeros: ZeroPoints | None = None,
        dtype: torch.dtype | None = None,
        exponent_bias: bool | None = None,
        whole: ExpertsWeight | None = None,
    ) -> Self:
        """Repack every expert to another layout, one expert at a time.

        RepackError if the layout cannot represent one of them; MismatchError if the experts get different
        tensors.

        Parameters
        ----------
        layout, zeros, dtype, exponent_bias
            Those of `qload.repack`.
        whole
            The experts before they were cut; their facts decide on every rank.
        """
        options = {"zeros": zeros, "dtype": dtype, "exponent_bias": exponent_bias}
        return replace(
            self,
            gate_up=repacked(self.gate_up, layout, None if whole is None else whole.gate_up, **options),
            down=repacked(self.down, layout, None if whole is None else whole.down, **options),
        )

    def restore(self) -> Self:
        """Restore every repacked expert bit for bit; others stay unchanged."""
        return replace(self, gate_up=restored(self.gate_up), down=restored(self.down))

    def get_linear(
        self,
        *,
        activations: Literal["declared", "unquantized"] = "declared",
        maximum: Callable[[Tensor], Tensor] | Literal["own"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.nn.Module:
        """Build a module (x, topk_ids, topk_weights) -> y, x (M, H) through the chosen experts of each token.

        ArgumentError if `facts` is None, for a scheme without a quantizer, and for one whose scale covers
        all tokens: a token's result must not depend on other tokens. CastError for a scale that overflows or
        underflows in `dtype`.

        Parameters
        ----------
        activations
            Whether what goes into gate and up, and into down, is quantized as `layer.activations` of the
            stacks declares, by each expert's own stored scales, or taken as it comes.
        maximum
            Of a share by "tensor", whose down has some of its inputs only, where its scale covers all of a
            token: what `maximum_over` makes of the ranks that cut the same experts, one reduction for each
            token and expert; or "own", each rank by its own inputs. ArgumentError where it is missing.
        dtype
            Of the activations: scales and biases of experts in a kernel's order become of this type, as those
            of `Weight.get_linear`; None keeps them.
        """
        if self.facts is None:
            remedy = "the layers of each expert are `expert(index)`"
            expected = f"the activation of {self.gate_up.layer.name or 'these experts'}; {remedy}"
            raise ArgumentError("facts", expected, "None")
        module: torch.nn.Module = call_upward(EXPERTS_FACTORY, self, activations, maximum, dtype)
        return module

    def __repr__(self) -> str:
        return f"ExpertsWeight({self.gate_up.layer.name}, {self.shape}, {self.gate_up!r}, {self.down!r})"
