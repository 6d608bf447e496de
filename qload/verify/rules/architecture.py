"""Rules of the model's config.json: number of layers, required tensors, their shapes, and the head.

A format relates its own tensors and knows nothing about the model: a query projection in the place of the
keys, lost outputs, or an embedding of another vocabulary are sound layers of the wrong shape.

`tie_word_embeddings: true` with a head of other values has two readings: transformers warns and keeps both
(`tie_weights`), engines never read the head. `lm_head: false` in a quantization config makes engines look for
a plain head, and fail at a quantized one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from qload import dtypes
from qload.architecture import Architecture, Inventory, Missing
from qload.architecture.architecture import SHOWN, TIE, Tie, absent, tie_of
from qload.architecture.names import TOWER
from qload.architecture.table import DIGITS, spelled
from qload.configs.matching import HEAD
from qload.experts import ExpertStacks
from qload.loader import LayerDescription
from qload.spec import named
from qload.storage import TensorInfo, rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.rules.layers import layer_lists, lost_siblings
from qload.verify.rules.rule import Rule

Difference = tuple[str, str | None, str, str]  # name, file, stored shape, shape by the config


def check_layer_count(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report counted layers without a tensor, and stored layers beyond the count.

    Drafts are skipped: they continue the numbers of their target, or have none. For a known type of model the
    names of its table count; for another type the longest list of layers, and further layers are lawful.
    """
    if checkpoint.is_draft:
        return
    inventory = checkpoint.inventory
    if inventory is not None and inventory.architecture.layers is not None:
        yield from _count_by_table(rule, inventory, inventory.architecture.layers)
        return
    claimed = checkpoint.num_hidden_layers
    if claimed and not any(part.isdecimal() for name in checkpoint.names for part in name.split(".")):
        message = f"num_hidden_layers is {claimed}, and no tensor's name has a number of a layer"
        yield rule.finding(None, "config.json", f"config.json: {message}")
    lists = {
        name: layers
        for name, layers in layer_lists(checkpoint.names).items()
        if "expert" not in name and not TOWER.search(name)
    }
    if claimed is None or not lists:
        return
    block, layers = max(lists.items(), key=lambda item: len(item[1]))
    first, count = absent(claimed, [int(index) for index in layers if len(index) <= DIGITS])
    yield from _absent_layers(rule, lambda layer: f"{block}.{layer}", claimed, first, count)


def _count_by_table(rule: Rule, inventory: Inventory, claimed: int) -> Iterator[Finding]:
    """Count layers by the names of this type of model."""
    yield from _absent_layers(rule, inventory.name_of_layer, claimed, *inventory.lost_layers())
    layers = inventory.layers | inventory.plain_predictors
    beyond = sorted(layer for layer in layers - inventory.undeclared_predictors if layer >= claimed)
    if beyond:
        name, shown = inventory.name_of_layer(beyond[0]), join_numbers(beyond[:SHOWN], len(beyond))
        message = f"{name}: num_hidden_layers is {claimed}, and further layers are stored: {shown}"
        remedy = "set num_hidden_layers to the number of layers, if no layer is to be left out"
        yield replace(rule.finding(name, "config.json", message, remedy), severity="warning")


def _absent_layers(
    rule: Rule, name: Callable[[int], str], claimed: int, first: Sequence[int], count: int
) -> Iterator[Finding]:
    if count:
        message = f"num_hidden_layers is {claimed}, and {count} of these layers have no tensor: "
        yield rule.finding(name(first[0]), "config.json", message + join_numbers(first, count))


def join_numbers(numbers: Sequence[int], count: int) -> str:
    """Return numbers of layers or experts as text, with an ellipsis if there are `count` and more."""
    return ", ".join(map(str, numbers)) + (", ..." if count > len(numbers) else "")


