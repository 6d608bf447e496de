"""Peers from a folder: wheels and shared libraries, as they lie there, without an installation.

A wheel is unpacked beside the run and can be imported; a shared library of operators is loaded into torch.
What a wheel needs besides has to be there already, or in the folder too.
"""

import sys
import zipfile
from pathlib import Path
from tempfile import mkdtemp

import torch

from qload.errors import ArgumentError


def add(folder: Path) -> list[str]:
    """Make what the folder holds importable; the names of its files, in order.

    Raises ArgumentError where it holds neither, or a file that is not what its name says.
    """
    wheels, libraries = sorted(folder.glob("*.whl")), sorted(folder.glob("*.so"))
    if not wheels and not libraries:
        raise ArgumentError("peers", "names, or a folder of wheels and shared libraries", str(folder))
    place = mkdtemp(prefix="peers-")
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as packed:
                for member in packed.infolist():
                    path = Path(packed.extract(member, place))
                    if (
                        path.is_file() and member.external_attr >> 16 & 0o100
                    ):  # a program that the peer starts
                        path.chmod(path.stat().st_mode | 0o100)
        except zipfile.BadZipFile as broken:
            raise ArgumentError("peers", "whole wheels", f"{wheel}: {broken}") from broken
    if wheels:
        sys.path.append(place)  # behind what is installed
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as broken:
            raise ArgumentError("peers", "libraries that load here", f"{library}: {broken}") from broken
    return [path.name for path in (*wheels, *libraries)]
