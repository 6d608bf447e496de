"""Experts that are stored in one tensor of all, dequantized into one tensor of all.

Where an expert lies in the new stack is asked of what will read it, `find_stacks`, by the header that the new
file will have. A matrix whose stack would not be found there, or not whole, stays refused.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.conversion.output_tensors import Item, Piece, as_stored
from qload.conversion.targets import StoredLayer
from qload.detect.files import SECTIONS
from qload.experts import ExpertStacks
from qload.experts.stack_finder import StoredStack, find_stacks
from qload.experts.stack_slices import Slot
from qload.loader import LayerDescription
from qload.storage import TensorInfo
from qload.verify.checkpoint import Checkpoint

WEIGHT = ".weight"


@dataclass(frozen=True)
class NewStack:
    """A stack of plain weights, in the place of the tensors `sources`, with all that these hold of experts.

    `layers`: prefixes of the experts' layers that it is made of.
    """

    sources: Collection[str]
    layers: Collection[str]
    item: Item


@dataclass(frozen=True)
class PlannedHeaders:
    """Tensors that are not written yet, by their headers."""

    infos: Mapping[str, TensorInfo]

    def keys(self) -> Collection[str]:
        """Of the tensors."""
        return self.infos.keys()

    def info(self, name: str) -> TensorInfo:
        """As it will be."""
        return self.infos[name]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """There is nothing to read yet."""
        raise KeyError(name)

    def close(self) -> None:
        """Nothing to let go of."""


def new_stacks(subject: Checkpoint, stored: Mapping[str, StoredLayer]) -> list[NewStack]:
    """The stacks whose every layer becomes plain, each as one tensor; `stored`: what layers become."""
    assert subject.weights is not None
    storage = subject.weights.storage
    if not isinstance(storage, ExpertStacks) or subject.architecture is None:
        return []
    there = storage.storage.keys()
    sources: dict[str, list[StoredStack]] = {}
    for stack in storage.stacks:
        if stack.field != "bias":
            sources.setdefault(_name(stack.prefix, there), []).append(stack)
    made = {}
    for name, stacks in sources.items():
        info = _info(subject, stacks, stored)
        taken = name in there and name not in {stack.source for stack in stacks}
        if info is not None and not taken and not _has_own(subject, _prefixes(stacks)):
            made[name] = info
    config = {key: value for key, value in subject.model_config.items() if key not in SECTIONS}
    found = {stack.source: stack for stack in find_stacks(PlannedHeaders(made), config)}
    return [
        _new(name, made[name], sources[name], found[name], stored)
        for name in made
        if name in found and found[name].layers == sources[name][0].layers
    ]


def _name(prefix: str, there: Collection[str]) -> str:
    """Name of the new stack: that of the old stack's weight, with or without `.weight`."""
    dotted = any(f"{prefix}.{field}" in there for field in ("weight", "weight_packed"))
    return f"{prefix}{WEIGHT}" if dotted else prefix


def shared_sources(subject: Checkpoint, stored: Mapping[str, StoredLayer]) -> dict[str, str]:
    """Tensors of experts whose own weights are tensors apart -> the stack that has them, where all change.

    So transformers stores FP8: the weight of each expert, and the scales of all in one.
    """
    assert subject.weights is not None
    storage = subject.weights.storage
    if not isinstance(storage, ExpertStacks):
        return {}
    found: dict[str, str] = {}
    for stack in storage.stacks:
        prefixes = _prefixes([stack])
        if all(prefix in stored for prefix in prefixes) and _has_own(subject, prefixes):
            found |= {name: stack.source for name, _, _ in stack.names()}
    return found


def _has_own(subject: Checkpoint, prefixes: Collection[str]) -> bool:
    """Whether the first tensor of each of these layers, its weight, is in no stack."""
    there = as_stored(subject).keys()
    layers = (subject.layers[prefix] for prefix in prefixes)
    return all(
        isinstance(layer, LayerDescription) and layer.names.full(layer.specs[0].name) in there
        for layer in layers
    )


def _prefixes(stacks: Collection[StoredStack]) -> set[str]:
    return {name.rpartition(".")[0] for stack in stacks for name, _, _ in stack.names()}


def _info(
    subject: Checkpoint, stacks: Collection[StoredStack], stored: Mapping[str, StoredLayer]
) -> TensorInfo | None:
    """The header of a stack of all these layers in plain; None where not all of them become plain."""
    assert subject.architecture is not None
    prefixes = _prefixes(stacks)
    if not all(prefix in stored and stored[prefix].weight_type.plain for prefix in prefixes):
        return None
    count = max(stack.count for stack in stacks)
    shapes = [_tensor(stored[prefix]) for prefix in prefixes]
    outputs, inputs = sum(info.shape[0] for info in shapes) // count, shapes[0].shape[1]
    both = (inputs, outputs) if subject.architecture.table.stacked.inputs_first else (outputs, inputs)
    return TensorInfo(shapes[0].dtype, (count, *both))


def _tensor(layer: StoredLayer) -> TensorInfo:
    assert layer.item is not None
    (info,) = layer.item.tensors.values()
    return info


def _new(
    name: str,
    info: TensorInfo,
    stacks: Collection[StoredStack],
    found: StoredStack,
    stored: Mapping[str, StoredLayer],
) -> NewStack:
    nbytes = info.nbytes // info.shape[0]  # of an expert

    def read() -> Iterator[Piece]:
        for expert in range(info.shape[0]):
            block = torch.empty(info.shape[1:], dtype=info.dtype)
            for part, slot in found.parts.items():
                _fill(block, slot, stored[f"{found.lead}.{expert}.{part.removesuffix(WEIGHT)}"])
            yield name, expert * nbytes, block

    prefixes = _prefixes(stacks)
    items = [item for prefix in prefixes if (item := stored[prefix].item) is not None]
    held = nbytes + max(item.held for item in items)
    item = Item({name: info}, sum(item.source for item in items), read, held)
    return NewStack([stack.source for stack in stacks], prefixes, item)


def _fill(block: Tensor, slot: Slot, layer: StoredLayer) -> None:
    """Write an expert's matrix where the slot has it, run by run of its outputs."""
    assert layer.item is not None
    info = _tensor(layer)
    outputs = block.T if slot.inputs_first else block
    mine = (
        outputs[slot.first :: slot.step]
        if slot.step > 1
        else outputs[slot.first : slot.first + info.shape[0]]
    )
    width = info.shape[1] * info.dtype.itemsize
    for _, at, run in layer.item.read():
        mine[at // width : at // width + len(run)] = run
