"""Load of the experts of a layer: names, headers, facts and cuts first, then the weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, MismatchError, ShapeError, UnsupportedFormatError
from qload.experts.activation import ExpertFacts, facts_of
from qload.experts.expert_parallel import ExpertSplit, LocalExperts, grid, local_experts
from qload.experts.names import ExpertNames, Holder, Naming, names_of
from qload.experts.stacked_storage import StackedLayers
from qload.experts.weight import ExpertsWeight, StackedWeight, Stacking
from qload.formats.unquantized import FLOATS
from qload.loader import FormatLoader, LayerDescription, Part, Split, TensorSource, WeightsLoader
from qload.loader.description import check_alike as check_parts
from qload.loader.description import configs_apart
from qload.loader.layer_values import check_scales
from qload.loader.sharding import Share, shares_of
from qload.loader.source import WrappedSource
from qload.parallel import ProcessGroup
from qload.spec import Role, TensorSpec, Weight, named
from qload.storage import WeightStorage


class ExpertSource(WrappedSource):
    """What an inner source holds, for the ranks of a `group` that cut the same experts.

    Until `begin` what is read whole is a fact of an expert, and kept. What a load has used, and what it has
    to note, is entered into the ledger by `end`: a load that fails leaves nothing there.
    """

    def __init__(self, inner: TensorSource, group: ProcessGroup) -> None:
        super().__init__(inner)
        self.process_group = group
        self._facts: dict[str, Tensor] | None = {}
        self._kept: dict[str, Tensor] = {}
        self._taken: list[str] = []
        self._notes: dict[str, None] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Facts are known: of those called `names` they are kept until they are read, and no longer."""
        known = self._facts or {}
        self._kept = {name: known[name] for name in names if name in known}
        self._facts = None

    def end(self) -> None:
        """Enter into the ledger what was used and noted, each once."""
        self.inner.take(self._taken)
        for note in self._notes:
            self.inner.note(note)

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        """As the inner source, or what was read before."""
        if self._facts is not None:
            fact = self.inner.read(name, index, role=role)
            self._facts[name] = fact
            return fact
        if not index and name in self._kept:
            return self._kept.pop(name)
        return self.inner.read(name, index, role=role)

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor, *, role: Role) -> None:
        """As the inner source."""
        self.inner.read_into(name, index, out, role=role)

    def take(self, names: Iterable[str]) -> None:
        """Kept until the end."""
        self._taken += names

    def note(self, text: str) -> None:
        """Kept until the end."""
        self._notes[text] = None


def check_alike(first: LayerDescription, other: LayerDescription) -> None:
    """One matrix of two experts: MismatchError that names the other's where a stack could not hold both."""
    if other.specs is first.specs and other.sizes is first.sizes and other.format is first.format:
        return  # described once, as layers are that have the same headers
    for what, a, b in _compared(first, other):
        if a != b:
            raise MismatchError(
                other.prefix,
                f"experts of one layer differ in {what}",
                f"{a} as in {first.prefix}",
                str(b),
            )


def _compared(first: LayerDescription, other: LayerDescription) -> Iterator[tuple[str, Any, Any]]:
    kept, others = ([spec for spec in layer.specs if not spec.spent] for layer in (first, other))
    yield "format", first.format.weight_type.format, other.format.weight_type.format
    yield "tensors", _names(kept), _names(others)
    yield "(N, K)", (first.N, first.K), (other.N, other.K)
    yield "config", *configs_apart(first.format.config, other.format.config)
    yield "what is declared of its inputs", first.format.activations, other.format.activations
    for one, two in zip(kept, others, strict=True):
        a, b = (str(layer.dtypes[one.name]).removeprefix("torch.") for layer in (first, other))
        yield f"the dtype of {one.name}", a, b
        yield f"the axes of {one.name}", one.text, two.text
    for dim in first.sizes.keys() | other.sizes.keys():
        yield f"the size of {dim}", first.sizes.get(dim), other.sizes.get(dim)


