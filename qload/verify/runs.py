"""A subject in runs of its tensors and layers, for rules that judge each of them by itself."""

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
    names, prefixes = subject.names, subject.prefixes
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
        vars(run).update(names=names[at * size : (at + 1) * size], layers=layers[at])
        found.append(run)
    return found


def size_of(run: Subject) -> int:
    """The bytes of a run's names."""
    assert run.weights is not None
    storage = run.weights.storage
    return sum(storage.info(name).nbytes for name in run.names)
