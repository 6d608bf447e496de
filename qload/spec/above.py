"""What stands to the right of this package: named here, and imported only when it is called."""

from importlib import import_module
from typing import Any

LINEAR = ("qload.kernels.linear", "linear_of")  # makes a module of a weight
EXPERTS = ("qload.kernels.experts", "experts_module")  # makes a module of the experts of a layer
TARGET = ("qload.repacking.loaders", "for_target")  # makes a loader repack for a kernel


def call(above: tuple[str, str], *arguments: Any) -> Any:
    """The result of a function that is named by its module and itself."""
    module, name = above
    return getattr(import_module(module), name)(*arguments)
