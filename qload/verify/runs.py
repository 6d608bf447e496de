"""A subject in runs of its tensors and layers, for rules that judge each of them by itself."""

from collections.abc import Iterator
from copy import copy

from qload.errors import QloadError
from qload.loader import LayerDescription
from qload.verify.subject import Subject

NAMES = 64  # of a run: few enough that many threads and ranks find work, many enough to be worth a task


def runs(subject: Subject, size: int = NAMES) -> list[Subject]:
    """The subject with a run of names and a run of layers, for each of these, in order.

    Both orders are those of the whole subject, so that what is found run by run is found in the same order.
    A layer is in the run of its first name.
    """
    names, prefixes, judged = subject.names, subject.prefixes, {*subject.judged}
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        first.setdefault(prefixes[name], at // size)
    count = max(1, -(-len(names) // size))
    layers: list[dict[str, LayerDescription | QloadError]] = [{} for _ in range(count)]
    for prefix, layer in subject.all_layers.items():
        layers[first[prefix]][prefix] = layer
    found = []
    for at in range(count):
        run = copy(subject)
        mine = names[at * size : (at + 1) * size]
        vars(run).update(names=mine, layers=layers[at], judged=[name for name in mine if name in judged])
        found.append(run)
    return found


def pieces_of(run: Subject) -> Iterator[tuple[str, Subject]]:
    """Yield each layer and then each tensor of a run as a subject of its own, with its name."""
    for prefix, layer in run.layers.items():
        piece = copy(run)
        vars(piece).update(names=[], judged=[], layers={prefix: layer})
        yield prefix, piece
    for name in run.names:
        piece = copy(run)
        judged = [name] if name in run.judged else []
        vars(piece).update(names=[name], judged=judged, layers={})
        yield name, piece


def size_of(run: Subject) -> int:
    """The bytes of a run's names."""
    assert run.weights is not None
    storage = run.weights.storage
    return sum(storage.info(name).nbytes for name in run.names)
