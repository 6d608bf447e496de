"""Experts of a layer in one tensor: plain and MXFP4 experts are joined, and all others are split.

transformers has the plain experts of some model types in one tensor, and MXFP4 experts of gpt-oss in two:

    gate_up_proj                              (E, N, K) or (E, K, N)
    gate_up_proj_blocks, gate_up_proj_scales  (E, N, K/32, 16), (E, N, K/32)

`stack_finder` locates each expert in a new tensor as in a stored one. In other formats the experts of stored
stacks become tensors of their own.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.conversion.output_files import Chunk, OutputItem, copy_tensor, stored_tensors, tensor_names
from qload.conversion.targets import OutputLayers
from qload.detect.config_reader import SECTIONS
from qload.experts import ExpertStacks
from qload.experts.stack_finder import StoredStack, find_stacks
from qload.experts.stack_layouts import BYTES_OF_BLOCK, LAYERS, Slot
from qload.formats import MXFP4ExpertsWeight
from qload.loader import LayerDescription
from qload.spec import named
from qload.storage import MemoryStorage, TensorInfo
from qload.verify.checkpoint import VerifiedCheckpoint

WEIGHT_SUFFIX, BIAS = ".weight", "bias"
GPT_OSS, MXFP4_MATRICES = "gpt_oss", ("gate_up_proj", "down_proj")
EXPERT_LAYER = re.compile(r"(.+)\.([0-9]+)\.(?:gate_proj|up_proj|down_proj)")
NOT_STACKED = (
    "gpt-oss stacks gate_proj, up_proj and down_proj of all experts of a layer, of equal sizes; this layer "
    "is no such expert, or the model_type is not gpt_oss"
)


@dataclass(frozen=True)
class ExpertsItem:
    """Item with tensors of all experts of a layer.

    It replaces the tensors `sources`, and contains the layers with the prefixes `layers`.
    """

    sources: Collection[str]
    layers: Collection[str]
    item: OutputItem


def experts_items(source: VerifiedCheckpoint, layers: OutputLayers) -> list[ExpertsItem]:
    """Return the items of experts that lie in one tensor, in the source or in the new checkpoint."""
    new = [*_plain_stacks(source, layers), *_mxfp4_stacks(source, layers)]
    return [*_joined_experts(source, layers, new), *_split_experts(source, layers)]


def shared_sources(source: VerifiedCheckpoint, layers: OutputLayers) -> dict[str, str]:
    """Map tensors of single experts to the stored tensor of all experts that contains them.

    Only for experts with weights of their own, as in the FP8 checkpoints of transformers, where the scales
    alone share a tensor; and only if every expert is converted.
    """
    sources: dict[str, str] = {}
    for stack in stored_stacks(source):
        prefixes = _prefixes([stack])
        if all(prefix in layers for prefix in prefixes) and _have_own_weights(source, prefixes):
            sources |= {name: stack.source for name, _, _ in stack.names()}
    return sources


def stored_stacks(source: VerifiedCheckpoint) -> Collection[StoredStack]:
    """Return the stored tensors of several experts."""
    storage = source.weights.storage
    return storage.stacks if isinstance(storage, ExpertStacks) else ()


def stack_tensors(
    tensors: Mapping[str, TensorInfo], stacks: Sequence[StoredStack], items: Sequence[OutputItem]
) -> OutputItem:
    """Return the item of new tensors of all experts, by `stacks`; `items` have the tensors of each expert."""
    by_name = {name: item for item in items for name in item.tensors}
    count = stacks[0].count

    def read() -> Iterator[Chunk]:
        for expert in range(count):
            places = {
                f"{stack.lead}.{expert}.{part}": (stack.source, slot)
                for stack in stacks
                for part, slot in stack.parts.items()
            }
            blocks = {name: torch.empty(info.shape[1:], dtype=info.dtype) for name, info in tensors.items()}
            for item in {id(by_name[name]): by_name[name] for name in places}.values():
                for name, offset, chunk in item.read():
                    new_name, slot = places[name]
                    _fill_slot(blocks[new_name], slot, item.tensors[name], offset, chunk)
            for name, block in blocks.items():
                yield name, expert * block.nbytes, block

    expert_bytes = sum(info.nbytes for info in tensors.values()) // count
    memory_bytes = expert_bytes + max(item.memory_bytes for item in items)
    return OutputItem(tensors, sum(item.source_bytes for item in items), read, memory_bytes)


def _fill_slot(block: Tensor, slot: Slot, info: TensorInfo, offset: int, chunk: Tensor) -> None:
    """Write a chunk of a tensor of one expert into its slot of the expert's block."""
    outputs = block.T if slot.inputs_first else block.reshape(block.shape[0] if block.ndim else 1, -1)
    rows = info.shape[0]
    end = None if slot.step > 1 else slot.first + rows
    first = offset * rows // info.nbytes
    values = chunk.reshape(-1, info.nbytes // rows // chunk.itemsize)
    outputs[slot.first : end : slot.step][first : first + len(values)] = values


def _prefixes(stacks: Collection[StoredStack]) -> list[str]:
    """Return the prefixes of the layers in stacks."""
    return list(dict.fromkeys(name.rpartition(".")[0] for stack in stacks for name, _, _ in stack.names()))


def _have_own_weights(source: VerifiedCheckpoint, prefixes: Collection[str]) -> bool:
    """Return whether the weight of each of these layers is a stored tensor of its own."""
    stored = stored_tensors(source).keys()
    layers = (source.layers[prefix] for prefix in prefixes)
    return all(
        isinstance(layer, LayerDescription) and layer.names.full(layer.specs[0].name) in stored
        for layer in layers
    )


def _item(layers: OutputLayers, prefix: str) -> OutputItem:
    item = layers[prefix].item
    assert item is not None
    return item


def _group_stacks(
    source: VerifiedCheckpoint, key: Callable[[StoredStack], str]
) -> dict[str, list[StoredStack]]:
    """Group stacks of weights with the tensors beside them, except for biases."""
    groups: dict[str, list[StoredStack]] = {}
    for stack in stored_stacks(source):
        if stack.field != BIAS:
            groups.setdefault(key(stack), []).append(stack)
    return groups


def _plain_stacks(source: VerifiedCheckpoint, layers: OutputLayers) -> Iterator[dict[str, TensorInfo]]:
    """Yield the plain tensor of all experts of each stack whose layers all become plain."""
    if source.architecture is None:
        return
    stored = stored_tensors(source).keys()
    for name, stacks in _group_stacks(source, lambda stack: _weight_name(stack.prefix, stored)).items():
        info = _plain_info(source, stacks, layers)
        taken = name in stored and name not in {stack.source for stack in stacks}
        if info is not None and not taken and not _have_own_weights(source, _prefixes(stacks)):
            yield {name: info}


def _weight_name(prefix: str, stored: Collection[str]) -> str:
    """Return the name of the new tensor; it ends in `.weight` if the stored one has a suffix."""
    dotted = any(f"{prefix}.{field}" in stored for field in ("weight", "weight_packed"))
    return f"{prefix}{WEIGHT_SUFFIX}" if dotted else prefix


def _plain_info(
    source: VerifiedCheckpoint, stacks: Collection[StoredStack], layers: OutputLayers
) -> TensorInfo | None:
    """Return dtype and shape of the plain tensor, or None if some layer does not become plain."""
    assert source.architecture is not None
    prefixes = _prefixes(stacks)
    if not all(prefix in layers and layers[prefix].weight_type.plain for prefix in prefixes):
        return None
    count = max(stack.count for stack in stacks)
    infos = [_item(layers, prefix).tensors[named(prefix, "weight")] for prefix in prefixes]
    outputs, inputs = sum(info.shape[0] for info in infos) // count, infos[0].shape[1]
    shape = (inputs, outputs) if source.architecture.table.stacked.inputs_first else (outputs, inputs)
    return TensorInfo(infos[0].stored_dtype, (count, *shape))


def _mxfp4_stacks(source: VerifiedCheckpoint, layers: OutputLayers) -> Iterator[dict[str, TensorInfo]]:
    """Yield the tensors of each matrix whose layers all become `MXFP4ExpertsWeight`, of equal sizes."""
    if source.architecture is None or source.architecture.type != GPT_OSS:
        return
    counts: dict[str, int] = {}
    for prefix, layer in layers.items():
        found = EXPERT_LAYER.fullmatch(prefix)
        if found is not None and layer.weight_type is MXFP4ExpertsWeight:
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    for lead, count in counts.items():
        for matrix in MXFP4_MATRICES if count <= len(layers) else ():
            prefixes = [f"{lead}.{expert}.{part}" for expert in range(count) for part in LAYERS[matrix]]
            shapes = {
                _item(layers, prefix).tensors[named(prefix, "weight_packed")].shape
                for prefix in prefixes
                if prefix in layers
            }
            if len(shapes) == 1 and all(prefix in layers for prefix in prefixes):
                yield _mxfp4_tensors(source, f"{lead}.{matrix}", count, prefixes, *shapes)


def _mxfp4_tensors(
    source: VerifiedCheckpoint, name: str, count: int, prefixes: Sequence[str], shape: tuple[int, ...]
) -> dict[str, TensorInfo]:
    """Return the tensors of one matrix of all experts; `shape` is that of the codes of one layer."""
    storage, outputs = source.weights.storage, shape[0] * len(prefixes) // count
    grid = (count, outputs, shape[1] // BYTES_OF_BLOCK)
    tensors = {
        f"{name}_blocks": TensorInfo(torch.uint8, (*grid, BYTES_OF_BLOCK)),
        f"{name}_scales": TensorInfo(torch.uint8, grid),
    }
    names = storage.keys()
    if all(named(prefix, BIAS) in names for prefix in prefixes):
        dtype = storage.info(named(prefixes[0], BIAS)).stored_dtype
        tensors[f"{name}_{BIAS}"] = TensorInfo(dtype, (count, outputs))
    return tensors


def _joined_experts(
    source: VerifiedCheckpoint, layers: OutputLayers, new: Sequence[Mapping[str, TensorInfo]]
) -> Iterator[ExpertsItem]:
    """Yield the item of each group of new tensors in which a reader finds all of their layers."""
    config = {key: value for key, value in source.model_config.items() if key not in SECTIONS}
    headers = {
        name: torch.zeros((), dtype=info.dtype).expand(info.shape)
        for tensors in new
        for name, info in tensors.items()
    }
    found = {stack.source: stack for stack in find_stacks(MemoryStorage(headers), config)}
    stacks = stored_stacks(source)
    origins = {name: stack.source for stack in stacks for name, _, _ in stack.names()}
    owners = {stack.source: _first_prefix(stack) for stack in stacks if stack.field != BIAS}
    for tensors in new:
        joined = [found[name] for name in tensors if name in found]
        prefixes = _prefixes(joined)
        if len(joined) < len(tensors) or not all(prefix in layers for prefix in prefixes):
            continue
        biases = [name for stack in joined if stack.field == BIAS for name, _, _ in stack.names()]
        items = [_item(layers, prefix) for prefix in prefixes]
        items += [copy_tensor(source.weights.storage, name) for name in biases]
        wanted = {*prefixes}
        names = [*biases, *(name for prefix in prefixes for name in tensor_names(source, prefix))]
        sources = {origins.get(name, name) for name in names}
        sources |= {name for name, owner in owners.items() if owner in wanted}
        yield ExpertsItem(sources, prefixes, stack_tensors(tensors, joined, items))


def _first_prefix(stack: StoredStack) -> str:
    """Return the prefix of the first layer in a stack."""
    name, _, _ = next(stack.names())
    return name.rpartition(".")[0]


def _split_experts(source: VerifiedCheckpoint, layers: OutputLayers) -> Iterator[ExpertsItem]:
    """Yield the item of each stored matrix whose layers all become quantized layers of one expert."""
    storage = source.weights.storage
    for prefix, stacks in _group_stacks(source, lambda stack: stack.prefix).items():
        prefixes = _prefixes(stacks)
        kinds = [layers[name].weight_type for name in prefixes if name in layers]
        kept = len(kinds) < len(prefixes) or any(kind.plain or kind is MXFP4ExpertsWeight for kind in kinds)
        if kept or _have_own_weights(source, prefixes):
            continue
        biases = [stack for stack in stored_stacks(source) if (stack.prefix, stack.field) == (prefix, BIAS)]
        items = [_item(layers, name) for name in prefixes]
        items += [copy_tensor(storage, name) for stack in biases for name, _, _ in stack.names()]
        yield ExpertsItem([stack.source for stack in (*stacks, *biases)], prefixes, _join(items))


def _join(items: Sequence[OutputItem]) -> OutputItem:
    """Join items into one; its read yields their chunks in order."""

    def read() -> Iterator[Chunk]:
        for item in items:
            yield from item.read()

    tensors = {name: info for item in items for name, info in item.tensors.items()}
    memory_bytes = max(item.memory_bytes for item in items)
    return OutputItem(tensors, sum(item.source_bytes for item in items), read, memory_bytes)
