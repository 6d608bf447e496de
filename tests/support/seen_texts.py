"""Texts that a test sees: findings, notes, layers and errors of all reports, diagnoses, and all errors."""

from collections.abc import Iterator
from typing import Any

import pytest

from qload.conversion import Conversion, ShardedCheckpoint
from qload.diagnosis import Diagnosis
from qload.diff import CheckpointDiff
from qload.errors import QloadError
from qload.plan.report import Explanation, ShardingPlan
from qload.verify import Report

REPORTS = (Report, Conversion, ShardedCheckpoint, CheckpointDiff, ShardingPlan, Explanation)
FREQUENT = "config.json: model_type is missing"  # a note about most handmade checkpoints
PLACES = ("n", "k", "group", "rank", "expert")  # of a diagnosis
FAILED = ("refused", "differs", "shape", "missing", "unread", "rounded")


def record(monkeypatch: pytest.MonkeyPatch, *others: type) -> list[Any]:
    """Return a list that gets each report, error, and object of the `others` from its creation on."""
    seen: list[Any] = []
    for each in (*REPORTS, *others, *_error_types(QloadError)):
        monkeypatch.setattr(each, "__init__", _recorded(each, seen))
    return seen


def _error_types(base: type[QloadError]) -> Iterator[type[QloadError]]:
    """Yield a class of errors and its subclasses that have a constructor of their own."""
    if "__init__" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from _error_types(derived)


def _recorded(kind: type, seen: list[Any]) -> Any:
    create: Any = kind.__init__  # type: ignore[misc]

    def create_and_record(self: Any, *arguments: Any, **fields: Any) -> None:
        create(self, *arguments, **fields)
        seen.append(self)

    return create_and_record


def lines_of(seen: Any) -> Iterator[str]:
    """Yield a line for each finding, note, layer with a problem, diagnosis, or error."""
    if isinstance(seen, QloadError):
        yield _line(f"{type(seen).__name__} {seen}")
        return
    if isinstance(seen, Diagnosis):
        places = [f"{name} {place}" for name in PLACES if (place := getattr(seen, name))]
        yield f"{seen.fault}: {seen.sentence} ({', '.join([*places, *seen.also])})"
        return
    for found in getattr(seen, "findings", ()):
        place = f"{found.severity} {found.rule} {found.tensor} {found.file}"
        yield _line(f"{place}: {found.message} ({found.remedy})")
    yield from (_line(f"note {note}") for note in getattr(seen, "notes", ()) if not note.startswith(FREQUENT))
    for name in ("unreadable", "unsupported"):
        if text := getattr(seen, name, ""):
            yield _line(f"{name} {text}")
    for layer in seen.layers:
        if getattr(layer, "outcome", "") in FAILED:
            yield _line(f"{layer.outcome} {layer.name}: {layer.detail}")


def _line(text: str) -> str:
    return text.replace("\n", " | ")
