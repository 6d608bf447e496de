"""Numbers of test cases per run: examples per property, and a selection of slow tests."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

FEW, SOME, MANY = 20, 50, 100  # default numbers of examples, by profile


def profile() -> Any:
    """Return the default settings of the active profile."""
    return settings.default


def at_most(count: int) -> settings:
    """Return settings for `count` examples, or half of them in a run of all tests, with new draws per run."""
    quick = profile().max_examples <= FEW
    return settings(max_examples=-(-count // 2) if quick else count)


def some(cases: Sequence[Any], count: int, place: int = 0) -> list[Any]:
    """Mark all cases but `count` as slow tests; `place` selects the part of the others."""
    quick = {(place * count + turn) % len(cases) for turn in range(min(count, len(cases)))}
    return [case if turn in quick else as_slow(case) for turn, case in enumerate(cases)]


def as_slow(case: Any) -> Any:
    """Return a case marked as slow, with its name if it has one."""
    named = isinstance(case, tuple) and hasattr(case, "values")
    values, name = (case.values, case.id) if named else ((case,), None)
    return pytest.param(*values, id=name, marks=pytest.mark.slow)
