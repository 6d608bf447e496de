"""Description of a layer's experts: one in full, the others by comparison of headers and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from qload.dtypes import DtypeLike
from qload.errors import DtypeError, MismatchError, ShapeError
from qload.experts.names import ExpertNames, NameSource
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import LayerDescription, TensorSource, WeightsLoader
from qload.loader.description import LayerNames, configs_apart
from qload.loader.description import check_alike as check_parts
from qload.loader.source import WrappedSource
from qload.parallel import ProcessGroup
from qload.spec import Role, named
from qload.storage import WeightStorage
from qload.storage.protocol import AskedRows


class PendingRows(Protocol):
    """Reads of rows in progress; one of the methods ends them."""

    def finish(self) -> None:
        """Wait for all rows."""

    def close(self) -> None:
        """End the reads; the rows are undefined."""


class Owner(NameSource, Protocol):
    """Tensors of a rank with its device, dtype and loader: `Weights`."""

    storage: WeightStorage
    dtype: torch.dtype | None
    aliases: dict[str, Sequence[str]]

    @property
    def device(self) -> torch.device:
        """Device of the loaded tensors."""

    @property
    def loader(self) -> WeightsLoader:
        """Loader of single layers."""

    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """Exempt the tensors with a reason."""

    def read_rows(self, asked: Sequence[AskedRows]) -> None:
        """Read the same elements of tensors of one shape, each into a row: (names, index, out) each."""

    def begin_rows(self, asked: Sequence[AskedRows]) -> PendingRows:
        """Begin the reads of `read_rows`."""


class ExpertSource(WrappedSource):
    """Tensors for loads of single experts: facts are read once, and ledger entries wait for `commit`.

    Parameters
    ----------
    inner
        Tensors of this rank.
    group
        Ranks that cut the same experts.
    """

    def __init__(self, inner: TensorSource, group: ProcessGroup) -> None:
        super().__init__(inner, ledger="later")
        self.process_group = group
        self.facts: dict[str, Tensor] = {}

    def read_fact(self, name: str, role: Role) -> Tensor:
        """Read a fact once."""
        fact = self.facts.get(name)
        if fact is None:
            fact = self.facts[name] = self.inner.read_fact(name, role)
        return fact

    def place(self, fact: Tensor) -> Tensor:
        """Copy part of a fact to the device."""
        return self.inner.place(fact)

    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor, *, role: Role) -> None:
        """Read into `out` as the inner source."""
        self.inner.read_into(name, index, out, role=role)


class DescribedExperts:
    """Matrices of all experts, described by headers and facts.

    Parameters
    ----------
    source
        Tensors for loads of single experts, with their facts.
    prefixes, lead, endings
        Prefixes of each expert's matrices, the text before them in stored names, and the text after them, by
        matrix and field.
    first
        Descriptions of the first expert's matrices.
    facts
        Facts of each matrix by field, stacked over the experts with the first one's headers.
    rows
        Number of an expert -> its row in these stacks.
    others
        Descriptions of matrices with facts of their own, by (expert, matrix).
    biased
        Whether each matrix has a bias; empty for a part of the matrices of an expert.
    """

    def __init__(
        self,
        source: ExpertSource,
        prefixes: Sequence[tuple[str, ...]],
        lead: str,
        endings: Sequence[Mapping[str, str]],
        first: tuple[LayerDescription, ...],
        facts: Sequence[Mapping[str, Tensor]],
        rows: Mapping[int, int],
        others: Mapping[tuple[int, int], LayerDescription],
        biased: Sequence[bool],
    ) -> None:
        self.source, self.prefixes, self.lead = source, prefixes, lead
        self.first, self.facts, self.rows, self.others, self.biased = first, facts, rows, others, biased
        self.names: list[dict[str, list[str]]] = []  # stored names of all experts, by matrix and field
        for matrix in range(len(first)):
            names = dict[str, list[str]]()
            for name, ending in endings[matrix].items():
                names[name] = full = list[str]()
                for own in prefixes:
                    full.append(f"{lead}{own[matrix]}{ending}")
            self.names.append(names)
        for (expert, matrix), layer in others.items():
            for spec in first[matrix].specs:
                if spec.name in layer.dtypes:
                    self.names[matrix][spec.name][expert] = lead + layer.names.full(spec.name)

    def layer(self, expert: int, matrix: int) -> LayerDescription:
        """Description of one expert's matrix."""
        first, prefix = self.first[matrix], self.prefixes[expert][matrix]
        known = first if prefix == first.prefix else self.others.get((expert, matrix))
        if known is not None:
            return known
        assert isinstance(first.names, LayerNames)
        names = LayerNames(self.source, prefix, first.names.suffixes)
        facts = {name: stack[self.rows[expert]] for name, stack in self.facts[matrix].items()}
        return replace(first, prefix=prefix, names=names, facts=facts)

    def fact_rows(self, name: str, matrix: int, experts: Sequence[int]) -> Tensor:
        """A fact of one matrix of several consecutive experts, stacked: (E, ...)."""
        if self.others:
            return torch.stack([self.layer(expert, matrix).facts[name] for expert in experts])
        return self.facts[matrix][name][experts[0] : experts[-1] + 1]

    def all_names(self, matrices: Iterable[int], experts: Sequence[int]) -> list[str]:
        """Stored names of all tensors of several matrices and consecutive experts."""
        names = list[str]()
        for matrix in matrices:
            for full in self.names[matrix].values():
                names += full[experts[0] : experts[-1] + 1]
        return names

    def notes(self, matrices: Iterable[int], experts: Iterable[int]) -> Iterator[str]:
        """Notes on several matrices and experts."""
        for expert in experts:
            for matrix in matrices:
                layer = self.others.get((expert, matrix), self.first[matrix])
                for note in (*layer.notes, *([layer.dialect] if layer.dialect else [])):
                    yield f"{self.prefixes[expert][matrix]}: {note}"


