"""vLLM's Python without shared libraries, for this environment: `python -m tests.engines.vllm.wheel FILE`.

Installed as a package it would bring a CUDA build of torch and 60 packages, none of which loads a model.
"""

import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile


def unpack(wheel: Path, folder: Path) -> None:
    """All but native code."""
    with ZipFile(wheel) as held:
        held.extractall(folder, [name for name in held.namelist() if ".so" not in Path(name).suffixes])


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sysconfig.get_path("purelib")))
