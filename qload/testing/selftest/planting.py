"""A pytest plugin that plants one fault in a function of the project under test: `pytest -p THIS`.

`qload selftest --tests` starts it. The function packs a weight, which is given as a typed weight of qload or
as tensors under their stored names (`qweight`, `scales`, ...), in any order of arguments; or it multiplies.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import FORMATS
from qload.spec import TensorSpec, Weight
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault


class Named:
    """Tensors under their stored names, as a fault sees a weight."""

    def __init__(self, weight_type: type[Weight], tensors: dict[str, Tensor]) -> None:
        self.format = weight_type.format
        self.config: Any = weight_type.example
        self._type, self._held = weight_type, tensors

    def tensors(self, config: Any) -> tuple[TensorSpec, ...]:
        """The declaration of those that are held."""
        return self._type.tensors(config)

    def fields(self) -> dict[str, Tensor]:
        """By field."""
        return self._held

    def holding(self, tensors: dict[str, Tensor]) -> "Named":
        """The same with other tensors."""
        return Named(self._type, self._held | tensors)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `qload selftest` says."""
    group = parser.getgroup("qload selftest")
    for name in ("fault", "pack", "gemm", "format", "reached"):
        group.addoption(f"--qload-plant-{name}", default=None, help="of qload selftest")


def pytest_configure(config: pytest.Config) -> None:
    """Put a wrong function in the place of the right one."""
    given = {
        name: config.getoption(f"--qload-plant-{name}")
        for name in ("fault", "pack", "gemm", "format", "reached")
    }
    if given["fault"] is None:
        return
    fault = next(each for each in KERNEL_FAULTS if each.name == given["fault"])
    reached = Path(given["reached"])
    if fault.change is not None and given["pack"]:
        replaced(given["pack"], lambda function: packing(function, fault, given["format"], reached))
    if fault.around is not None and given["gemm"]:
        replaced(given["gemm"], lambda function: multiplying(function, fault, reached))


def replaced(place: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `module:function`, or `module:Class.method`, where it is defined."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrap(getattr(owner, name)))


def packing(
    function: Callable[..., Any], fault: KernelFault, format_name: str | None, reached: Path
) -> Callable[..., Any]:
    """The function, given a weight with the fault in it."""

    @functools.wraps(function)
    def wrong(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(function).bind(*arguments, **named)
        for name, value in bound.arguments.items():
            if isinstance(value, Weight):
                packed = fault.packed(value)
                if packed is not None:
                    bound.arguments[name] = packed
                    reached.write_text("planted")
                return function(*bound.args, **bound.kwargs)
        changed = in_tensors(fault, bound.arguments, format_name)
        if changed:
            bound.arguments.update(changed)
            reached.write_text("planted")
        return function(*bound.args, **bound.kwargs)

    return wrong


def in_tensors(fault: KernelFault, arguments: dict[str, Any], format_name: str | None) -> dict[str, Tensor]:
    """The tensors among `arguments` that the fault changes; ArgumentError for a format that is none."""
    known = {each.format: each for each in FORMATS}
    if format_name not in known:
        raise ArgumentError(
            "--format", f"one of {', '.join(known)}, for tensors under stored names", repr(format_name)
        )
    held = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    assert fault.change is not None
    changed: Any = fault.change(Named(known[format_name], held))  # type: ignore[arg-type]
    if changed is None:
        return {}
    return {name: tensor for name, tensor in changed.fields().items() if not _same(tensor, held[name])}


def multiplying(function: Callable[..., Any], fault: KernelFault, reached: Path) -> Callable[..., Any]:
    """The function with the fault around it; its first argument of floats with two axes is x."""

    @functools.wraps(function)
    def wrong(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(function).bind(*arguments, **named)
        name = next((name for name, value in bound.arguments.items() if _is_input(value)), None)
        if name is None:
            return function(*arguments, **named)

        def product(x: Tensor) -> Any:
            bound.arguments[name] = x
            return function(*bound.args, **bound.kwargs)

        reached.write_text("planted")
        return fault.gemm(product, 0)(bound.arguments[name])

    return wrong


def _is_input(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
