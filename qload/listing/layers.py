"""`layers`: what is in a checkpoint, layer by layer, before any of it is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from qload.errors import QloadError, checked
from qload.listing.groups import Groups
from qload.listing.info import LayerInfo, broken, info_of
from qload.weights import Weights, open_checkpoint


@checked
def layers(path_or_weights: str | PathLike[str] | Weights) -> list[LayerInfo]:
    """Every layer of a checkpoint, in the order of their names, and no weight is read.

    Headers are, and the small tensors that say what a layer is: `g_idx`, and the zero points of GPTQ and AWQ.
    A layer that cannot be loaded is listed with its `error`. A bias, and what is no layer, is not listed.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or what `open_checkpoint` made of one, which
        stays open. What its loader repacks or quantizes while loading is described as it is stored, and
        `target` says what the loader makes of it.

    Raises
    ------
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, where the path cannot be opened.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, layers, loader_from_config
    >>> words, scales = torch.zeros(8, 64, dtype=torch.int32), torch.ones(2, 64).half()
    >>> tensors = {"up.qweight": words, "up.qzeros": words[:2, :8], "up.scales": scales,
    ...            "up.g_idx": torch.arange(64).int() // 32, "norm.weight": torch.ones(64)}
    >>> config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    >>> weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config, target="marlin"))
    >>> [(layer.prefix, layer.format, layer.shape, layer.target) for layer in layers(weights)]
    [('norm', 'unquantized', (64,), None), ('up', 'gptq', (64, 64), 'gptq_marlin')]
    """
    with _opened(path_or_weights) as weights:
        groups = Groups(weights)
        return [
            broken(groups, prefix, layer) if isinstance(layer, QloadError) else info_of(weights, layer)
            for prefix, layer in groups.layers.items()
        ]


@contextmanager
def _opened(path_or_weights: str | PathLike[str] | Weights) -> Iterator[Weights]:
    if isinstance(path_or_weights, Weights):
        yield path_or_weights
    else:
        with open_checkpoint(path_or_weights) as weights:
            yield weights