def check_required(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor of the model's architecture table that is not stored; a draft model may lack any.

    `layer-count` reports whole layers, and `missing-sibling` a tensor that one layer lacks.
    """
    if checkpoint.requires_all_tensors:
        for missing, message in missing_tensors(checkpoint):
            yield rule.finding(missing.name, None, message, _remedy(checkpoint, missing))


def missing_tensors(checkpoint: VerifiedCheckpoint) -> Iterator[tuple[Missing, str]]:
    """Yield each tensor of the model's architecture table that is not stored, with a message."""
    inventory = checkpoint.inventory
    if inventory is None:
        return
    reported = [lost.name for lost in lost_siblings(checkpoint)]
    for missing in inventory.missing():
        if not any(name == missing.name or name.startswith(f"{missing.name}.") for name in reported):
            without = f"{missing.name}: not stored{_layers_without(missing)}"
            yield missing, f"{without}; config.json says {_setting(checkpoint, missing)}"


def _layers_without(missing: Missing) -> str:
    if missing.what == "the model" or (missing.count == 1 and missing.what == "layers"):
        return ""
    numbers = join_numbers(missing.numbers, missing.count)
    if missing.what == "layers":
        return f", in {missing.count} of {missing.total} layers: {numbers}"
    return f", and {missing.count} experts are missing in all: {numbers}" if missing.count > 1 else ""


def _setting(checkpoint: VerifiedCheckpoint, missing: Missing) -> str:
    architecture = checkpoint.architecture
    assert architecture is not None  # its inventory exists
    if _is_head(architecture, missing):
        return f"model_type is {architecture.type}, and not that head and embedding are tied"
    return f"model_type is {architecture.type}"


def _is_head(architecture: Architecture, missing: Missing) -> bool:
    return missing.name.endswith(spelled(architecture.table.head))


def _remedy(checkpoint: VerifiedCheckpoint, missing: Missing) -> str:
    """Return the remedy; for a missing head, also a tie to the embedding."""
    again, tie = "fetch or write the checkpoint again", tie_of(checkpoint.model_config)
    if checkpoint.architecture is None or not _is_head(checkpoint.architecture, missing):
        return again
    return f"{again}; or, if the embedding is the head, set {tie.key or TIE} to true in config.json: {tie}"


def check_shapes(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each matrix of the model with another shape once, with the number of its layers."""
    architecture = checkpoint.architecture
    if architecture is None:
        return
    differences: dict[str, list[Difference]] = defaultdict(list)
    for difference in (
        *_matrix_differences(checkpoint, architecture),
        *_tensor_differences(checkpoint, architecture),
    ):
        place = architecture.find(difference[0])
        differences[place.row.name if place else difference[0]].append(difference)
    for group in differences.values():
        name, file, stored, expected = group[0]
        more = f"; {len(group) - 1} more differ, up to {group[-1][0]}" if len(group) > 1 else ""
        yield rule.finding(name, file, f"{name}: {stored}, config.json says {expected}{more}")


def _matrix_differences(checkpoint: VerifiedCheckpoint, architecture: Architecture) -> Iterator[Difference]:
    for layer in checkpoint.described():
        expected = architecture.expected(layer.prefix)
        if expected is None or "K" not in layer.sizes:
            continue
        shape, lawful = (layer.N, layer.K), architecture.paddings(layer.prefix)
        experts = architecture.sizes.get("experts")
        if checkpoint.is_draft and _is_of_draft(checkpoint, architecture, layer, expected):
            continue
        shapes = (expected, layer.format.weight_type.pad(*expected))
        if shape not in shapes and not (expected[1] == layer.K and layer.N in lawful):
            yield _matrix_difference(architecture, layer, f"(N, K) is {shape}", str(expected))
        elif experts is not None and layer.sizes.get("E", experts) != experts:
            yield _matrix_difference(architecture, layer, f"{layer.sizes['E']} experts", f"{experts} experts")


def _is_of_draft(
    checkpoint: VerifiedCheckpoint,
    architecture: Architecture,
    layer: LayerDescription,
    expected: tuple[int, int],
) -> bool:
    """Return whether EAGLE-3 explains a shape: attention with doubled inputs, or a smaller vocabulary."""
    place, last = architecture.find(layer.prefix), layer.prefix.rpartition(".")[2]
    N, K = expected
    if place is not None and place.row.name == architecture.table.head:
        return layer.K == K and layer.N in checkpoint.config_integers("draft_vocab_size")
    return last in ("q_proj", "k_proj", "v_proj") and layer.N == N and layer.K == 2 * K


def _matrix_difference(
    architecture: Architecture, layer: LayerDescription, stored: str, expected: str
) -> Difference:
    words = f"{expected} ({architecture.said(layer.prefix)})" if expected.startswith("(") else expected
    return layer.prefix, layer.names.file(layer.specs[0].name), stored, words


def _tensor_differences(checkpoint: VerifiedCheckpoint, architecture: Architecture) -> Iterator[Difference]:
    """Yield differences of norms, biases, and stacks of experts that are one tensor."""
    for name in checkpoint.readable_names:
        shape, prefix = architecture.shape(name), name
        if not architecture.find(name):
            prefix = name.removesuffix(".weight")
        info = checkpoint.weights.info(name) if shape or architecture.find(prefix) else None
        if info is None:
            continue
        lawful = [shape] if shape else _stack_shapes(architecture, prefix, info)
        if lawful and info.shape not in lawful:
            yield _tensor_difference(name, info, lawful, architecture.said(prefix))
    yield from _joined_stacks(checkpoint, architecture)
    yield from _unread_stacks(checkpoint, architecture)


def _joined_stacks(checkpoint: VerifiedCheckpoint, architecture: Architecture) -> Iterator[Difference]:
    """Yield differences of stacks with gate and up in one layer; the table has no size for these."""
    storage = checkpoint.weights.storage
    if not isinstance(storage, ExpertStacks):
        return
    for stack in storage.stacks:
        if not stack.joined or stack.field != "weight" or not architecture.find(stack.prefix):
            continue
        info = storage.info(stack.source)
        lawful = _stack_shapes(architecture, stack.prefix, info)
        if lawful and info.shape not in lawful:
            yield _tensor_difference(stack.source, info, lawful, architecture.said(stack.prefix))


def _unread_stacks(checkpoint: VerifiedCheckpoint, architecture: Architecture) -> Iterator[Difference]:
    """Yield differences of unread stacks that no format could read: wrong numbers of experts or floats."""
    for name in checkpoint.unread:
        shape, prefix = architecture.shape(name), name.removesuffix(".weight")
        if not shape and not architecture.find(prefix):
            continue
        info = checkpoint.weights.info(name)
        lawful = [shape] if shape else _stack_shapes(architecture, prefix, info)
        if not lawful or info.shape in lawful:
            continue
        lost = info.dtype.is_floating_point and prod(info.shape) != prod(lawful[0])
        other = len(info.shape) > 2 and lawful[0][0] not in info.shape  # two axes may be all experts in one
        if shape or lost or other:
            yield _tensor_difference(name, info, lawful, architecture.said(prefix))


def _tensor_difference(name: str, info: TensorInfo, lawful: list[tuple[int, ...]], source: str) -> Difference:
    """Return a difference between a stored shape and lawful ones; `source`: the settings behind these."""
    return name, info.file, f"shape is {info.shape}", f"{' or '.join(map(str, lawful))} ({source})"


def _stack_shapes(architecture: Architecture, name: str, info: TensorInfo) -> list[tuple[int, ...]]:
    """Return the lawful shapes of stacked experts: inputs first, or outputs first."""
    expected, experts = architecture.expected(name), architecture.sizes.get("experts")
    packed = 2 if info.stored_dtype is dtypes.uint8 else 1  # inputs in a byte
    if expected is None or experts is None or len(info.shape) != 3:
        return []
    if packed == 1 and not info.dtype.is_floating_point:
        return []
    N, K = expected[0], expected[1] // packed
    return [(experts, N, K), (experts, K, N)]


def check_plain_head(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report a quantized head if the config says `lm_head: false`."""
    architecture, inventory = checkpoint.architecture, checkpoint.inventory
    denying = next((config for config in checkpoint.configs if config.values.get("lm_head") is False), None)
    if denying is None:
        return
    head = None  # for a model type without a table
    if architecture is not None and inventory is not None:
        (head,) = inventory.spell(architecture.table.head)
    for layer in checkpoint.described():
        is_head = layer.prefix == head if head else layer.prefix.rpartition(".")[2] == HEAD
        if is_head and not layer.format.weight_type.plain:
            yield rule.field_finding(
                layer,
                layer.specs[0].name,
                f"the head is {layer.format.weight_type.format}, and {denying.file} says that "
                f"{denying.key('lm_head')} is false",
                f"set lm_head to true in {denying.file}",
            )


def check_tied_head(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report the first row in which a tied head differs from the embedding; drafts are skipped."""
    architecture, inventory = checkpoint.architecture, checkpoint.inventory
    if architecture is None or inventory is None or not architecture.tied:
        return
    tie = tie_of(checkpoint.model_config)
    if checkpoint.is_draft or tie.outer:  # a default of some programs alone is a note
        return
    storage = checkpoint.weights.storage
    prefixes = inventory.spell(architecture.table.head, architecture.table.embedding)
    names = [named(prefix, "weight") for prefix in prefixes]
    if not {*names} <= set(storage.keys()) or not checkpoint.unread.keys().isdisjoint(names):
        return
    head, embedding = names
    ours, theirs = storage.info(head), storage.info(embedding)
    if not (ours.dtype.is_floating_point and theirs.dtype.is_floating_point):
        return  # one of them is quantized: its bytes say nothing about the other
    if ours.shape != theirs.shape:
        difference = f"has shape {ours.shape}, not {theirs.shape}"
        yield _tie_finding(rule, (head, embedding), ours.file, difference, tie)
        return
    for start, run in rows(storage, head):
        other = storage.read(embedding, (slice(start, start + len(run)),)[: len(ours.shape)])
        different = run.float().ne(other.float()).reshape(len(run), -1).any(1).nonzero()
        if different.numel():
            difference = f"differs from row {start + int(different[0])} on"
            yield _tie_finding(rule, (head, embedding), ours.file, difference, tie)
            return


def _tie_finding(rule: Rule, names: tuple[str, str], file: str | None, difference: str, tie: Tie) -> Finding:
    head, embedding = names
    why = str(tie) if tie.denied or not tie.key else TIE
    keys = f"{tie.key} and {tie.denied}" if tie.denied else tie.key or TIE
    return rule.finding(
        head,
        file,
        f"{head}: {difference}; the config ties it to {embedding} ({why}), so that engines ignore it",
        f"set {keys} to false in config.json, if the model uses the head",
    )
