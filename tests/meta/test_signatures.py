"""Quantizers in public signatures: objects, never a name, a tuple or a dict of settings."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qload
from tests.annotations import parameters

NAMES = ("quantize", "quantizer")
LOOSE = ("str", "Literal", "tuple", "Tuple", "list", "Sequence", "dict", "Dict", "Mapping", "Any")


def public_modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages(qload.__path__, "qload.")]
    needs_an_engine = {f"qload.engines.vllm.{name}" for name in ("config", "kernel", "methods")}
    needs_an_engine |= {name for name in found if name.startswith("qload.engines.transformers")}
    left_out = {name for name in found if "._" in name} | needs_an_engine
    return ["qload", *(name for name in found if name not in left_out)]


def functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every public function of a module, and every public method and constructor of its classes."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
    for name in names:
        value = getattr(loaded, name)
        if inspect.isfunction(value):
            yield f"{module}.{name}", value
        elif inspect.isclass(value) and value.__module__.startswith("qload"):
            for method, held in vars(value).items():
                made = getattr(held, "__func__", held)
                if inspect.isfunction(made) and (method == "__init__" or not method.startswith("_")):
                    yield f"{module}.{name}.{method}", made


def takes_it_loosely(name: str, annotation: str) -> bool:
    """Return whether a parameter has the name of a quantizer and an annotation of text or loose settings."""
    if name not in NAMES and not name.startswith("quantizer_"):
        return False
    used = {node.id for node in ast.walk(ast.parse(annotation or "Any")) if isinstance(node, ast.Name)}
    return not used.isdisjoint(LOOSE) or name.startswith("quantizer_")


def test_no_public_signature_takes_a_quantizer_as_text_or_loose_settings() -> None:
    wrong = [
        f"{where}({name}: {annotation})"
        for module in public_modules()
        for where, function in functions(module)
        for name, parameter in parameters(function).items()
        for annotation in [inspect.formatannotation(parameter.annotation).replace("typing.", "")]
        if takes_it_loosely(name, "" if parameter.annotation is parameter.empty else annotation)
    ]

    assert wrong == []


@pytest.mark.parametrize(
    ("name", "annotation", "loose"),
    [
        ("quantizer", "str", True),
        ("quantizer", "str | None", True),
        ("quantize", "Literal['fp8', 'eetq'] | None", True),
        ("quantizer", "tuple[int, int, str, bool]", True),
        ("quantizer", "dict[str, int]", True),
        ("quantizer", "", True),
        ("quantizer_params", "Params", True),
        ("quantizer", "qload.quantize.quantizers.Quantizer", False),
        ("prefix", "str", False),
    ],
)
def test_the_walk_knows_what_is_loose(name: str, annotation: str, loose: bool) -> None:
    assert takes_it_loosely(name, annotation) == loose


def test_the_walk_sees_the_constructor_that_takes_a_quantizer() -> None:
    (loader,) = [
        f for name, f in functions("qload.quantize.loading") if name.endswith("QuantizingLoader.__init__")
    ]

    assert "quantizer" in inspect.signature(loader).parameters
    assert all(any(True for _ in functions(module)) for module in ("qload", "qload.weights", "qload.methods"))


@pytest.mark.parametrize("module", ["qload.formats", "qload.repacking", "qload.spec", "qload.weights"])
def test_a_package_without_a_stub_exports_what_it_defines_and_imports_from_its_modules(module: str) -> None:
    loaded = importlib.import_module(module)
    names = set[str]()
    for node in ast.parse(Path(str(loaded.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{module}."):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}

    assert names - {"__all__"} <= {*loaded.__all__}
    assert all(hasattr(loaded, name) for name in loaded.__all__)
