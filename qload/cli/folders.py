"""The folders that a list of files lies in, as tools for commits name files: `--folders`."""

import logging
from collections.abc import Iterator, Sequence
from os import listdir
from pathlib import Path

ENDS = (".safetensors", ".safetensors.index.json")

log = logging.getLogger("qload")


def folders_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Each folder once, in order, without those that hold no checkpoint: many a `config.json` lies in one."""
    for folder in dict.fromkeys(path if path.is_dir() else path.parent for path in paths):
        if _holds_a_checkpoint(folder):
            yield folder
        else:
            log.info("%s: passed over, there are no safetensors", folder)


def _holds_a_checkpoint(folder: Path) -> bool:
    try:
        return any(name.endswith(ENDS) for name in listdir(folder))
    except OSError:  # to be told by what opens it
        return True
