"""Whose a module's tensors are, once a kernel has prepared them: one module may hold several weights.

What a kernel made of a checkpoint's tensors must not pass for the checkpoint's again, and what one weight
needs beside its own tensors must not lie where another's does.
"""

from collections.abc import Iterable

from torch import nn

from qload.errors import ArgumentError

OWNERS = "mp_linear_owners"  # name of a tensor -> name of the weight it was prepared for


def is_prepared(layer: nn.Module, weight: str) -> bool:
    """Whether a kernel has prepared this weight of a module."""
    return _owners(layer).get(weight) == weight


def check_unowned(layer: nn.Module, names: Iterable[str | None]) -> None:
    """Every one of these tensors is the checkpoint's still, or ArgumentError."""
    owners = _owners(layer)
    for name in names:
        if name in owners:
            raise ArgumentError(
                name, "a checkpoint's tensor", f"what was prepared for {owners[name]} already"
            )


def free_name(layer: nn.Module, weight: str, field: str) -> str:
    """Under which name a module can hold what a weight needs: `field`, or with the weight's name in front."""
    for name in (field, f"{weight}_{field}"):
        if not hasattr(layer, name):
            return name
    raise ArgumentError(f"{weight}_{field}", "a name that is free on the module", "one that is taken")


def own(layer: nn.Module, weight: str, names: Iterable[str]) -> None:
    """These tensors are the weight's from here on; survives a copy of the module."""
    setattr(layer, OWNERS, {**_owners(layer), **dict.fromkeys([weight, *names], weight)})


def _owners(layer: nn.Module) -> dict[str, str]:
    return getattr(layer, OWNERS, {})
