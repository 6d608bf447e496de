"""`load_layers`: all that `layers` lists, as typed weights."""

from collections.abc import Callable, Iterator

from qload.errors import checked
from qload.listing.coverage import account
from qload.listing.groups import Groups
from qload.spec import Weight
from qload.weights import Weights

Progress = Callable[[str, int, int], None]  # a stage, bytes that are done, bytes of all


@checked
def load_layers(weights: Weights, *, progress: Progress | None = None) -> Iterator[tuple[str, Weight]]:
    """Each layer of a checkpoint with its prefix, whole, on the device and in the order that `weights` say.

    The fastest way to load a model that is not cut: threads read the next layers while one is repacked, see
    `Weights.stream`, which takes loads of shares too. Layers come in the order of their names, vectors such
    as norms among them; a layer that cannot be loaded is an error when it is its turn.
    UnreadTensorsError, before anything is loaded, where a tensor is in a form that no format reads.

    Parameters
    ----------
    weights
        What `open_checkpoint` made.
    progress
        Told "loading", the bytes that were loaded, and those of all layers.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, load_layers, loader_from_config
    >>> storage = MemoryStorage({"norm.weight": torch.ones(4), "up.weight": torch.ones(8, 4)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> {prefix: weight.shape for prefix, weight in load_layers(weights)}
    {'norm': (4,), 'up': (8, 4)}
    """
    groups = Groups(weights)
    error = account(groups).error()
    if error is not None:
        raise error
    return _told(weights, groups, progress) if progress else weights.stream(groups.found)


def _told(weights: Weights, groups: Groups, progress: Progress) -> Iterator[tuple[str, Weight]]:
    info = weights.storage.info
    sizes = {prefix: sum(info(name).nbytes for name in groups.under(prefix)) for prefix in groups.found}
    done, total = 0, sum(sizes.values())
    progress("loading", done, total)
    for prefix, weight in weights.stream(groups.found):
        done += sizes[prefix]
        progress("loading", done, total)
        yield prefix, weight
