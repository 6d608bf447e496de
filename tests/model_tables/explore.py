"""Samples of a model type: a base, single changes of its fields, and random changes of many fields."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from transformers import PreTrainedModel

from tests.model_tables.build import Sample, build_sample
from tests.model_tables.draw import (
    EXPERTS,
    FEW_LAYERS,
    LISTS,
    SMALL,
    VOCABULARY_MAP,
    Changes,
    Field,
    few,
    fields_of,
)

DRAWS, TRIES = 30, 5
FOREIGN = "foreign_text"
MAX_TENSORS = 4000  # of a sample


@dataclass
class Explored:
    """Samples of a model type, the fields that change its tensors, and a source of further samples."""

    samples: list[Sample]
    relevant: list[Field]
    draw: Callable[[], Sample]


def explore(model_class: type[PreTrainedModel], seed: str) -> Explored:
    """Build samples; raise the error of the base if no base can be built."""
    chance = random.Random(seed)
    fields = fields_of(model_class.config_class)
    base = find_base(model_class, fields)
    first = build_sample(model_class, base)
    samples, relevant, stuck = [first], [], []
    for one in fields:
        if isinstance(one.default, tuple) and all(isinstance(text, str) for text in one.default):
            sample = attempt(model_class, {**base, one.name: [FOREIGN]})
            if sample and any(FOREIGN in name for name in sample.shapes):
                raise ValueError(f"names of its tensors are texts of the config: {one.name}")
        if one.leaf in LISTS:
            _keep_kinds(model_class, one, base)
        found = list(_singles(model_class, one, base, first))
        one.values = [value for value, _ in found]
        samples += [sample for _, sample in found]
        if any(sample.shapes != first.shapes for _, sample in found):
            relevant.append(one)
        elif not found and type(one.default) is int:
            stuck.append(one)
    samples += list(_pairs(model_class, stuck, relevant, base))
    relevant += [one for one in stuck if one.values]
    idle = [one for one in fields if one.values and one not in relevant]

    def draw() -> Sample:
        return _draw(model_class, relevant, idle, base, chance)

    samples += [draw() for _ in range(DRAWS)]
    return Explored(samples, relevant, draw)


def attempt(model_class: type[PreTrainedModel], changes: Changes) -> Sample | None:
    """Build a sample; None if the class refuses the config."""
    try:
        sample = build_sample(model_class, changes)
    except MemoryError:
        raise
    except Exception:
        return None
    return sample if len(sample.shapes) <= MAX_TENSORS else None


def find_base(model_class: type[PreTrainedModel], fields: list[Field]) -> Changes:
    """Find a config that builds: small, or with lists of layers, or the default."""
    small: dict[str, Any] = {one.name: count for one in fields if (count := few(one)) is not None}
    small |= {one.name: {"<image>": 0} for one in fields if one.leaf == VOCABULARY_MAP}
    layers = {name: count for name, count in small.items() if "expert" not in name}
    heads = {one.name: 64 for one in fields if one.leaf == "head_dim" and one.default is None}
    experts = {one.name: SMALL for one in fields if EXPERTS.fullmatch(one.leaf) and one.default is None}
    keys = {one.name: 8 for one in fields if one.leaf == "num_key_value_heads" and one.default is None}
    both = {**small, **heads, **experts}
    given = ({**small, **heads}, {**small, **experts}, both, {**small, **keys}, {**both, **keys})
    for changes in chain((small, layers, *given), _listed(fields, small), ({},)):
        if attempt(model_class, changes) is not None:
            return changes
    build_sample(model_class, small)
    raise ValueError(f"more than {MAX_TENSORS} tensors")


def _listed(fields: list[Field], small: Changes) -> Iterator[Changes]:
    """Yield lists of kinds of layers, for a class without a default list."""
    lists = [one for one in fields if one.leaf in LISTS and one.kinds]
    for first in chain(combinations(lists[0].kinds, 2), [lists[0].kinds]) if lists else ():
        kinds = {one.name: first if one is lists[0] else one.kinds for one in lists}
        yield {
            **small,
            **{name: [own[i % len(own)] for i in range(FEW_LAYERS)] for name, own in kinds.items()},
        }


def _keep_kinds(model_class: type[PreTrainedModel], one: Field, base: Changes) -> None:
    """Keep the kinds of layers that build a model, alone or in turns with another."""
    layers = _layers(base, one.name.removesuffix(one.leaf), None)
    one.kinds = tuple(
        kind
        for kind in one.kinds
        if any(
            attempt(model_class, {**base, one.name: [(kind, other)[i % 2] for i in range(layers)]})
            for other in (kind, *one.kinds[:3])
        )
    )


def _layers(changes: Changes, lead: str, sample: Sample | None) -> int:
    """Number of layers of a section."""
    for flat in (changes, sample.flat if sample else {}):
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"):
            if isinstance(flat.get(f"{lead}{name}"), int):
                return int(flat[f"{lead}{name}"])
    return 4


def _singles(
    model_class: type[PreTrainedModel], one: Field, base: Changes, first: Sample
) -> Iterator[tuple[Any, Sample]]:
    """Yield values of one field with their samples; one of an integer that changes no tensor."""
    chance = random.Random(one.name)
    values = one.values
    if one.per_layer:
        layers = _layers(base, one.name.removesuffix(one.leaf), None)
        values = [one.draw(chance, layers) for _ in range(3)]
    for value in values:
        if one.name in base and base[one.name] == value:
            continue
        changes = {**base, one.name: value}
        if not one.per_layer:  # lists of the base follow the number of layers
            for name, listed in base.items():
                if isinstance(listed, list):
                    count = _layers(changes, one.name.removesuffix(one.leaf), None)
                    changes[name] = [listed[i % len(listed)] for i in range(count)]
        sample = attempt(model_class, changes)
        if sample is not None:
            yield value, sample
            if type(value) is int and value and sample.shapes == first.shapes:
                return


def _pairs(
    model_class: type[PreTrainedModel], stuck: list[Field], relevant: list[Field], base: Changes
) -> Iterator[Sample]:
    """Yield changes of two sizes by one factor, for sizes that cannot change alone."""
    sizes = [one for one in (*relevant, *stuck) if type(one.default) is int and one.default > 1]
    for one in stuck:
        if one.default <= 1:
            continue
        for other in sizes:
            if other is one:
                continue
            for factor in (2, 3):
                changes = {
                    **base,
                    one.name: one.default * factor,
                    other.name: base.get(other.name, other.default) * factor,
                }
                sample = attempt(model_class, changes)
                if sample is not None:
                    one.values = [*one.values, changes[one.name]]
                    other.values = list(dict.fromkeys((*other.values, changes[other.name])))
                    yield sample
            if one.values:
                break


def _draw(
    model_class: type[PreTrainedModel],
    relevant: list[Field],
    idle: list[Field],
    base: Changes,
    chance: random.Random,
) -> Sample:
    drawn = [one for one in relevant if chance.random() < 0.6] + [
        one for one in idle if chance.random() < 0.25
    ]
    chance.shuffle(drawn)
    for _ in range(TRIES):
        changes = dict(base)
        for one in drawn:
            if not one.per_layer:
                changes[one.name] = one.draw(chance, 0)
        for one in drawn:
            if one.per_layer:
                lead = one.name.removesuffix(one.leaf)
                changes[one.name] = one.draw(chance, _layers(changes, lead, None))
        for one in (*relevant, *idle):  # lists of the base follow the number of layers
            if one.per_layer and one not in drawn and one.name in base:
                changes[one.name] = one.draw(chance, _layers(changes, one.name.removesuffix(one.leaf), None))
        sample = attempt(model_class, changes)
        if sample is not None:
            return sample
        drawn = drawn[: len(drawn) * 2 // 3]
    return build_sample(model_class, base)
