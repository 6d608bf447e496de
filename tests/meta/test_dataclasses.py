"""Frozen records with few exceptions, and comparison of weights by identity: tensors compare by element."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from abc import ABC
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Protocol, get_origin, is_typeddict

import pydantic
from syrupy.assertion import SnapshotAssertion
from torch import nn

import qload
from qload.errors import QloadError
from qload.spec import Weight


@cache
def classes() -> tuple[type[Any], ...]:
    """Yield every class of the library."""
    return tuple(dict.fromkeys(found()))


def found() -> Iterator[type[Any]]:
    names = (name for _, name, _ in pkgutil.walk_packages(qload.__path__, "qload."))
    for name in (name for name in names if "__main__" not in name):
        try:
            module = importlib.import_module(name)
        except ImportError:  # optional dependency
            continue
        yield from (
            kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == name
        )


def records() -> list[Any]:
    return [kind for kind in classes() if "__dataclass_params__" in vars(kind)]


# Records with fields filled in during a run.
MUTABLE = {
    *("Ledger", "Traffic"),
    *("Comparison", "LogitResult", "CompareState", "ScaleFit", "Distance", "Checkpoint"),
    "ValueDiff",
    "NativeInputs",  # its codes have the dtype of the product
}
NEVER_COMPARED = {  # though their fields are tensors
    *("ByteStripsCall", "ExllamaCall", "KernelCall", "MarlinCall", "StripsCall"),
    *("ExpertMatrix", "ExpertsCall", "SortedPairs", "NativeInputs"),
    *("CaseContent", "DrawnLayer", "Guards", "ModelPrompt", "RunPlan", "WeightComparison", "Window"),
    *("Codes", "ExactScales", "Fit", "Piece", "Prefetch", "TensorMove"),
}
OF_EACH_TENSOR = {"Entry", "GGUFEntry", "Slot", "TensorInfo", "TensorView"}
BASES = {  # base classes with the fields
    "ReportBase",
    "Grouped",
    "ConvertedStorage",
    "EvidencedZeroPoints",
    "PackedWords",
}


def test_a_record_is_frozen() -> None:
    thawed = [kind for kind in records() if not kind.__dataclass_params__.frozen]
    others = [kind.__qualname__ for kind in thawed if not issubclass(kind, QloadError)]

    assert records()
    assert set(others) <= MUTABLE


def test_a_record_of_each_tensor_has_no_dict() -> None:
    slotted = {kind.__qualname__ for kind in records() if "__slots__" in vars(kind)}

    assert slotted >= OF_EACH_TENSOR


def test_what_holds_tensors_is_compared_by_identity() -> None:
    kinds = [kind for kind in records() if issubclass(kind, (Weight, QloadError)) or _has_tensors(kind)]
    compared = {kind.__qualname__ for kind in kinds if kind.__dataclass_params__.eq}

    assert compared <= NEVER_COMPARED


def test_a_weight_shows_shapes_and_no_values_of_a_million() -> None:
    weights = [kind for kind in records() if issubclass(kind, Weight) and kind is not Weight]

    assert weights
    assert [kind.__qualname__ for kind in weights if kind.__dataclass_params__.repr] == []


def test_what_has_fields_is_a_record() -> None:
    bare = []
    for kind in classes():
        fields = [name for name, hint in inspect.get_annotations(kind).items() if _is_field(kind, name, hint)]
        if fields and kind not in records() and not _is_other(kind) and kind.__name__ not in BASES:
            bare.append(kind.__qualname__)

    assert bare == []


def test_a_method_that_returns_a_value_has_a_body_or_is_abstract() -> None:
    concrete = [
        f"{kind.__qualname__}.{name}"
        for kind in classes()
        if ABC in kind.__mro__
        for name, member in vars(kind).items()
        if (function := getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function) and function.__annotations__.get("return") not in (None, "None")
        if _has_no_body(function) and not getattr(member, "__isabstractmethod__", False)
    ]

    assert concrete == []


OPTIONS = {"init": True, "repr": True, "eq": True, "order": False, "unsafe_hash": False, "frozen": False}
FLAGS = {"init": True, "repr": True, "compare": True, "hash": None, "kw_only": False}


def record_text(kind: Any) -> str:
    """Return the options of a record that differ from the defaults, and its fields with such flags."""
    options = _changed(kind.__dataclass_params__, OPTIONS) + ["slots"] * ("__slots__" in vars(kind))
    shown = [f"{kind.__module__}.{kind.__qualname__}({', '.join(options)})"]
    for each in dataclasses.fields(kind):
        flags = _changed(each, FLAGS)
        if each.default_factory is not dataclasses.MISSING:
            flags.append(f"factory={each.default_factory.__qualname__}")  # type: ignore[attr-defined]
        shown += [f"{each.name}({', '.join(flags)})"] * bool(flags)
    return " ".join(shown)


def _changed(options: Any, defaults: dict[str, Any]) -> list[str]:
    return [f"{name}={now}" for name, usual in defaults.items() if (now := getattr(options, name)) != usual]


def test_options_of_records(golden: SnapshotAssertion) -> None:
    """A record that is mutable, compared or shown in another way is noticed by few callers."""
    own = (kind for kind in records() if kind.__module__.split(".")[1] != "engines")

    assert "\n".join(sorted(map(record_text, own))) == golden


def _has_no_body(function: Any) -> bool:
    def documented() -> None:
        """Without statements."""

    if function.__code__.co_code != documented.__code__.co_code:  # nearly all; the source is slow to parse
        return False
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Expr)


def _has_tensors(kind: Any) -> bool:
    texts = (str(each.type) for each in dataclasses.fields(kind))
    return any(re.search(r"\bTensor\b", text) and "Callable" not in text for text in texts)


def _is_field(kind: Any, name: str, hint: Any) -> bool:
    return get_origin(hint) is not ClassVar and "ClassVar" not in str(hint) and name not in vars(kind)


def _is_other(kind: Any) -> bool:
    return (
        is_typeddict(kind)
        or issubclass(kind, (pydantic.BaseModel, tuple, nn.Module))
        or Protocol in kind.__mro__
    )


NAMED = ("spec", "layouts", "formats", "kernel_formats", "kernels", "methods")  # need no optional package


def test_names_of_classes(golden: SnapshotAssertion) -> None:
    """Programs read these names from `format`, errors and reports."""
    own = (kind for kind in classes() if kind.__module__.split(".")[1] in NAMED)
    names = {
        f"{k.__module__}.{k.__qualname__}": vars(k)["name"] for k in own if type(vars(k).get("name")) is str
    }
    assert "\n".join(f"{kind}: {name!r}" for kind, name in sorted(names.items())) == golden
