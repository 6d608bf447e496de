"""Dequantization of experts that are stored in one tensor into one plain tensor of all experts.

The slot of each expert in the new tensor is the slot that `find_stacks` reports for the new file's header. An
expert is refused if `find_stacks` does not report its new tensor with all matrices.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.conversion.output_tensors import Chunk, OutputItem, stored_tensors
from qload.conversion.targets import OutputLayer, OutputLayers
from qload.detect.files import SECTIONS
from qload.experts import ExpertStacks
from qload.experts.stack_finder import StoredStack, find_stacks
from qload.experts.stack_slices import Slot
from qload.loader import LayerDescription
from qload.storage import MemoryStorage, TensorInfo
from qload.verify.checkpoint import Checkpoint

WEIGHT_SUFFIX = ".weight"


@dataclass(frozen=True)
class PlainStack:
    """Item with one plain tensor of all experts.

    It replaces the tensors `sources`, and contains the layers with the prefixes `layers`.
    """

    sources: Collection[str]
    layers: Collection[str]
    item: OutputItem


def plain_stacks(source: Checkpoint, layers: OutputLayers) -> list[PlainStack]:
    """Return the plain tensors of all experts; every layer of each becomes plain in `layers`."""
    storage = source.weights.storage
    if not isinstance(storage, ExpertStacks) or source.architecture is None:
        return []
    stored = storage.storage.keys()
    stacks_by_name: dict[str, list[StoredStack]] = {}
    for stack in storage.stacks:
        if stack.field != "bias":
            stacks_by_name.setdefault(_weight_name(stack.prefix, stored), []).append(stack)
    infos = {}
    for name, stacks in stacks_by_name.items():
        info = _stack_info(source, stacks, layers)
        taken = name in stored and name not in {stack.source for stack in stacks}
        if info is not None and not taken and not _have_own_weights(source, _prefixes(stacks)):
            infos[name] = info
    config = {key: value for key, value in source.model_config.items() if key not in SECTIONS}
    headers = {name: torch.zeros((), dtype=info.dtype).expand(info.shape) for name, info in infos.items()}
    recognized = {stack.source: stack for stack in find_stacks(MemoryStorage(headers), config)}
    return [
        _plain_stack(name, info, stacks_by_name[name], recognized[name], layers)
        for name, info in infos.items()
        if name in recognized and recognized[name].layers == stacks_by_name[name][0].layers
    ]


def _weight_name(prefix: str, stored: Collection[str]) -> str:
    """Return the name of the new tensor; it ends in `.weight` if the stored one has a suffix."""
    dotted = any(f"{prefix}.{field}" in stored for field in ("weight", "weight_packed"))
    return f"{prefix}{WEIGHT_SUFFIX}" if dotted else prefix


def shared_sources(source: Checkpoint, layers: OutputLayers) -> dict[str, str]:
    """Map tensors of single experts to the stored tensor of all experts that contains them.

    Only for experts with weights of their own, as in the FP8 checkpoints of transformers, where the scales
    alone share a tensor; and only if every expert is converted.
    """
    storage = source.weights.storage
    if not isinstance(storage, ExpertStacks):
        return {}
    sources: dict[str, str] = {}
    for stack in storage.stacks:
        prefixes = _prefixes([stack])
        if all(prefix in layers for prefix in prefixes) and _have_own_weights(source, prefixes):
            sources |= {name: stack.source for name, _, _ in stack.names()}
    return sources


def _have_own_weights(source: Checkpoint, prefixes: Collection[str]) -> bool:
    """Return whether the weight of each of these layers is a stored tensor of its own."""
    stored = stored_tensors(source).keys()
    layers = (source.layers[prefix] for prefix in prefixes)
    return all(
        isinstance(layer, LayerDescription) and layer.names.full(layer.specs[0].name) in stored
        for layer in layers
    )


def _prefixes(stacks: Collection[StoredStack]) -> set[str]:
    return {name.rpartition(".")[0] for stack in stacks for name, _, _ in stack.names()}


def _stack_info(
    source: Checkpoint, stacks: Collection[StoredStack], layers: OutputLayers
) -> TensorInfo | None:
    """Return dtype and shape of the plain tensor, or None if some layer does not become plain."""
    assert source.architecture is not None
    prefixes = _prefixes(stacks)
    if not all(prefix in layers and layers[prefix].weight_type.plain for prefix in prefixes):
        return None
    count = max(stack.count for stack in stacks)
    infos = [_item_and_info(layers[prefix])[1] for prefix in prefixes]
    outputs, inputs = sum(info.shape[0] for info in infos) // count, infos[0].shape[1]
    shape = (inputs, outputs) if source.architecture.table.stacked.inputs_first else (outputs, inputs)
    return TensorInfo(infos[0].dtype, (count, *shape))


def _item_and_info(layer: OutputLayer) -> tuple[OutputItem, TensorInfo]:
    assert layer.item is not None
    (info,) = layer.item.tensors.values()
    return layer.item, info


def _plain_stack(
    name: str,
    info: TensorInfo,
    stacks: Collection[StoredStack],
    target: StoredStack,
    layers: OutputLayers,
) -> PlainStack:
    expert_bytes = info.nbytes // info.shape[0]

    def read() -> Iterator[Chunk]:
        for expert in range(info.shape[0]):
            block = torch.empty(info.shape[1:], dtype=info.dtype)
            for part, slot in target.parts.items():
                prefix = f"{target.lead}.{expert}.{part.removesuffix(WEIGHT_SUFFIX)}"
                _fill_slot(block, slot, layers[prefix])
            yield name, expert * expert_bytes, block

    prefixes = _prefixes(stacks)
    items = [_item_and_info(layers[prefix])[0] for prefix in prefixes]
    memory_bytes = expert_bytes + max(item.memory_bytes for item in items)
    item = OutputItem({name: info}, sum(item.source_bytes for item in items), read, memory_bytes)
    return PlainStack([stack.source for stack in stacks], prefixes, item)


def _fill_slot(block: Tensor, slot: Slot, layer: OutputLayer) -> None:
    """Write one matrix of an expert into its slot of the expert's block, chunk by chunk."""
    item, info = _item_and_info(layer)
    outputs = block.T if slot.inputs_first else block
    end = None if slot.step > 1 else slot.first + info.shape[0]
    rows = outputs[slot.first : end : slot.step]
    row_bytes = info.shape[1] * info.dtype.itemsize
    for _, offset, chunk in item.read():
        rows[offset // row_bytes : offset // row_bytes + len(chunk)] = chunk
