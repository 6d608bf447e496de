"""From a path to `Weights`: files, the config beside them, and the loader it asks for."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike

import torch

from qload.architecture import architecture_of
from qload.detect import (
    KernelTarget,
    Target,
    check_configs,
    config_notes,
    effective_claims,
    find_configs,
    for_target,
    loader_from_claims,
    read_model_config,
)
from qload.errors import checked
from qload.experts import with_experts
from qload.loader import WeightsLoader
from qload.loader.finite_scales import Nonfinite
from qload.parallel import ProcessGroup
from qload.storage import SafetensorsStorage, WeightStorage
from qload.weights.weights import Weights

log: logging.Logger = logging.getLogger("qload")


@checked
def open_checkpoint(
    path: str | PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    prefix: str | None = None,
    target: Target | None = None,
    nonfinite: Nonfinite = "error",
) -> Weights:
    """Open a safetensors file, a directory or a sharded index as `Weights`.

    Use it as a context manager, which closes the files. The config beside the files determines the loader.

    Parameters
    ----------
    path
        A safetensors file, a directory, or an index.
    device
        Device of the loaded tensors.
    dtype
        Type of plain floats after the load; None keeps the stored type. Packed words, indices, scales,
        integers and float8 are never cast. An overflowing cast raises `CastError`.
    process_group
        An object with `rank()` and `size()`, such as a group of torch.distributed; None is one rank.
    aliases
        Other names of a tensor: `{"lm_head.weight": ["model.embed_tokens.weight"]}`.
    prefix
        A prefix to try before a name that is not stored.
    target
        Order of the loaded weights in memory: "auto" (the fastest kernels of the device), "marlin",
        "strips", "panels", "exllama", or a `KernelTarget`; None keeps the stored order. A weight that the
        order cannot hold keeps its own, with a note in `Weights.report()`. "marlin" repacks FP8 and FP4
        for a `dtype` of float16 or bfloat16; "auto" repacks them only for a `KernelTarget` with a dtype.
    nonfinite
        "error" refuses a layer with a scale that is NaN or infinite, by `NonfiniteScaleError` on all ranks;
        "allow" loads such scales as stored.

    Raises
    ------
    StorageError
        Where a file is not a checkpoint that can be trusted.
    ConfigError, UnsupportedFormatError
        Where the config is malformed, or of a method that is not read.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import open_checkpoint
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"up.weight": torch.ones(4, 2)}, os.path.join(folder.name, "model.safetensors"))
    >>> with open_checkpoint(folder.name) as weights:
    ...     weights.get_weights("up")
    UnquantizedWeight(up, (4, 2), UnquantizedConfig(axes=2), weight=(4, 2))
    >>> folder.cleanup()
    """
    storage: WeightStorage = SafetensorsStorage(path)
    try:
        config = read_model_config(path)
        storage = with_experts(storage, config)
        return Weights(
            storage,
            loader=for_target(_loader(path, storage), _heard(target, dtype)),
            device=device,
            dtype=dtype,
            process_group=process_group,
            aliases=aliases,
            prefix=prefix,
            architecture=architecture_of(config),
            nonfinite=nonfinite,
        )
    except BaseException:
        storage.close()
        raise


def _heard(target: Target | None, dtype: torch.dtype | None) -> Target | None:
    """The target, with the dtype that plain floats are cast to where it needs one and says none."""
    if target is None or dtype not in (torch.float16, torch.bfloat16):
        return target
    said = target if isinstance(target, KernelTarget) else KernelTarget(target)
    return replace(said, dtype=dtype) if said.kernel == "marlin" and said.dtype is None else target


def _loader(path: str | PathLike[str], storage: WeightStorage) -> WeightsLoader:
    """The loader of the config that counts, once no other config contradicts it."""
    configs = find_configs(path)
    found = configs[0] if configs else None
    loader = loader_from_claims(found, storage)
    claims = effective_claims(found, storage) if configs[1:] else None
    if claims is not None:
        for error in check_configs(configs, claims, storage):
            raise error
        for note in config_notes(configs, claims, storage):
            log.info("%s", note)
    return loader
