"""Verdicts about a checkpoint, the exit code of each, and the version of all JSON that is printed."""

from collections.abc import Iterable, Mapping
from typing import Literal

Verdict = Literal["unreadable", "findings", "internal", "incomplete", "unsupported", "ok"]
SCHEMA = 2
# The exit code of each verdict, in the order in which verdicts are decided: the first that holds is taken.
EXIT_CODES: Mapping[Verdict, int] = {
    "unreadable": 1,
    "findings": 1,
    "internal": 3,
    "incomplete": 4,
    "unsupported": 4,
    "ok": 0,
}
WORST_FIRST = (2, 3, 1, 4, 0)  # exit codes: which of several counts


def worst_code(codes: Iterable[int]) -> int:
    """The exit code of a command over several paths, each of which has its own; 0 of none."""
    there = set(codes)
    return next((code for code in WORST_FIRST if code in there), max(there, default=0))
