"""Constants of modules and classes as golden text: names of keys and tensors, limits, tables.

Most are facts about other programs. A test of a format rarely notices a change of one entry among many.
"""

import ast
import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, TypeVar

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import qload
from qload.dtypes import Dtype

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
    if isinstance(value, (torch.dtype, torch.device, Dtype, range)):
        return str(value)
    if isinstance(value, Struct):
        return f"Struct({value.format!r})"
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f"{each.name}={constant_text(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__qualname__}({', '.join(shown)})"
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shortened(text: str) -> str:
    """Return a text, or the length and the digest of a long one."""
    return f"{len(text)} characters, {digest(text)}" if len(text) > LONGEST_TEXT else text


def constants(package: str) -> Iterator[str]:
    """Yield a line for each constant that a module of the package, or a class of it, defines."""
    for module in modules(package):
        values = {name: vars(module)[name] for name in defined_names(module)} | class_values(module)
        for name, value in sorted(values.items()):
            if isinstance(value, TypeVar):
                continue
            yield f"{module.__name__.removeprefix('qload.')}.{name} = {shortened(constant_text(value))}"


def defined_names(module: Any) -> set[str]:
    """Return the public constants that a module assigns at its top level; private names may be caches."""
    source = Path(module.__file__).read_text()
    return set(re.findall(r"^([A-Z][A-Z0-9_]*)(?:: [^=\n]+)? = ", source, re.MULTILINE))


def class_values(module: Any) -> dict[str, Any]:
    """Return the attributes that the classes of a module assign, without fields; members of an enum too."""
    values = {}
    for node in ast.parse(Path(module.__file__).read_text()).body:
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            known = vars(vars(module)[node.name])
            for target in assigned_targets(statement):
                value = known.get(target)
                values[f"{node.name}.{target}"] = value.value if isinstance(value, Enum) else value
    return values


def assigned_targets(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a class assigns to the class itself."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and statement.value and isinstance(statement.target, ast.Name):
        return [statement.target.id] if "ClassVar" in ast.unparse(statement.annotation) else []
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_constants_of_a_package(package: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(constants(package)) == golden