def _names(specs: list[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def bias_name(prefix: str) -> str:
    """`experts.0.down_proj` -> `experts.0.down_proj.bias`."""
    return named(prefix, "bias")


def check_biases(
    source: TensorSource,
    firsts: Sequence[LayerDescription],
    layers: Sequence[LayerDescription],
    expected: Sequence[bool],
    biased: Sequence[bool],
) -> None:
    """Gate, up and down have a bias where those of the first expert have one, of one float type each.

    `expected`, `biased`: which have one, of the first expert and of this one. MismatchError, ShapeError and
    DtypeError name what is wrong.
    """
    if biased[0] != biased[1]:
        has, lacks = layers[biased[1]], layers[biased[0]]
        raise MismatchError(lacks.prefix, "gate and up differ in bias", f"a bias as in {has.prefix}", "none")
    for first, layer, wanted, got in zip(firsts, layers, expected, biased, strict=True):
        if wanted != got:
            a, b = (f"{'a' if has else 'no'} bias" for has in (wanted, got))
            what = "experts of one layer differ in bias"
            raise MismatchError(layer.prefix, what, f"{a} as in {first.prefix}", b)
        if got:
            _check_bias(source, firsts[0] if layer is layers[1] else first, layer)


def read_biases(
    source: TensorSource, experts: Sequence[Sequence[str]], shares: Sequence[Share], device: torch.device
) -> Tensor | None:
    """(E, outputs that are here): of each expert the biases of some matrices, one after another.

    `experts`: the prefixes of these matrices; `shares`: this rank's of each, the same of all experts.
    """
    widths = [share.bounds.n1 - share.bounds.n0 for share in shares]
    stack: Tensor | None = None
    for row, prefixes in enumerate(experts):
        at = 0
        for prefix, share, width in zip(prefixes, shares, widths, strict=True):
            index = (slice(share.bounds.n0, share.bounds.n1),)
            bias = source.read(bias_name(prefix), index, role=Role.FLOAT)
            if stack is None:
                stack = torch.empty((len(experts), sum(widths)), dtype=bias.dtype, device=device)
            stack[row, at : at + width] = bias
            at += width
    source.take(bias_name(prefix) for prefixes in experts for prefix in prefixes)
    return stack


def _check_bias(source: TensorSource, first: LayerDescription, layer: LayerDescription) -> None:
    """A bias is a vector of its layer's outputs, plain, and of the type of the first expert's."""
    name, wanted = bias_name(layer.prefix), source.info(bias_name(first.prefix)).dtype
    info = source.info(name)
    got, plain = _plain(info.dtype), [_plain(dtype) for dtype in FLOATS]
    if info.shape != (layer.N,):
        raise ShapeError(name, f"({layer.N},) = (N,)", info.shape, info.file)
    if info.dtype not in FLOATS:
        raise DtypeError(name, plain, got, info.file)
    if info.dtype != wanted:
        what = "experts of one layer differ in the dtype of bias"
        raise MismatchError(layer.prefix, what, f"{_plain(wanted)} as in {first.prefix}", got)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Matrices = tuple[LayerDescription, LayerDescription, LayerDescription]  # gate, up and down
Shares = tuple[list[Share], list[Share]]  # this rank's of gate and up, and of down


@dataclass(frozen=True)
class Described:
    """What all experts of a layer have in common, and which tensors they are made of.

    `layers`: gate, up and down of the first expert; `everyone`: those of all experts; `biased`: which of
    them have a bias. `facts`: names of the facts of the experts that are here. `elsewhere`: of all tensors of
    the others.
    """

    layers: Matrices
    everyone: Sequence[LayerDescription]
    biased: tuple[bool, bool, bool]
    facts: Sequence[str]
    elsewhere: Sequence[str]


def described(
    source: ExpertSource,
    loader: WeightsLoader,
    names: ExpertNames,
    local: LocalExperts,
    device: torch.device,
) -> Described:
    """Every expert described and compared with the first, on every rank alike; no weight is read.

    MissingTensorError for a missing one, MismatchError for one that is not as the first.
    """
    firsts: Matrices | None = None
    everyone = list[LayerDescription]()
    expected, facts, elsewhere = (False, False, False), list[str](), list[str]()
    for expert in range(names.count):
        gate, up, down = names.of(expert)
        layers = loader.describe(source, gate), loader.describe(source, up), loader.describe(source, down)
        biased = tuple(source.has_tensor(bias_name(layer.prefix)) for layer in layers)
        if firsts is None:
            firsts, expected = layers, (biased[0], biased[1], biased[2])
            _check_sizes(*layers)
        check_parts(layers[:2])
        everyone += layers
        for first, other in zip(firsts, layers, strict=True):
            check_alike(first, other)
            _check_made(loader, first, other, device)
        check_biases(source, firsts, layers, expected, biased)
        if local.start <= expert < local.stop:
            facts += (layer.names.full(fact) for layer in layers for fact in layer.facts)
        else:
            elsewhere += _tensors(layers, biased)
    assert firsts is not None  # names are of one expert at least
    return Described(firsts, everyone, expected, facts, elsewhere)


def check_cuts(source: ExpertSource, found: Described, split: bool) -> Shares:
    """This rank's shares of gate and up, and of down; every cut of every rank is checked, of all experts.

    They are alike in all that a cut depends on, so that the first stands for them.
    """
    gate, up, down = found.layers
    return (
        shares_of(
            source, {gate.prefix: gate, up.prefix: up}, parts_of(gate.prefix, up.prefix), columns(split)
        ),
        shares_of(source, {down.prefix: down}, parts_of(down.prefix), rows(split)),
    )


def parts_of(*prefixes: str) -> list[Part]:
    """The layers under some prefixes, whole."""
    return [Part(prefix) for prefix in prefixes]


def columns(split: bool) -> Split | None:
    """How gate and up are cut, if they are."""
    return "N" if split else None


def rows(split: bool) -> Split | None:
    """How down is cut, if it is."""
    return "K" if split else None


def _check_sizes(gate: LayerDescription, up: LayerDescription, down: LayerDescription) -> None:
    """Gate and up make what down takes, and down makes what they take, or MismatchError."""
    if "K" not in gate.sizes or "K" not in down.sizes:
        vector = gate if "K" not in gate.sizes else down
        raise ShapeError(vector.names.full("weight"), "(N, K), a matrix of an expert", (vector.N,))
    for layer, expected, other in (
        (up, (gate.N, gate.K), f"(N, K) of {gate.prefix}"),
        (down, (gate.K, gate.N), f"(K, N) of {gate.prefix}"),
    ):
        got = (layer.N, layer.K)
        if got != expected:
            raise MismatchError(
                layer.prefix, "matrices of one expert do not fit", f"{expected}, {other}", str(got)
            )


def _check_made(
    loader: WeightsLoader, first: LayerDescription, other: LayerDescription, device: torch.device
) -> None:
    """What a loader makes of an expert is what it makes of the first, or MismatchError."""
    a, b = loader.made(first, device), loader.made(other, device)
    if a != b:
        a, b = a or first.format.weight_type.format, b or other.format.weight_type.format
        what = "experts of one layer differ in the format that they are loaded in"
        raise MismatchError(other.prefix, what, f"{a} as {first.prefix}", b)


def _tensors(layers: Sequence[LayerDescription], biased: Sequence[bool]) -> list[str]:
    found = [layer.names.full(spec.name) for layer in layers for spec in layer.specs]
    return found + [bias_name(layer.prefix) for layer, has in zip(layers, biased, strict=True) if has]


ELSEWHERE = "of an expert that another rank has"


class Owner(Holder, Protocol):
    """What `Weights` is here."""

    storage: WeightStorage
    device: torch.device

    @property
    def loader(self) -> WeightsLoader:
        """What serves the typed loads."""

    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """Tensors for whose names there is a reason may stay unused."""


@dataclass(frozen=True)
class Plan:
    """A load of which names, facts and cuts are checked, on every rank alike, and no weight was read."""

    names: ExpertNames
    local: LocalExperts
    source: ExpertSource
    found: Described
    shares: Shares
    cut: bool

    @property
    def here(self) -> list[Naming]:
        """The prefixes of gate, up and down of every expert that is here."""
        return [self.names.of(expert) for expert in range(self.local.start, self.local.stop)]


def load_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None,
    facts: ExpertFacts | None,
) -> ExpertsWeight:
    """The experts under a prefix that are on this rank, or its share of each; see `Weights.get_experts`."""
    plan = plan_experts(weights, prefix, split, expert_ranks, examine=weights.nonfinite == "error")
    known = facts or facts_of(weights.architecture)
    gate_ups, downs = Stacking(prefix, len(plan.local)), Stacking(prefix, len(plan.local))
    plan.source.begin(plan.found.facts)
    for gate, up, down in plan.here:
        gate_ups.put(_load(weights.loader, plan.source, [gate, up], columns(plan.cut), gate_ups.places()))
        downs.put(_load(weights.loader, plan.source, [down], rows(plan.cut), downs.places()))
    biases = _biases(plan, weights.device)
    made = ExpertsWeight(gate_ups.stack(), downs.stack(), known, plan.local, *biases)
    plan.source.end()
    elsewhere = dict.fromkeys((plan.names.lead + name for name in plan.found.elsewhere), ELSEWHERE)
    if elsewhere:
        weights.exempt_by(elsewhere.get)
    return made


def _load(
    loader: WeightsLoader,
    source: ExpertSource,
    prefixes: Sequence[str],
    split: Split | None,
    places: Mapping[str, Tensor],
) -> Weight:
    """One layer of an expert, read straight to its places where the loader can."""
    if isinstance(loader, FormatLoader):
        return loader.load(source, parts_of(*prefixes), split, out=places)
    return loader.load(source, parts_of(*prefixes), split)


def plan_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None = None,
    *,
    examine: bool = False,
) -> Plan:
    """All that is checked before a weight is read: names, headers, facts, and every cut of every rank.

    `examine`: the scales of all experts too, where other ranks have some: all ranks refuse alike.
    """
    groups = grid(split, weights.process_group, expert_ranks)
    names = names_of(weights, prefix)
    local = local_experts(prefix, names.count, groups.experts)
    source, cut = ExpertSource(weights, groups.tensor), split in ("tensor", "both")
    found = described(source, weights.loader, names, local, weights.device)
    plan = Plan(names, local, source, found, check_cuts(source, found, cut), cut)
    if examine and len(local) < names.count:
        for layer in found.everyone:
            check_scales(source, [layer], {}, whole=False)
    return plan


