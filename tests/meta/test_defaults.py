"""Defaults of functions and constructors, also of private ones, as golden text.

Another default changes the result of every call without the option, also where all tests pass the option.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.meta.test_constants import PACKAGES, constant_text, modules, shortened
from tests.meta.test_dataclasses import classes


def functions(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield each function, constructor and method that a module defines, by name."""
    for name, value in vars(module).items():
        function = inspect.unwrap(value) if callable(value) else value
        if getattr(function, "__module__", "") != module.__name__:
            continue
        if inspect.isfunction(function):
            yield name, function
        elif inspect.isclass(function):
            for method, member in vars(function).items():
                own = inspect.unwrap(getattr(member, "__func__", member))
                if inspect.isfunction(own):
                    yield f"{name}.{method}", own


def parameter_text(parameter: inspect.Parameter) -> str:
    """Return the text of a parameter with its default; a keyword-only one has a star."""
    star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
    return f"{star}{parameter.name}={shortened(constant_text(parameter.default))}"


def defaults(package: str) -> Iterator[str]:
    """Yield a line for every function and constructor of a package with defaults."""
    for module in modules(package):
        for name, function in functions(module):
            parameters = inspect.signature(function).parameters.values()
            given = [each for each in parameters if each.default is not each.empty]
            if given:
                place = module.__name__.removeprefix("qload.")
                yield f"{place}.{name}({', '.join(map(parameter_text, given))})"


@pytest.mark.parametrize("package", PACKAGES)
def test_defaults_of_a_package(package: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(sorted(defaults(package))) == golden


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
