"""What a conversion will write, known before a byte of it is: the layers, the files, and what is refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from qload.conversion import fp8
from qload.conversion.asked import EXPERTS, AskedTarget, StoredLayer
from qload.conversion.items import Item, copied
from qload.conversion.sections import HEAD, WrittenConfig, section
from qload.conversion.source import as_stored
from qload.conversion.stacked import new_stacks, shared_sources
from qload.conversion.targets import FLOATS
from qload.detect.matching import EMBEDDINGS
from qload.errors import ArgumentError, NonfiniteScaleError, QloadError
from qload.errors.reporting import cause_of, group_by_cause
from qload.formats import GPTQConfig
from qload.loader import LayerDescription
from qload.loader.finite_scales import Nonfinite, check_scales
from qload.spec import Role
from qload.storage import WeightStorage
from qload.verify.subject import Subject

Told = Callable[[int, int], None]  # layers that were asked, and all
OWNER = "compressed-tensors"
CACHE = "kv_cache_scheme"
FLOAT = "float32"  # the target that every readable layer can be written as
ROUND = "round the values by rounding=True (--round)"
KEEP = "or leave it as it is by keep (--keep)"
STACKED = "is one of several in a tensor of all experts, which is not taken apart"


@dataclass(frozen=True)
class Planned:
    """A conversion before it begins.

    `layers`: those that change, by prefix; `kept`: quantized ones that stay. `refused`: reasons by prefix.
    """

    items: Sequence[Item]
    layers: Mapping[str, StoredLayer]
    section: WrittenConfig
    refused: Mapping[str, str]
    notes: Sequence[str]


def planned(asked: AskedTarget, keep: Sequence[str], tell: Told, nonfinite: Nonfinite = "error") -> Planned:
    """Every layer asked; ArgumentError where no layer would change, or a pattern of `keep` means none."""
    subject = asked.subject
    quantized = {
        prefix: layer
        for prefix, layer in subject.layers.items()
        if not (isinstance(layer, LayerDescription) and layer.format.weight_type.plain)
    }
    kept = _kept(subject, quantized, keep)
    asking = {prefix: layer for prefix, layer in quantized.items() if prefix not in kept}
    if asked.to == fp8.NAME and not quantized:
        asking = dict(_exact(subject, keep))
    stored, refused = _answers(asked, asking, tell)
    if not stored and not refused:
        raise ArgumentError(
            "path", "a checkpoint with quantized layers to convert", "none: all is plain, or kept"
        )
    refused |= _contradicting(quantized)
    spoiled = nonfinite_layers(subject) if nonfinite == "error" else {}
    refused |= spoiled
    items = list(_items(subject, stored, refused))
    made = _section(subject, [*stored.values(), *kept.values()])
    refused = {**made.refused, **refused}
    by_target = {prefix: reason for prefix, reason in refused.items() if prefix not in spoiled}
    notes = [*_notes(subject, stored, asked.to), *_remedies(asked, asking, by_target)]
    return Planned(items, stored, made, refused, notes)


def _remedies(
    asked: AskedTarget, layers: Mapping[str, LayerDescription | QloadError], refused: Mapping[str, str]
) -> Iterator[str]:
    """One note for each cause of refusals: what the first of these layers can be written as instead."""
    groups = group_by_cause(refused, name=str, cause=lambda prefix: cause_of(refused[prefix], prefix))
    for group in groups:
        layer = layers.get(group.first)
        if isinstance(layer, LayerDescription) and layer.contradiction is None:
            rest = group.count - 1
            more = f" and {rest} layer{'s' * (rest > 1)} like it" if rest else ""
            integers = () if asked.to in FLOATS else asked.as_other_integers(layer).items()
            others = [name for name, made in integers if not _section(asked.subject, [made]).refused]
            if asked.to != FLOAT and EXPERTS not in layer.sizes:
                others.append(FLOAT)
            ways = [f"write {' or '.join(others)} instead"] if others else []
            ways += [ROUND] if asked.can_round else []
            yield f"{group.first}{more}: {', '.join([*ways, KEEP])}"


def _exact(subject: Subject, keep: Sequence[str]) -> Iterator[tuple[str, LayerDescription]]:
    """The matrices of a plain checkpoint that owners quantize: all but embeddings, heads and what is kept."""
    for prefix, layer in subject.layers.items():
        left_out = prefix.rpartition(".")[2] in (*EMBEDDINGS, HEAD)
        kept = any(fnmatchcase(prefix, pattern) for pattern in keep)
        if isinstance(layer, LayerDescription) and "K" in layer.sizes and not left_out and not kept:
            yield prefix, layer


def _answers(
    asked: AskedTarget, layers: Mapping[str, LayerDescription | QloadError], tell: Told
) -> tuple[dict[str, StoredLayer], dict[str, str]]:
    """What layers become, and why others cannot."""
    told = asked.answers(list(layers.values()), tell)
    stored = {prefix: made for prefix, made in zip(layers, told, strict=True) if not isinstance(made, str)}
    return stored, {prefix: why for prefix, why in zip(layers, told, strict=True) if isinstance(why, str)}


def _contradicting(layers: Mapping[str, LayerDescription | QloadError]) -> dict[str, str]:
    """Layers with values that contradict the config, each with its reason; they are refused."""
    return {
        prefix: " ".join(str(layer.contradiction).split())
        for prefix, layer in layers.items()
        if isinstance(layer, LayerDescription) and layer.contradiction is not None
    }


def nonfinite_layers(subject: Subject) -> dict[str, str]:
    """Layers with scales that are NaN or infinite, each with its reason; they are refused."""
    assert subject.weights is not None
    found = {}
    for layer in subject.described():
        try:
            check_scales(subject.weights, [layer], {}, whole=False)
        except NonfiniteScaleError as error:
            found[layer.prefix] = str(error)
    return found


def _kept(subject: Subject, quantized: Mapping[str, object], keep: Sequence[str]) -> dict[str, StoredLayer]:
    """The quantized layers that patterns, as a shell has them, leave as they are."""
    for pattern in keep:
        if not any(fnmatchcase(prefix, pattern) for prefix in subject.layers):
            raise ArgumentError(
                "keep", "patterns of names of layers, such as *.q_proj", f"{pattern!r:.80}, of none"
            )
    return {
        prefix: _as_it_is(subject, layer)
        for prefix, layer in quantized.items()
        if isinstance(layer, LayerDescription) and any(fnmatchcase(prefix, pattern) for pattern in keep)
    }


def _as_it_is(subject: Subject, layer: LayerDescription) -> StoredLayer:
    config = layer.format.config
    permuted = isinstance(config, GPTQConfig) and not config.positional and config.groups(layer.K) > 1
    symmetric = bool(layer.format.claims and layer.format.claims.sym)
    return StoredLayer(layer.prefix, layer.format.weight_type, config, layer.K, symmetric, permuted)


def _items(subject: Subject, stored: Mapping[str, StoredLayer], refused: dict[str, str]) -> Iterator[Item]:
    """All that is written, in the order of the source; what stands in the way of a layer is entered."""
    raw = as_stored(subject)
    stacks = new_stacks(subject, stored)
    whole = {prefix: stack for stack in stacks for prefix in stack.layers}
    alone = {prefix: layer for prefix, layer in stored.items() if prefix not in whole}
    holders = _holders(subject, alone, raw, refused)
    holders |= {source: next(iter(stack.item.tensors)) for stack in stacks for source in stack.sources}
    items = {next(iter(stack.item.tensors)): stack.item for stack in stacks}
    items |= {prefix: layer.item for prefix, layer in alone.items() if layer.item is not None}
    new = {name: holder for holder, item in items.items() for name in item.tensors}
    begun: set[str] = set()
    left_out = {*subject.loader.config_tensors, *_meaningless(subject)}
    for name in list(raw.keys()):
        holder = holders.get(name)
        if holder is None and name not in left_out:
            if name in new:
                refused[new[name]] = f"there is another tensor {name} already"
            yield copied(raw, name)
        elif holder is not None and holder not in begun:
            begun.add(holder)
            yield items[holder]  # all that change have one


def _meaningless(subject: Subject) -> Iterator[str]:
    """Tensors beside plain weights that its own config says nothing by, and another might."""
    for layer in subject.described():
        for spec in layer.specs:
            if spec.role is Role.UNUSED:
                yield layer.names.full(spec.name)


def _holders(
    subject: Subject, stored: Mapping[str, StoredLayer], raw: WeightStorage, refused: dict[str, str]
) -> dict[str, str]:
    """The tensors that layers which change are stored in, and which layer that is."""
    found, there, shared = {}, raw.keys(), shared_sources(subject, stored)
    for prefix in stored:
        layer = subject.layers[prefix]
        assert isinstance(layer, LayerDescription)
        for spec in layer.specs:
            name = layer.names.full(spec.name)
            if name not in there and name not in shared:
                refused[prefix] = f"{name} {STACKED}"
            found[shared.get(name, name)] = prefix
    return found


def _section(subject: Subject, layers: Sequence[StoredLayer]) -> WrittenConfig:
    """The config of all that is quantized at the end, and of the matrices that are not."""
    changed = {layer.prefix for layer in layers}
    quantized = [layer for layer in layers if not layer.weight_type.plain]
    plain = [layer.prefix for layer in layers if layer.weight_type.plain]
    plain += [
        prefix
        for prefix, layer in subject.layers.items()
        if isinstance(layer, LayerDescription) and layer.format.weight_type.plain and "K" in layer.sizes
        if prefix not in changed
    ]
    made = section(quantized, sorted(name for name in plain if name.rpartition(".")[2] not in EMBEDDINGS))
    cache = _cache_scheme(subject)
    if cache is not None and CACHE in (made.values or {}):
        return replace(made, values={**(made.values or {}), CACHE: cache})
    return made


def _cache_scheme(subject: Subject) -> object | None:
    """How keys and values are quantized in the cache, which compressed-tensors alone says beside weights."""
    found = next(iter(subject.configs), None)
    return None if found is None else found.values.get(CACHE)


def _notes(subject: Subject, stored: Mapping[str, StoredLayer], to: str) -> Iterator[str]:
    schemes = {
        layer.format.activations
        for prefix in stored
        if isinstance(layer := subject.layers[prefix], LayerDescription) and layer.format.activations
    }
    for scheme in sorted(schemes, key=str):
        if to != fp8.NAME:
            yield f"inputs were quantized ({scheme}), which {to} does not say: they are taken as they come"
        elif scheme.dynamic and scheme.owner != OWNER:
            yield f"scales of inputs ({scheme}) were found as {scheme.owner} does, and are as {OWNER} does"
    if _cache_scheme(subject) is not None and to not in (OWNER, fp8.NAME):
        yield f"the config has a {CACHE}, which {to} does not say: engines keep keys and values as they come"
    doubtful = [layer for layer in subject.described() if layer.format.config.doubt]
    if doubtful:
        yield f"{doubtful[0].prefix}: {doubtful[0].format.config.doubt}; {len(doubtful)} layers in all"
    unused = sorted(_meaningless(subject))
    if unused:
        yield f"left out, as nothing reads them: {len(unused)} tensors, such as {unused[0]}"
    if subject.loader.config_tensors:
        yield f"left out, as the config says it: {', '.join(subject.loader.config_tensors)}"
