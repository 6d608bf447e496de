"""Verdicts about a checkpoint, their exit codes, and the version of the printed JSON."""

from collections.abc import Iterable, Mapping
from typing import Literal

Verdict = Literal["unreadable", "findings", "internal", "incomplete", "unsupported", "ok"]
SCHEMA = 2
# Verdict -> exit code, in order of precedence: a report has the first verdict that holds.
EXIT_CODES: Mapping[Verdict, int] = {
    "unreadable": 1,
    "findings": 1,
    "internal": 3,
    "incomplete": 4,
    "unsupported": 4,
    "ok": 0,
}
WORST_FIRST = (2, 3, 1, 4, 0)  # exit codes of several paths, in order of precedence


def worst_code(codes: Iterable[int]) -> int:
    """Combine the exit codes of several paths; 0 for no path."""
    there = set(codes)
    return next((code for code in WORST_FIRST if code in there), max(there, default=0))
