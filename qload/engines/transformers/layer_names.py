"""Map quantized layers of a checkpoint to modules of a model, with the renamings of transformers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from qload.engines.transformers.placeholder_layers import (
    STACKS,
    UNGATED_STACKS,
    expert_stacks,
    has_inputs_first,
)
from qload.errors import UnsupportedFormatError
from qload.experts.stack_layouts import StackOrder

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
        self._modules: Mapping[str, nn.Module] = dict(model.named_modules())

    def of(self, key: str) -> str | None:
        """Return the name of the tensor `key` in the model; None if it is not in the model."""
        name, _ = rename_source_key(key, self._renamings, self._converters, self._base, self._tensors)
        return str(name) if name in self._tensors else None

    def place(self, prefix: str) -> tuple[str, int, int]:
        """Return where the matrix of a layer is in the model: name, number of its part, number of parts.

        The name is "" if it is not in the model. UnsupportedFormatError for a matrix that transformers
        splits, permutes or joins with others along the inputs.
        """
        key = f"{prefix}.weight"
        name = self.of(key)
        _, source = rename_source_key(key, self._renamings, self._converters)
        if name is None or source is None:
            return name or "", 0, 1
        converter = self._sources[source]
        steps = [step for step in converter.operations if not isinstance(step, MergeModulelist)]
        is_join = all(isinstance(step, Concatenate) and step.dim == 0 for step in steps)
        if self._tensors[name].ndim == 2 and not is_join:
            done = ", ".join(type(step).__name__ for step in converter.operations)
            problem = f"it is quantized, and transformers makes {name} of it by {done}"
            raise UnsupportedFormatError(prefix, problem)
        return name, converter.source_patterns.index(source), len(converter.source_patterns)

    def stack_order(self, key: str) -> StackOrder | None:
        """Return the order of the stored stack `key` by the class of its experts; None if it is unknown."""
        name = self.of(key)
        module = self._modules.get((name or "").rpartition(".")[0])
        is_concatenated = getattr(module, "is_concatenated", None)
        if module is None or is_concatenated is None or expert_stacks(module) is None:
            return None
        _, source = rename_source_key(key, self._renamings, self._converters)
        steps = [] if source is None else self._sources[source].operations
        turns = [step for step in steps if isinstance(step, Transpose) and {step.dim0, step.dim1} == {1, 2}]
        interleaves = [step for step in steps if isinstance(step, Interleave) and step.dim == 1]
        if len(turns) + len(interleaves) < len(steps) or (turns and interleaves):
            return None
        interleaved = bool(interleaves) == bool(is_concatenated)
        return StackOrder(interleaved, None if turns else has_inputs_first(module))

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
    linears
        Name in the model -> prefixes in the checkpoint, whose outputs are joined.
    experts, embeddings
        Name in the model -> prefix in the checkpoint.
    matrices
        The same of parameters of other modules, such as routers.
    unplaced
        Prefixes of quantized layers without a module in the model.
    """

    linears: dict[str, tuple[str, ...]] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    embeddings: dict[str, str] = field(default_factory=dict)
    matrices: dict[str, str] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of all modules."""
        owners = (name.rpartition(".")[0] for name in self.matrices)
        return list(dict.fromkeys((*self.linears, *self.experts, *self.embeddings, *owners)))

    @property
    def layer_prefixes(self) -> set[str]:
        """Prefixes of all layers except experts."""
        joined = (prefix for prefixes in self.linears.values() for prefix in prefixes)
        return {*joined, *self.embeddings.values(), *self.matrices.values()}


def map_layers(
    model: Any,
    names: ModelNames,
    prefixes: Iterable[str],
    stacks: Mapping[str, Sequence[str]],
    is_quantized: Callable[[str], bool],
    will_be_quantized: Callable[[str], bool],
) -> LayerMap:
    """Map the layers of `prefixes`, if stored quantized or quantized by the load, to modules.

    `stacks`: prefix of the experts of a layer -> names of their stored stacks.

    UnsupportedFormatError for a stored one whose place is neither a matrix nor experts; other modules that
    the load would quantize, embeddings too, stay plain.
    """
    modules, layers, expert_prefixes = dict(model.named_modules()), LayerMap(), set[str]()
    parts: dict[str, dict[int, str]] = {}
    for prefix in prefixes:
        expert = EXPERT.fullmatch(prefix)
        if expert and expert[1] in expert_prefixes:
            continue
        is_stored = is_quantized(prefix)
        if not is_stored and not will_be_quantized(prefix):
            continue
        try:
            parameter, part, count = names.place(prefix)
        except UnsupportedFormatError:
            if is_stored:
                raise
            continue
        name, _, own = parameter.rpartition(".")
        module = modules.get(name)
        stored = stacks.get(expert[1], ()) if expert else ()
        experts = _find_experts(names, modules, prefix, expert[1], stored) if expert else None
        if is_linear(module) and own == "weight":
            parts.setdefault(name, {})[part] = prefix
            if len(parts[name]) == count:
                layers.linears[name] = tuple(parts[name][number] for number in range(count))
        elif experts is not None and expert is not None:
            expert_prefixes.add(expert[1])
            layers.experts[experts] = expert[1]
        elif not is_stored:
            continue
        elif isinstance(module, nn.Embedding) and own == "weight" and count == 1:
            layers.embeddings[name] = prefix
        elif module is not None and count == 1 and _is_matrix(module, own):
            layers.matrices[parameter] = prefix
        elif parameter:
            target = type(module).__name__ if own == "weight" and module else "several layers in one tensor"
            problem = f"it is quantized, and its place {parameter} in the model is {target}"
            raise UnsupportedFormatError(prefix, problem)
        else:
            layers.unplaced.append(prefix)
    for name in parts.keys() - layers.linears.keys():
        problem = f"it is quantized, and other layers that transformers joins with it in {name} are plain"
        raise UnsupportedFormatError(next(iter(parts[name].values())), problem)
    return layers


def _is_matrix(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.ndim == 2


def _find_experts(
    names: ModelNames, modules: Mapping[str, nn.Module], prefix: str, experts: str, stored: Sequence[str]
) -> str | None:
    """Return the name of the module of the experts under `experts`, with the matrix `prefix`; or None.

    `stored`: names of the stored stacks of these experts.
    """
    stacks = dict.fromkeys((*STACKS, *UNGATED_STACKS))
    for key in (f"{prefix}.weight", *stored, *(f"{experts}.{stack}" for stack in stacks)):
        name = (names.of(key) or "").rpartition(".")[0]
        if name in modules and expert_stacks(modules[name]):
            return name
    return None


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module computes a linear layer, as torch's class or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear | Conv1D) and type(module).forward in (
        nn.Linear.forward,
        Conv1D.forward,
    )


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
