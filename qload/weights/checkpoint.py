"""From a path to `Weights`: files, the config beside them, and the loader it asks for."""

from collections.abc import Mapping, Sequence
from os import PathLike

import torch

from qload.detect import Target, find_config, for_target, loader_from_claims
from qload.errors import checked
from qload.parallel import ProcessGroup
from qload.storage import SafetensorsStorage
from qload.weights.weights import Weights


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
) -> Weights:
    """The tensors of a safetensors file, a directory, or a sharded index, as `Weights`.

    The loader follows from the config beside the files, and from `target` (`loader_from_config`). The
    other arguments are those of `Weights`. Use it as a context manager, which closes the files.
    """
    storage = SafetensorsStorage(path)
    try:
        loader = for_target(loader_from_claims(find_config(path), storage), target)
        return Weights(
            storage,
            loader=loader,
            device=device,
            dtype=dtype,
            process_group=process_group,
            aliases=aliases,
            prefix=prefix,
        )
    except BaseException:
        storage.close()
        raise