def describe_experts(
    weights: Owner, source: ExpertSource, names: ExpertNames, joined: int, *, complete: bool
) -> DescribedExperts:
    """Describe the first expert, and compare the others with it, on every rank alike.

    Experts with the first one's headers and facts need no description of their own. MissingTensorError for a
    missing expert, MismatchError for one unlike the first.

    Parameters
    ----------
    joined
        Number of first matrices that are joined in one weight.
    complete
        Whether these are all matrices of an expert, down as the last.
    """
    loader = weights.loader
    first = tuple(loader.describe(weights, prefix) for prefix in names.of(0))
    endings = list[dict[str, str]]()
    for layer in first:
        endings.append({})
        for spec in layer.specs:
            full = layer.names.full(spec.name)
            endings[-1][spec.name] = full[len(layer.prefix) :]
            if spec.name in layer.facts:
                source.facts[full] = layer.facts[spec.name]
    biased = _check_expert(weights, loader, first, first, joined, complete)
    alike = [0, *_alike_by_headers(weights, loader, names, first)]
    facts = _read_facts(weights, source, names, endings, first, alike)
    known = set(alike)
    for stacks in facts:
        for stack in stacks.values():
            stored = stack.reshape(len(alike), -1).view(torch.uint8).numpy()  # for this thread alone
            equal = (stored == stored[0]).all(1).tolist()
            known.difference_update(expert for expert, same in zip(alike, equal, strict=True) if not same)
    others: dict[tuple[int, int], LayerDescription] = {}
    for expert in range(1, names.count):
        if expert not in known:
            layers = tuple(loader.describe(source, prefix) for prefix in names.of(expert))
            _check_expert(weights, loader, first, layers, joined, complete, biased)
            for matrix, layer in enumerate(layers):
                others[expert, matrix] = layer
    rows = {expert: row for row, expert in enumerate(alike)}
    prefixes = [names.of(expert) for expert in range(names.count)]
    lead = "" if weights.aliases else names.lead  # an alias is looked up by its own name
    return DescribedExperts(source, prefixes, lead, endings, first, facts, rows, others, biased)