def _biases(plan: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Of gate and up this rank's outputs; of down all, on the first of the ranks whose outputs are summed."""
    source, (of_gates, _, of_downs) = plan.source, plan.found.biased
    gates = [(gate, up) for gate, up, _ in plan.here if of_gates]
    downs = [(down,) for _, _, down in plan.here if of_downs]
    first = read_biases(source, gates, plan.shares[0], device) if gates else None
    if not downs:
        return first, None
    if source.process_group.rank():
        source.take(bias_name(down) for (down,) in downs)  # which another rank adds
        return first, None
    return first, read_biases(source, downs, plan.shares[1], device)


def load_stacked(
    loader: WeightsLoader, source: TensorSource, prefix: str, layers: StackedLayers, split: Split | None
) -> StackedWeight:
    """Load one matrix of all experts by its stored name; each expert is cut along `split`.

    UnsupportedFormatError for interleaved gate and up; ArgumentError for a cut of joined gate and up.
    """
    if layers.interleaved:
        raise UnsupportedFormatError(
            f"{prefix}: interleaved outputs of {' and '.join(layers.layers)}",
            "one layer cannot have both",
            remedy=f"load {layers.of(0)[0]} and so on, or get_experts({layers.lead!r})",
        )
    if split is not None and len(layers.layers) > 1:
        expected = f"{' or '.join(layers.of(0))}, or get_experts({layers.lead!r}, split='tensor')"
        raise ArgumentError("prefix", expected, f"{prefix}, which is several layers")
    stacking = Stacking(prefix, layers.count)
    for expert in range(layers.count):
        stacking.put(loader.load(source, parts_of(*layers.of(expert)), split))
    stack = stacking.stack()
    return StackedWeight(stack, config=stack.config, layer=stack.layer)
