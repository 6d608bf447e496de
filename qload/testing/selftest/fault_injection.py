"""A pytest plugin that plants one fault in a function of the project under test: `pytest -p THIS`.

`qload selftest --tests` loads it. The function packs a weight, given as a typed weight of qload or as tensors
under their stored names (`qweight`, `scales`, ...) in any order of arguments; or it multiplies.
"""

import functools
import importlib
import inspect
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import FORMATS
from qload.spec import TensorSpec, Weight
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.runner import FAILED, PASSED, run_faults, run_pytest

OPTIONS = ("fault", "pack", "gemm", "format", "reached")


class NamedTensors:
    """Tensors under their stored names, with the methods of a weight that a fault calls."""

    def __init__(self, weight_type: type[Weight], tensors: dict[str, Tensor]) -> None:
        self.format = weight_type.format
        self.config: Any = weight_type.example
        self._type, self._tensors = weight_type, tensors

    def tensors(self, config: Any) -> tuple[TensorSpec, ...]:
        """Return the declaration of the format."""
        return self._type.tensors(config)

    def fields(self) -> dict[str, Tensor]:
        """Return the tensors by field."""
        return self._tensors

    def holding(self, tensors: dict[str, Tensor]) -> "NamedTensors":
        """Return a copy with some other `tensors`."""
        return NamedTensors(self._type, self._tensors | tensors)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `qload selftest` passes."""
    group = parser.getgroup("qload selftest")
    for name in OPTIONS:
        group.addoption(f"--qload-plant-{name}", default=None, help="set by qload selftest")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the named functions by faulty ones."""
    values = {name: config.getoption(f"--qload-plant-{name}") for name in OPTIONS}
    if values["fault"] is None:
        return
    fault = next(each for each in KERNEL_FAULTS if each.name == values["fault"])
    reached = Path(values["reached"])
    if fault.change is not None and values["pack"]:
        replace_function(
            values["pack"], lambda packing: with_fault(packing, fault, values["format"], reached)
        )
    if fault.around is not None and values["gemm"]:
        replace_function(values["gemm"], lambda gemm: around_product(gemm, fault, reached))


def replace_function(place: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `module:function`, or `module:Class.method`, in the module that defines it."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrap(getattr(owner, name)))


def with_fault(
    packing: Callable[..., Any], fault: KernelFault, format_name: str | None, reached: Path
) -> Callable[..., Any]:
    """Wrap a `packing` function so that its weight has the `fault`; write the file `reached` at a call."""

    @functools.wraps(packing)
    def faulty(*arguments: Any, **keywords: Any) -> Any:
        bound = inspect.signature(packing).bind(*arguments, **keywords)
        for name, value in bound.arguments.items():
            if isinstance(value, Weight):
                packed = fault.packed(value)
                if packed is not None:
                    bound.arguments[name] = packed
                    reached.write_text("planted")
                return packing(*bound.args, **bound.kwargs)
        changed = changed_tensors(fault, bound.arguments, format_name)
        if changed:
            bound.arguments.update(changed)
            reached.write_text("planted")
        return packing(*bound.args, **bound.kwargs)

    return faulty


def changed_tensors(
    fault: KernelFault, arguments: dict[str, Any], format_name: str | None
) -> dict[str, Tensor]:
    """Return the tensors among `arguments` that the fault changes; ArgumentError for an unknown format."""
    known = {each.format: each for each in FORMATS}
    if format_name not in known:
        raise ArgumentError(
            "--format", f"one of {', '.join(known)}, for tensors under stored names", repr(format_name)
        )
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    assert fault.change is not None
    changed: Any = fault.change(NamedTensors(known[format_name], tensors))  # type: ignore[arg-type]
    if changed is None:
        return {}
    return {name: tensor for name, tensor in changed.fields().items() if not _equal(tensor, tensors[name])}


def around_product(product: Callable[..., Any], fault: KernelFault, reached: Path) -> Callable[..., Any]:
    """Wrap a `product` with the `fault`; x is its first argument of floats with two axes."""

    @functools.wraps(product)
    def faulty(*arguments: Any, **keywords: Any) -> Any:
        bound = inspect.signature(product).bind(*arguments, **keywords)
        names = (
            name
            for name, value in bound.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2
        )
        name = next(names, None)
        if name is None:
            return product(*arguments, **keywords)

        def of_inputs(x: Tensor) -> Any:
            bound.arguments[name] = x
            return product(*bound.args, **bound.kwargs)

        reached.write_text("planted")
        return fault.gemm(of_inputs, 0)(bound.arguments[name])

    return faulty


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


PLUGIN = "qload.testing.selftest.fault_injection"

End = Literal["caught", "let through", "not reached"]


@dataclass(frozen=True)
class Outcome:
    """The result of the tests with one fault.

    Attributes
    ----------
    fault, words
        The id and the description of the fault.
    end
        "caught" by a test that failed; "let through"; "not reached", if no test called the function with a
        weight that the fault changes.
    """

    fault: str
    words: str
    end: End

    def row(self) -> dict[str, Any]:
        """The columns of the report by name."""
        return {"fault": self.fault, "words": self.words, "end": self.end}


def adopted_matrix(
    tests: str, *, pack: str | None = None, gemm: str | None = None, format: str | None = None
) -> Iterator[Outcome]:
    """Run the tests of a project once for each fault, planted in its own functions.

    Parameters
    ----------
    tests
        The command, "pytest tests/kernels"; it runs in the working directory.
    pack, gemm
        `module:function` of the packing of a weight, and of the product of x (M, K) by it; at least one.
    format
        The format of the tensors of `pack`, named as in qload, if its parameters are tensors under stored
        names.

    Raises
    ------
    ArgumentError
        If the command is not pytest, or the tests fail before a fault is planted.
    """
    if pack is None and gemm is None:
        raise ArgumentError("pack or gemm", "module:function", "neither")
    options = _pytest_options(tests)
    applicable = [
        fault
        for fault in KERNEL_FAULTS
        if (fault.change if pack else None) or (fault.around if gemm else None)
    ]
    _run(options, (PASSED,))
    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        reached = Path(folder) / "reached"

        def trial(fault: KernelFault) -> Iterator[Outcome]:
            reached.unlink(missing_ok=True)
            values = {"fault": fault.name, "reached": reached, "pack": pack, "gemm": gemm, "format": format}
            planted = [f"--qload-plant-{name}={value}" for name, value in values.items() if value is not None]
            code = _run([*options, *planted], (PASSED, FAILED))
            end: End = "caught" if code == FAILED else "let through"
            yield Outcome(fault.name, fault.words, end if reached.exists() else "not reached")

        yield from run_faults(applicable, trial)


def _pytest_options(tests: str) -> list[str]:
    words = shlex.split(tests)
    if not words or Path(words[0]).name not in ("pytest", "py.test"):
        raise ArgumentError("tests", "a command of pytest, such as 'pytest tests/kernels'", repr(tests))
    return ["-q", "-x", "--tb=no", "-p", PLUGIN, *words[1:]]


def _run(options: list[str], allowed: tuple[int, ...]) -> int | None:
    qload_folder = Path(__file__).resolve().parents[3]
    expected = "tests that pass" if allowed == (PASSED,) else "tests that pass or fail"
    return run_pytest(*options, path=[os.getcwd(), qload_folder]).check(allowed, expected).exit_code
