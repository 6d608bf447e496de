"""Records are frozen, but for a few, and weights are compared by identity: tensors have no one answer."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, get_origin, is_typeddict

import pydantic
import pytest
from torch import nn

import qload
from qload.devices import StoredCodes, StoredTable
from qload.errors import QloadError

MODULES = [name for _, name, _ in pkgutil.walk_packages(qload.__path__, "qload.") if "__main__" not in name]


def classes() -> Iterator[type[Any]]:
    """Every class of the library."""
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # what only some installations have
            continue
        yield from (
            kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == name
        )


RECORDS = [kind for kind in dict.fromkeys(classes()) if "__dataclass_params__" in vars(kind)]
# What is filled in as a run goes on.
MUTABLE = {
    *("Ledger", "LayerTable", "FindingTable", "Traffic"),
    *("Comparison", "Compared", "Watching", "ScaleFit", "Distance", "Subject"),
    "ValueDiff",
    "NativeInputs",  # whose codes are made in the type that a product asks for
}
BASES = {"Answer", "Grouped"}  # of classes that have the fields


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__qualname__)
def test_a_record_is_frozen(kind: Any) -> None:
    params = kind.__dataclass_params__

    assert params.frozen or issubclass(kind, QloadError) or kind.__name__ in MUTABLE
    if issubclass(kind, (qload.Weight, QloadError, StoredCodes, StoredTable)):
        assert not params.eq
    if issubclass(kind, qload.Weight) and kind is not qload.Weight:
        assert not params.repr  # shapes, and no values of a million


def test_what_has_fields_is_a_record() -> None:
    bare = []
    for kind in classes():
        fields = [name for name, hint in inspect.get_annotations(kind).items() if _is_field(kind, name, hint)]
        if fields and kind not in RECORDS and not _is_other(kind) and kind.__name__ not in BASES:
            bare.append(kind.__qualname__)

    assert bare == []


def _is_field(kind: Any, name: str, hint: Any) -> bool:
    return get_origin(hint) is not ClassVar and "ClassVar" not in str(hint) and name not in vars(kind)


def _is_other(kind: Any) -> bool:
    return (
        is_typeddict(kind)
        or issubclass(kind, (pydantic.BaseModel, tuple, nn.Module))
        or Protocol in kind.__mro__
    )