def _alike_by_headers(
    weights: Owner, loader: WeightsLoader, names: ExpertNames, first: Sequence[LayerDescription]
) -> Iterator[int]:
    """Yield the experts with the tensors, headers and config entries of the first, up to a missing one."""
    for layer in first:
        if weights.aliases or layer.dialect is not None or not isinstance(layer.names, LayerNames):
            return
    start, info, rests = f"{names.lead}{names.prefix}.", weights.storage.info, names.tensors.get(0, ())
    headers = []
    for rest in rests:
        header = info(f"{start}0.{rest}")
        headers.append((rest, header.stored_dtype, header.shape))
    for expert in range(1, names.count):
        if expert not in names.tensors:
            return
        alike = rests == names.tensors[expert]
        for rest, dtype, shape in headers if alike else ():
            other = info(f"{start}{expert}.{rest}")
            alike = alike and other.stored_dtype == dtype and other.shape == shape
        for layer, prefix in zip(first, names.of(expert), strict=True) if alike else ():
            alike = alike and loader.names_alike(layer.prefix, prefix)
        if alike:
            yield expert


def _read_facts(
    weights: Owner,
    source: ExpertSource,
    names: ExpertNames,
    endings: Sequence[Mapping[str, str]],
    first: Sequence[LayerDescription],
    experts: Sequence[int],
) -> list[dict[str, Tensor]]:
    """Facts of each matrix by field, stacked over several `experts`; the facts of the first are known."""
    stacks = list[dict[str, Tensor]]()
    asked = list[AskedRows]()
    prefixes = [names.of(expert) for expert in experts[1:]]
    for matrix, layer in enumerate(first):
        stacks.append({})
        for name, fact in layer.facts.items():
            stack = stacks[-1][name] = fact.new_empty((len(experts), *fact.shape))
            stack[0] = fact
            ending = endings[matrix][name]
            full, stored = list[str](), list[str]()
            for own in prefixes:
                full.append(own[matrix] + ending)
                stored.append(names.lead + full[-1])
            if full:
                asked.append((stored, (), stack[1:]))
                source.facts.update(zip(full, stack[1:], strict=True))
    if asked:
        weights.read_rows(asked)
    return stacks


def _check_expert(
    weights: Owner,
    loader: WeightsLoader,
    first: Sequence[LayerDescription],
    layers: Sequence[LayerDescription],
    joined: int,
    complete: bool,
    expected: Sequence[bool] | None = None,
) -> list[bool]:
    """Check an expert's matrices among themselves and against the `first`; return which have a bias."""
    if layers is first and complete:
        _check_sizes(*layers)
    check_parts(layers[:joined])
    for one, other in zip(first, layers, strict=True) if layers is not first else ():
        check_alike(one, other)
        made = [loader.made(layer, weights.device) for layer in (one, other)]
        if made[0] != made[1]:
            what = "experts of one layer differ in the format that they are loaded in"
            a, b = made[0] or one.format.weight_type.format, made[1] or other.format.weight_type.format
            raise MismatchError(other.prefix, what, f"{a} as {one.prefix}", b)
    biased = [weights.has_tensor(bias_name(layer.prefix)) for layer in layers] if complete else []
    if complete:
        _check_biases(weights, first, layers, joined, expected or biased, biased)
    return biased


def check_alike(first: LayerDescription, other: LayerDescription) -> None:
    """Compare one matrix of two experts; MismatchError, with the other's name, if no stack can hold both."""
    if other.specs is first.specs and other.sizes is first.sizes and other.format is first.format:
        return  # both have one cached description
    for what, a, b in _compared(first, other):
        if a != b:
            raise MismatchError(
                other.prefix,
                f"experts of one layer differ in {what}",
                f"{a} as in {first.prefix}",
                str(b),
            )


