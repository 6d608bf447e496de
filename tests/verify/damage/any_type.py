"""Damage to a model of any type that a table describes: each kind once.

A function changes the model in place, or raises DoesNotApplyError with the reason why it cannot. It returns
another sound model than the one before the change, or None. `ALONE`: shown by names, shapes, the config or
values. `AGAINST`: both states are sound, and only another checkpoint shows it.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qload import architecture_of
from qload.architecture import Architecture
from qload.architecture.table import RowMatch, size_names
from tests.verify.damage.model import DoesNotApplyError, Model

Plant = Callable[[Model], Model | None]
TOWERS = ("vision", "visual", "audio", "speech", "image", "tower")
PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"), ("gate", "up"), ("input_linear", "output_linear"))


class Typed:
    """A model, and the places of its tensors in the table of its type."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def architecture(self) -> Architecture:
        """The names and shapes by the config."""
        found = architecture_of(self.model.config)
        if found is None:
            raise DoesNotApplyError("no table knows the type of the model")
        return found

    @cached_property
    def places(self) -> dict[str, RowMatch]:
        """The row of each tensor, also of one with codes or scales of a matrix."""
        found = {}
        for name in sorted(self.model.tensors):
            prefix = name.rpartition(".")[0]
            place = next(filter(None, map(self.architecture.find, (name, prefix, f"{prefix}.weight"))), None)
            if place is not None:
                found[name] = place
        return found

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return self.model.tensors

    @property
    def last(self) -> int:
        """The last layer."""
        layers = [place.layer for place in self.places.values() if place.layer is not None]
        if not layers:
            raise DoesNotApplyError("no layers")
        return max(layers)

    def of_layer(self, layer: int) -> list[str]:
        """The tensors of a layer."""
        return [name for name, place in self.places.items() if place.layer == layer]

    def vectors(self, names: Any) -> list[str]:
        """Names of plain vectors among `names`."""
        return [name for name in names if self.tensors[name].ndim == 1 and is_plain(self.tensors[name])]

    def matrices(self, layer: int | None = None) -> dict[str, list[str]]:
        """The matrices of layers: prefix -> names of all tensors of each."""
        found: dict[str, list[str]] = {}
        for name, place in self.places.items():
            is_matrix = not place.row.tensor or self.tensors[name].ndim == 2
            if place.layer is not None and is_matrix and layer in (None, place.layer):
                prefix = name if self.architecture.expected(name) else name.rpartition(".")[0]
                found.setdefault(prefix, []).append(name)
        if not found:
            raise DoesNotApplyError("no matrices of layers")
        return found

    def end(self, prefix: str) -> str:
        """The plain weight of the embedding or the head."""
        found = [name for name, place in self.places.items() if place.row.name == prefix]
        if len(found) != 1 or not is_plain(self.tensors[found[0]]):
            raise DoesNotApplyError(f"no plain {prefix}")
        return found[0]

    def experts(self) -> dict[tuple[int, int], list[str]]:
        """The tensors of each expert, by layer and number."""
        found: dict[tuple[int, int], list[str]] = {}
        for name, place in self.places.items():
            if place.layer is not None and place.expert is not None:
                found.setdefault((place.layer, place.expert), []).append(name)
        if len(found) < 2:
            raise DoesNotApplyError("no experts of their own names")
        return found

    def stack(self) -> str:
        """The last plain stack of experts."""
        count = self.architecture.sizes.get("experts")
        found = [
            name for name in self.places if self.tensors[name].ndim == 3 and is_plain(self.tensors[name])
        ]
        found = [name for name in found if len(self.tensors[name]) == count]
        found = [name for name in found if min(self.tensors[name].shape[1:]) > 1]
        if not found:
            raise DoesNotApplyError("no experts in one tensor")
        return found[-1]

    def twins(self) -> Iterator[tuple[str, str]]:
        """Pairs of tensors of the same name and shape in two layers."""
        for name in self.of_layer(self.last):
            for layer in range(self.last):
                other = name.replace(f".{self.last}.", f".{layer}.", 1)
                if other in self.tensors and self.tensors[other].shape == self.tensors[name].shape:
                    yield name, other
                    break

    def size_key(self, *sizes: str) -> tuple[dict[str, Any], str]:
        """The section and the key of the first of these sizes that the config states and tensors have."""
        table, config = self.architecture.table, self.architecture.config
        shapes = {text for place in self.places.values() for text in place.row.shape.split()}
        used = {"layers", *chain.from_iterable(map(size_names, shapes))}
        for size in sizes:
            for key in table.sizes[size].keys if size in table.sizes and size in used else ():
                section: Any = config
                *outer, last = key.split(".")
                for part in outer:
                    section = section.get(part, {})
                if isinstance(section, dict) and type(section.get(last)) is int and section[last] > 1:
                    return section, last
        raise DoesNotApplyError(f"no {sizes[0]} in the config")

    def drop(self, names: Any) -> None:
        """Drop tensors."""
        names = list(names)
        if not names:
            raise DoesNotApplyError("nothing to drop")
        for name in names:
            del self.tensors[name]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has plain floats."""
    return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)


def plant(change: Callable[[Typed], Model | None]) -> Plant:
    """Return a change of the tensors by their places as one of the model."""

    @wraps(change)
    def planted(model: Model) -> Model | None:
        return change(Typed(model))

    return planted


# Lost


@plant
def layer_lost(typed: Typed) -> None:
    """Every tensor of the last layer."""
    typed.drop(typed.of_layer(typed.last))


@plant
def matrix_lost(typed: Typed) -> None:
    """A matrix of the last layer, of no expert."""
    found = [names for names in typed.matrices(typed.last).values() if typed.places[names[0]].expert is None]
    typed.drop(found[-1] if found else ())


@plant
def vector_lost(typed: Typed) -> None:
    """A norm or a bias of the last layer."""
    typed.drop(typed.vectors(typed.of_layer(typed.last))[-1:])


@plant
def embedding_lost(typed: Typed) -> None:
    typed.drop([typed.end(typed.architecture.table.embedding)])


@plant
def head_lost(typed: Typed) -> None:
    if typed.architecture.tied:
        raise DoesNotApplyError("the head is the embedding")
    typed.drop([typed.end(typed.architecture.table.head)])


@plant
def expert_lost(typed: Typed) -> None:
    typed.drop(max(typed.experts().items())[1])


@plant
def expert_matrix_lost(typed: Typed) -> None:
    """One matrix of an expert."""
    names = max(typed.experts().items())[1]
    typed.drop(name for name in names if name.rpartition(".")[0] == names[0].rpartition(".")[0])


@plant
def scales_lost(typed: Typed) -> None:
    """The scales of a matrix."""
    typed.drop([typed.model.scales(typed.model.target())])


# Renamed


@plant
def matrix_renamed(typed: Typed) -> None:
    """The tensors of the last matrix under a wrong name."""
    prefix, names = list(typed.matrices(typed.last).items())[-1]
    for name in names:
        typed.tensors[name.replace(prefix, f"{prefix}_x", 1)] = typed.tensors.pop(name)


@plant
def tower_renamed(typed: Typed) -> None:
    """A tensor of a tower of vision or audio under a wrong name."""
    found = [name for name in sorted(typed.tensors) if any(part in name for part in TOWERS)]
    found = [name for name in found if typed.tensors[name].ndim > 1]
    if not found:
        raise DoesNotApplyError("no tower")
    lead, _, last = found[-1].rpartition(".")
    typed.tensors[f"{lead}_x.{last}"] = typed.tensors.pop(found[-1])


# Wrong shapes


@plant
def vocabulary_short(typed: Typed) -> None:
    """An embedding of 8 tokens fewer; a tied head is the same."""
    name = typed.end(typed.architecture.table.embedding)
    typed.tensors[name] = typed.tensors[name][:-8].clone()


@plant
def matrix_transposed(typed: Typed) -> None:
    """A plain matrix of the last layer, of no expert, that is no square."""
    _transpose(typed, lambda place: place.expert is None)


@plant
def expert_transposed(typed: Typed) -> None:
    """A matrix of an expert, not square, transposed."""
    typed.experts()
    _transpose(typed, lambda place: place.expert is not None)


def _transpose(typed: Typed, applies: Callable[[RowMatch], bool]) -> None:
    for name in reversed([name for names in typed.matrices().values() for name in names]):
        tensor = typed.tensors[name]
        if tensor.ndim == 2 and is_plain(tensor) and len({*tensor.shape}) > 1 and applies(typed.places[name]):
            typed.tensors[name] = tensor.T.contiguous()
            return
    raise DoesNotApplyError("no plain matrix that is no square")


@plant
def router_short(typed: Typed) -> None:
    """A router of one expert fewer."""
    for name, place in typed.places.items():
        if place.row.shape.startswith("experts ") and place.expert is None and typed.tensors[name].ndim == 2:
            typed.tensors[name] = typed.tensors[name][:-1].clone()
            return
    raise DoesNotApplyError("no router")


@plant
def stack_short(typed: Typed) -> None:
    """A stack of one expert fewer."""
    name = typed.stack()
    typed.tensors[name] = typed.tensors[name][:-1].clone()


@plant
def matrix_short(typed: Typed) -> None:
    """Half of the outputs of the last plain matrix."""
    found = [name for names in typed.matrices(typed.last).values() for name in names]
    found = [name for name in found if typed.tensors[name].ndim == 2 and is_plain(typed.tensors[name])]
    if not found:
        raise DoesNotApplyError("no plain matrix")
    typed.tensors[found[-1]] = typed.tensors[found[-1]].chunk(2)[0].clone()


# Another config


@plant
def hidden_edited(typed: Typed) -> None:
    section, key = typed.size_key("hidden")
    section[key] *= 2


@plant
def inner_edited(typed: Typed) -> None:
    section, key = typed.size_key("ffn", "moe")
    section[key] *= 2


@plant
def vocabulary_edited(typed: Typed) -> None:
    section, key = typed.size_key("vocab")
    section[key] *= 2


@plant
def layers_added(typed: Typed) -> None:
    """One layer more in the config."""
    section, key = typed.size_key("layers")
    section[key] += 1
    for name, value in section.items():
        if isinstance(value, list) and len(value) == section[key] - 1:
            section[name] = [*value, value[-1]]


@plant
def layers_left_out(typed: Typed) -> None:
    """One layer fewer in the config."""
    section, key = typed.size_key("layers")
    section[key] -= 1
    for name, value in section.items():
        if isinstance(value, list) and len(value) == section[key] + 1:
            section[name] = value[:-1]


@plant
def experts_edited(typed: Typed) -> None:
    """Twice as many experts in the config."""
    section, key = typed.size_key("experts")
    section[key] *= 2


# Values


@plant
def vector_nan(typed: Typed) -> None:
    """NaN as the first value of a norm or a bias."""
    _last_vector(typed)[0] = float("nan")


@plant
def vector_zero(typed: Typed) -> None:
    """The values of the norms of the last layer."""
    found = [
        name for name in typed.vectors(typed.of_layer(typed.last)) if "norm" in name.lower() or ".ln_" in name
    ]
    found = [name for name in found if name.endswith("weight")]
    if not found:
        raise DoesNotApplyError("no norm")
    for name in found:
        typed.tensors[name].zero_()


def _last_vector(typed: Typed) -> Tensor:
    found = typed.vectors(typed.of_layer(typed.last))
    if not found:
        raise DoesNotApplyError("no vector")
    return typed.tensors[found[-1]]


@plant
def scales_zero(typed: Typed) -> None:
    typed.tensors[typed.model.scales(typed.model.target())].zero_()


@plant
def layer_copied(typed: Typed) -> None:
    """The tensors of another layer in the place of those of the last one."""
    pairs = list(typed.twins())
    if not pairs:
        raise DoesNotApplyError("no second layer of this kind")
    for name, other in pairs:
        typed.tensors[name] = typed.tensors[other].clone()


@plant
def matrix_copied(typed: Typed) -> None:
    """The tensors of the largest matrix of the last layer, copied from another layer."""
    pairs = dict(typed.twins())
    matrices = typed.matrices(typed.last).values()
    for names in sorted(matrices, key=lambda names: -sum(typed.tensors[name].nbytes for name in names)):
        if set(names) <= pairs.keys():
            for name in names:
                typed.tensors[name] = typed.tensors[pairs[name]].clone()
            return
    raise DoesNotApplyError("no second layer of this kind")


@plant
def expert_copied(typed: Typed) -> None:
    """The tensors of another expert in the place of those of the last one."""
    for name, other in _expert_pairs(typed):
        typed.tensors[name] = typed.tensors[other].clone()


def _expert_pairs(typed: Typed) -> list[tuple[str, str]]:
    experts = typed.experts()
    layer, last = max(experts)
    pairs = [(name, name.replace(f".{last}.", f".{last - 1}.")) for name in experts[layer, last]]
    layers = f".{layer}."
    if layer == last:  # both numbers are in the name
        pairs = [
            (name, name[::-1].replace(f".{last}."[::-1], f".{last - 1}."[::-1], 1)[::-1]) for name, _ in pairs
        ]
    if not all(other in typed.tensors and layers in other for _, other in pairs):
        raise DoesNotApplyError("no second expert")
    return pairs


@plant
def expert_scales_copied(typed: Typed) -> None:
    """The scales of another expert."""
    pairs = [(name, other) for name, other in _expert_pairs(typed) if is_scale(name)]
    if not pairs:
        raise DoesNotApplyError("no scales of experts")
    for name, other in pairs:
        typed.tensors[name] = typed.tensors[other].clone()


def is_scale(name: str) -> bool:
    """Whether a tensor has scales of a matrix."""
    return name.rpartition(".")[2] in ("scales", "weight_scale", "weight_scale_inv")


# Both states are sound


def exchange(typed: Typed, pairs: list[tuple[str, str]], reason: str) -> None:
    """Exchange tensors."""
    tensors = typed.tensors
    pairs = [(one, other) for one, other in pairs if tensors[one].shape == tensors[other].shape]
    if not pairs:
        raise DoesNotApplyError(reason)
    for one, other in pairs:
        tensors[one], tensors[other] = tensors[other], tensors[one]


@plant
def gate_and_up_exchanged(typed: Typed) -> None:
    """The gate and the up projection of a layer, or two other matrices of one shape."""
    matrices = typed.matrices(typed.last)
    for prefix, names in matrices.items():
        lead, _, last = prefix.rpartition(".")
        partners = [f"{lead}.{up}" for gate, up in PAIRS if gate == last]
        partners += [other for other in matrices if other > prefix and last not in dict(PAIRS)]
        for partner in partners:
            pairs = [(name, name.replace(prefix, partner, 1)) for name in names]
            if all(is_exchangeable(typed, *pair) for pair in pairs):
                exchange(typed, pairs, "")
                return
    raise DoesNotApplyError("no two matrices of one shape")


def is_exchangeable(typed: Typed, name: str, other: str) -> bool:
    """Whether two tensors have one shape and dtype."""
    one, two = typed.tensors[name], typed.tensors.get(other)
    return two is not None and (one.shape, one.dtype) == (two.shape, two.dtype)


@plant
def layers_exchanged(typed: Typed) -> None:
    """The tensors of two layers."""
    exchange(typed, list(typed.twins()), "no second layer of this kind")


@plant
def experts_exchanged(typed: Typed) -> None:
    """The tensors of two experts."""
    exchange(typed, _expert_pairs(typed), "no second expert")


@plant
def expert_scales_exchanged(typed: Typed) -> None:
    """The scales of two experts."""
    pairs = [(one, other) for one, other in _expert_pairs(typed) if is_scale(one)]
    exchange(typed, pairs, "no scales of experts")


@plant
def stacked_expert_transposed(typed: Typed) -> None:
    """The values of one expert of a stack in the other order, in the old shape."""
    tensor = typed.tensors[typed.stack()]
    tensor[-1] = tensor[-1].T.reshape(tensor[-1].shape).clone()


@plant
def predictor_lost(typed: Typed) -> Model | None:
    """The MTP layer of the config; transformers stores none."""
    layers = typed.architecture.layers
    if not typed.architecture.sizes.get("predict") or layers is None:
        raise DoesNotApplyError("no MTP layer in the config")
    names = [name for name in typed.of_layer(layers - 1) if f".{layers - 1}." in name]
    if not names:
        raise DoesNotApplyError("no last layer")
    moved = {name.replace(f".{layers - 1}.", f".{layers}.", 1): typed.tensors[name] for name in names}
    lead = next(iter(moved)).partition(f".{layers}.")[0]
    hidden = typed.architecture.sizes["hidden"] or 1
    draw = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(0))
    moved[f"{lead}.{layers}.eh_proj.weight"] = draw
    return Model({**typed.tensors, **moved}, typed.model.config)


@plant
def rows_exchanged(typed: Typed) -> None:
    """Two rows of the embedding."""
    tensor = typed.tensors[typed.end(typed.architecture.table.embedding)]
    tensor[[3, 5]] = tensor[[5, 3]]


ALONE: tuple[Plant, ...] = (
    layer_lost, matrix_lost, vector_lost, embedding_lost, head_lost, expert_lost, expert_matrix_lost,
    scales_lost, matrix_renamed, tower_renamed, vocabulary_short, matrix_transposed, expert_transposed,
    router_short, stack_short, matrix_short, hidden_edited, inner_edited, vocabulary_edited, layers_added,
    layers_left_out, experts_edited, vector_nan, vector_zero, scales_zero, matrix_copied, expert_copied,
)  # fmt: skip
AGAINST: tuple[Plant, ...] = (
    layer_copied, layers_exchanged, gate_and_up_exchanged, rows_exchanged, experts_exchanged,
    expert_scales_copied, expert_scales_exchanged, stacked_expert_transposed, predictor_lost,
)  # fmt: skip
