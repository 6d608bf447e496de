"""Map quantized layers of a checkpoint to modules of a model, with the renamings of transformers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from qload.engines.transformers.placeholder_layers import STACKS, has_stacked_experts
from qload.errors import UnsupportedFormatError

EXPERT = re.compile(r"(.+)\.[0-9]+\.[^.]+")  # such as `model.layers.0.mlp.experts.7.w1`
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


class ModelNames:
    """Mapping from tensor names in a checkpoint to names in a model.

    Parameters
    ----------
    model
        transformers' model, before any of its layers is replaced.
    """

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._sources = {source: entry for entry in self._converters for source in entry.source_patterns}
        self._base: str = model.base_model_prefix
        self._tensors: Mapping[str, Any] = model.state_dict()

    def of(self, key: str) -> str | None:
        """Return the name of the tensor `key` in the model; None if it is not in the model."""
        name, _ = rename_source_key(key, self._renamings, self._converters, self._base, self._tensors)
        return str(name) if name in self._tensors else None

    def is_float(self, key: str) -> bool:
        """Return whether the tensor `key` is a floating point tensor in the model."""
        name = self.of(key)
        return name is not None and bool(self._tensors[name].dtype.is_floating_point)

    def unexpected(self, key: str) -> Iterator[str]:
        """Yield the names under which transformers reports the tensor `key` as unexpected."""
        name, source = rename_source_key(key, self._renamings, self._converters)
        targets: list[str] = self._sources[source].target_patterns if source else []
        yield name
        yield from (name.replace(targets[0], target) for target in targets)


@dataclass(frozen=True)
class LayerMap:
    """Layers that qload loads, by their names in the model.

    Attributes
    ----------
    linears, experts
        Name in the model -> prefix in the checkpoint.
    unplaced
        Prefixes of quantized layers without a module in the model.
    """

    linears: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)


def map_layers(
    model: Any,
    names: ModelNames,
    prefixes: Iterable[str],
    is_quantized: Callable[[str], bool],
    will_be_quantized: Callable[[str], bool],
) -> LayerMap:
    """Map the layers of `prefixes`, if stored quantized or quantized by the load, to modules.

    UnsupportedFormatError for a stored one whose module is neither a linear layer nor a module of experts;
    other modules that the load would quantize, such as embeddings, stay plain.
    """
    modules, layers, expert_prefixes = dict(model.named_modules()), LayerMap(), set[str]()
    for prefix in prefixes:
        expert = EXPERT.fullmatch(prefix)
        if expert and expert[1] in expert_prefixes:
            continue
        is_stored = is_quantized(prefix)
        if not is_stored and not will_be_quantized(prefix):
            continue
        name = (names.of(f"{prefix}.weight") or "").removesuffix(".weight")
        if is_linear(modules.get(name)):
            layers.linears[name] = prefix
            continue
        experts = _find_experts(names, modules, prefix, expert[1]) if expert else None
        if experts is not None and expert is not None:
            expert_prefixes.add(expert[1])
            layers.experts[experts] = expert[1]
        elif is_stored and name:
            target = type(modules[name]).__name__ if name in modules else "several layers in one tensor"
            problem = f"it is quantized, and its place {name} in the model is {target}"
            raise UnsupportedFormatError(prefix, problem)
        elif is_stored:
            layers.unplaced.append(prefix)
    return layers


def _find_experts(
    names: ModelNames, modules: Mapping[str, nn.Module], prefix: str, experts: str
) -> str | None:
    """Return the name of the module of the experts under `experts`, with the matrix `prefix`; or None."""
    for key in (f"{prefix}.weight", *(f"{experts}.{stack}" for stack in STACKS)):
        name = (names.of(key) or "").rpartition(".")[0]
        if name in modules and has_stacked_experts(modules[name]):
            return name
    return None


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a linear layer, in one of transformers' two classes."""
    return isinstance(module, nn.Linear | Conv1D)


def name_patterns(names: Iterable[str]) -> set[str]:
    """Return regular expressions for these names: one for all names that differ in the first number alone.

    Any later number, such as that of an expert, is matched.
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
        f"^{form.replace('{}', '(?:' + '|'.join(sorted(numbers)) + ')') if numbers else form}$"
        for form, numbers in firsts.items()
    }
