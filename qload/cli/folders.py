"""The folders that a list of files lies in, as tools for commits name files: `--folders`."""

import logging
from collections.abc import Iterator, Sequence
from os import listdir
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qload.hub import HubId

ENDS = (".safetensors", ".safetensors.index.json")

log = logging.getLogger("qload")


def folders_of(paths: "Sequence[Path | HubId]") -> "Iterator[Path | HubId]":
    """Each folder once, in order, without those that hold no checkpoint: many a `config.json` lies in one.

    A model of the hub is what it is.
    """
    for folder in dict.fromkeys(_folder(path) for path in paths):
        if not isinstance(folder, Path) or _holds_a_checkpoint(folder):
            yield folder
        else:
            log.info("%s: passed over, there are no safetensors", folder)


def _folder(path: "Path | HubId") -> "Path | HubId":
    return path.parent if isinstance(path, Path) and not path.is_dir() else path


def _holds_a_checkpoint(folder: Path) -> bool:
    try:
        return any(name.endswith(ENDS) for name in listdir(folder))
    except OSError:  # to be told by what opens it
        return True
