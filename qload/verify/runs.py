"""A subject in runs of its tensors and layers, for rules that judge each of them by itself."""

from copy import copy
from itertools import islice

from qload.verify.subject import Subject

NAMES = 64  # of a run: few enough that many threads and ranks find work, many enough to be worth a task


def runs(subject: Subject) -> list[tuple[Subject, int]]:
    """(subject with this run of names and this run of layers, bytes of these names), in order.

    Both orders are those of the whole subject, so that what is found run by run is found in the same order.
    """
    assert subject.weights is not None
    storage, names, layers = subject.weights.storage, subject.names, subject.layers
    subject.specs, subject.prefixes  # noqa: B018  (computed once here, and not once a run)
    count = max(1, -(-len(names) // NAMES))
    each, left = -(-len(layers) // count), iter(layers.items())
    found = []
    for at in range(count):
        mine = names[at * NAMES : (at + 1) * NAMES]
        run = copy(subject)
        vars(run).update(names=mine, layers=dict(islice(left, each)))
        found.append((run, sum(storage.info(name).nbytes for name in mine)))
    return found
