"""What a public docstring has to say, as functions that return what is wrong with one object.

A parameter counts as documented where its name stands in backticks, opens an entry of a section, or is
followed by its shape, as in "x (M, K)". A method may leave to the method that it overrides what that one
says; a constructor's parameters, and what it raises, stand in the docstring of its class.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qload import errors

PACKAGES = (
    "qload",
    "qload.methods",
    "qload.models",
    "qload.testing",
    "qload.kernels",
    "qload.kernel_formats",
    "qload.layouts",
    "qload.quantize.policy",
    "qload.repacking",
)
CONSTRUCTORS = ("__init__", "__post_init__")
ERRORS = {name for name in errors.__all__ if name.endswith("Error")}


@dataclass(frozen=True)
class Documented:
    """A public class or function: its name, its own docstring, those it may rely on, and what it calls."""

    name: str
    own: str
    inherited: str
    parameters: tuple[str, ...]
    bodies: tuple[Callable[..., Any], ...]

    @property
    def text(self) -> str:
        """All that a reader is told."""
        return f"{self.own}\n{self.inherited}"

    @property
    def raises(self) -> frozenset[str]:
        """The errors of qload's that its own code raises by name."""
        return frozenset[str]().union(*(raised(body) for body in self.bodies))


def public_names(package: str) -> dict[str, Any]:
    """What a package offers: its `__all__`, or what a module without one defines itself."""
    module = importlib.import_module(package)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    return {name: getattr(module, name) for name in names}


def is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def constants() -> Iterator[tuple[str, str]]:
    """(package, name) of every public value that is no class and no function."""
    for package in PACKAGES:
        yield from ((package, name) for name, value in public_names(package).items() if not is_code(value))


@cache
def documented() -> tuple[Documented, ...]:
    """Every public class and function once, and every public method of the classes, their bases' too."""
    values = [value for package in PACKAGES for value in public_names(package).values() if is_code(value)]
    return tuple({each.name: each for value in values for each in of(value)}.values())


def of(value: Any) -> Iterator[Documented]:
    """A class with its public methods, or a function alone."""
    if not inspect.isclass(value):
        yield of_function(f"{value.__module__}.{value.__qualname__}", value, "")
        return
    yield of_class(value)
    bases = [base for base in value.__mro__ if base.__module__ == value.__module__ or is_ours(base)]
    for base in bases:
        for name, held in vars(base).items():
            if not name.startswith("_") and (function := function_of(held)) is not None:
                full = f"{base.__module__}.{base.__qualname__}.{name}"
                yield of_function(full, function, inherited(base, name))


def is_ours(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "qload"


def function_of(held: Any) -> Callable[..., Any] | None:
    """The function behind a method, a class method or a property; None for anything else."""
    held = getattr(held, "fget", None) or getattr(held, "func", None) or getattr(held, "__func__", held)
    return held if inspect.isfunction(held) else None


def inherited(owner: type, name: str) -> str:
    """The docstrings of the methods that a method overrides."""
    held = [vars(base).get(name) for base in owner.__mro__[1:]]
    return "\n".join(inspect.getdoc(each) or "" for each in held if each is not None)


def of_function(name: str, function: Callable[..., Any], above: str) -> Documented:
    return Documented(name, doc(function), above, parameters(function), (function,))


def of_class(value: type) -> Documented:
    """A class as its constructor is called."""
    made = [vars(value)[name] for name in CONSTRUCTORS if inspect.isfunction(vars(value).get(name))]
    written = [each for each in made if is_ours(each) and source(each)]  # not by a decorator or a protocol
    names = [name for each in written for name in parameters(each)]
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    above = "\n".join(doc(base) for base in value.__mro__[1:] if is_ours(base))
    full = f"{value.__module__}.{value.__qualname__}"
    return Documented(full, doc(value), above, tuple(dict.fromkeys(names)), tuple(written))


def doc(value: object) -> str:
    """The docstring that was written, not the one that `dataclass` makes up."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    made_up = inspect.isclass(value) and (text or "").startswith(f"{value.__name__}(")
    return "" if made_up else inspect.cleandoc(text or "")


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    names = inspect.signature(function).parameters
    return tuple(name for name in names if name not in ("self", "cls") and not name.startswith("_"))


def raised(function: Callable[..., Any]) -> frozenset[str]:
    """The errors of qload's that a function's own body raises by name."""
    tree = ast.parse(textwrap.dedent(source(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = [call.func if isinstance(call, ast.Call) else call for call in calls]
    return frozenset(name.id for name in names if isinstance(name, ast.Name) and name.id in ERRORS)


def source(function: Callable[..., Any]) -> str:
    """The text of a function; none where another library made it, as a strategy of Hypothesis's."""
    return inspect.getsource(function) if Path(function.__code__.co_filename).is_file() else ""


def no_summary(each: Documented) -> str | None:
    """The first line, where it is not a sentence: a capital, shape or dtype first, a full stop last."""
    first = each.own.partition("\n")[0]
    begins = re.match(r"[A-Z0-9(`|]|u?int\d|float\d", first)
    sentence = begins and len(first.split()) > 1 and first.endswith(".")
    return None if sentence else first or "no docstring"


def undocumented(each: Documented) -> list[str]:
    """The parameters that no docstring names."""
    return [name for name in each.parameters if not names(each.text, name)]


def unnamed_errors(each: Documented) -> list[str]:
    """The errors that are raised and not named."""
    return sorted(error for error in each.raises if not re.search(rf"\b{error}\b", each.text))


def names(text: str, parameter: str) -> bool:
    """Whether a docstring documents a parameter."""
    quoted = rf"`[^`\n]*\b{parameter}\b[^`\n]*`"
    entry = rf"^(?:[*\w]+, )*\**{parameter}(?:, [*\w]+)*\n +\S"
    shaped = rf"\b{parameter} \("
    return re.search(f"{quoted}|{entry}|{shaped}", text, re.MULTILINE) is not None
