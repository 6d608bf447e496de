"""Checks of public docstrings, as functions from one object to its defects.

A docstring documents a parameter by its name in backticks, by an entry in a section, or by its shape after
the name, as in "x (M, K)". A method inherits the documentation of the overridden method; the docstring of a
class documents the parameters and the errors of its constructor.
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
    """Public class or function: its name, its docstring, inherited docstrings, parameters and functions."""

    name: str
    own: str
    inherited: str
    parameters: tuple[str, ...]
    bodies: tuple[Callable[..., Any], ...]

    @property
    def text(self) -> str:
        """All documentation of the object, inherited docstrings included."""
        return f"{self.own}\n{self.inherited}"

    @property
    def raises(self) -> frozenset[str]:
        """Errors of qload raised by name in the object's functions."""
        return frozenset[str]().union(*(raised(body) for body in self.bodies))


def public_names(package: str) -> dict[str, Any]:
    """Return the public names of a package: its `__all__`, or by default the definitions in its module."""
    module = importlib.import_module(package)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    return {name: getattr(module, name) for name in names}


def is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def constants() -> Iterator[tuple[str, str]]:
    """Yield (package, name) of every public value except classes and functions."""
    for package in PACKAGES:
        yield from ((package, name) for name, value in public_names(package).items() if not is_code(value))


@cache
def documented() -> tuple[Documented, ...]:
    """Return every public class and function once, and every public method of the classes and their bases."""
    values = [value for package in PACKAGES for value in public_names(package).values() if is_code(value)]
    return tuple({each.name: each for value in values for each in of(value)}.values())


def of(value: Any) -> Iterator[Documented]:
    """Yield a class with its public methods, or a single function."""
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
    """Return the function of a method, a class method or a property; None for any other value."""
    held = getattr(held, "fget", None) or getattr(held, "func", None) or getattr(held, "__func__", held)
    return held if inspect.isfunction(held) else None


def inherited(owner: type, name: str) -> str:
    """Return the docstrings of the overridden methods."""
    held = [vars(base).get(name) for base in owner.__mro__[1:]]
    return "\n".join(inspect.getdoc(each) or "" for each in held if each is not None)


def of_function(name: str, function: Callable[..., Any], above: str) -> Documented:
    return Documented(name, doc(function), above, parameters(function), (function,))


def of_class(value: type) -> Documented:
    """Return the documentation of a class, with the parameters of its constructor."""
    made = [vars(value)[name] for name in CONSTRUCTORS if inspect.isfunction(vars(value).get(name))]
    written = [each for each in made if is_ours(each) and source(each)]  # not generated
    names = [name for each in written for name in parameters(each)]
    if dataclasses.is_dataclass(value):
        names += [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    above = "\n".join(doc(base) for base in value.__mro__[1:] if is_ours(base))
    full = f"{value.__module__}.{value.__qualname__}"
    return Documented(full, doc(value), above, tuple(dict.fromkeys(names)), tuple(written))


def doc(value: object) -> str:
    """Return the docstring in the source, without the default docstring of `dataclass`."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    made_up = inspect.isclass(value) and (text or "").startswith(f"{value.__name__}(")
    return "" if made_up else inspect.cleandoc(text or "")


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    names = inspect.signature(function).parameters
    return tuple(name for name in names if name not in ("self", "cls") and not name.startswith("_"))


def raised(function: Callable[..., Any]) -> frozenset[str]:
    """Return the errors of qload raised by name in the body of a function."""
    tree = ast.parse(textwrap.dedent(source(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = [call.func if isinstance(call, ast.Call) else call for call in calls]
    return frozenset(name.id for name in names if isinstance(name, ast.Name) and name.id in ERRORS)


def source(function: Callable[..., Any]) -> str:
    """Return the source of a function; empty for a generated function of a library such as Hypothesis."""
    return inspect.getsource(function) if Path(function.__code__.co_filename).is_file() else ""


def no_summary(each: Documented) -> str | None:
    """Return the first line unless it is a sentence: a capital, shape or dtype first, a full stop last."""
    first = each.own.partition("\n")[0]
    begins = re.match(r"[A-Z0-9(`|]|u?int\d|float\d", first)
    sentence = begins and len(first.split()) > 1 and first.endswith(".")
    return None if sentence else first or "no docstring"


def undocumented(each: Documented) -> list[str]:
    """Return the parameters without documentation."""
    return [name for name in each.parameters if not names(each.text, name)]


def unnamed_errors(each: Documented) -> list[str]:
    """Return the raised errors without documentation."""
    return sorted(error for error in each.raises if not re.search(rf"\b{error}\b", each.text))


def names(text: str, parameter: str) -> bool:
    """Return whether a docstring documents a parameter."""
    quoted = rf"`[^`\n]*\b{parameter}\b[^`\n]*`"
    entry = rf"^(?:[*\w]+, )*\**{parameter}(?:, [*\w]+)*\n +\S"
    shaped = rf"\b{parameter} \("
    return re.search(f"{quoted}|{entry}|{shaped}", text, re.MULTILINE) is not None
