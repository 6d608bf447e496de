"""Constants of the library as golden text: names of keys and tensors, limits, tables.

Most are facts about other programs. A test of a format rarely notices a change of one entry among many.
"""

import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import qload

OPTIONAL = {"engines", "native"}  # packages that depend on optional packages or on this machine
PACKAGES = sorted(
    each.name for each in pkgutil.iter_modules(qload.__path__) if each.ispkg and each.name not in OPTIONAL
)
LONGEST_TEXT = 1000  # characters; longer tables are shown by their digest


def modules(package: str) -> Iterator[Any]:
    """Yield the modules of a package."""
    root = importlib.import_module(f"qload.{package}")
    yield root
    for each in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if not each.name.endswith("__main__"):
            yield importlib.import_module(each.name)


def constant_text(value: Any) -> str:
    """Return the text of a value: sorted sets, names of functions, digests of tensors."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f"re({value.pattern!r}, {value.flags})"
    if isinstance(value, Path):
        return value.name
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(constant_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{constant_text(k)}: {constant_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(constant_text, value))})"
    if isinstance(value, partial):
        return f"{constant_text(value.func)}{constant_text(value.args)}{constant_text(value.keywords)}"
    if isinstance(value, torch.Tensor):
        content = value.contiguous().view(torch.uint8) if value.dim() else value
        return f"{value.dtype} {tuple(value.shape)} {digest(str(content.tolist()))}"
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f"{each.name}={constant_text(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__qualname__}({', '.join(shown)})"
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def constants(package: str) -> Iterator[str]:
    """Yield a line for each constant that a module of the package defines."""
    for module in modules(package):
        for name in sorted(defined_names(module)):
            value = vars(module)[name]
            if isinstance(value, TypeVar):
                continue
            text = constant_text(value)
            if len(text) > LONGEST_TEXT:
                text = f"{len(text)} characters, {digest(text)}"
            yield f"{module.__name__.removeprefix('qload.')}.{name} = {text}"


def defined_names(module: Any) -> set[str]:
    """Return the public constants that a module assigns at its top level; private names may be caches."""
    source = Path(module.__file__).read_text()
    return set(re.findall(r"^([A-Z][A-Z0-9_]*)(?:: [^=\n]+)? = ", source, re.MULTILINE))


@pytest.mark.parametrize("package", PACKAGES)
def test_constants_of_a_package(package: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(constants(package)) == golden
