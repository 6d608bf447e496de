"""A matrix has the (N, K) that the model's config says, and a norm or a bias its length.

A format knows how its own tensors go together, and nothing of the model: a query projection that holds the
keys, outputs that were lost, and an embedding of another vocabulary are sound layers of the wrong shape.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import torch

from qload.architecture import Architecture
from qload.experts import ExpertStacks
from qload.loader import LayerDescription
from qload.storage import TensorInfo
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject

Difference = tuple[str, str | None, str, str]  # name, file, what it is, what the config says


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each matrix of the model, with the number of layers where it is another."""
    architecture = subject.architecture
    if architecture is None:
        return
    found: dict[str, list[Difference]] = defaultdict(list)
    for differs in (*_matrices(subject, architecture), *_tensors(subject, architecture)):
        place = architecture.find(differs[0])
        found[place.row.name if place else differs[0]].append(differs)
    for group in found.values():
        name, file, here, said = group[0]
        more = f"; so are {len(group) - 1} more, to {group[-1][0]}" if len(group) > 1 else ""
        yield rule.finding(name, file, f"{name}: {here}, config.json says {said}{more}")


def _matrices(subject: Subject, architecture: Architecture) -> Iterator[Difference]:
    for layer in subject.described():
        expected = architecture.expected(layer.prefix)
        if expected is None or "K" not in layer.sizes:
            continue
        shape, lawful = (layer.N, layer.K), architecture.paddings(layer.prefix)
        experts = architecture.sizes.get("experts")
        if subject.draft and _is_of_draft(subject, architecture, layer, expected):
            continue
        if shape != expected and not (expected[1] == layer.K and layer.N in lawful):
            yield _difference(architecture, layer, f"(N, K) is {shape}", str(expected))
        elif experts is not None and layer.sizes.get("E", experts) != experts:
            yield _difference(architecture, layer, f"{layer.sizes['E']} experts", f"{experts} experts")


def _is_of_draft(
    subject: Subject, architecture: Architecture, layer: LayerDescription, expected: tuple[int, int]
) -> bool:
    """Return whether EAGLE-3 explains a shape: attention with doubled inputs, or a smaller vocabulary."""
    place, last = architecture.find(layer.prefix), layer.prefix.rpartition(".")[2]
    N, K = expected
    if place is not None and place.row.name == architecture.table.head:
        return layer.K == K and layer.N in subject.counted("draft_vocab_size")
    return last in ("q_proj", "k_proj", "v_proj") and layer.N == N and layer.K == 2 * K


def _difference(architecture: Architecture, layer: LayerDescription, here: str, said: str) -> Difference:
    words = f"{said} ({architecture.said(layer.prefix)})" if said.startswith("(") else said
    return layer.prefix, layer.names.file(layer.specs[0].name), here, words


def _tensors(subject: Subject, architecture: Architecture) -> Iterator[Difference]:
    """Tensors that are named whole: norms, biases, and stacks of experts that cannot be told apart."""
    assert subject.weights is not None
    for name in subject.judged:
        shape = architecture.shape(name)
        info = subject.weights.info(name) if shape or architecture.find(name) else None
        if info is None:
            continue
        lawful = [shape] if shape else _stacks(architecture, name, info)
        if lawful and info.shape not in lawful:
            yield _tensor_difference(name, info, lawful, architecture.said(name))
    yield from _joined_stacks(subject, architecture)
    yield from _unread_stacks(subject, architecture)


def _joined_stacks(subject: Subject, architecture: Architecture) -> Iterator[Difference]:
    """Stacks that are read with gate and up in one layer, of which the table knows no size."""
    storage = subject.weights.storage if subject.weights else None
    if not isinstance(storage, ExpertStacks):
        return
    for stack in storage.stacks:
        if not stack.joined or stack.field != "weight" or not architecture.find(stack.prefix):
            continue
        info = storage.info(stack.source)
        lawful = _stacks(architecture, stack.prefix, info)
        if lawful and info.shape not in lawful:
            yield _tensor_difference(stack.source, info, lawful, architecture.said(stack.prefix))


def _unread_stacks(subject: Subject, architecture: Architecture) -> Iterator[Difference]:
    """Stacks that no format reads, and that no format could: the wrong number of experts or of floats."""
    assert subject.weights is not None
    for name in subject.unread:
        shape, prefix = architecture.shape(name), name.removesuffix(".weight")
        if not shape and not architecture.find(prefix):
            continue
        info = subject.weights.info(name)
        lawful = [shape] if shape else _stacks(architecture, prefix, info)
        if not lawful or info.shape in lawful:
            continue
        lost = info.dtype.is_floating_point and prod(info.shape) != prod(lawful[0])
        other = len(info.shape) > 2 and lawful[0][0] not in info.shape  # two axes may be all experts in one
        if shape or lost or other:
            yield _tensor_difference(name, info, lawful, architecture.said(prefix))


def _tensor_difference(name: str, info: TensorInfo, lawful: list[tuple[int, ...]], source: str) -> Difference:
    """Difference between a stored shape and the lawful ones; `source`: the settings behind these."""
    return name, info.file, f"shape is {info.shape}", f"{' or '.join(map(str, lawful))} ({source})"


def _stacks(architecture: Architecture, name: str, info: TensorInfo) -> list[tuple[int, ...]]:
    """What experts that are stacked may be: inputs first, or outputs first."""
    expected, experts = architecture.expected(name), architecture.sizes.get("experts")
    packed = 2 if info.dtype == torch.uint8 else 1  # inputs to a byte
    if expected is None or experts is None or len(info.shape) != 3:
        return []
    if packed == 1 and not info.dtype.is_floating_point:
        return []
    N, K = expected[0], expected[1] // packed
    return [(experts, N, K), (experts, K, N)]


RULE = Rule("architecture-shape", "headers", check)
