"""Texts that a test sees: the findings, notes, layers and errors of all reports, and all errors of qload."""

from collections.abc import Iterator
from typing import Any

import pytest

from qload.conversion import Conversion, ShardedCheckpoint
from qload.diff import CheckpointDiff
from qload.errors import QloadError
from qload.plan.report import Explanation, ShardingPlan
from qload.verify import Report

REPORTS = (Report, Conversion, ShardedCheckpoint, CheckpointDiff, ShardingPlan, Explanation)
FREQUENT = "config.json: model_type is missing"  # a note about most handmade checkpoints
FAILED = ("refused", "differs", "shape", "missing", "unread", "rounded")


def record(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each report and error from its creation on."""
    seen: list[Any] = []

    def create(cls: type[QloadError], *arguments: Any, **fields: Any) -> QloadError:
        seen.append(Exception.__new__(cls, *arguments))
        return seen[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(QloadError, "__new__", staticmethod(create), raising=False)
    for report_type in REPORTS:
        monkeypatch.setattr(report_type, "__init__", _recorded(report_type, seen))
    return seen


def _recorded(report_type: type, seen: list[Any]) -> Any:
    create = report_type.__init__

    def create_and_record(report: Any, *arguments: Any, **fields: Any) -> None:
        create(report, *arguments, **fields)
        seen.append(report)

    return create_and_record


def lines_of(seen: Any) -> Iterator[str]:
    """Yield a line for each finding, note, layer with a problem, or error."""
    if isinstance(seen, QloadError):
        yield _line(f"{type(seen).__name__} {seen}")
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
