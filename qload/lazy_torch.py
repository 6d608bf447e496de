"""Torch for modules that also read headers, imported at its first use.

    from qload.lazy_torch import Tensor, torch

`torch` imports the module at the first access to an attribute; before, `Tensor` has no instances. The import
replaces both names by torch's own in all modules of qload, so that later uses cost nothing. Annotations with
these names are strings: `from __future__ import annotations`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = __name__.partition(".")[0]


class LazyTorch:
    """Stand-in for torch, which it imports at the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(), name)


class LazyTensor(type):
    """Type of the stand-in for `torch.Tensor`; its instances are torch's tensors."""

    def __instancecheck__(cls, value: object) -> bool:
        return is_imported() and isinstance(value, _load().Tensor)


class Tensor(metaclass=LazyTensor):
    """Stand-in for `torch.Tensor` before the import of torch."""


torch: Any = LazyTorch()
STAND_INS = {"torch": torch, "Tensor": Tensor}


def is_imported() -> bool:
    """Return whether torch has been imported."""
    return sys.modules.get("torch") is not None


def replace_names() -> None:
    """Replace the names in all modules of qload by torch's, if torch has been imported."""
    if is_imported() and globals()["torch"] is STAND_INS["torch"]:
        _load()


def _load() -> ModuleType:
    """Import torch, and replace the names in all modules of qload by torch's."""
    module = import_module("torch")
    names = {"torch": module, "Tensor": module.Tensor}
    for name, other in list(sys.modules.items()):
        if other is not None and name.partition(".")[0] == PACKAGE:
            own = vars(other)
            own.update({key: value for key, value in names.items() if own.get(key) is STAND_INS[key]})
    return module


replace_names()
