"""Defaults of public signatures and values of constants, as golden text that a change has to state.

Another default changes the result of a call without the option, and another name in a table changes the files
and configs that qload accepts: both deserve a line in a diff, also where all tests pass the option.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from textwrap import indent
from types import ModuleType
from typing import Any, Protocol

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import qload

ENGINES = ("qload.engines.transformers", "qload.engines.vllm")  # not installed in every environment
PACKAGES = sorted(name for _, name, _ in pkgutil.iter_modules(qload.__path__) if not name.startswith("_"))
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
PLAIN = (str, bytes, int, float, complex, range, torch.dtype, torch.device, type(None))
LEFT_OUT = {
    **dict.fromkeys(("TEXTS", "RULES"), "the pages of docs/rules, which have their own tests"),
    **dict.fromkeys(
        ("DOTTED_SUFFIXES", "DOTTED_ENDINGS", "UNDERSCORE_SUFFIXES"),
        "in the order of a set, derived from tables here",
    ),
    "_LOADED_MODULES": "depends on the machine",
}
LINE, INDENT = 140, "  "
MAX_LENGTH = 300  # of a text that is data; longer ones are help, which tests of the command line show


@cache
def modules(package: str) -> tuple[ModuleType, ...]:
    """Return every module of a package that can be imported without an engine and without a compiler."""
    first = importlib.import_module(f"qload.{package}")
    names = [
        each.name for each in pkgutil.walk_packages(getattr(first, "__path__", []), f"{first.__name__}.")
    ]
    names = [name for name in names if "._" not in name and not name.startswith(ENGINES)]
    return (first, *map(importlib.import_module, names))


def own(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module, and their methods, by qualified name."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and not issubclass(value, (Enum, Protocol)):
            yield name, value
            for method, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


class Names:
    """Texts of values, equal on every machine: a record has its fields once, then its name."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def shown(self, value: Any) -> str | None:
        """Return the text of a value, or None of one that has none: a tensor, a type variable.

        Sets are sorted, records have their fields, functions and classes their names.
        """
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, (frozenset, set)):
            return self.joined("{}", sorted(f"{self.shown(each)}" for each in value))
        if isinstance(value, Mapping):
            pairs = value.items()
            return self.joined("{}", (f"{self.shown(key)}: {self.shown(each)}" for key, each in pairs))
        if isinstance(value, (tuple, list)):
            return self.joined("()", (f"{self.shown(each)}" for each in value))
        if isinstance(value, re.Pattern):
            return f"/{value.pattern}/"
        if isinstance(value, partial):
            return f"{self.shown(value.func)}{self.shown(value.args)}{self.shown(value.keywords)}"
        if isinstance(value, Enum):
            return str(value)
        if is_dataclass(value) and not isinstance(value, type):
            pairs = ((each, getattr(value, each.name, None)) for each in fields(value))
            held = (f"{each.name}={self.shown(own)}" for each, own in pairs if own is not each.default)
            text = type(value).__name__ + self.joined("()", held)
            self.known[id(value)] = f"{type(value).__name__}(...)"
            return text
        if isinstance(value, PLAIN):
            return repr(value)
        return getattr(value, "__qualname__", None)

    def joined(self, brackets: str, parts: Iterable[str]) -> str:
        """Return the parts in one line, or in one each where that is long."""
        listed = list(parts)
        text = ", ".join(listed)
        if len(text) > LINE:
            text = "".join(f"\n{indent(each, INDENT)}," for each in listed) + "\n"
        return f"{brackets[0]}{text}{brackets[1]}"

    def constants(self, module: ModuleType) -> Iterator[str]:
        """Yield a text for every constant that the module assigns, and its public names."""
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if name == "__all__":
                yield f"{module.__name__}.__all__ = {self.shown(sorted(value))}"
                continue
            assigned = CONSTANT.fullmatch(name) and re.search(rf"^{name}\b[^=\n]*= ", source, re.MULTILINE)
            if not assigned or name in LEFT_OUT or (isinstance(value, str) and len(value) > MAX_LENGTH):
                continue
            text = self.shown(value)
            if text is not None:
                yield f"{module.__name__}.{name} = {text}"
            if id(value) in self.known:
                self.known[id(value)] = name


def unlike_others(record: Any) -> Iterator[str]:
    """Yield the fields that a comparison, a hash, a text or the constructor leaves out."""
    for each in fields(record):
        left_out = [name for name in ("compare", "repr", "init") if not getattr(each, name)]
        left_out += ["hash"] if each.hash is False else []
        if left_out:
            yield f"{each.name}: no {', '.join(left_out)}"


def defaults(module: ModuleType) -> Iterator[str]:
    """Yield a line for every public function and constructor with defaults."""
    names = Names()
    for name, function in own(module):
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # a class of another library
            continue
        given = [
            f"{each.name}={names.shown(each.default)}"
            for each in parameters
            if each.default is not each.empty
        ]
        if given:
            yield f"{module.__name__}.{name}({', '.join(given)})"
        if is_dataclass(function):
            yield from (f"{module.__name__}.{name}.{each}" for each in unlike_others(function))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_defaults_of(package: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(line for module in modules(package) for line in defaults(module)) == golden


@pytest.mark.parametrize("package", PACKAGES)
def test_the_constants_of(package: str, golden: SnapshotAssertion) -> None:
    names = Names()

    assert "\n".join(line for module in modules(package) for line in names.constants(module)) == golden
