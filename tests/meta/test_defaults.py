"""Defaults of public functions and constructors, as golden text.

Another default changes the result of every call without the option, also where all tests pass the option.
"""

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.meta.docstrings import PACKAGES, public_names
from tests.meta.test_dataclasses import classes


def public_functions(package: str) -> Iterator[tuple[str, Any]]:
    """Yield the public functions, classes and methods of a package, by name."""
    for name, value in sorted(public_names(package).items()):
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and Enum not in value.__mro__ and Protocol not in value.__mro__:
            yield name, value
            for method, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def default_text(value: object) -> str:
    """Return the text of a default: functions and classes by name, everything else as Python shows it."""
    return getattr(value, "__qualname__", None) or repr(value)


def parameter_text(parameter: inspect.Parameter) -> str:
    """Return the text of a parameter with its default; a keyword-only one has a star."""
    star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
    return f"{star}{parameter.name}={default_text(parameter.default)}"


def defaults(package: str) -> Iterator[str]:
    """Yield a line for every public function and constructor with defaults."""
    for name, function in public_functions(package):
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # a class of another library
            continue
        given = [each for each in parameters if each.default is not each.empty]
        if given:
            yield f"{name}({', '.join(map(parameter_text, given))})"


@pytest.mark.parametrize("package", PACKAGES)
def test_defaults_of_public_functions(package: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(defaults(package)) == golden


def overridden_defaults() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each parameter of an override, its default, and the one in the base class."""
    for kind in classes():
        for method, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if method == "__init__" or not inspect.isfunction(function):
                continue
            for base in kind.__mro__[1:]:
                overridden = getattr(vars(base).get(method), "__func__", vars(base).get(method))
                known = inspect.signature(overridden).parameters if inspect.isfunction(overridden) else {}
                for name, parameter in inspect.signature(function).parameters.items():
                    pair = parameter.default, known[name].default if name in known else parameter.empty
                    if parameter.empty not in pair:
                        yield f"{kind.__qualname__}.{method}({name})", *pair


def test_an_override_has_the_defaults_of_its_base_class() -> None:
    """Callers know the base class alone: `nn.Module.to` calls `_apply` without `recurse`."""
    pairs = list(overridden_defaults())

    assert pairs
    assert [name for name, own, base in pairs if repr(own) != repr(base)] == []