def _compared(first: LayerDescription, other: LayerDescription) -> Iterator[tuple[str, Any, Any]]:
    """Yield the properties that experts of one layer share: name, and both values."""
    kept, others = ([spec for spec in layer.specs if not spec.spent] for layer in (first, other))
    yield "format", first.format.weight_type.format, other.format.weight_type.format
    yield "tensors", ", ".join(spec.name for spec in kept), ", ".join(spec.name for spec in others)
    yield "(N, K)", (first.N, first.K), (other.N, other.K)
    yield "config", *configs_apart(first.format.config, other.format.config)
    yield "what is declared of its inputs", first.format.activations, other.format.activations
    for one, two in zip(kept, others, strict=True):
        yield f"the dtype of {one.name}", _plain(first.dtypes[one.name]), _plain(other.dtypes[one.name])
        yield f"the axes of {one.name}", one.text, two.text
    for dim in first.sizes.keys() | other.sizes.keys():
        yield f"the size of {dim}", first.sizes.get(dim), other.sizes.get(dim)


def _check_sizes(first: LayerDescription, *others: LayerDescription) -> None:
    """Raise MismatchError unless gate and up are of one size, and down, the last, is their transpose."""
    *ups, down = others
    if "K" not in first.sizes or "K" not in down.sizes:
        vector = first if "K" not in first.sizes else down
        raise ShapeError(vector.names.full("weight"), "(N, K), a matrix of an expert", (vector.N,))
    for layer, expected, other in (
        *((up, (first.N, first.K), f"(N, K) of {first.prefix}") for up in ups),
        (down, (first.K, first.N), f"(K, N) of {first.prefix}"),
    ):
        got = (layer.N, layer.K)
        if got != expected:
            raise MismatchError(
                layer.prefix, "matrices of one expert do not fit", f"{expected}, {other}", str(got)
            )


def bias_name(prefix: str) -> str:
    """`experts.0.down_proj` -> `experts.0.down_proj.bias`."""
    return named(prefix, "bias")


def _check_biases(
    source: TensorSource,
    first: Sequence[LayerDescription],
    layers: Sequence[LayerDescription],
    joined: int,
    expected: Sequence[bool],
    biased: Sequence[bool],
) -> None:
    """Check that each matrix has a bias if the first expert's has one, each of one float dtype.

    `expected`, `biased`: whether each matrix has one, of the first expert and of this one. MismatchError,
    ShapeError and DtypeError with the name of the layer or tensor.
    """
    if joined == 2 and biased[0] != biased[1]:
        has, lacks = layers[biased[1]], layers[biased[0]]
        raise MismatchError(lacks.prefix, "gate and up differ in bias", f"a bias as in {has.prefix}", "none")
    for matrix, (wanted, got) in enumerate(zip(expected, biased, strict=True)):
        one, layer = first[matrix], layers[matrix]
        if wanted != got:
            a, b = (f"{'a' if has else 'no'} bias" for has in (wanted, got))
            what = "experts of one layer differ in bias"
            raise MismatchError(layer.prefix, what, f"{a} as in {one.prefix}", b)
        if got:
            _check_bias(source, first[0] if matrix < joined else one, layer)


def _check_bias(source: TensorSource, first: LayerDescription, layer: LayerDescription) -> None:
    """Check that a bias is a vector (N,) of floats, with the dtype of the first expert's."""
    name, wanted = bias_name(layer.prefix), source.info(bias_name(first.prefix)).stored_dtype
    info = source.info(name)
    if info.shape != (layer.N,):
        raise ShapeError(name, f"({layer.N},) = (N,)", info.shape, info.file)
    if info.stored_dtype not in FLOATS:
        raise DtypeError(name, list(map(_plain, FLOATS)), _plain(info.stored_dtype), info.file)
    if info.stored_dtype != wanted:
        what = "experts of one layer differ in the dtype of bias"
        raise MismatchError(
            layer.prefix, what, f"{_plain(wanted)} as in {first.prefix}", _plain(info.stored_dtype)
        )


def _plain(dtype: DtypeLike) -> str:
    return str(dtype).removeprefix("torch.")
