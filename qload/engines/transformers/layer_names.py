"""Which quantized layer of a checkpoint goes where in a model: names, as transformers renames them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from qload.engines.transformers.placeholder_layers import STACKS, are_experts
from qload.errors import UnsupportedFormatError

EXPERT = re.compile(r"(.+)\.[0-9]+\.[^.]+")  # `model.layers.0.mlp.experts.7.w1`
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


class ModelNames:
    """From names in a checkpoint to names in a model.

    Parameters
    ----------
    model
        As transformers made it, before any of its layers is replaced.
    """

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._sources = {source: each for each in self._converters for source in each.source_patterns}
        self._base: str = model.base_model_prefix
        self._held: Mapping[str, Any] = model.state_dict()

    def of(self, key: str) -> str | None:
        """What the tensor `key` is called in the model; None: it is not in it."""
        found, _ = rename_source_key(key, self._renamings, self._converters, self._base, self._held)
        return str(found) if found in self._held else None

    def is_float(self, key: str) -> bool:
        """Return whether the model has a floating point tensor in the place of `key`."""
        found = self.of(key)
        return found is not None and bool(self._held[found].dtype.is_floating_point)

    def unexpected(self, key: str) -> Iterator[str]:
        """What transformers calls the tensor `key` when it finds no place for it."""
        found, source = rename_source_key(key, self._renamings, self._converters)
        targets: list[str] = self._sources[source].target_patterns if source else []
        yield found
        yield from (found.replace(targets[0], target) for target in targets)


@dataclass(frozen=True)
class Places:
    """The layers that qload loads, by their names in the model.

    Attributes
    ----------
    linears, experts
        Name in the model -> prefix in the checkpoint.
    nowhere
        Prefixes of quantized layers that the model has no place for.
    """

    linears: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    nowhere: list[str] = field(default_factory=list)


def places_of(
    model: Any,
    names: ModelNames,
    prefixes: Iterable[str],
    stored: Callable[[str], bool],
    made: Callable[[str], bool],
) -> Places:
    """Where each of the layers `prefixes` goes that is `stored` quantized, or `made` so while it is loaded.

    UnsupportedFormatError for one that is stored so, and whose place is neither a linear layer nor a module
    of experts; what else would be made so, such as an embedding, stays plain.
    """
    modules, found, leads = dict(model.named_modules()), Places(), set[str]()
    for prefix in prefixes:
        expert = EXPERT.fullmatch(prefix)
        if expert and expert[1] in leads:
            continue
        is_stored = stored(prefix)
        if not is_stored and not made(prefix):
            continue
        name = (names.of(f"{prefix}.weight") or "").removesuffix(".weight")
        if is_linear(modules.get(name)):
            found.linears[name] = prefix
            continue
        home = home_of(names, modules, prefix, expert[1]) if expert else None
        if home is not None and expert is not None:
            leads.add(expert[1])
            found.experts[home] = expert[1]
        elif not is_stored:
            continue
        elif name:
            kind = type(modules[name]).__name__ if name in modules else "several layers in one tensor"
            raise UnsupportedFormatError(
                prefix, f"it is quantized, and its place {name} in the model is {kind}"
            )
        else:
            found.nowhere.append(prefix)
    return found


def home_of(names: ModelNames, modules: Mapping[str, nn.Module], prefix: str, lead: str) -> str | None:
    """The module of the experts under `lead`, of which `prefix` is one matrix; None: there is none."""
    for key in (f"{prefix}.weight", *(f"{lead}.{stack}" for stack in STACKS)):
        home = (names.of(key) or "").rpartition(".")[0]
        if home in modules and are_experts(modules[home]):
            return home
    return None


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module is a product with a matrix, in one of transformers' two ways to store that."""
    return isinstance(module, nn.Linear | Conv1D)


def patterns(names: Iterable[str]) -> set[str]:
    """Regular expressions that match these names: one for all that differ in the first number alone.

    Further numbers, such as those of experts, may be any.
    """
    firsts: dict[str, set[str]] = {}
    for name in names:
        first = NUMBER.search(name)
        if first is None:
            firsts.setdefault(re.escape(name), set())
            continue
        rest = "[0-9]+".join(map(re.escape, NUMBER.split(name[first.end() :])))
        firsts.setdefault(f"{re.escape(name[: first.start()])}{{}}{rest}", set()).add(first[0])
    return {
        f"^{form.replace('{}', '(?:' + '|'.join(sorted(found)) + ')') if found else form}$"
        for form, found in firsts.items()
    }
