"""Verdicts in their order, exit codes, and the code of several paths."""

from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import pytest

from qload.checkpoint import ReportBase
from qload.errors.reporting import EXIT_CODES, worst_code

ORDER = ("unreadable", "findings", "internal", "incomplete", "unsupported")
CODES = {"unreadable": 1, "findings": 1, "internal": 3, "incomplete": 4, "unsupported": 4, "ok": 0}


@dataclass(frozen=True)
class Said(ReportBase):
    """A report of which some verdicts hold."""

    holds: tuple[str, ...]
    path: str = "a"

    def _readable(self) -> bool:
        return "unreadable" not in self.holds

    def _sound(self) -> bool:
        return "findings" not in self.holds

    def _internal(self) -> bool:
        return "internal" in self.holds

    def _incomplete(self) -> bool:
        return "incomplete" in self.holds

    def _unsupported(self) -> bool:
        return "unsupported" in self.holds

    def _data(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("holds", [each for count in range(6) for each in combinations(ORDER, count)])
def test_the_first_verdict_that_holds_is_taken(holds: tuple[str, ...]) -> None:
    said = Said(holds)
    expected = min(holds, key=ORDER.index, default="ok")

    assert said.verdict == expected
    assert said.exit_code == CODES[expected] == EXIT_CODES[said.verdict]
    assert said.to_json() == {"schema": 2, "path": "a", "verdict": expected}


def test_of_several_paths_the_worst_code_counts() -> None:
    worst_first = [2, 3, 1, 4, 0]
    for count in range(1, 6):
        for codes in permutations(worst_first, count):
            assert worst_code(codes) == min(codes, key=worst_first.index)
    assert worst_code([]) == 0
